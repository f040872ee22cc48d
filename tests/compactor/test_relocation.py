"""Segments on their way into the cold directory: many at a time, and none that holds up the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.executors import Hanging
from tests.harness import poll
from tests.storage.faults import FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.compactor.relocation import AHEAD_MAX
from topics.compactor.work_queue import RETRY_MS
from topics.core.segment_list import COLD, SEALED, SegmentList
from topics.shm.arena_heap import ArenaFullError
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage.verify import verify
from topics.walshard.hosted.hosted import Hosted

EVENTS = 2
HOT = 1


class Picky(FaultyFileSystem):
    """Opening, making or removing one file fails, as long as it is said."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable = self.stuck = self.full = "none"

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if path.endswith(self.unreadable) and flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EIO, "Input/output error", path)
        if path.endswith(self.full) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return super().open(path, flags, mode)

    def unlink(self, path: str) -> None:
        if path.endswith(self.stuck):
            raise OSError(errno.EPERM, "Operation not permitted", path)
        super().unlink(path)


class Tiers:
    """A topic of sealed segments, of which all but the last may go."""

    def __init__(self, root: Path, helper: Executor | None = None) -> None:
        self.fs = Picky()
        self.cold_dir = root / "cold"
        self.rig = Rig(
            str(root / "data"),
            self.fs,
            segment_max_events=str(EVENTS),
            cold_dir=str(self.cold_dir),
            hot_retain_segments=str(HOT),
        )
        self.compaction = Compaction(self.rig, helper)
        self.segments = 0

    def seal(self, segments: int) -> None:
        for _ in range(segments):
            self.rig.append("t", *[b"1"] * EVENTS)
        self.segments += segments
        self.compaction.cut()

    def cold(self, name: str = "t") -> list[int]:
        """First seqs."""
        return [info.first_seq for info in self.compaction.segments(name) if info.flags & COLD]

    def all_cold(self) -> bool:
        return [info.flags for info in self.compaction.segments("t")] == [SEALED | COLD] * (self.segments - HOT) + [
            SEALED
        ] * HOT

    def failures(self) -> int:
        return self.compaction.life.cell.get("failures")


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    (tmp_path / "data").mkdir()
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.rig.shard.close()
    tiers.rig.close()
    assert verify(str(tmp_path / "data"), lambda *_: None, str(tiers.cold_dir)).damage == []


def test_a_step_takes_note_of_all_copies_that_are_done(tiers: Tiers) -> None:
    tiers.seal(2 * AHEAD_MAX + HOT)
    for steps in range(3):
        tiers.compaction.compactor.upkeep()
        assert len(tiers.cold()) == steps * AHEAD_MAX
    assert tiers.all_cold()
    assert tiers.compaction.life.cell.get("segments_relocated") == 2 * AHEAD_MAX


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[Tiers]:
    """With a helper thread as the compactor has it."""
    (tmp_path / "data").mkdir()
    with ThreadPoolExecutor(1) as helper:
        tiers = Tiers(tmp_path, helper)
        yield tiers
    tiers.rig.shard.close()
    tiers.rig.close()


def test_the_end_of_a_copy_wakes_the_compactor(threaded: Tiers) -> None:
    threaded.seal(4)
    wake = threaded.rig.shared.compactor_wake
    while not threaded.all_cold():
        wake.drain()
        threaded.compaction.compactor.upkeep()
        if not threaded.all_cold():
            poll("a signal", lambda: wake_was_signalled(wake.fd), 20.0)


def wake_was_signalled(fd: int) -> bool:
    try:
        return os.eventfd_read(fd) > 0
    except BlockingIOError:
        return False


def test_a_file_that_cannot_be_copied_holds_up_no_other(tiers: Tiers) -> None:
    tiers.fs.unreadable = f"seg-{1:020d}.data"
    tiers.seal(6)
    for _ in range(40):
        tiers.compaction.compactor.upkeep()
        tiers.rig.clock.ms += 100
    assert tiers.cold() == [3, 5, 7, 9]
    assert tiers.failures() == 1
    tiers.rig.clock.ms += RETRY_MS
    tiers.compaction.upkeep()
    assert tiers.failures() == 2
    tiers.fs.unreadable = "none"
    tiers.rig.clock.ms += RETRY_MS
    tiers.compaction.upkeep()
    assert tiers.cold() == [3, 5, 7, 9], "it is waited longer each time"
    tiers.rig.clock.ms += RETRY_MS
    tiers.compaction.upkeep()
    assert tiers.all_cold()


@pytest.mark.parametrize("kind", ["tags", "idx", "data"])
def test_a_segment_that_goes_while_it_is_copied_is_no_failure(tiers: Tiers, kind: str) -> None:
    tiers.fs.unreadable = f"seg-{1:020d}.{kind}"  # as if its files had gone before they were opened
    tiers.seal(4)
    tiers.compaction.compactor.upkeep()
    tiers.rig.call(DeleteRecords("t", 3, None, b""))
    tiers.compaction.cut()
    tiers.compaction.upkeep()
    assert (tiers.cold(), tiers.failures()) == ([3, 5], 0)
    for _ in range(2):
        tiers.compaction.cut()
    assert not list(tiers.cold_dir.rglob(f"seg-{1:020d}.*")), "the copies of its other files are for nothing"


def test_segments_go_while_none_can_be_rewritten(tiers: Tiers) -> None:
    """A full disk is one on which no segment can be rewritten, and which relocation makes room on."""
    tiers.rig.append("dead", b"1", b"2")
    tiers.rig.append("dead", b"3", b"4", tag=b"x")
    tiers.rig.append("dead", b"5")
    tiers.seal(1)
    tiers.rig.call(DeleteRecords("dead", None, "eq", b"x"))
    tiers.fs.full = f"seg-{3:020d}.1.data"
    tiers.seal(5)
    for again_ms in (RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS):
        with pytest.raises(OSError, match="No space left"):
            tiers.compaction.compactor.upkeep()
        for _ in range(3):
            tiers.rig.clock.ms += again_ms // 4
            tiers.compaction.compactor.upkeep()
        tiers.rig.clock.ms += again_ms // 4
    assert tiers.all_cold()
    assert not list(Path(tiers.rig.settings.data_dir).rglob("*.1.*")), "half a copy is room that others need"
    tiers.fs.full = "none"
    tiers.compaction.upkeep()
    assert [info.version for info in tiers.compaction.segments("dead")] == [0, 1, 0]


def test_an_object_that_cannot_be_deleted_keeps_no_other(tiers: Tiers) -> None:
    tiers.seal(4)
    tiers.compaction.upkeep()
    assert tiers.all_cold()
    tiers.fs.stuck = f"cold/topics/{next((tiers.cold_dir / 'topics').iterdir()).name}/seg-{1:020d}.data"
    tiers.rig.call(DeleteTopic("t", False))
    for _ in range(5):
        tiers.compaction.cut()
    assert [path.name for path in tiers.cold_dir.rglob("seg-*")] == [f"seg-{1:020d}.data"]
    assert tiers.failures() > 0
    tiers.fs.stuck = "none"
    for _ in range(2):
        tiers.compaction.cut()
    assert not list(tiers.cold_dir.rglob("seg-*"))


def test_a_topic_that_the_shard_does_not_mark_leaves_the_others_cold(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("t", "u"):
        for _ in range(3 + HOT):
            tiers.rig.append(name, *[b"1"] * EVENTS)
    tiers.compaction.cut()
    prepare_segments = Hosted.prepare_segments

    def no_room_for_u(hosted: Hosted, segments: SegmentList) -> tuple[int, int]:
        if hosted.topic.name == "u":
            raise ArenaFullError("no room in the arena")
        return prepare_segments(hosted, segments)

    monkeypatch.setattr(Hosted, "prepare_segments", no_room_for_u)
    tiers.compaction.upkeep()
    assert (tiers.cold(), tiers.cold("u")) == ([1, 3, 5], [])
    assert (tiers.compaction.life.cell.get("segments_relocated"), tiers.failures()) == (3, 3)
    monkeypatch.undo()
    tiers.rig.clock.ms += RETRY_MS
    tiers.compaction.upkeep()
    assert tiers.cold("u") == [1, 3, 5]
    assert (tiers.compaction.life.cell.get("segments_relocated"), tiers.failures()) == (6, 3)


def test_while_the_cold_directory_hangs_what_has_gone_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is forgotten either: objects that were put there before are removed when they can be."""
    monkeypatch.setattr("topics.compactor.relocation.QUEUE_MIN", 8)
    monkeypatch.setattr("topics.compactor.relocation.REMOVED_MAX", 20)
    (tmp_path / "data").mkdir()
    helper = Hanging()
    tiers = Tiers(tmp_path, helper)
    relocation = tiers.compaction.compactor._relocation
    assert relocation is not None
    tiers.seal(4)
    tiers.compaction.upkeep()
    assert tiers.cold() == [1, 3, 5]
    helper.hangs = True
    names, copies = [], []
    for turn in range(1, 41):
        tiers.seal(3)
        tiers.compaction.compactor.upkeep()
        tiers.rig.call(DeleteRecords("t", (4 + 3 * turn) * EVENTS, None, b""))
        tiers.compaction.cut()
        tiers.compaction.cut()
        names.append(len(relocation._removed))
        copies.append(len(relocation._queue))
    assert max(names) <= 20
    assert max(copies) < 2 * (AHEAD_MAX + 8), "of some 120"
    assert names.count(0) > 1, "more than there was room for"
    helper.go_on()
    for _ in range(4):
        tiers.compaction.upkeep()
        tiers.compaction.cut()
    assert tiers.cold() == []
    assert not list(tiers.cold_dir.rglob("seg-*"))
    tiers.seal(2)
    tiers.compaction.upkeep()
    assert len(tiers.cold()) == 2
    tiers.rig.shard.close()
    tiers.rig.close()


class Listed(Picky):
    """Counts the looks at the cold directory, of which some fail."""

    def __init__(self, cold_dir: Path) -> None:
        super().__init__()
        self.topics_dir = str(cold_dir / "topics")
        self.failing = range(0)
        self.looks = 0

    def listdir(self, path: str) -> list[str]:
        if path == self.topics_dir:
            self.looks += 1
            if self.looks in self.failing:
                raise OSError(errno.EIO, "Input/output error", path)
        return super().listdir(path)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("needless", [True, False])
def test_what_the_cold_directory_has_for_nothing_goes_though_nothing_else_happens(
    tmp_path: Path, needless: bool, failing: int, late: bool
) -> None:
    """A failed look is repeated however often and long it fails. Objects without a use are no reason for a snapshot."""
    (tmp_path / "data").mkdir()
    helper = Hanging()
    tiers = Tiers(tmp_path, helper)
    tiers.seal(4)
    tiers.compaction.upkeep()
    for _ in range(3):
        tiers.compaction.cut()
    assert tiers.all_cold()
    needed = sorted(tiers.cold_dir.rglob("seg-*"))
    assert needed
    if needless:
        needed[0].with_name(f"seg-{1:020d}.7.data").write_bytes(b"of a former life")
    tiers.rig.fs = tiers.fs = fs = Listed(tiers.cold_dir)
    fs.failing = range(1, 1 + failing)
    tiers.compaction.begin_again()
    helper.hangs = late
    compactor = tiers.compaction.compactor
    snapshots = 0
    for _ in range(8):
        if compactor.has_news:
            tiers.compaction.cut()
            snapshots += 1
        if helper.hangs:
            helper.go_on()
        compactor.tidy()
    assert sorted(tiers.cold_dir.rglob("seg-*")) == needed
    assert fs.looks == 1 + failing
    assert tiers.failures() == failing
    # The one that each life begins with; if that knew of it already, it needs only one more.
    assert snapshots == 1 + needless + (needless and (late or failing > 0))
    assert not compactor.has_news
    tiers.rig.shard.close()
    tiers.rig.close()
