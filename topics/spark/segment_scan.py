"""`mode=segments`: records in sealed segments are read from their files, all others over HTTP (docs/spark.md).

The driver asks for the manifest, which pins the files. It cuts ranges as in `mode=http`, and gives each the segments
with its records. Tasks renew the pins while they run; when none runs any more, the pins end by themselves. A task
leaves out records that were deleted since the query was planned. If a file is not there (a pin ran out, a cold
directory is not mounted), it asks the service for that part. Damage is a gap, never fewer rows.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from topics.api.segment_answers import Manifest, ManifestSegment
from topics.client import Client, ClientError, NotFoundError, Retry, ServiceBusyError, UnreachableError, calls
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_GONE, LOCATION_LOST
from topics.spark import http_read, segment_arrow
from topics.spark.columns import Records
from topics.spark.http_read import TASK_RETRY, ReadPlan, connect
from topics.spark.offsets import Gap, Range
from topics.spark.options import Directories, OptionError, Service
from topics.spark.segment_arrow import ArrowEntries, InconsistentLengthsError, Ints
from topics.storage.segment import ENTRY_LEN, CorruptSegment, index_digest

BATCH_BYTES: Final = 16 * 2**20
"""Memory of an executor that a batch takes at most, roughly; a single record may be larger."""
DAMAGED: Final = "damaged"

log = logging.getLogger("topics.spark")


def check_directories(directories: Directories, segments: Iterable[ManifestSegment]) -> None:
    """Raise OptionError if a directory has nothing of the service, though one of `segments` should be there."""
    any_cold = any(segment.tier == "cold" for segment in segments)
    cold = directories.cold if any_cold and directories.cold_store is None else None
    for option, path in (("dataDir", directories.data), ("coldDir", cold)):
        if path is not None and not os.path.isdir(os.path.join(path, "topics")):
            raise OptionError(
                f"option {option}={path!r}: there is no directory topics in it on this machine; give the service's "
                "directory as it is mounted where the tasks run"
            )


class SegmentScan:
    """Index and data of one segment, and which of its records a reader wants. Raise FileNotFoundError, OSError."""

    def __init__(
        self, directories: Directories, segment: ManifestSegment, topic: str, plan: ReadPlan, dedupe_node: bool
    ) -> None:
        self._segment = segment
        self._topic = topic
        self._tags = plan.tags
        self._not_node = plan.options.node if dedupe_node else None
        self._with_meta = plan.options.include_meta
        self._idx_path = os.path.join(directories.data, segment.idx_path)
        data_root = directories.data if segment.tier == "hot" else directories.cold
        if segment.tier == "archive":
            reason = "it is still in the archive that the service was restored from"
            raise FileNotFoundError(2, reason, segment.data_path)
        if data_root is None:
            raise FileNotFoundError(
                2, "it is in the cold tier, and neither coldDir nor coldUrl is set", segment.data_path
            )
        self._data_path = os.path.join(data_root, segment.data_path)
        self._store = None if segment.tier == "hot" else directories.cold_store
        self._name = segment.data_path.removeprefix("topics/")
        if self._store is None:
            self._data_fd = os.open(self._data_path, os.O_RDONLY | os.O_CLOEXEC)
        elif not self._store.exists(self._name):
            raise FileNotFoundError(2, "it is not in the bucket", self._data_path)

    def __enter__(self) -> SegmentScan:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is None:
            os.close(self._data_fd)

    def read(self, from_seq: int, to_seq: int) -> Iterator[Records | Gap]:
        """Yield the records and gaps of from_seq + 1..to_seq, as far as they are in this segment, in order."""
        first_seq, last_seq = max(self._segment.first_seq, from_seq + 1), min(self._segment.last_seq, to_seq)
        try:
            entries = self._entries(first_seq, last_seq)
        except CorruptSegment as damage:
            yield self._damaged(first_seq, last_seq, damage)
            return
        for start, stop in _runs(entries):
            yield from self._run(first_seq + start, entries.part(start, stop))

    def _entries(self, first_seq: int, last_seq: int) -> ArrowEntries:
        """Read the present index of these records. CorruptSegment if it is not the index that the service has."""
        segment = self._segment
        with open(self._idx_path, "rb") as file:
            idx = file.read()
        records = segment.last_seq - segment.first_seq + 1
        if len(idx) != records * ENTRY_LEN:
            raise CorruptSegment(self._idx_path, len(idx), f"the file ends there, {records * ENTRY_LEN} bytes are due")
        if segment.idx_xxh3 is not None and f"{index_digest(idx):016x}" != segment.idx_xxh3:
            raise CorruptSegment(self._idx_path, 0, f"is not the index that the service has ({segment.idx_xxh3})")
        return segment_arrow.read_entries(idx, first_seq - segment.first_seq, last_seq - first_seq + 1)

    def _run(self, first_seq: int, entries: ArrowEntries) -> Iterator[Records | Gap]:
        count = len(entries.ts)
        if entries.flags[0] & LOCATION_LOST:
            yield Gap(first_seq, first_seq + count - 1, EvictReason(int(entries.offsets[0])).name.lower())
            return
        try:
            records = self._records(first_seq, entries)
        except CorruptSegment as damage:
            if count == 1:
                yield self._damaged(first_seq, first_seq, damage)
                return
            # Read both halves, so that the records beside a damaged one are still read.
            middle = count // 2
            yield from self._run(first_seq, entries.part(0, middle))
            yield from self._run(first_seq + middle, entries.part(middle, count))
            return
        if records is not None and len(records.seq):
            yield records

    def _records(self, first_seq: int, entries: ArrowEntries) -> Records | None:
        """Return the live records of these entries; None without any. Raise CorruptSegment."""
        buffer, found = self._frames(first_seq, entries)
        live = np.flatnonzero(entries.flags & LOCATION_GONE == 0)
        live = live[segment_arrow.not_deleted(buffer, found[live], entries.lengths[live])] if len(live) else live
        if not len(live):
            return None
        try:
            return segment_arrow.decode(
                buffer,
                first_seq + live,
                entries.ts[live],
                found[live],
                entries.lengths[live],
                tags=self._tags,
                not_node=self._not_node,
                with_meta=self._with_meta,
            )
        except InconsistentLengthsError as wrong:
            at = int(entries.offsets[live[wrong.number]])
            raise CorruptSegment(self._data_path, at, "inconsistent lengths") from wrong

    def _frames(self, first_seq: int, entries: ArrowEntries) -> tuple[bytes, Ints]:
        """Return (bytes, where each frame begins in them); live frames are checked. Raise CorruptSegment."""
        segment = self._segment
        at = (first_seq - segment.first_seq) * ENTRY_LEN
        starts, end = segment_arrow.extent(entries, segment.data_bytes, self._idx_path, at)
        base = int(starts[0])
        buffer = self._data(base, end) if end else b""
        starts = starts - base
        segment_arrow.check_frames(self._data_path, buffer, base, first_seq, entries, starts)
        return buffer, starts

    def _data(self, start: int, end: int) -> bytes:
        """Read bytes start..end of the data."""
        if self._store is not None:
            try:
                return self._store.read_range(self._name, start, end - start)
            except EOFError as short:
                raise CorruptSegment(self._data_path, start, str(short)) from short
        found = b""
        while len(found) < end - start:
            piece = os.pread(self._data_fd, end - start - len(found), start + len(found))
            if not piece:
                raise CorruptSegment(self._data_path, start + len(found), f"the file ends there, {end} bytes are due")
            found += piece
        return found

    def _damaged(self, first_seq: int, last_seq: int, damage: CorruptSegment) -> Gap:
        log.error("topic %s: records %s to %s: %s", self._topic, first_seq, last_seq, damage)
        return Gap(first_seq, last_seq, DAMAGED, str(damage))


def _runs(entries: ArrowEntries) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs that have only lost records or none; each fits into a batch."""
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
            end = min(stop, start + http_read.ROWS_PER_BATCH, max(start + 1, fitting))
            yield start, end
            start = end


PIN_TTL_MS: Final = 600_000
_RENEW_EVERY_S: Final = PIN_TTL_MS / 1000 / 4
MISSING_RETRY: Final = http_read.PLAN_RETRY
MISSING: Final = "missing"
_RENEW_RETRY: Final = Retry(total_s=2.0)


class Pinned(NamedTuple):
    """A pin on files of a topic."""

    topic: str
    id: str


class Sealed(NamedTuple):
    """The segments of one range, ascending, whose records count from `earliest_seq` on; and all pins of the query."""

    segments: tuple[ManifestSegment, ...]
    earliest_seq: int
    dedupe_node: bool
    pins: tuple[Pinned, ...]


def sealed_of(client: Client, parts: Sequence[Range]) -> tuple[list[Sealed], tuple[Pinned, ...]]:
    """Return for each range the sealed segments with its records, pinned; and the pins."""
    found: dict[str, tuple[Manifest, list[ManifestSegment]]] = {}
    pins: list[Pinned] = []
    with _ended_on_failure(client, pins):
        for topic in dict.fromkeys(part.topic for part in parts):
            of_topic = [part for part in parts if part.topic == topic]
            from_seq, to_seq = min(part.from_seq for part in of_topic), max(part.to_seq for part in of_topic)
            try:
                manifest, segments, of_topic_pins = pinned_segments(client, topic, from_seq, to_seq)
            except NotFoundError:
                continue  # deleted since the plan: the task finds that out over HTTP
            except ServiceBusyError as refused:
                if refused.detail.get("limit") != "pins":
                    raise
                log.warning("topic %s is read over HTTP, not from its files: %s", topic, refused)
                continue
            found[topic] = manifest, segments
            pins += of_topic_pins
    return [_sealed_of(part, found.get(part.topic), tuple(pins)) for part in parts], tuple(pins)


def _sealed_of(part: Range, found: tuple[Manifest, list[ManifestSegment]] | None, pins: tuple[Pinned, ...]) -> Sealed:
    # Another instance of the topic has other records; the task finds that out over HTTP.
    if found is None or found[0].epoch != part.epoch:
        return Sealed((), 0, True, pins)
    manifest, segments = found
    mine = tuple(one for one in segments if one.last_seq > part.from_seq and one.first_seq <= part.to_seq)
    return Sealed(mine, manifest.earliest_seq, manifest.dedupe_node, pins)


def pinned_segments(
    client: Client, topic: str, from_seq: int = 0, to_seq: int | None = None
) -> tuple[Manifest, list[ManifestSegment], list[Pinned]]:
    """Return (the topic at that moment, its sealed segments with records from_seq + 1..to_seq, their pins)."""
    manifest = page = client.call(calls.segments(topic, from_seq, to_seq, pin_ttl_ms=PIN_TTL_MS))
    segments, pins = list(page.segments), _pin_of(page)
    with _ended_on_failure(client, pins):
        while page.next_from_seq is not None:
            page = client.call(calls.segments(topic, page.next_from_seq, to_seq, pin_ttl_ms=PIN_TTL_MS))
            pins += _pin_of(page)
            if page.epoch != manifest.epoch:
                break  # the topic was made again meanwhile: the tasks will find that out
            segments += page.segments
    return manifest, segments, pins


def _pin_of(page: Manifest) -> list[Pinned]:
    return [] if page.pin is None else [Pinned(page.topic, page.pin.id)]


@contextmanager
def _ended_on_failure(client: Client, pins: list[Pinned]) -> Iterator[None]:
    """End the pins made so far if the block fails: nobody else knows them."""
    try:
        yield
    except BaseException:
        end_pins(client, pins)
        raise


def end_pins(client: Client, pins: Iterable[Pinned]) -> None:
    """End pins before their time. After the first that gets no answer the others are left: they end by themselves."""
    for pin in pins:
        try:
            client.call(calls.end_pin(*pin))
        except (ServiceBusyError, UnreachableError):
            return
        except ClientError as error:
            log.warning("a pin of topic %s was not ended: %s", pin.topic, error)


def read_part(one: Range, sealed: Sealed, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a range in order, from files where there are any; otherwise like `http_read.read_range`."""
    options = plan.options
    with connect(options.service, TASK_RETRY) as client:
        items = _PartReader(client, _renewal_of(options.service, sealed.pins), one, sealed, plan).items()
        yield from http_read.delivered(one.topic, _joined(items), plan)


class _PartReader:
    """Reads a range, from files and over HTTP, in the order of its seqs."""

    def __init__(self, client: Client, renewal: _Renewal, one: Range, sealed: Sealed, plan: ReadPlan) -> None:
        assert plan.options.directories is not None
        self._directories = plan.options.directories
        self._client = client
        self._renewal = renewal
        self._range = one
        self._sealed = sealed
        self._plan = plan

    def items(self) -> Iterator[pa.RecordBatch | Gap]:
        one, sealed = self._range, self._sealed
        if sealed.segments:
            check_directories(self._directories, sealed.segments)
        if one.gap is not None:
            yield one.gap
        cursor = one.from_seq
        for segment in sealed.segments:
            begin = max(segment.first_seq - 1, sealed.earliest_seq - 1, cursor)
            end = min(segment.last_seq, one.to_seq)
            if begin >= end:
                continue
            yield from self._over_http(cursor, begin)
            try:
                yield from self._from_file(segment, begin, end)
            except FileNotFoundError as missing:
                log.warning("topic %s: %s is not there, the service is asked instead", one.topic, missing.filename)
                yield from self._without_file(begin, end)
            cursor = end
        yield from self._over_http(cursor, one.to_seq)

    def _over_http(self, from_seq: int, to_seq: int, client: Client | None = None) -> Iterator[pa.RecordBatch | Gap]:
        part = Range(self._range.topic, self._range.epoch, from_seq, to_seq)
        return http_read.batches_and_gaps(client or self._client, part, self._plan)

    def _from_file(self, segment: ManifestSegment, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch | Gap]:
        topic, plan = self._range.topic, self._plan
        with SegmentScan(self._directories, segment, topic, plan, self._sealed.dedupe_node) as files:
            for item in files.read(from_seq, to_seq):
                self._renewal.renew_when_due()
                yield item if isinstance(item, Gap) else plan.columns.batch(topic, item)

    def _without_file(self, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch | Gap]:
        """Read records over HTTP whose file is missing. If the service cannot read them either, they are a gap."""
        done = from_seq
        with connect(self._plan.options.service, MISSING_RETRY) as client:
            try:
                for item in self._over_http(from_seq, to_seq, client):
                    yield item
                    last = item.last_seq if isinstance(item, Gap) else item.column(1)[-1].as_py()
                    done = to_seq if last is None else last
            except ServiceBusyError as error:
                if error.code != "storage_unavailable":
                    raise
                yield Gap(done + 1, to_seq, MISSING, str(error))


def _joined(items: Iterable[pa.RecordBatch | Gap]) -> Iterator[pa.RecordBatch | Gap]:
    """Yield the items, with neighbouring parts of one gap joined."""
    gap: Gap | None = None
    for item in items:
        if isinstance(item, Gap) and gap is not None and _continues(gap, item):
            gap = gap._replace(last_seq=item.last_seq)
            continue
        if gap is not None:
            yield gap
        gap = item if isinstance(item, Gap) else None
        if gap is None:
            yield item
    if gap is not None:
        yield gap


def _continues(gap: Gap, other: Gap) -> bool:
    return gap.last_seq is not None and other.first_seq == gap.last_seq + 1 and other.reason == gap.reason


class _Renewal:
    """Renews the pins of a query while one of its tasks runs. Reading goes on if the service does not answer."""

    def __init__(self, service: Service, pins: tuple[Pinned, ...]) -> None:
        self._service = service
        self._pins = pins
        self._due_s = 0.0

    def renew_when_due(self) -> None:
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _RENEW_EVERY_S
        try:
            with connect(self._service, _RENEW_RETRY) as client:
                for topic, pin in self._pins:
                    client.call(calls.renew_pin(topic, pin, PIN_TTL_MS))
        except ClientError as error:
            log.warning("pins were not renewed: %s", error)


@lru_cache(maxsize=8)
def _renewal_of(service: Service, pins: tuple[Pinned, ...]) -> _Renewal:
    """Return the renewal that the tasks of this process share: each of them would ask for all pins of its query."""
    return _Renewal(service, pins)
