"""`mode=segments`: what is in sealed segments is read from their files, the rest over HTTP (docs/spark.md).

The driver asks for the manifest, which pins the files; ranges are cut as in `mode=http`, and each takes along which
segments it has records in. Tasks renew the pins while they run, for whoever runs after them; when none does any more,
the pins end by themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import pyarrow as pa

from topics.api.answers import Manifest, ManifestSegment
from topics.client import Client, ClientError, NotFoundError, Retry, ServiceBusyError, UnreachableError, calls
from topics.spark.columns import Columns
from topics.spark.http_read import PLAN_RETRY, TASK_RETRY, batches_and_gaps, connect, delivered
from topics.spark.offsets import Gap, Range
from topics.spark.options import Directories, ReadOptions
from topics.spark.segment_read import check_directories, read_segment

PIN_TTL_MS: Final = 600_000
_RENEW_EVERY_S: Final = PIN_TTL_MS / 1000 / 4
MISSING_RETRY: Final = PLAN_RETRY
MISSING: Final = "missing"
_RENEW_RETRY: Final = Retry(total_s=2.0)

_log = logging.getLogger("topics.spark")


class Pinned(NamedTuple):
    """A pin and the topic it is of."""

    topic: str
    id: str


class Sealed(NamedTuple):
    """What of one topic, from `earliest_seq` on, is in files, ascending; and all pins of the query."""

    segments: tuple[ManifestSegment, ...]
    earliest_seq: int
    dedupe_node: bool
    pins: tuple[Pinned, ...]


def sealed_of(client: Client, parts: Sequence[Range]) -> tuple[list[Sealed], tuple[Pinned, ...]]:
    """For each part the sealed segments it has records in, pinned; and the pins."""
    found: dict[str, tuple[Manifest, list[ManifestSegment]] | None] = {}
    pins: list[Pinned] = []
    with _ended_on_failure(client, pins):
        for topic in dict.fromkeys(part.topic for part in parts):
            of_topic = [part for part in parts if part.topic == topic]
            from_seq, to_seq = min(part.from_seq for part in of_topic), max(part.to_seq for part in of_topic)
            try:
                manifest, segments, of_topic_pins = pinned_segments(client, topic, from_seq, to_seq)
            except NotFoundError:
                found[topic] = None  # deleted since it was planned: reading over HTTP says so
                continue
            found[topic] = manifest, segments
            pins += of_topic_pins
    all_pins = tuple(pins)
    return [_sealed_of(part, found[part.topic], all_pins) for part in parts], all_pins


def end_pins(client: Client, pins: Iterable[Pinned]) -> None:
    """Before their time; a service that does not answer will end them itself, and is not asked for each of them."""
    for pin in pins:
        try:
            client.call(calls.end_pin(*pin))
        except (ServiceBusyError, UnreachableError):
            return
        except ClientError as error:
            _log.warning("a pin of topic %s was not ended: %s", pin.topic, error)


def read_part(
    one: Range, sealed: Sealed, options: ReadOptions, columns: Columns, tags: frozenset[str] | None
) -> Iterator[pa.RecordBatch]:
    """As `http_read.read_range`."""
    assert options.directories is not None
    with connect(options.service, TASK_RETRY) as client, connect(options.service, _RENEW_RETRY) as renewing:
        items = _items(client, _Renewal(renewing, sealed.pins), one, sealed, options, columns, tags)
        yield from delivered(one.topic, _joined(items), options, columns)


def pinned_segments(
    client: Client, topic: str, from_seq: int = 0, to_seq: int | None = None
) -> tuple[Manifest, list[ManifestSegment], list[Pinned]]:
    """(the topic at that moment, its sealed segments with records from_seq + 1..to_seq, their pins)."""
    manifest = page = client.call(calls.segments(topic, from_seq, to_seq, pin_ttl_ms=PIN_TTL_MS))
    segments, pins = list(page.segments), _pin_of(page)
    with _ended_on_failure(client, pins):
        while page.next_from_seq is not None:
            page = client.call(calls.segments(topic, page.next_from_seq, to_seq, pin_ttl_ms=PIN_TTL_MS))
            pins += _pin_of(page)
            if page.epoch != manifest.epoch:
                break  # made anew meanwhile: its readers find that out
            segments += page.segments
    return manifest, segments, pins


@contextmanager
def _ended_on_failure(client: Client, pins: list[Pinned]) -> Iterator[None]:
    """`pins`: those made by then, which nobody is told of."""
    try:
        yield
    except BaseException:
        end_pins(client, pins)
        raise


def _pin_of(page: Manifest) -> list[Pinned]:
    return [] if page.pin is None else [Pinned(page.topic, page.pin.id)]


def _sealed_of(part: Range, found: tuple[Manifest, list[ManifestSegment]] | None, pins: tuple[Pinned, ...]) -> Sealed:
    # Of another instance of the topic nothing is wanted; over HTTP the task finds out the same.
    if found is None or found[0].epoch != part.epoch:
        return Sealed((), 0, True, pins)
    manifest, segments = found
    mine = tuple(one for one in segments if one.last_seq > part.from_seq and one.first_seq <= part.to_seq)
    return Sealed(mine, manifest.earliest_seq, manifest.dedupe_node, pins)


def _items(
    client: Client,
    renewal: _Renewal,
    one: Range,
    sealed: Sealed,
    options: ReadOptions,
    columns: Columns,
    tags: frozenset[str] | None,
) -> Iterator[pa.RecordBatch | Gap]:
    directories = options.directories
    assert directories is not None
    if sealed.segments:
        check_directories(directories, sealed.segments)

    def over_http(from_seq: int, to_seq: int, gap: Gap | None = None) -> Iterator[pa.RecordBatch | Gap]:
        return batches_and_gaps(client, Range(one.topic, one.epoch, from_seq, to_seq, gap), options, columns, tags)

    if one.gap is not None:
        yield one.gap
    cursor = one.from_seq
    for segment in sealed.segments:
        begin = max(segment.first_seq - 1, sealed.earliest_seq - 1, cursor)
        end = min(segment.last_seq, one.to_seq)
        if begin >= end:
            continue
        if begin > cursor:
            yield from over_http(cursor, begin)
        part = Range(one.topic, one.epoch, begin, end)
        try:
            yield from _from_file(renewal, directories, segment, part, sealed, options, columns, tags)
        except FileNotFoundError as missing:
            _log.warning("topic %s: %s is not there, the service is asked instead", one.topic, missing.filename)
            yield from _instead_of_file(options, columns, tags, part)
        cursor = end
    if cursor < one.to_seq:
        yield from over_http(cursor, one.to_seq)


def _instead_of_file(
    options: ReadOptions, columns: Columns, tags: frozenset[str] | None, part: Range
) -> Iterator[pa.RecordBatch | Gap]:
    """Over HTTP, what is not there as a file. Where the service has not got it either, it is a gap."""
    done = part.from_seq
    with connect(options.service, MISSING_RETRY) as client:
        try:
            for item in batches_and_gaps(client, part, options, columns, tags):
                yield item
                last = item.last_seq if isinstance(item, Gap) else item.column(1)[-1].as_py()
                done = part.to_seq if last is None else last
        except ServiceBusyError as error:
            if error.code != "storage_unavailable":
                raise
            yield Gap(done + 1, part.to_seq, MISSING, str(error))


def _from_file(
    renewal: _Renewal,
    directories: Directories,
    segment: ManifestSegment,
    part: Range,
    sealed: Sealed,
    options: ReadOptions,
    columns: Columns,
    tags: frozenset[str] | None,
) -> Iterator[pa.RecordBatch | Gap]:
    for item in read_segment(directories, segment, part, sealed.dedupe_node, options, tags):
        renewal.renew_when_due()
        if isinstance(item, Gap):
            yield item
        else:
            yield columns.from_arrays(part.topic, item.seq, item.ts_ms, item.node, item.tag, item.data, item.meta)


def _joined(items: Iterable[pa.RecordBatch | Gap]) -> Iterator[pa.RecordBatch | Gap]:
    """A gap that goes on in the next segment is one gap."""
    open_gap: Gap | None = None
    for item in items:
        if isinstance(item, Gap):
            if open_gap is not None and _continues(open_gap, item):
                open_gap = open_gap._replace(last_seq=item.last_seq)
                continue
            if open_gap is not None:
                yield open_gap
            open_gap = item
            continue
        if open_gap is not None:
            yield open_gap
            open_gap = None
        yield item
    if open_gap is not None:
        yield open_gap


def _continues(gap: Gap, other: Gap) -> bool:
    return gap.last_seq is not None and other.first_seq == gap.last_seq + 1 and other.reason == gap.reason


class _Renewal:
    """Keeps the pins of a query while one of its tasks runs. A service that does not answer is no reason to stop: as
    long as the files are there, nothing else of it is needed.
    """

    def __init__(self, client: Client, pins: tuple[Pinned, ...]) -> None:
        self._client = client
        self._pins = pins
        self._due_s = 0.0

    def renew_when_due(self) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _RENEW_EVERY_S
        try:
            for topic, pin in self._pins:
                self._client.call(calls.renew_pin(topic, pin, PIN_TTL_MS))
        except ClientError as error:
            _log.warning("pins were not renewed: %s", error)
