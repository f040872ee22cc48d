"""Several failures in one cut, and full disks on which many topics wait: none hides or repeats another."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compactor.test_cut_failures import BIG, Machine, machine_of
from topics.compactor.checkpoints import FULL_AFTER
from topics.compactor.shard_copy import ShardLink
from topics.core.segment_list import SEALED
from topics.shm import messages
from topics.shm.ring import Ring
from topics.shm.topic_messages import Checkpoint, DeleteRecords
from topics.storage.frame import Bytes


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield from machine_of(tmp_path, 1)


class Short:
    """A ring to which everything is long but a question of the shard's state."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.message_max_bytes = sum(map(len, messages.encode_call(1, Checkpoint([])))) + 8

    def push(self, *parts: Bytes) -> bool:
        return self._ring.push(*parts)


def fill_shared_memory(machine: Machine, link: ShardLink, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For one long message: nothing fits where it is to go."""
    path = root / "spilled"
    path.symlink_to("/dev/full")
    monkeypatch.setattr(link, "_requests", Short(link._requests))
    monkeypatch.setattr(link, "_spill_path", str(path))
    return path


def test_a_full_segment_without_postings_is_not_returned_to_within_a_cut(machine: Machine) -> None:
    machine.rig.append("t", b"1", b"2", b"3", tag=b"x")
    assert machine.compaction.cut()
    path = machine.directory_of("t") / f"seg-{1:020d}.data"
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    path.write_bytes(damaged)
    machine.rig.append("t", b"4")
    assert machine.compaction.cut()
    assert [(info.last_seq, info.flags & SEALED) for info in machine.compaction.segments("t")] == [(4, 0)]
    tries: list[str] = []

    def fails(call: str, failing: str) -> int:
        if call == "open" and f"seg-{5:020d}.data" in failing:
            tries.append(failing)
            assert len(tries) < 5, "the cut never ends"
            return errno.ENOSPC
        return 0

    machine.fs.fails = fails
    machine.rig.append("t", b"5")
    assert not machine.compaction.cut()
    assert len(tries) == 1
    machine.fs.fails = lambda _call, _path: 0
    assert machine.compaction.cut()
    assert [info.first_seq for info in machine.compaction.segments("t")] == [1, 5]
    path.write_bytes(content + path.read_bytes()[len(content) :])


def test_a_refusal_hides_no_error_of_the_disk(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.rig.append("big", *[BIG] * 9)
    machine.rig.append("small", b"1")
    assert machine.compaction.cut()
    assert machine.files_of("big")
    machine.is_full()
    machine.fs.room_bytes += 500
    compactor = machine.compaction.compactor
    assert compactor.marks.doubted == set()
    machine.rig.append("new", BIG)
    machine.rig.append("small", b"2")
    machine.delete("big")
    spilled = fill_shared_memory(machine, compactor.shard_copies[0].link, tmp_path, monkeypatch)
    assert not machine.compaction.cut()
    assert not spilled.is_symlink(), "somebody met it"
    assert machine.files_of("big") == []
    assert compactor.marks.doubted == {0}
    assert machine.compaction.cut()


@pytest.mark.parametrize("what", ["checkpoint", "marks"])
def test_full_shared_memory_is_no_full_disk(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for name in ("gone", "t"):
        machine.rig.append(name, b"1", tag=b"x")
        machine.rig.append(name, b"2")
    assert machine.compaction.cut()
    compactor = machine.compaction.compactor
    assert machine.files_of("gone")
    machine.delete("gone")
    if what == "checkpoint":
        machine.rig.append("t", b"3")
    else:
        compactor.marks.doubt()
        machine.rig.call(DeleteRecords("t", None, "eq", b"x"))
    spilled = fill_shared_memory(machine, compactor.shard_copies[0].link, tmp_path, monkeypatch)
    if what == "marks":
        # The mark of the deletion in the log made the topic due, for which nothing is to be told.
        assert compactor.marks.doubted == {0}
    assert not machine.compaction.cut()
    assert not spilled.is_symlink(), "somebody met it"
    assert machine.files_of("gone"), "nothing is removed before its time"
    assert compactor.marks.doubted == (set() if what == "checkpoint" else {0})
    for _ in range(2):
        assert machine.compaction.cut()
    assert machine.files_of("gone") == []
    assert machine.seqs("t") == ([1, 2, 3] if what == "checkpoint" else [2])


def test_an_error_keeps_nothing_of_what_was_to_be_written(machine: Machine) -> None:
    """Each of them would hold its topic's records until the cut is over."""
    machine.rig.append("t", b"1")
    compactor = machine.compaction.compactor
    (shard_copy,) = compactor.shard_copies
    until = shard_copy.link.committed
    assert until is not None
    shard_copy.catch_up(until, lambda: None)
    machine.fs.fails = lambda call, _path: errno.EIO if call == "fdatasync" else 0
    with pytest.raises(OSError, match="Input/output") as raised:
        compactor._checkpoint(shard_copy)
    frames = [entry.name for entry in raised.traceback]
    assert "run" in frames
    assert "_append_to_one" not in frames
    machine.fs.fails = lambda _call, _path: 0


def topics_with_files(machine: Machine) -> list[str]:
    return [str(path) for path in (machine.data_dir / "topics").rglob("seg-*")]


def test_on_a_full_disk_a_few_topics_are_tried_and_leave_no_files(machine: Machine) -> None:
    names = [f"t{number}" for number in range(3 * FULL_AFTER)]
    machine.rig.append("first", b"1")
    assert machine.compaction.cut()
    machine.is_full()
    for name in names:
        machine.rig.append(name, b"1")
    before = topics_with_files(machine)
    tried: set[str] = set()

    def note(call: str, path: str) -> int:
        if call == "open" and path.endswith(".data"):
            tried.add(path)
        return 0

    machine.fs.fails = note
    for _ in range(2):
        tried.clear()
        assert not machine.compaction.cut()
        assert len(tried) == FULL_AFTER
        assert topics_with_files(machine) == before
    machine.fs.room_bytes = 1 << 30
    assert machine.compaction.cut()
    assert {machine.in_segments(name) for name in names} == {1}


@pytest.mark.parametrize("failing", ["data", "idx"])
def test_a_segment_that_cannot_be_made_leaves_no_files(machine: Machine, failing: str) -> None:
    machine.rig.append("t", b"1")
    machine.fs.fails = lambda call, path: errno.EIO if call == "open" and path.endswith(failing) else 0
    assert not machine.compaction.cut()
    assert topics_with_files(machine) == []
    machine.fs.fails = lambda _call, _path: 0
    assert machine.compaction.cut()
