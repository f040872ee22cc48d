"""What a task does in `mode=segments`: reads sealed segments from their files, and over HTTP what is in none.

The index is read when its records are: what has been deleted since the query was planned is left out. A file that is
not there (a pin that ran out, a cold directory that is not mounted) is no answer, so that part is asked of the service,
which knows whether its records are gone. Damage is a gap that the query hears of, never fewer rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from topics.api.answers import ManifestSegment
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_GONE, LOCATION_LOST
from topics.spark.errors import OptionError
from topics.spark.offsets import Gap, Range
from topics.spark.options import Directories, ReadOptions
from topics.spark.segment_arrow import InconsistentLengthsError, Records, decode, not_deleted
from topics.spark.segment_frames import Entries, Ints, check_frames, extent, read_entries
from topics.storage.segment import ENTRY_LEN, CorruptSegment
from topics.storage.segment_columns import index_digest

ROWS_PER_BATCH: Final = 8_000
BATCH_BYTES: Final = 16 * 2**20
"""About what a batch may take of an executor's memory; one record may be larger."""
DAMAGED: Final = "damaged"

_log = logging.getLogger("topics.spark")


def check_directories(directories: Directories, segments: Iterable[ManifestSegment]) -> None:
    """OptionError where nothing of the service is, though one of `segments` should be there."""
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
    """Records and gaps of the part of a segment that is in `one`, in order. Raises FileNotFoundError before anything
    else when a file is not there, OSError.
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

    def entries(self, first_seq: int, last_seq: int) -> Entries:
        """The index of these records as it is now, if it is the one that the service has. Raises CorruptSegment."""
        segment = self._segment
        with open(self._idx_path, "rb") as file:
            idx = file.read()
        records = segment.last_seq - segment.first_seq + 1
        if len(idx) != records * ENTRY_LEN:
            raise CorruptSegment(self._idx_path, len(idx), f"the file ends there, {records * ENTRY_LEN} bytes are due")
        if segment.idx_xxh3 is not None and f"{index_digest(idx):016x}" != segment.idx_xxh3:
            raise CorruptSegment(self._idx_path, 0, f"is not the index that the service has ({segment.idx_xxh3})")
        return read_entries(idx, first_seq - segment.first_seq, last_seq - first_seq + 1)

    def frames(self, first_seq: int, entries: Entries) -> tuple[bytes, Ints]:
        """(bytes, where each frame begins in them); those of live records are checked. Raises CorruptSegment."""
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


def _runs(entries: Entries) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs that are either lost altogether or have no lost record, and are not too long."""
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
    entries: Entries,
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
        # Damage keeps nobody from what lies beside it.
        middle = count // 2
        for start, stop in ((0, middle), (middle, count)):
            yield from _run(files, entries.part(start, stop), first_seq + start, dedupe_node, options, tags, topic)
        return
    if len(records.seq):
        yield records


def _damaged(topic: str, first_seq: int, last_seq: int, damage: CorruptSegment) -> Gap:
    _log.error("topic %s: records %s to %s: %s", topic, first_seq, last_seq, damage)
    return Gap(first_seq, last_seq, DAMAGED, str(damage))
