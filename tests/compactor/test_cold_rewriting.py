"""Deletions in the cold directory give their space back: the segment comes here, is rewritten, and goes there again,
whatever fails, hangs or dies meanwhile.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import poll
from tests.storage.faults import CHANGING_CALLS, Crash, Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.compactor.work_queue import RETRY_MS
from topics.core.segment_list import COLD, SEALED
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage import kill_points
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.kill_points import KillPoint
from topics.storage.layout import parse_segment_file
from topics.storage.verify import verify

EVENTS = 8
"""Records in a segment."""
SEGMENTS = 4
HOT = 1
READS = frozenset(("pread",))


class ColdGate(OsFileSystem):
    """The real one; who opens a file of the cold directory, `last` of all, waits while the gate is closed, and meets
    `error`.
    """

    def __init__(self, cold_dir: str) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.error: int | None = None
        self.last = ""
        self.entered = threading.Event()
        self._cold_dir = cold_dir

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if path.startswith(self._cold_dir):
            self.last = path
            self.entered.set()
            assert self.gate.wait(20)
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error), path)
        return super().open(path, flags, mode)


class Tiers:
    """A topic with SEGMENTS sealed segments, all but one of them cold. Odd seqs have the tag that is deleted."""

    def __init__(self, root: Path, fs: FileSystem | None = None, helper: ThreadPoolExecutor | None = None) -> None:
        self.data_dir, self.cold_dir = str(root / "data"), str(root / "cold")
        os.makedirs(self.data_dir, exist_ok=True)
        self.rig = Rig(
            self.data_dir,
            fs or FaultyFileSystem(),
            segment_max_events=str(EVENTS),
            segment_rewrite_dead_ratio="0.3",
            cold_dir=self.cold_dir,
            hot_retain_segments=str(HOT),
        )
        self.helper = helper
        self.compaction = Compaction(self.rig, helper)
        self.live: list[int] = []
        self.count = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            self.count += 1
            self.rig.append("t", b"%d" % self.count, tag=b"odd" if self.count % 2 else b"even")
            self.live.append(self.count)

    def all_cold_but_one(self) -> None:
        self.write(EVENTS * SEGMENTS)
        self.compaction.cut()
        self.settle(lambda: self.flags() == [SEALED | COLD] * (SEGMENTS - HOT) + [SEALED])

    def delete(self, tag: str = "odd") -> None:
        self.rig.call(DeleteRecords("t", None, "eq", tag.encode()))
        self.live = [seq for seq in self.live if (seq % 2 == 0) != (tag == "even")]

    def settle(self, done: Callable[[], bool]) -> None:
        """Cuts and upkeep until it is so."""

        def step() -> bool:
            self.compaction.upkeep()
            self.compaction.cut()
            return done()

        poll("the compactor to be done", step, 20.0)

    def flags(self) -> list[int]:
        return [info.flags for info in self.compaction.segments("t")]

    def versions(self) -> list[int]:
        return [info.version for info in self.compaction.segments("t")]

    def is_rewritten(self) -> bool:
        """All of it, and cold again."""
        return set(self.versions()) == {1} and self.flags() == [SEALED | COLD] * (SEGMENTS - HOT) + [SEALED]

    def cold_files(self) -> list[tuple[int, int, str]]:
        """(first seq, version, kind)"""
        found = []
        for _, _, names in os.walk(self.cold_dir):
            for name in names:
                parsed = parse_segment_file(name)
                found.append((*parsed[0], parsed[1]) if parsed is not None else (0, 0, name))
        return sorted(found)

    def is_tidy(self) -> bool:
        """Nothing is left in the cold directory but what counts."""
        wanted = {(info.first_seq, info.version) for info in self.compaction.segments("t") if info.flags & COLD}
        return {(first_seq, version) for first_seq, version, _ in self.cold_files()} == wanted

    def check(self) -> None:
        assert [(seq, int(data)) for seq, data in self.compaction.read("t")] == [(seq, seq) for seq in self.live]

    def close(self) -> None:
        self.rig.shard.close()
        self.rig.close()
        if self.helper is not None:
            self.helper.shutdown()
        assert verify(self.data_dir, lambda *_: None, self.cold_dir).damage == []


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    tiers.all_cold_but_one()
    yield tiers
    kill_points.arm(None, lambda: None)
    tiers.close()


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Tiers, ColdGate]]:
    """With a helper thread as the compactor has it."""
    fs = ColdGate(str(tmp_path / "cold"))
    tiers = Tiers(tmp_path, fs, ThreadPoolExecutor(1))
    tiers.all_cold_but_one()
    yield tiers, fs
    fs.gate.set()
    tiers.close()


def test_what_is_deleted_there_gives_its_space_back(tiers: Tiers) -> None:
    before = sum(path.stat().st_size for path in Path(tiers.cold_dir).rglob("*.data"))
    tiers.delete()
    tiers.settle(lambda: tiers.is_rewritten() and tiers.is_tidy())
    after = sum(path.stat().st_size for path in Path(tiers.cold_dir).rglob("*.data"))
    assert after < before * 0.6
    tiers.check()
    hot = {path.suffix for path in Path(tiers.data_dir, "topics").rglob("*.1.*")}
    assert hot == {".data", ".idx", ".tags"}
    assert not list(Path(tiers.data_dir, "topics").glob("*.tmp"))
    for restart in (tiers.rig.boot, tiers.rig.restart_service):
        restart()
        tiers.compaction.begin_again()
        tiers.check()
    tiers.delete("even")
    assert tiers.live == []
    tiers.settle(lambda: not tiers.cold_files())


def test_a_share_of_the_bytes_decides(tiers: Tiers) -> None:
    """A segment with no more deleted bytes than the ratio stays as it is."""
    for _ in range(2):
        tiers.rig.call(DeleteRecords("t", 3, None, b""))
    tiers.live = tiers.live[2:]
    for _ in range(3):
        tiers.compaction.upkeep()
        tiers.compaction.cut()
    assert set(tiers.versions()) == {0}
    tiers.check()


def test_a_later_life_finds_what_is_to_be_rewritten(tiers: Tiers) -> None:
    tiers.delete()
    tiers.compaction.cut()
    tiers.rig.restart_service()
    tiers.compaction.begin_again()
    tiers.settle(lambda: tiers.is_rewritten() and tiers.is_tidy())
    tiers.check()


@pytest.mark.parametrize("point", ["rewrite.fetched", "rewrite.synced", "rewrite.marked"])
def test_what_is_deleted_while_it_is_rewritten_stays_deleted(tiers: Tiers, point: KillPoint) -> None:
    def delete() -> None:
        kill_points.arm(None, lambda: None)
        tiers.delete("even")
        tiers.write(1)

    tiers.delete()
    tiers.compaction.cut()
    kill_points.arm(point, delete)
    tiers.settle(lambda: len(tiers.live) == 1)
    tiers.check()
    tiers.settle(lambda: not tiers.cold_files())
    tiers.rig.restart_service()
    tiers.compaction.begin_again()
    tiers.check()


def test_a_topic_deleted_while_it_is_rewritten_leaves_nothing(tiers: Tiers) -> None:
    def delete_topic() -> None:
        kill_points.arm(None, lambda: None)
        tiers.rig.call(DeleteTopic("t", False))
        tiers.rig.append("t", b"1")
        tiers.live = [1]

    tiers.delete()
    tiers.compaction.cut()
    kill_points.arm("rewrite.fetched", delete_topic)
    tiers.settle(lambda: tiers.live == [1] and not tiers.cold_files())
    tiers.check()


def test_a_cold_directory_that_hangs_holds_up_nothing(gated: tuple[Tiers, ColdGate]) -> None:
    tiers, fs = gated
    tiers.rig.append("other", *[b"1"] * EVENTS, tag=b"odd")
    tiers.rig.append("other", b"2")
    tiers.compaction.cut()
    tiers.delete()
    fs.entered.clear()
    fs.gate.clear()
    tiers.compaction.cut()
    tiers.compaction.upkeep()
    assert fs.entered.wait(20)
    # Records are written, put into segments, deleted; segments are rewritten, snapshots made and logs trimmed.
    for _ in range(3):
        tiers.write(EVENTS)
        tiers.delete()
        tiers.rig.call(DeleteRecords("other", None, "eq", b"odd"))
        tiers.compaction.cut()
        tiers.compaction.upkeep()
        tiers.check()
    assert tiers.versions()[SEGMENTS - HOT] == 1, "the hot one is rewritten all the same"
    assert tiers.versions()[: SEGMENTS - HOT] == [0] * (SEGMENTS - HOT)
    fs.gate.set()
    tiers.settle(lambda: set(tiers.versions()[:SEGMENTS]) == {1} and tiers.is_tidy())
    tiers.check()


def test_a_segment_that_goes_while_it_is_fetched_is_no_failure(gated: tuple[Tiers, ColdGate]) -> None:
    tiers, fs = gated
    tiers.delete()
    fs.entered.clear()
    fs.gate.clear()
    tiers.compaction.cut()
    tiers.compaction.upkeep()
    assert fs.entered.wait(20)
    tiers.delete("even")
    tiers.write(1)

    def has_gone() -> bool:
        tiers.write(1)
        tiers.compaction.cut()
        return not list(Path(tiers.data_dir).rglob("seg-*0001.idx"))

    poll("the index of the first segment to go", has_gone, 20.0)
    fs.gate.set()
    tiers.settle(lambda: not tiers.cold_files())  # `upkeep` raises what fails
    tiers.check()


def test_a_cold_directory_that_fails_is_asked_again_later(gated: tuple[Tiers, ColdGate]) -> None:
    tiers, fs = gated
    tiers.delete()
    tiers.compaction.cut()
    fs.error = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        poll("the failure", tiers.compaction.upkeep)
    tiers.compaction.cut()
    fs.error = None
    for _ in range(3):
        tiers.compaction.upkeep()
        tiers.compaction.cut()
    assert tiers.versions()[0] == 0
    tiers.rig.clock.ms += RETRY_MS
    tiers.settle(lambda: tiers.is_rewritten() and tiers.is_tidy())
    tiers.check()


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_a_cold_directory_that_gave_something_begins_anew(tmp_path: Path, what: str) -> None:
    """The next failure counts as a first one, whatever became of the fetched segment."""
    fs = ColdGate(str(tmp_path / "cold"))
    tiers = Tiers(tmp_path, fs)
    tiers.all_cold_but_one()
    compactor = tiers.compaction.compactor
    step_ms = 1_000
    """a fetch that was begun in one step is taken in the next one"""

    def failure_after_ms() -> int:
        waited_ms = 0
        while waited_ms <= 32 * RETRY_MS:
            try:
                compactor.upkeep()
            except OSError:
                return waited_ms
            tiers.rig.clock.ms += step_ms
            waited_ms += step_ms
        return waited_ms

    tiers.delete()
    tiers.compaction.cut()
    fs.error = errno.EIO
    failure_after_ms()
    assert failure_after_ms() == RETRY_MS + step_ms
    fs.error = None
    first = min(Path(tiers.cold_dir).rglob("*.data"))
    content = first.read_bytes()
    if what == "damaged":
        first.write_bytes(content.replace(b'"data":4', b'"data":9'))

    def act() -> None:
        kill_points.arm(None, lambda: None)
        assert fs.last == str(first)
        fs.error = errno.EIO
        if what == "gone":
            tiers.rig.call(DeleteRecords("t", EVENTS + 1, None, b""))
            compactor.follow(0)

    kill_points.arm("rewrite.fetched", act)
    assert failure_after_ms() >= 2 * RETRY_MS
    assert fs.error
    assert fs.last != str(first)
    assert failure_after_ms() <= RETRY_MS + 2 * step_ms
    fs.error = None
    if what == "damaged":
        first.write_bytes(content)
    tiers.close()


@pytest.mark.parametrize("damage", ["changed", "shorter"])
def test_what_is_damaged_there_stays_as_it_is(tiers: Tiers, damage: str) -> None:
    path = next(iter(sorted(Path(tiers.cold_dir).rglob("*.data"))))
    content = path.read_bytes()
    path.write_bytes(content[:-3] if damage == "shorter" else content.replace(b'"data":4', b'"data":9'))
    tiers.delete()
    tiers.settle(lambda: tiers.versions() == [0, 1, 1, 1])
    assert path.exists()
    path.write_bytes(content)
    tiers.check()
    tiers.compaction.begin_again()
    tiers.settle(lambda: tiers.is_rewritten() and tiers.is_tidy())
    tiers.check()


@pytest.mark.parametrize("point", ["rewrite.fetched", "rewrite.copied", "rewrite.synced", "rewrite.marked"])
@pytest.mark.parametrize("who", ["compactor", "service"])
def test_killed_at_each_step(tiers: Tiers, point: KillPoint, who: str) -> None:
    def die() -> None:
        raise Crash(point)

    tiers.delete()
    tiers.compaction.cut()
    kill_points.arm(point, die)
    # The hot segment is rewritten first, and comes to all points but one.
    crashes = 0
    while crashes < 3:
        try:
            tiers.settle(tiers.is_rewritten)
            break
        except Crash:
            crashes += 1
            if crashes == 2:
                kill_points.arm(None, die)
            tiers.compaction.begin_again()
            if who == "service":
                tiers.rig.restart_service()
            tiers.check()
    assert crashes == 2
    tiers.settle(lambda: tiers.is_rewritten() and tiers.is_tidy())
    tiers.check()


def strike_at(root: Path, nth: int, error: int, calls: frozenset[str]) -> bool:
    """The compactor meets that error at its nth call from the rewriting on; False when it makes fewer."""
    tiers = Tiers(root)
    try:
        tiers.all_cold_but_one()
        tiers.delete()
        tiers.compaction.cut()
        fs = FaultyFileSystem()
        shard_fs, tiers.rig.fs = tiers.rig.fs, fs
        tiers.compaction.begin_again()
        assert tiers.compaction.compactor is not None  # a life with that file system
        fs.arm(Fault(nth, error, calls=calls))
        done = False
        while not done and not fs.struck:
            try:
                tiers.settle(lambda: bool(fs.struck) or (tiers.is_rewritten() and tiers.is_tidy()))
                done = True
            except OSError:
                assert fs.struck
            except Crash:
                fs.bury()
                tiers.compaction.begin_again()
                assert fs.struck
        struck = bool(fs.struck)
        tiers.rig.fs = shard_fs
        if error == Fault.CRASH:
            tiers.compaction.begin_again()
        fs.arm(None)
        tiers.check()
        tiers.rig.clock.ms += RETRY_MS
        tiers.settle(lambda: tiers.is_rewritten() and tiers.is_tidy())
        tiers.rig.restart_service()
        tiers.compaction.begin_again()
        tiers.check()
        return struck
    finally:
        tiers.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["fails", "killed before", "reads fail"])
def test_every_call(name: str, tmp_path: Path) -> None:
    """One in nine; `make crash` takes every one."""
    error = Fault.CRASH if name == "killed before" else errno.EIO
    calls = READS if name == "reads fail" else CHANGING_CALLS
    stride = 3 * int(os.environ.get("TOPICS_CALL_STRIDE", "3")) if calls is CHANGING_CALLS else 1
    if os.environ.get("TOPICS_CALL_STRIDE") == "1":
        stride = 1
    nth = 1 + random.Random(name).randrange(stride)
    while strike_at(tmp_path / str(nth), nth, error, calls):
        shutil.rmtree(tmp_path / str(nth))
        nth += stride
    print(f"{name}: {nth - 1} calls, one in {stride}")
    assert nth > (2 if calls is READS else 60)
