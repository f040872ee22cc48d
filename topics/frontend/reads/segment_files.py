"""Segments as this frontend has them open.

Only the committed part of a segment is looked at, and committed bytes never change but for the marks of a deletion:
what is open stays right while the compactor appends to the segment, and after it has removed it. A segment that has
grown is opened anew; a rewritten one has another name. One whose files were replaced by a copy is opened anew within
seconds, at once when they were found to be damaged.
"""

from __future__ import annotations

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
        """What the index leads to, opened when it is first asked for: times and floors are in the index alone. Raises
        FileNotFoundError, CorruptSegment.
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
        """Whether the index is neither removed nor replaced."""
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


class SegmentFiles:
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
    """What a segment's `.data` is called in the cold tier (`storage.segment_store`)."""
    return layout.segment_data_path(f"{topic_id:016x}", info.first_seq, info.version)
