"""The compactor's own code beside a shard in the test's process: while it waits for the shard, that has its turn."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, cast

from tests.executors import Inline
from tests.walshard.rig import Rig
from topics.compactor.compactor import Compactor
from topics.compactor.main import build
from topics.core.location import LOCATION_GONE, LOCATION_LOST, flags_of
from topics.core.segment_list import COLD, SegmentInfo
from topics.shm.control import Role
from topics.storage import layout
from topics.storage.borrowed import ColdSource, open_cold
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment import ENTRY_LEN, CommittedFile
from topics.storage.segment_reader import SegmentReader


class Life:
    """The life of a process, as `compactor.main` has it."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.clock = rig.clock
        self.cell = rig.shared.control.cell(Role.COMPACTOR, 0)
        self.steps = 0

    def alive(self) -> None:
        """There is always time."""
        self.steps += 1

    def wait(self) -> None:
        self._rig.step()
        for shard in self._rig.shards:
            shard.sync_in_background()


class Compaction:
    """A rig with a compactor that works when it is told to."""

    def __init__(self, rig: Rig, helper: Executor | None = None) -> None:
        self.rig = rig
        self.helper = helper or Inline()
        self._incarnation = 0
        self._compactor: Compactor | None = None
        self.life = Life(rig)

    def begin_again(self) -> None:
        """A new life from the newest snapshot, once it is needed."""
        self._compactor = None

    @property
    def compactor(self) -> Compactor:
        if self._compactor is None:
            self._incarnation += 1
            self.life = Life(self.rig)
            life = cast(Any, self.life)
            helper = cast(ThreadPoolExecutor, self.helper)
            self._compactor = build(self.rig.settings, self.rig.shared, self._incarnation, self.rig.fs, life, helper)
        return self._compactor

    def cut(self) -> bool:
        """Everything into segments, a snapshot, and the shard has dropped what log files it may; False if it failed."""
        complete = self.compactor.cut()
        self.rig.run()
        for shard in self.rig.shards:
            while shard.upkeep.busy:
                shard.sync_in_background()
        return complete

    def upkeep(self) -> None:
        """Do the work that can wait, as far as it goes."""
        for _ in range(50):
            self.compactor.upkeep()
            self.rig.clock.ms += 1

    # -- a reader's side

    def segments(self, name: str) -> tuple[SegmentInfo, ...]:
        reader = self.rig.reader_of(self.rig.owner(name))
        found = reader.look_up(name)
        assert found is not None, name
        segments = reader.segments(*found)
        assert segments is not None
        return segments

    def read(self, name: str) -> list[tuple[int, bytes]]:
        """(seq, data) of all live records, wherever they are."""
        reader = self.rig.reader_of(self.rig.owner(name))
        found = reader.look_up(name)
        assert found is not None, name
        slot, view = found
        segments = reader.segments(slot, view)
        assert segments is not None
        assert view.evict_floor <= view.earliest_seq <= view.head_seq + 1
        records: list[tuple[int, bytes]] = []
        next_seq = view.earliest_seq
        directory = layout.topic_dir(self.rig.settings.data_dir, view.topic_id)
        cold = self._cold() if any(info.flags & COLD for info in segments) else None
        for info in segments:
            if info.last_seq < view.earliest_seq:
                continue
            assert info.first_seq <= next_seq, "no seq is missing between earliest and head"
            assert info.last_seq < view.base_seq
            segment = self._segment(directory, info, cold)
            flags = flags_of(segment.entries(next_seq, info.last_seq))
            for seq, gone in zip(range(next_seq, info.last_seq + 1), flags, strict=True):
                if gone & LOCATION_GONE:
                    continue
                frame = segment.frame(seq)
                assert frame is not None
                assert not frame.deleted
                records.append((seq, frame.data.removeprefix(b'"data":')))
            next_seq = info.last_seq + 1
        assert next_seq >= min(view.base_seq, view.head_seq + 1)
        return records + [record for record in self.rig.read_ring(name, view) if record[0] >= view.earliest_seq]

    def lost(self, name: str, info: SegmentInfo, seq: int) -> bool:
        """Return whether a segment has the record of a topic as a lost one."""
        directory = layout.topic_dir(self.rig.settings.data_dir, self.rig.hosted(name).topic.id)
        return bool(self._segment(directory, info, self._cold()).entries(seq, seq)[3] >> 32 & LOCATION_LOST)

    def _cold(self) -> ColdSource | None:
        return open_cold(OsFileSystem(), self.rig.settings.data_dir, self.rig.settings.cold_dir)

    def _segment(self, directory: str, info: SegmentInfo, cold: ColdSource | None) -> SegmentReader:
        """Return a segment, all of which is read at once."""
        idx = CommittedFile(layout.segment_idx_path(directory, info.first_seq, info.version), info.records * ENTRY_LEN)
        if info.flags & COLD:
            assert cold is not None
            name = layout.segment_data_path(os.path.basename(directory), info.first_seq, info.version)
            data = cold.read_range(name, 0, info.data_bytes)
        else:
            path = layout.segment_data_path(directory, info.first_seq, info.version)
            data = CommittedFile(path, info.data_bytes)[:]
        return SegmentReader(directory, info.first_seq, idx[:], data, info.version)
