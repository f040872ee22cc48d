"""The files that this frontend reads records from, mapped read-only: logs and segments."""

from __future__ import annotations

import mmap
import os
from array import array
from collections import OrderedDict
from typing import Final

from topics.core.segment_list import COLD, SegmentInfo
from topics.storage import layout
from topics.storage.segment import (
    ENTRY_LEN,
    Columns,
    CommittedFile,
    check_frames,
    entries_of_idx,
    extent,
    first_at,
    read_columns,
    ts_of,
)

MAPS_MAX: Final = 64


class LogFiles:
    """Maps the files of all shards, the least recently used going first when there are too many.

    Only bytes that a published location names are ever looked at, and those do not change any more.
    """

    def __init__(self, data_dir: str, ram_dir: str, shards: int, maps_max: int = MAPS_MAX) -> None:
        self.data_dir = data_dir
        self._directories = [
            (layout.group_dir(data_dir, shard, shards), layout.ram_group_dir(ram_dir, shard)) for shard in range(shards)
        ]
        self._maps: OrderedDict[tuple[int, bool, int], mmap.mmap] = OrderedDict()
        self._maps_max = maps_max

    def get(self, shard: int, in_ram: bool, file_no: int, end: int) -> mmap.mmap:
        """The file, mapped at least up to byte `end`; FileNotFoundError when it is gone, EOFError if shorter."""
        key = (shard, in_ram, file_no)
        mapped = self._maps.get(key)
        if mapped is not None and end <= len(mapped):
            self._maps.move_to_end(key)
            return mapped
        # Files of the RAM log grow while they are written.
        mapped = self._map(layout.log_path(self._directories[shard][in_ram], file_no))
        self._forget_removed(shard, in_ram)
        if end > len(mapped):
            raise EOFError(f"log file {file_no} of shard {shard} ends before byte {end}")
        self._maps[key] = mapped
        self._maps.move_to_end(key)
        if len(self._maps) > self._maps_max:
            self._maps.popitem(last=False)
        return mapped

    def sweep(self) -> None:
        """Let go of files that their shards removed. Call it now and then."""
        for shard, in_ram in {key[:2] for key in self._maps}:
            self._forget_removed(shard, in_ram)

    def _forget_removed(self, shard: int, in_ram: bool) -> None:
        """A file that its shard removed takes space until the last map of it is gone."""
        directory = self._directories[shard][in_ram]
        for key in [key for key in self._maps if key[:2] == (shard, in_ram)]:
            if not os.path.exists(layout.log_path(directory, key[2])):
                del self._maps[key]

    def _map(self, path: str) -> mmap.mmap:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise EOFError(f"{path} is empty") from error
        finally:
            os.close(fd)


SEGMENTS_MAX: Final = 128
"""Open at once, each with its index and, most often, its data."""
_SWEEP_STEP: Final = 8
_CHECKED: Final = b"\1"
_MARKED: Final = 2


class OpenSegment:
    """The committed part of one segment."""

    __slots__ = (
        "_checked",
        "_data",
        "_idx",
        "data_bytes",
        "data_path",
        "first_seq",
        "idx_path",
        "is_cold",
        "last_seq",
        "name",
    )

    def __init__(self, directory: str, topic_id: int, info: SegmentInfo, checked: bytes = b"") -> None:
        """Opens the index; FileNotFoundError when it is gone, CorruptSegment when it is shorter. What reads the files
        raises CorruptSegment, too.
        """
        self.first_seq = info.first_seq
        self.last_seq = info.last_seq
        self.data_bytes = info.data_bytes
        self.idx_path = layout.segment_idx_path(directory, info.first_seq, info.version)
        self.data_path = layout.segment_data_path(directory, info.first_seq, info.version)
        self.name = object_name(topic_id, info)
        self._idx = CommittedFile(self.idx_path, info.records * ENTRY_LEN)
        self._data: CommittedFile | None = None
        self.is_cold = False
        """The cold tier has its data, and this directory for a while at most."""
        self._checked = bytearray(checked.ljust(info.records, b"\0"))
        """1: the frame of this record was found to be whole since this was opened; 2: and marked deleted."""

    def data(self) -> CommittedFile:
        """The file that the index leads to, opened when it is first asked for: times and floors are in the index alone.
        Raises FileNotFoundError, CorruptSegment.
        """
        if self._data is None:
            self._data = CommittedFile(self.data_path, self.data_bytes)
        return self._data

    def data_here(self) -> CommittedFile | None:
        """`data`; None when only the cold tier has them. They stay here for a while after they have become cold."""
        if not self.is_cold:
            return self.data()
        self.let_go()
        try:
            return self.data()
        except FileNotFoundError:
            return None

    def let_go(self) -> None:
        """Of data that were removed, which take space as long as they are open, or replaced by what nobody checked."""
        if self._data is not None and not self._data.has_its_name:
            self._data = None
            self._checked = bytearray(len(self._checked))

    @property
    def is_current(self) -> bool:
        """Tell whether the index is neither removed nor replaced."""
        return self._idx.has_its_name

    def columns(self, first_seq: int, last_seq: int) -> Columns:
        """Index entries of these seqs."""
        return read_columns(self._idx, first_seq - self.first_seq, last_seq - first_seq + 1)

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        """The same as entries of a record index (`core.location`)."""
        start = (first_seq - self.first_seq) * ENTRY_LEN
        return entries_of_idx(self._idx[start : start + (last_seq - first_seq + 1) * ENTRY_LEN], first_seq)

    def extent(self, first_seq: int, columns: Columns) -> tuple[list[int], int]:
        """(where the frames of `columns` begin, where the last one ends). Raises CorruptSegment."""
        return extent(columns, self.data_bytes, self.idx_path, (first_seq - self.first_seq) * ENTRY_LEN)

    def check(
        self,
        buffer: bytes,
        base: int,
        first_seq: int,
        columns: Columns,
        starts: list[int],
        again: bool = False,
        fetched: bool = False,
    ) -> list[int]:
        """That these frames are whole (`segment.check_frames`): once for bytes of this file unless it has to be
        `again`, every time for those that were `fetched` from the cold tier. Raises CorruptSegment.

        Returns the seqs whose frames say that they are deleted, though the index did not: an older one, as a rule, that
        somebody put here. Either of the two counts.
        """
        start = first_seq - self.first_seq
        end = start + len(starts)
        if again or fetched or self._checked.find(0, start, end) >= 0:
            marked = check_frames(self.data_path, buffer, base, first_seq, columns, starts)
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
        """To be handed on to the same segment when it has grown."""
        self.let_go()
        return bytes(self._checked)

    def ts_at(self, seq: int) -> int:
        """Commit time of a record, ms."""
        return ts_of(self._idx, seq - self.first_seq)

    def first_seq_at(self, ts: int) -> int:
        """The first seq whose commit time is >= ts; last_seq + 1 when there is none."""
        return self.first_seq + first_at(self._idx, self.last_seq - self.first_seq + 1, ts)


class OpenSegments:
    """Segments of all topics, the least recently used going first when there are too many."""

    def __init__(self, data_dir: str, segments_max: int = SEGMENTS_MAX) -> None:
        self._data_dir = data_dir
        self._segments_max = segments_max
        self._open: OrderedDict[tuple[int, int, int], OpenSegment] = OrderedDict()
        self._unswept: list[tuple[int, int, int]] = []

    def get(self, topic_id: int, info: SegmentInfo) -> OpenSegment:
        """The segment, at least as long as `info` says. Raises FileNotFoundError, CorruptSegment, OSError."""
        key = (topic_id, info.first_seq, info.version)
        opened = self._open.get(key)
        if opened is None or opened.last_seq < info.last_seq:
            directory = layout.topic_dir(self._data_dir, topic_id)
            opened = OpenSegment(directory, topic_id, info, opened.checked() if opened is not None else b"")
            self._open[key] = opened
            if len(self._open) > self._segments_max:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        opened.is_cold = bool(info.flags & COLD)
        return opened

    def forget(self, path: str) -> None:
        """This file of a segment is damaged: whoever comes next opens what there is by then."""
        for key in [key for key, opened in self._open.items() if path in (opened.idx_path, opened.data_path)]:
            del self._open[key]

    def sweep(self) -> None:
        """Lets go of some whose files were removed or replaced meanwhile; to be called now and then."""
        if not self._unswept:
            self._unswept = list(self._open)
        for key in self._unswept[-_SWEEP_STEP:]:
            known = self._open.get(key)
            if known is None:
                continue
            if known.is_current:
                known.let_go()
            else:
                del self._open[key]
        del self._unswept[-_SWEEP_STEP:]


def object_name(topic_id: int, info: SegmentInfo) -> str:
    """The name of a segment's `.data` in the cold tier (`storage.segment_store`)."""
    return layout.segment_data_path(f"{topic_id:016x}", info.first_seq, info.version)
