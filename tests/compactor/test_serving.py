"""The order in which the compactor's process does things."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from tests.storage.faults import SmallFileSystem
from tests.walshard.compaction import Compaction, Life
from tests.walshard.rig import Rig
from topics.compactor import main
from topics.compactor.life import ClockNote
from topics.core.errors import TopicsError
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage.wal import room_left_bytes

INTERVAL_MS = 1_000
STEP_MS = 50


def disk_room(rig: Rig) -> Callable[[], int]:
    return partial(room_left_bytes, rig.fs, rig.settings.data_dir, rig.shared.control.cut_bytes)


class Serving(Life):
    """Time goes on by a step whenever the process sleeps; `seen` is then (cuts, rewritten segments) so far."""

    def __init__(self, rig: Rig, sleeps: int, step_ms: int = STEP_MS) -> None:
        super().__init__(rig)
        self._step_ms = step_ms
        self.seen: list[tuple[int, int]] = []
        self._left = sleeps

    @property
    def stopping(self) -> bool:
        return self._left == 0

    def sleep(self, timeout_ms: int) -> None:
        self._left -= 1
        self._rig.clock.ms += self._step_ms
        self._rig.run()
        self.seen.append((self.cell.get("snapshots"), self.cell.get("segments_rewritten")))


def test_upkeep_waits_for_the_first_cut(tmp_path: Path) -> None:
    """An error that ends the process in upkeep, in each incarnation, must not keep it from ever making a snapshot."""
    rig = Rig(
        str(tmp_path), segment_max_events="8", segment_rewrite_dead_ratio="0.1", checkpoint_interval_ms=str(INTERVAL_MS)
    )
    compaction = Compaction(rig)
    try:
        for number in range(16):
            rig.append("t", b"%d" % number, tag=b"x" if number % 2 else b"y")
        compaction.cut()
        rig.call(DeleteRecords("t", None, "eq", b"x"))
        compaction.begin_again()  # it finds in the index what it is to rewrite
        rig.append("t", b"news")
        compactor = compaction.compactor
        life = Serving(rig, 3 * INTERVAL_MS // STEP_MS)
        before = life.cell.get("snapshots")
        note = ClockNote(rig.fs, rig.settings.data_dir, "this boot", [], rig.clock)
        main.serve(compactor, rig.settings, cast(Any, life), note, disk_room(rig))
        assert {cuts > before for cuts, rewritten in life.seen if rewritten} == {True}
        assert {rewritten for cuts, rewritten in life.seen if cuts == before} == {0}
        assert life.seen[-1][1] == 2
    finally:
        rig.close()


def test_upkeep_and_tidying_do_not_wait_for_a_long_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(
        str(tmp_path), segment_max_events="8", segment_rewrite_dead_ratio="0.1", checkpoint_interval_ms="86400000"
    )
    compaction = Compaction(rig)
    try:
        for number in range(16):
            rig.append("t", b"%d" % number, tag=b"x" if number % 2 else b"y")
        compaction.cut()
        rig.call(DeleteRecords("t", None, "eq", b"x"))
        compaction.begin_again()
        compactor = compaction.compactor
        life = Serving(rig, 130, step_ms=1_000)
        begun_ms = rig.clock.ms
        tidied: list[int] = []
        monkeypatch.setattr(compactor, "tidy", lambda: tidied.append(rig.clock.ms - begun_ms))
        note = ClockNote(rig.fs, rig.settings.data_dir, "this boot", [], rig.clock)
        main.serve(compactor, rig.settings, cast(Any, life), note, disk_room(rig))
        assert [rewritten for _, rewritten in life.seen[:60]] == [0] * 60
        assert life.seen[-1][1] == 2
        assert tidied == [60_000, 120_000]
    finally:
        rig.close()


ROOM_BYTES = 12 << 20
BLOCK = b'"' + b"x" * 9998 + b'"'


class FullDisk:
    """A shard and a compactor on a disk of 12 MiB, which four topics share until nothing more is taken."""

    def __init__(self, root: Path, file_mib: int = 1) -> None:
        self.fs = SmallFileSystem(ROOM_BYTES)
        self.fs.directory = str(root)
        self.rig = Rig(str(root), self.fs, wal_file_bytes=str(file_mib << 20))
        self.compaction = Compaction(self.rig)
        self.heads: dict[str, int] = {}

    def serve(self, ms: int) -> None:
        """Have the compactor work for so long."""
        life = Serving(self.rig, ms // 250, step_ms=250)
        compactor = self.compaction.compactor
        note = ClockNote(self.fs, self.rig.settings.data_dir, "this boot", [], self.rig.clock)
        main.serve(compactor, self.rig.settings, cast(Any, life), note, disk_room(self.rig))

    def fill(self, *names: str) -> TopicsError:
        """Write to these topics in turn, until one is refused."""
        while True:
            for name in names:
                try:
                    self.heads[name] = self.rig.append(name, *[BLOCK] * 5).first_seq + 4
                except TopicsError as error:
                    return error

    def check(self) -> None:
        for name, head_seq in self.heads.items():
            assert [seq for seq, _ in self.compaction.read(name)] == list(range(1, head_seq + 1)), name


@pytest.mark.parametrize("file_mib", [1, 64])
@pytest.mark.parametrize("filled", ["before a cut", "over many cuts"])
def test_on_a_full_disk_a_delete_makes_room_within_seconds(tmp_path: Path, file_mib: int, filled: str) -> None:
    """Though records of all topics share every log file, and none of them is in a segment yet. It needs no restart."""
    disk = FullDisk(tmp_path, file_mib)
    names = [f"t{number}" for number in range(4)]
    try:
        for _ in range(1 if filled == "before a cut" else 12):
            refusal = disk.fill(*names)
            assert (refusal.code, (refusal.detail or {})["cause"]) == ("storage_unavailable", "ENOSPC")
            if filled != "before a cut":
                disk.serve(3_000)
        assert sum(disk.heads.values()) * len(BLOCK) > ROOM_BYTES // (4 if filled == "before a cut" else 2)
        disk.rig.call(DeleteTopic("t0", False))
        gone = disk.heads.pop("t0")
        disk.serve(4_000)
        before = sum(disk.heads.values())
        disk.fill("t1", "t2")
        disk.serve(4_000)
        disk.fill("t1", "t2")
        assert sum(disk.heads.values()) - before > gone // 2
        disk.check()
        disk.rig.restart_service()
        disk.compaction.begin_again()
        disk.check()
    finally:
        disk.rig.close()


def test_deletes_have_room_when_nothing_else_has(tmp_path: Path) -> None:
    disk = FullDisk(tmp_path)
    try:
        for number in range(200):
            disk.rig.append(f"small-{number}", b"1")
        disk.fill("t")
        with pytest.raises(TopicsError, match="nothing of this write was committed"):
            disk.rig.append("new", b"1")
        for number in range(200):
            disk.rig.call(DeleteTopic(f"small-{number}", False))
        disk.rig.call(DeleteRecords("t", 1000, None, b""))
    finally:
        disk.rig.close()
