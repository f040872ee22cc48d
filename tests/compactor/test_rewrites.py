"""Segments that are examined for rewriting, and what a failed rewriting leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.storage.faults import CHANGING_CALLS, Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.compactor.work_queue import RETRY_MS
from topics.core.segment_list import COLD, SEALED
from topics.shm.topic_messages import DeleteRecords
from topics.storage.verify import verify

EVENTS = 8


class Counting(FaultyFileSystem):
    """`opened`: paths that were, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self.opened.append(path)
        return super().open(path, flags, mode)


class Machine:
    def __init__(self, root: Path, **settings: Any) -> None:
        self.data_dir = root / "data"
        self.data_dir.mkdir()
        self.fs = Counting()
        self.rig = Rig(
            str(self.data_dir), self.fs, segment_max_events=str(EVENTS), segment_rewrite_dead_ratio="0.3", **settings
        )
        self.compaction = Compaction(self.rig)

    def write(self, count: int, name: str = "t") -> None:
        """Every other one has the tag that `delete` deletes."""
        for number in range(count):
            self.rig.append(name, b"1", tag=b"x" if number % 2 else b"")

    def delete(self, name: str = "t") -> None:
        self.rig.call(DeleteRecords(name, None, "eq", b"x"))
        self.compaction.cut()

    def versions(self, name: str = "t") -> list[int]:
        return [info.version for info in self.compaction.segments(name)]

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.data_dir.rglob(pattern))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.rig.close()


def test_what_was_deleted_before_a_segment_was_sealed_counts_as_well(machine: Machine) -> None:
    machine.write(EVENTS - 1)
    machine.compaction.cut()
    machine.delete()
    machine.compaction.upkeep()
    assert machine.versions() == [0], "nothing rewrites what is still appended to"
    machine.rig.append("t", b"1")
    machine.rig.append("t", b"1")
    machine.compaction.cut()
    machine.compaction.upkeep()
    assert machine.versions() == [1, 0]
    assert [seq for seq, _ in machine.compaction.read("t")] == [1, 3, 5, 7, 8, 9]


def test_one_without_tags_is_damaged_and_nothing_is_copied(machine: Machine) -> None:
    machine.write(EVENTS + 1)
    machine.compaction.cut()
    path = next(machine.data_dir.rglob("*.tags"))
    content = path.read_bytes()
    path.unlink()
    machine.delete()
    machine.fs.opened.clear()
    machine.compaction.upkeep()
    assert machine.versions() == [0, 0]
    assert [path for path in machine.fs.opened if ".1." in path] == []
    path.write_bytes(content)


def test_one_with_the_tags_of_another_holds_up_no_other(machine: Machine) -> None:
    machine.write(2 * EVENTS + 1)
    machine.compaction.cut()
    machine.delete()
    first, second = sorted(machine.data_dir.rglob("*.tags"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    machine.compaction.upkeep()
    assert machine.versions() == [0, 1, 0]
    first.write_bytes(content)


def test_ones_that_are_damaged_are_read_no_faster_than_others(machine: Machine) -> None:
    """Each is read as a whole, and again for each delete in it."""
    for number in range(2 * EVENTS + 1):
        machine.rig.append("t", b'"' + b"x" * 100_000 + b'"', tag=b"x" if number % 2 else b"")
    machine.compaction.cut()
    contents = {path: path.read_bytes() for path in sorted(machine.data_dir.rglob("*.data"))[:2]}
    for path, content in contents.items():
        path.write_bytes(content[:50] + b"y" + content[51:])
    machine.delete()
    with capture_logs() as lines:
        due_in_ms = machine.compaction.compactor.upkeep()
        assert due_in_ms is not None
        assert due_in_ms > 0, "the second one waits"
        machine.compaction.upkeep()
    assert machine.versions() == [0, 0, 0]
    assert [line["event"] for line in lines].count("a damaged segment is not rewritten") == 1, "one a minute"
    for path, content in contents.items():
        path.write_bytes(content)


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename", "fsync_dir"])
def test_one_that_cannot_be_written_leaves_no_files_and_comes_later_each_time(machine: Machine, call: str) -> None:
    machine.write(EVENTS + 1)
    machine.compaction.cut()
    before = machine.files("seg-*")
    machine.delete()
    tries = []
    machine.fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset((call,))))
    for second in range(8 * RETRY_MS // 1000):
        try:
            machine.compaction.compactor.upkeep()
        except OSError:
            tries.append(second * 1000)
            assert machine.files("seg-*") == before
        machine.rig.clock.ms += 1000
    assert tries == [0, RETRY_MS, 3 * RETRY_MS, 7 * RETRY_MS]
    machine.fs.arm(None)
    machine.rig.clock.ms += 8 * RETRY_MS
    machine.compaction.upkeep()
    assert machine.versions() == [1, 0]
    machine.compaction.cut()
    assert verify(str(machine.data_dir), lambda *_: None).damage == []


def test_one_that_cannot_be_written_holds_up_no_other(machine: Machine) -> None:
    for name in ("bad", "good"):
        machine.write(EVENTS + 1, name)
    machine.compaction.cut()
    for name in ("bad", "good"):
        machine.delete(name)
    machine.fs.arm(Fault(1, errno.EIO, calls=CHANGING_CALLS))
    with pytest.raises(OSError, match="Input/output error"):
        machine.compaction.upkeep()
    machine.compaction.upkeep()
    assert [machine.versions(name) for name in ("bad", "good")] == [[0, 0], [1, 0]]
    machine.rig.clock.ms += RETRY_MS
    machine.compaction.upkeep()
    assert machine.versions("bad") == [1, 0]


def test_a_cold_one_without_tags_here_is_fetched_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, cold_dir=str(tmp_path / "cold"), hot_retain_segments="0")
    try:
        machine.write(EVENTS)
        machine.compaction.cut()
        machine.compaction.upkeep()
        assert [info.flags for info in machine.compaction.segments("t")] == [SEALED | COLD]
        next(machine.data_dir.rglob("*.tags")).unlink()
        machine.delete()
        machine.fs.opened.clear()
        for _ in range(20):
            machine.compaction.upkeep()
            machine.rig.clock.ms += RETRY_MS
        assert [os.path.basename(path) for path in machine.fs.opened].count("fetched.tmp") == 1
        assert machine.versions() == [0]
    finally:
        machine.rig.close()
