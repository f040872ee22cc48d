"""Options of the data source, with the names of Spark's Kafka source, and its errors, each in one line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Final, Literal, TypeVar

import msgspec

from topics.core.names import is_topic_name
from topics.setting_values import RefusedValueError, bucket_url
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment_store import SegmentStore, open_store

_OURS = re.compile(r"(^|\s)topics\.[\w.]+Error: ")
_BEFORE_ERROR = ("Traceback (most recent call last):", "thrown from the Python worker:")


class TopicsSparkError(Exception):
    """An error of the data source that its user can do something about."""


class OptionError(TopicsSparkError):
    """An option is missing, unknown, or has a value that it cannot have."""


class DataLossError(TopicsSparkError):
    """Records of the range that was asked for are gone (`failOnDataLoss`)."""


def plainly(error: BaseException) -> str:
    """Return this package's error in one that came through Spark, or else its Python error, or its first line."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        ours = _OURS.search(line)
        if ours is not None:
            return line[ours.end() :]
    begins_at = next((number for number, line in enumerate(lines) if line.endswith(_BEFORE_ERROR)), len(lines))
    for line in lines[begins_at + 1 :]:
        if not line.startswith(" ") and not line.endswith(_BEFORE_ERROR):
            return line
    return lines[0].strip() if lines else type(error).__name__


Position = int | Literal["earliest", "latest"]
"""A cursor, as everywhere in the API. Reading begins behind this seq (0: at the first record), or ends with it."""
TombstoneMode = Literal["fail", "rows", "ignore"]

ChoiceT = TypeVar("ChoiceT", bound=str)
DefaultT = TypeVar("DefaultT", int, None)

READ_OPTIONS: Final = (
    "url token subscribe subscribePattern startingOffsets endingOffsets startingTimestamp maxOffsetsPerTrigger "
    "minPartitions maxRecordsPerPartition failOnDataLoss tombstones node includeTags includeMeta schema mode dataDir "
    "coldDir coldUrl pushFilters"
)
_SINK_MAX_CHARS: Final = 255 - len(".01234567-0123-0123-0123-0123456789ab")  # the query's id comes behind it
WRITE_OPTIONS: Final = "url token topic sink recordsPerStage recordsPerSecond"
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname"})


class Service(msgspec.Struct, frozen=True):
    """Address of the service, and the API key for it."""

    url: str
    token: str | None

    def __repr__(self) -> str:
        return f"Service({self.url!r})"  # without the key, for logs


class Positions(msgspec.Struct, frozen=True):
    """Positions of the topics that are named, and of all others."""

    other: Position
    by_topic: dict[str, Position] = {}

    def of(self, topic: str) -> Position:
        return self.by_topic.get(topic, self.other)


class Directories(msgspec.Struct, frozen=True):
    """The service's directories as they are mounted where the tasks run. `cold` may be the URL of a bucket."""

    data: str
    cold: str | None

    @property
    def cold_store(self) -> SegmentStore | None:
        """The bucket; None for a directory."""
        return None if self.cold is None or "://" not in self.cold else _store_of(self.cold)


@cache
def _store_of(url: str) -> SegmentStore:
    """Return the bucket's store, one for each process: it keeps connections."""
    if find_spec("obstore") is None:
        raise OptionError(f"{url} needs the package obstore where tasks run: pip install 'topicsd[bucket]'")
    return open_store(OsFileSystem(), url)


class ReadOptions(msgspec.Struct, frozen=True):
    service: Service
    topics: tuple[str, ...]
    pattern: str | None
    starting: Positions | None
    """None: `earliest` for a batch, `latest` for a stream."""
    ending: Positions | None
    starting_ts: int | None
    max_offsets_per_trigger: int | None
    min_partitions: int
    max_records_per_partition: int | None
    """None: `offsets.split` decides by the number of records."""
    tombstones: TombstoneMode
    node: str | None
    include_tags: bool
    include_meta: bool
    parsed_schema: str | None
    push_filters: bool
    directories: Directories | None
    """Directories of sealed segments; None: everything is read over HTTP."""

    def subscribed(self, topic: str) -> bool:
        return topic in self.topics if self.pattern is None else re.fullmatch(self.pattern, topic) is not None


class WriteOptions(msgspec.Struct, frozen=True):
    service: Service
    topic: str | None
    sink: str
    records_per_stage: int
    records_per_second: int
    """Limit of each task; 0: none."""


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Return the options of a read. OptionError names a wrong option, its value and what is allowed."""
    options = _GivenOptions(given, READ_OPTIONS, "reading")
    topics = tuple(name for part in options.text("subscribe", "").split(",") if (name := part.strip()))
    pattern = options.text("subscribePattern", "") or None
    if bool(topics) == bool(pattern):
        raise OptionError("give one of the options subscribe (topic names, comma-separated) and subscribePattern")
    for name in topics:
        _check_topic("subscribe", name)
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError(f"option subscribePattern={pattern!r} is not a regular expression: {error}") from None
    starting_ts = options.count("startingTimestamp", None)
    starting = options.positions("startingOffsets")
    if starting_ts is not None and starting is not None:
        raise OptionError("give only one of startingTimestamp and startingOffsets")
    return ReadOptions(
        service=options.service(),
        topics=topics,
        pattern=pattern,
        starting=starting,
        ending=options.positions("endingOffsets"),
        starting_ts=starting_ts,
        max_offsets_per_trigger=options.count("maxOffsetsPerTrigger", None, at_least=1),
        min_partitions=options.count("minPartitions", 1, at_least=1),
        max_records_per_partition=options.count("maxRecordsPerPartition", None, at_least=1),
        tombstones=_tombstones(options),
        node=options.text("node", "") or None,
        include_tags=options.flag("includeTags", True),
        include_meta=options.flag("includeMeta", True),
        parsed_schema=options.text("schema", "") or None,
        push_filters=options.flag("pushFilters", False),
        directories=_directories(options),
    )


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Return the options of a write. OptionError names a wrong option, its value and what is allowed."""
    options = _GivenOptions(given, WRITE_OPTIONS, "writing")
    topic = options.text("topic", "") or None
    if topic is not None:
        _check_topic("topic", topic)
    sink = options.text("sink", "") or "spark"
    _check_topic("sink", sink)
    if len(sink) > _SINK_MAX_CHARS:
        raise OptionError(f"option sink: {sink!r} has {len(sink)} characters, at most are {_SINK_MAX_CHARS}")
    per_second = options.count("recordsPerSecond", 0)
    per_stage = options.count("recordsPerStage", 5_000, at_least=1)
    return WriteOptions(options.service(), topic, sink, min(per_stage, per_second or per_stage), per_second)


def _directories(options: _GivenOptions) -> Directories | None:
    modes: tuple[Literal["http", "segments"], ...] = ("http", "segments")
    mode = options.choice("mode", modes, "http")
    data, cold = options.text("dataDir", "") or None, options.text("coldDir", "") or None
    cold_url = options.text("coldUrl", "")
    if cold_url:
        if cold is not None:
            raise OptionError("give only one of coldDir and coldUrl")
        try:
            cold = bucket_url("").parse(cold_url)
        except RefusedValueError as refused:
            raise OptionError(f"option coldUrl {refused}") from None
        except ValueError:
            raise OptionError(f"option coldUrl={cold_url!r} must be {bucket_url('').allowed}") from None
    if mode == "http":
        if data or cold:
            raise OptionError("dataDir, coldDir and coldUrl are for mode=segments; mode=http needs none of them")
        return None
    if data is None:
        raise OptionError("mode=segments needs the option dataDir: TOPICS_DATA_DIR as it is mounted where tasks run")
    return Directories(data, cold)


def _tombstones(options: _GivenOptions) -> TombstoneMode:
    fails = options.flag("failOnDataLoss", True)
    if not options.has("tombstones"):
        return "fail" if fails else "ignore"
    allowed: tuple[TombstoneMode, ...] = ("fail", "rows", "ignore")
    mode = options.choice("tombstones", allowed, "fail")
    if options.has("failOnDataLoss") and fails != (mode == "fail"):
        raise OptionError(f"failOnDataLoss={str(fails).lower()} contradicts tombstones={mode}: give tombstones alone")
    return mode


class _GivenOptions:
    """The options of a query. Their names are compared without case, as Spark does."""

    def __init__(self, given: Mapping[str, str], known: str, doing: str) -> None:
        self._values = {name.lower(): value for name, value in given.items()}
        by_lower = {name.lower(): name for name in known.split()}
        for name in self._values.keys() - by_lower.keys() - _SPARKS_OWN:
            close = difflib.get_close_matches(name, by_lower, 1)
            hint = f"did you mean {by_lower[close[0]]}?" if close else f"known are {', '.join(by_lower.values())}"
            raise OptionError(f"there is no option {name} for {doing}; {hint}")

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str, default: str) -> str:
        return str(self._values.get(name.lower(), default)).strip()

    def service(self) -> Service:
        url = self.text("url", "http://127.0.0.1:4000")
        if re.fullmatch(r"https?://[^/\s]+.*", url) is None:
            raise OptionError(f"option url={url!r} does not name a service: give one like http://127.0.0.1:4000")
        return Service(url, self.text("token", "") or None)

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name, str(default)).lower()
        if value not in ("true", "false"):
            raise OptionError(f"option {name}={value!r} must be true or false")
        return value == "true"

    def choice(self, name: str, allowed: tuple[ChoiceT, ...], default: ChoiceT) -> ChoiceT:
        value = self.text(name, default).lower()
        for one in allowed:
            if value == one:
                return one
        raise OptionError(f"option {name}={value!r} must be one of {', '.join(allowed)}")

    def count(self, name: str, default: DefaultT, at_least: int = 0) -> int | DefaultT:
        if not self.has(name):
            return default
        value = self.text(name, "")
        with suppress(ValueError):  # of more than 4,300 digits
            if value.isdecimal() and (count := int(value)) >= at_least:
                return count
        raise OptionError(f"option {name}={value[:100]!r} must be an integer of at least {at_least}")

    def positions(self, name: str) -> Positions | None:
        if not self.has(name):
            return None
        value = self.text(name, "")
        if value in ("earliest", "latest"):
            return Positions(_position(name, value))
        try:
            by_topic = json.loads(value)
        except json.JSONDecodeError:
            by_topic = None
        if not isinstance(by_topic, dict):
            raise OptionError(
                f"option {name}={value!r} must be earliest, latest or JSON like "
                '{"orders": 1200, "audit": "earliest"} (a seq is a cursor: 1200 is the last record before the range)'
            )
        other: Position = "latest" if name == "endingOffsets" else "earliest"
        return Positions(other, {topic: _position(name, one) for topic, one in by_topic.items()})


def _position(option: str, value: object) -> Position:
    if value == "earliest" or value == -2:
        return "earliest"
    if value == "latest" or value == -1:
        return "latest"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise OptionError(f"option {option}: {value!r} is not a position: a seq, earliest (-2) or latest (-1)")


def _check_topic(option: str, name: str) -> None:
    if not is_topic_name(name):
        raise OptionError(
            f"option {option}: {name!r} is not a valid name: 1 to 255 of A-Z a-z 0-9 . _ : -, letter or digit first"
        )
