"""`mode=segments`: records in sealed segments are read from their files, all others over HTTP (docs/spark.md).

The driver asks for the manifest, which pins the files. Ranges are cut as in `mode=http`, and each takes along the
segments that have its records. Tasks renew the pins while they run, for the tasks after them; when none runs any more,
the pins end by themselves.

A task reads the index together with the records: it leaves out what has been deleted since the query was planned. A
file that is not there (a pin that ran out, a cold directory that is not mounted) is no answer, so the task asks the
service for that part, which knows whether its records are gone. Damage is a gap that the query hears of, never fewer
rows.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from topics.api.segment_answers import Manifest, ManifestSegment
from topics.client import Client, ClientError, NotFoundError, Retry, ServiceBusyError, UnreachableError, calls
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_GONE, LOCATION_LOST
from topics.spark.columns import ColumnBuilder
from topics.spark.http_read import PLAN_RETRY, TASK_RETRY, batches_and_gaps, connect, delivered
from topics.spark.offsets import Gap, Range
from topics.spark.options import Directories, ReadOptions
from topics.spark.segment_arrow import (
    ArrowEntries,
    InconsistentLengthsError,
    Ints,
    Records,
    check_frames,
    decode,
    extent,
    not_deleted,
    read_entries,
)
from topics.spark.spark_errors import OptionError
from topics.storage.segment import ENTRY_LEN, CorruptSegment, index_digest

ROWS_PER_BATCH: Final = 8_000
BATCH_BYTES: Final = 16 * 2**20
"""A batch may take about so much of an executor's memory; one record may be larger."""
DAMAGED: Final = "damaged"

_log = logging.getLogger("topics.spark")


def check_directories(directories: Directories, segments: Iterable[ManifestSegment]) -> None:
    """Raises OptionError if a directory has nothing of the service, though one of `segments` should be there."""
    any_cold = any(segment.tier == "cold" for segment in segments)
    for option, path in (("dataDir", directories.data), ("coldDir", directories.cold if any_cold else None)):
        if path is not None and not os.path.isdir(os.path.join(path, "topics")):
            raise OptionError(
                f"option {option}={path!r}: there is no directory topics in it on this machine; give the service's "
                "directory as it is mounted where the tasks run"
            )


def read_segment(
    directories: Directories,
    segment: ManifestSegment,
    one: Range,
    dedupe_node: bool,
    options: ReadOptions,
    tags: frozenset[str] | None,
) -> Iterator[Records | Gap]:
    """Yields records and gaps of the part of a segment that is in `one`, in order. Raises OSError, and
    FileNotFoundError before anything else when a file is not there.
    """
    first_seq, last_seq = max(segment.first_seq, one.from_seq + 1), min(segment.last_seq, one.to_seq)
    with _Files(directories, segment) as files:
        try:
            entries = files.entries(first_seq, last_seq)
        except CorruptSegment as damage:
            yield _damaged(one.topic, first_seq, last_seq, damage)
            return
        for start, stop in _runs(entries):
            yield from _run(files, entries.part(start, stop), first_seq + start, dedupe_node, options, tags, one.topic)


class _Files:
    """Index and data of one segment, open."""

    def __init__(self, directories: Directories, segment: ManifestSegment) -> None:
        self._segment = segment
        self._idx_path = os.path.join(directories.data, segment.idx_path)
        data_root = directories.data if segment.tier == "hot" else directories.cold
        if data_root is None:
            raise FileNotFoundError(
                2, "it is in the cold directory, and the option coldDir is not set", segment.data_path
            )
        self.data_path = os.path.join(data_root, segment.data_path)
        self._data_fd = os.open(self.data_path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._data_fd)

    def entries(self, first_seq: int, last_seq: int) -> ArrowEntries:
        """Reads the index of these records as it is now, if it is the one that the service has. Raises
        CorruptSegment.
        """
        segment = self._segment
        with open(self._idx_path, "rb") as file:
            idx = file.read()
        records = segment.last_seq - segment.first_seq + 1
        if len(idx) != records * ENTRY_LEN:
            raise CorruptSegment(self._idx_path, len(idx), f"the file ends there, {records * ENTRY_LEN} bytes are due")
        if segment.idx_xxh3 is not None and f"{index_digest(idx):016x}" != segment.idx_xxh3:
            raise CorruptSegment(self._idx_path, 0, f"is not the index that the service has ({segment.idx_xxh3})")
        return read_entries(idx, first_seq - segment.first_seq, last_seq - first_seq + 1)

    def frames(self, first_seq: int, entries: ArrowEntries) -> tuple[bytes, Ints]:
        """Returns (bytes, where each frame begins in them); frames of live records are checked. Raises
        CorruptSegment.
        """
        segment = self._segment
        at = (first_seq - segment.first_seq) * ENTRY_LEN
        starts, end = extent(entries, segment.data_bytes, self._idx_path, at)
        base = int(starts[0])
        buffer = os.pread(self._data_fd, end - base, base) if end else b""
        while len(buffer) < end - base:
            piece = os.pread(self._data_fd, end - base - len(buffer), base + len(buffer))
            if not piece:
                raise CorruptSegment(self.data_path, base + len(buffer), f"the file ends there, {end} bytes are due")
            buffer += piece
        starts = starts - base
        check_frames(self.data_path, buffer, base, first_seq, entries, starts)
        return buffer, starts


def _runs(entries: ArrowEntries) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of runs that are either lost altogether or have no lost record, and are not too long."""
    lost = entries.flags & LOCATION_LOST != 0
    ends_bytes = np.cumsum(entries.lengths)
    borders = [0, *(np.flatnonzero(np.diff(lost)) + 1).tolist(), len(lost)]
    for begin, stop in pairwise(borders):
        if lost[begin]:
            yield begin, stop
            continue
        start = begin
        while start < stop:
            before = ends_bytes[start - 1] if start else 0
            fitting = int(np.searchsorted(ends_bytes, before + BATCH_BYTES, "right"))
            end = min(stop, start + ROWS_PER_BATCH, max(start + 1, fitting))
            yield start, end
            start = end


def _run(
    files: _Files,
    entries: ArrowEntries,
    first_seq: int,
    dedupe_node: bool,
    options: ReadOptions,
    tags: frozenset[str] | None,
    topic: str,
) -> Iterator[Records | Gap]:
    count = len(entries.ts)
    if entries.flags[0] & LOCATION_LOST:
        yield Gap(first_seq, first_seq + count - 1, EvictReason(int(entries.offsets[0])).name.lower())
        return
    try:
        buffer, found = files.frames(first_seq, entries)
        live = np.flatnonzero(entries.flags & LOCATION_GONE == 0)
        starts, lengths = found[live], entries.lengths[live]
        undeleted = not_deleted(buffer, starts, lengths) if len(live) else np.ones(0, np.bool_)
        if not undeleted.all():
            live, starts, lengths = live[undeleted], starts[undeleted], lengths[undeleted]
        if not len(live):
            return
        try:
            records = decode(
                buffer,
                first_seq + live,
                entries.ts[live],
                starts,
                lengths,
                tags=tags,
                not_node=options.node if dedupe_node else None,
                with_meta=options.include_meta,
            )
        except InconsistentLengthsError as wrong:
            reason = "inconsistent lengths"
            raise CorruptSegment(files.data_path, int(entries.offsets[live[wrong.number]]), reason) from wrong
    except CorruptSegment as damage:
        if count == 1:
            yield _damaged(topic, first_seq, first_seq, damage)
            return
        # Damage must not keep a reader from the records beside it.
        middle = count // 2
        for start, stop in ((0, middle), (middle, count)):
            yield from _run(files, entries.part(start, stop), first_seq + start, dedupe_node, options, tags, topic)
        return
    if len(records.seq):
        yield records


def _damaged(topic: str, first_seq: int, last_seq: int, damage: CorruptSegment) -> Gap:
    _log.error("topic %s: records %s to %s: %s", topic, first_seq, last_seq, damage)
    return Gap(first_seq, last_seq, DAMAGED, str(damage))


PIN_TTL_MS: Final = 600_000
_RENEW_EVERY_S: Final = PIN_TTL_MS / 1000 / 4
MISSING_RETRY: Final = PLAN_RETRY
MISSING: Final = "missing"
_RENEW_RETRY: Final = Retry(total_s=2.0)


class Pinned(NamedTuple):
    """A pin and the topic it is of."""

    topic: str
    id: str


class Sealed(NamedTuple):
    """The records of one topic in files, from `earliest_seq` on, ascending; and all pins of the query."""

    segments: tuple[ManifestSegment, ...]
    earliest_seq: int
    dedupe_node: bool
    pins: tuple[Pinned, ...]


def sealed_of(client: Client, parts: Sequence[Range]) -> tuple[list[Sealed], tuple[Pinned, ...]]:
    """Returns for each part the sealed segments that have its records, pinned; and the pins."""
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
    """Ends pins before their time. A service that does not answer is not asked for each: it ends them itself."""
    for pin in pins:
        try:
            client.call(calls.end_pin(*pin))
        except (ServiceBusyError, UnreachableError):
            return
        except ClientError as error:
            _log.warning("a pin of topic %s was not ended: %s", pin.topic, error)


def read_part(
    one: Range, sealed: Sealed, options: ReadOptions, columns: ColumnBuilder, tags: frozenset[str] | None
) -> Iterator[pa.RecordBatch]:
    """Does the same as `http_read.read_range`."""
    assert options.directories is not None
    with connect(options.service, TASK_RETRY) as client, connect(options.service, _RENEW_RETRY) as renewing:
        items = _items(client, _Renewal(renewing, sealed.pins), one, sealed, options, columns, tags)
        yield from delivered(one.topic, _joined(items), options, columns)


def pinned_segments(
    client: Client, topic: str, from_seq: int = 0, to_seq: int | None = None
) -> tuple[Manifest, list[ManifestSegment], list[Pinned]]:
    """Returns (the topic at that moment, its sealed segments with records from_seq + 1..to_seq, their pins)."""
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
    """`pins` are those made by then, which nobody is told of."""
    try:
        yield
    except BaseException:
        end_pins(client, pins)
        raise


def _pin_of(page: Manifest) -> list[Pinned]:
    return [] if page.pin is None else [Pinned(page.topic, page.pin.id)]


def _sealed_of(part: Range, found: tuple[Manifest, list[ManifestSegment]] | None, pins: tuple[Pinned, ...]) -> Sealed:
    # Records of another instance of the topic are not wanted; over HTTP the task finds out the same.
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
    columns: ColumnBuilder,
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
    options: ReadOptions, columns: ColumnBuilder, tags: frozenset[str] | None, part: Range
) -> Iterator[pa.RecordBatch | Gap]:
    """Reads records over HTTP that are not there as a file. If the service has not got them either, they are a gap."""
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
    columns: ColumnBuilder,
    tags: frozenset[str] | None,
) -> Iterator[pa.RecordBatch | Gap]:
    for item in read_segment(directories, segment, part, sealed.dedupe_node, options, tags):
        renewal.renew_when_due()
        if isinstance(item, Gap):
            yield item
        else:
            yield columns.from_arrays(part.topic, item.seq, item.ts_ms, item.node, item.tag, item.data, item.meta)


def _joined(items: Iterable[pa.RecordBatch | Gap]) -> Iterator[pa.RecordBatch | Gap]:
    """Joins a gap with its continuation in the next segment."""
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
