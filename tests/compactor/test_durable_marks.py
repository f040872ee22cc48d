"""A deletion that the log no longer says is marked on the disk, whatever sync failed or process restarted before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage.page_cache import PageCache
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.compactor.checkpoints import SEQS_PER_MESSAGE, SYNC_ONE_BY_ONE_MAX
from topics.core.config import TopicConfig
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.storage import kill_points
from topics.storage.filesystem import syncfs_reports_errors
from topics.storage.verify import verify

EVENTS = 8
"""Records in a segment."""


class Machine:
    """A shard and a compactor over one page cache."""

    def __init__(self, data_dir: str) -> None:
        self.disk = PageCache()
        self.data_dir = data_dir
        self.rig = Rig(data_dir, self.disk, segment_max_events=str(EVENTS), segment_rewrite_dead_ratio="0")
        self.compaction = Compaction(self.rig)
        self.rig.call(PutTopic("t", TopicConfig(durability="fsync"), True))
        self.seq = 0

    def write(self, count: int) -> None:
        """Odd seqs get the tag that `delete` deletes."""
        for _ in range(count):
            self.seq += 1
            self.rig.append("t", b"%d" % self.seq, tag=b"odd" if self.seq % 2 else b"even")

    def delete(self) -> None:
        """The log has it on the disk when this returns."""
        assert self.rig.delete(DeleteRecords("t", None, "eq", b"odd"))

    def lose_power(self) -> None:
        self.disk.power_loss()
        self.rig.restart_service()
        self.compaction.begin_again()

    def check(self) -> None:
        assert [seq for seq, _ in self.compaction.read("t")] == list(range(2, self.seq + 1, 2))
        assert verify(self.data_dir, lambda *_: None).damage == []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(str(tmp_path))
    yield machine
    machine.rig.close()
    kill_points.arm(None, lambda: None)


def of_segments(path: str) -> bool:
    return "/topics/" in path or path.endswith("/topics")


def once(machine: Machine, wanted: Callable[[str], bool]) -> Callable[[str], bool]:
    """The first such sync fails."""
    return lambda path: wanted(path) and not machine.disk.failed


def test_the_model_forgets_what_a_failed_sync_covered(tmp_path: Path) -> None:
    """A later sync of the same bytes does not bring them back; only writing them again does."""
    disk = PageCache()
    path = str(tmp_path / "file")
    fd = disk.open(path, 0o102)  # O_RDWR | O_CREAT
    disk.pwritev(fd, [b"old"], 0)
    disk.fdatasync(fd)
    disk.pwritev(fd, [b"new"], 0)
    disk.fails = lambda _path: True
    with pytest.raises(OSError, match="Input/output error"):
        disk.fdatasync(fd)
    disk.fails = lambda _path: False
    disk.fdatasync(fd)
    assert disk.pread(fd, 9, 0) == b"new"
    disk.power_loss()
    assert disk.pread(fd, 9, 0) == b"old"
    disk.pwritev(fd, [b"new"], 0)
    disk.fdatasync(fd)
    disk.power_loss()
    assert disk.pread(fd, 9, 0) == b"new"
    disk.close(fd)


@pytest.mark.parametrize("kind", [".idx", ".data"])
@pytest.mark.parametrize("restarted", ["nobody", "compactor", "shard"])
def test_a_failed_sync_of_marks_is_not_repeated_as_if_clean(machine: Machine, kind: str, restarted: str) -> None:
    machine.write(3 * EVENTS)
    machine.compaction.cut()
    machine.delete()
    machine.disk.fails = once(machine, lambda path: of_segments(path) and path.endswith(kind))
    assert not machine.compaction.cut()
    if restarted == "compactor":
        machine.compaction.begin_again()
    elif restarted == "shard":
        machine.rig.boot()
    machine.compaction.cut()
    machine.lose_power()
    machine.check()


@pytest.mark.long
def test_a_failed_sync_of_the_file_system_is_not_either(machine: Machine) -> None:
    """The sync is of many segments, and of more than one message to the shard tells of."""
    count = max(EVENTS * (SYNC_ONE_BY_ONE_MAX + 2), 2 * SEQS_PER_MESSAGE + 2)
    machine.write(count)
    machine.compaction.cut()
    machine.delete()
    machine.disk.fails = once(machine, lambda path: path.endswith("/topics"))
    assert not machine.compaction.cut()
    assert machine.disk.failed == 1
    machine.compaction.cut()
    machine.lose_power()
    machine.check()


@pytest.mark.parametrize(
    ("release", "tells"),
    [
        ("5.7.19-200.fc32", False),
        ("4.19.0", False),
        ("5.8.0-rc1", True),
        ("5.15.167.4-microsoft-standard-WSL2", True),
        ("6.1.0-13-amd64", True),
        ("10.0", True),
        ("unknown", False),
    ],
)
def test_which_kernels_tell_of_a_failed_sync_of_the_file_system(release: str, tells: bool) -> None:
    assert syncfs_reports_errors(release) == tells


@pytest.mark.parametrize("tells", [True, False])
def test_where_it_is_not_told_each_segment_is_synced_by_itself(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    monkeypatch.setattr("topics.compactor.main.syncfs_reports_errors", lambda _release: tells)
    asked: list[str] = []

    def note(path: str) -> bool:
        asked.append(path)
        return False

    machine.disk.fails = note
    machine.write(EVENTS * (SYNC_ONE_BY_ONE_MAX + 2))
    assert machine.compaction.cut()
    machine.delete()
    assert machine.compaction.cut()
    assert any(path.endswith("/topics") for path in asked) == tells
    machine.lose_power()
    machine.check()


@pytest.mark.parametrize("kind", [".idx", ".data"])
def test_the_sync_of_what_is_appended_covers_marks_as_well(machine: Machine, kind: str) -> None:
    """Marks in the active segment, whose next records come to the disk by a sync of their own."""
    machine.write(EVENTS // 2)
    machine.compaction.cut()
    machine.delete()
    machine.seq += 1
    machine.rig.append("t", b"%d" % machine.seq, tag=b"odd")
    machine.write(1)
    machine.delete()
    machine.disk.fails = once(machine, lambda path: of_segments(path) and path.endswith(kind))
    assert not machine.compaction.cut()
    machine.compaction.cut()
    machine.lose_power()
    machine.check()


@pytest.mark.parametrize("restarted", ["nobody", "compactor"])
def test_what_is_deleted_between_copying_and_marking_is_marked_on_the_disk(machine: Machine, restarted: str) -> None:
    """The log tells of the deletion before it tells of the segment: a process that reads it again must know of both."""

    def delete() -> None:
        kill_points.arm(None, lambda: None)
        machine.delete()

    machine.write(2 * EVENTS)
    kill_points.arm("checkpoint.synced", delete)
    machine.compaction.cut()
    if restarted == "compactor":
        machine.compaction.begin_again()
    machine.compaction.cut()
    machine.lose_power()
    machine.check()


def test_a_cut_killed_before_its_snapshot_leaves_marks_to_the_next_life(machine: Machine) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    machine.write(2 * EVENTS)
    kill_points.arm("checkpoint.synced", machine_delete_then(machine, die))
    with pytest.raises(KeyboardInterrupt):
        machine.compaction.cut()
    kill_points.arm(None, lambda: None)
    machine.compaction.begin_again()
    machine.compaction.cut()
    machine.lose_power()
    machine.check()


def machine_delete_then(machine: Machine, die: Callable[[], None]) -> Callable[[], None]:
    """Deletes when segments are on the disk, and dies when their marks are in the log and the snapshot is not made."""

    def act() -> None:
        kill_points.arm("snapshot.due", die)
        machine.delete()

    return act
