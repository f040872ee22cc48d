"""The files that this frontend reads records from: logs, which are mapped read-only, and segments."""

from __future__ import annotations

import mmap
import os
from array import array
from collections import OrderedDict
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import Final

from topics.core.segment_list import COLD, SegmentInfo, SegmentKey
from topics.storage import layout, segment
from topics.storage.logfile import map_file
from topics.storage.segment import ENTRY_LEN, Columns, CommittedFile

MAPS_MAX: Final = 64


class LogFiles:
    """The mapped log files of all shards, the `maps_max` last used ones. Only bytes that locations name are read."""

    def __init__(self, data_dir: str, ram_dir: str, shards: int, maps_max: int = MAPS_MAX) -> None:
        self.data_dir = data_dir
        self._directories = [
            (layout.group_dir(data_dir, shard, shards), layout.ram_group_dir(ram_dir, shard)) for shard in range(shards)
        ]
        self._maps: OrderedDict[tuple[int, bool, int], mmap.mmap] = OrderedDict()
        self._maps_max = maps_max

    def get(self, shard: int, in_ram: bool, file_no: int, end: int) -> mmap.mmap:
        """Return the file, mapped to byte `end` at least. FileNotFoundError if it was removed, EOFError if shorter."""
        key = (shard, in_ram, file_no)
        mapped = self._maps.get(key)
        if mapped is not None and end <= len(mapped):
            self._maps.move_to_end(key)
            return mapped
        # Files of the RAM log grow while they are written.
        mapped = map_file(layout.log_path(self._directories[shard][in_ram], file_no))
        self._forget_removed(shard, in_ram)
        if end > len(mapped):
            raise EOFError(f"log file {file_no} of shard {shard} ends before byte {end}")
        self._maps[key] = mapped
        self._maps.move_to_end(key)
        if len(self._maps) > self._maps_max:
            self._maps.popitem(last=False)
        return mapped

    def sweep(self) -> None:
        """Unmap files that their shards removed. Call this now and then."""
        for shard, in_ram in {key[:2] for key in self._maps}:
            self._forget_removed(shard, in_ram)

    def _forget_removed(self, shard: int, in_ram: bool) -> None:
        """Unmap removed files, which take up space until then."""
        directory = self._directories[shard][in_ram]
        for key in [key for key in self._maps if key[:2] == (shard, in_ram)]:
            if not os.path.exists(layout.log_path(directory, key[2])):
                del self._maps[key]


SEGMENTS_MAX: Final = 1024
"""Segments that are open at once, as far as open files are allowed; each has its index open and, mostly, its data.
Opening one for a page, and checking its frames, costs as much as the page itself.
"""
RECORDS_MAX: Final = 16 << 20
"""Records of all open segments together. A byte is kept for each."""
_FILES_SHARE: Final = 16
_SWEEP_STEP: Final = 32
_CHECKED: Final = b"\1"
_MARKED: Final = 2


class OpenSegment:
    """The committed part of one segment. Methods that read its files raise CorruptSegment."""

    def __init__(self, directory: str, topic_id: int, info: SegmentInfo, checked: bytes = b"") -> None:
        """Open the index. FileNotFoundError if it was removed, CorruptSegment if it is shorter than `info` says."""
        self.first_seq = info.first_seq
        self.last_seq = info.last_seq
        self.data_bytes = info.data_bytes
        self.idx_path = layout.segment_idx_path(directory, info.first_seq, info.version)
        self.data_path = layout.segment_data_path(directory, info.first_seq, info.version)
        self.name = layout.object_name(*info.key_in(topic_id))
        self._idx = CommittedFile(self.idx_path, info.records * ENTRY_LEN)
        self._data: CommittedFile | None = None
        self.is_cold = False
        """True if the cold tier has the data. A copy may be in this directory for a while."""
        self._checked = bytearray(checked.ljust(info.records, b"\0"))
        """A byte a record: 1 if its frame was found to be whole since the opening; 2 if it is marked deleted, too."""

    def local_data(self) -> CommittedFile | None:
        """Return the data file; None if only the cold tier has it. Raise FileNotFoundError, CorruptSegment."""
        if self.is_cold:
            self.close_outdated()
        try:
            if self._data is None:
                self._data = CommittedFile(self.data_path, self.data_bytes)
            return self._data
        except FileNotFoundError:
            if self.is_cold:
                return None
            raise

    def close_outdated(self) -> None:
        """Close data whose file was removed, to free its space, or replaced: the new file is unchecked."""
        if self._data is not None and not self._data.has_its_name:
            self._data = None
            self._checked = bytearray(len(self._checked))

    @property
    def records(self) -> int:
        return len(self._checked)

    @property
    def is_current(self) -> bool:
        """Tell whether the index is neither removed nor replaced."""
        return self._idx.has_its_name

    def columns(self, first_seq: int, last_seq: int) -> Columns:
        return segment.read_columns(self._idx, first_seq - self.first_seq, last_seq - first_seq + 1)

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        """Return the index entries of these seqs as those of a record index (`core.location`)."""
        start = (first_seq - self.first_seq) * ENTRY_LEN
        return segment.entries_of_idx(self._idx[start : start + (last_seq - first_seq + 1) * ENTRY_LEN], first_seq)

    def extent(self, first_seq: int, columns: Columns) -> tuple[list[int], int]:
        """Return (the starts of the frames of `columns`, the end of the last one)."""
        return segment.extent(columns, self.data_bytes, self.idx_path, (first_seq - self.first_seq) * ENTRY_LEN)

    def check(
        self, buffer: bytes, base: int, first_seq: int, columns: Columns, starts: list[int], again: bool, fetched: bool
    ) -> list[int]:
        """Check that these frames are whole (`segment.check_frames`): bytes of this file only once, unless `again`;
        bytes that were `fetched` from the cold tier every time.

        Return the seqs that are deleted by their frames, though not by the index, which may be an older copy. A mark in
        either of them counts.
        """
        start = first_seq - self.first_seq
        end = start + len(starts)
        if again or fetched or self._checked.find(0, start, end) >= 0:
            marked = segment.check_frames(self.data_path, buffer, base, first_seq, columns, starts)
            if fetched:
                return marked
            self._checked[start:end] = _CHECKED * (end - start)
            for seq in marked:
                self._checked[seq - self.first_seq] = _MARKED
        if self._checked.find(_MARKED, start, end) < 0:
            return []
        return [
            seq for seq in range(first_seq, first_seq + len(starts)) if self._checked[seq - self.first_seq] == _MARKED
        ]

    def checked(self) -> bytes:
        """Return the results of `check`, for the same segment when it has grown."""
        self.close_outdated()
        return bytes(self._checked)

    def ts_at(self, seq: int) -> int:
        return segment.ts_of(self._idx, seq - self.first_seq)

    def first_seq_at(self, ts: int) -> int:
        """Return the first seq with a commit time >= ts; last_seq + 1 if there is none."""
        return self.first_seq + segment.first_at(self._idx, self.last_seq - self.first_seq + 1, ts)


def segments_max(open_files: int) -> int:
    """Return how many segments may stay open under this RLIMIT_NOFILE, most of which is for connections."""
    return SEGMENTS_MAX if open_files == RLIM_INFINITY else min(SEGMENTS_MAX, max(64, open_files // _FILES_SHARE))


class SegmentCache:
    """The open segments of all topics. It keeps the last used ones: `segments_max`, and RECORDS_MAX records."""

    def __init__(self, data_dir: str) -> None:
        self._data_dir = data_dir
        self._most = segments_max(getrlimit(RLIMIT_NOFILE)[0])
        self._records = 0
        self._open: OrderedDict[SegmentKey, OpenSegment] = OrderedDict()
        self._unswept: list[SegmentKey] = []

    def get(self, topic_id: int, info: SegmentInfo) -> OpenSegment:
        """Return the segment, at least as long as `info` says. Raise FileNotFoundError, CorruptSegment, OSError."""
        key = info.key_in(topic_id)
        opened = self._open.get(key)
        if opened is None or opened.last_seq < info.last_seq:
            directory = layout.topic_dir(self._data_dir, topic_id)
            opened = OpenSegment(directory, topic_id, info, opened.checked() if opened is not None else b"")
            self._drop(key)
            self._open[key] = opened
            self._records += opened.records
            while len(self._open) > self._most or (self._records > RECORDS_MAX and len(self._open) > 1):
                self._drop(next(iter(self._open)))
        self._open.move_to_end(key)
        opened.is_cold = bool(info.flags & COLD)
        return opened

    def forget(self, path: str) -> None:
        """Close the segment with this damaged file. The next reader opens the file that is there by then."""
        for key in [key for key, opened in self._open.items() if path in (opened.idx_path, opened.data_path)]:
            self._drop(key)

    def _drop(self, key: SegmentKey) -> None:
        opened = self._open.pop(key, None)
        if opened is not None:
            self._records -= opened.records

    def sweep(self) -> None:
        """Close some of the segments whose files were removed or replaced. Call this now and then."""
        if not self._unswept:
            self._unswept = list(self._open)
        for key in self._unswept[-_SWEEP_STEP:]:
            known = self._open.get(key)
            if known is None:
                continue
            if known.is_current:
                known.close_outdated()
            else:
                self._drop(key)
        del self._unswept[-_SWEEP_STEP:]
