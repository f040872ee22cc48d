"""Records that go while a cut is under way, after its compactor has read the log: the snapshot of that cut says that
they are there, and its segments, which were copied later, lack them. What the log says next is that they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_resharded import move
from topics.core.config import TopicConfig
from topics.shm.arena import TopicView
from topics.shm.queue_messages import Ack, Claim
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.storage import kill_points, layout
from topics.storage.filesystem import OsFileSystem, boot_id
from topics.storage.logfile import WalIdentity
from topics.storage.recovery import Recovery
from topics.storage.snapshot import load_snapshot
from topics.storage.verify import verify

MINUTE_MS = 60_000


class Beside:
    """A queue whose jobs 1 to 100 are leased, over a compactor."""

    def __init__(self, data_dir: str) -> None:
        self.data_dir = data_dir
        self.rig = Rig(data_dir, segment_max_events="20")
        self.compaction = Compaction(self.rig)
        self.rig.call(PutTopic("q", TopicConfig(type="queue"), True))
        self.head_seq = 0

    def append(self, count: int) -> None:
        for _ in range(count):
            self.head_seq += 1
            self.rig.append("q", b"%d" % self.head_seq, tag=b"old" if self.head_seq <= 50 else b"new")

    def lease(self) -> None:
        assert self.rig.call(Claim("q", "w", 1000, MINUTE_MS, 1)).seqs == list(range(1, self.head_seq + 1))

    def ack(self, first_seq: int, last_seq: int) -> None:
        seqs = list(range(first_seq, last_seq + 1))
        assert self.rig.call(Ack("q", "w", seqs, None)).count == len(seqs)

    def cut_beside(self, act: Callable[[], None]) -> None:
        """A cut that has read the log when that happens."""

        def once() -> None:
            kill_points.arm(None, lambda: None)
            act()

        kill_points.arm("checkpoint.followed", once)
        self.compaction.cut()

    @property
    def view(self) -> TopicView:
        return self.rig.view("q")

    def check(self, first_seq: int) -> None:
        """Check that `first_seq` to the head live, now and after every way to start again."""
        assert verify(self.data_dir, lambda _share: None).damage == []
        expected = [(seq, b"%d" % seq) for seq in range(first_seq, self.head_seq + 1)]
        before = self.view
        rig, compaction = self.rig, self.compaction
        for restart in (None, rig.boot, rig.restart_service, compaction.cut, compaction.cut, rig.boot):
            if restart is not None:
                restart()
            if restart == rig.restart_service:
                compaction.begin_again()
            view = self.view
            assert compaction.read("q") == expected
            assert (view.earliest_seq, view.records, view.live_bytes) == (first_seq, len(expected), before.live_bytes)
            assert (view.head_seq, view.evict_floor) == (self.head_seq, 1)
            assert self.hosted_live_size() == (view.records, view.live_bytes)
        assert rig.call(Claim("q", "w", 1000, MINUTE_MS, 1)).seqs == [seq for seq, _ in expected]

    def hosted_live_size(self) -> tuple[int, int]:
        """Return the live size, counted once more."""
        topic = self.rig.hosted("q").topic
        return topic.index.live_size(topic.earliest_seq, topic.head_seq) if topic.records else (0, 0)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    beside = Beside(str(tmp_path))
    yield beside
    kill_points.arm(None, lambda: None)
    beside.rig.close()
    assert verify(beside.data_dir, lambda _share: None).damage == []


def test_acks_of_the_oldest(beside: Beside) -> None:
    beside.append(100)
    beside.lease()
    beside.cut_beside(lambda: beside.ack(1, 50))
    beside.check(51)


def test_a_delete_by_tag_of_the_oldest(beside: Beside) -> None:
    beside.append(100)
    beside.cut_beside(lambda: beside.rig.call(DeleteRecords("q", None, "eq", b"old")))
    beside.check(51)


@pytest.mark.parametrize("more", [0, 30])
def test_acks_of_all_that_the_cut_has_read(beside: Beside, more: int) -> None:
    """A segment says so that has the last of them alone."""

    def act() -> None:
        beside.append(more)
        beside.ack(1, 100)
        if more:
            beside.rig.call(DeleteRecords("q", 111, None, b""))

    beside.append(100)
    beside.lease()
    beside.cut_beside(act)
    assert beside.view.earliest_seq == (111 if more else 101)
    beside.check(111 if more else 101)


@pytest.mark.parametrize("in_steps", [False, True])
def test_acks_across_a_segment_and_what_follows_it(beside: Beside, in_steps: bool) -> None:
    """Seqs are missing between two segments of the snapshot."""

    def act() -> None:
        for first_seq, last_seq in ((1, 10), (11, 30), (31, 50)) if in_steps else ((1, 50),):
            beside.ack(first_seq, last_seq)

    beside.append(30)
    beside.compaction.cut()
    beside.append(70)
    beside.lease()
    beside.cut_beside(act)
    beside.check(51)


def test_a_change_of_the_shard_count_before_the_log_is_read(beside: Beside) -> None:
    beside.append(30)
    beside.compaction.cut()
    beside.append(70)
    beside.lease()
    beside.cut_beside(lambda: beside.ack(1, 50))
    before = beside.view
    beside.rig.close()
    for shards in (3, 1):
        move(OsFileSystem(), beside.data_dir, shards)
    beside.rig = Rig(beside.data_dir, segment_max_events="20")
    beside.compaction = Compaction(beside.rig)
    assert beside.view.live_bytes == before.live_bytes
    beside.check(51)


@pytest.mark.parametrize("segments_before", [False, True])
def test_a_log_whose_next_bytes_are_damaged_and_given_up(beside: Beside, segments_before: bool) -> None:
    """Nothing says any more why records are gone that no segment has: a tombstone does."""
    if segments_before:
        beside.append(30)
        beside.compaction.cut()
    beside.append(100 - beside.head_seq)
    beside.lease()
    beside.cut_beside(lambda: beside.ack(1, 50))
    beside.rig.shard.close()
    beside.rig.close()
    snapshot = load_snapshot(OsFileSystem(), beside.data_dir)
    assert snapshot is not None
    position = snapshot.parts[0].position
    with open(layout.log_path(layout.wal_dir(beside.data_dir), position.file_no), "r+b") as file:
        file.seek(position.offset + 20)
        file.write(b"damage")
    identity = WalIdentity(0, 1, boot_id())
    assert not list(Recovery(OsFileSystem(), layout.wal_dir(beside.data_dir), identity, True, start=position))
    beside.rig = Rig(beside.data_dir, segment_max_events="20")
    beside.compaction = Compaction(beside.rig)
    assert [seq for seq, _ in beside.compaction.read("q")] == list(range(51, 101))
    view = beside.view
    assert (view.earliest_seq, view.evict_floor, view.records) == (51, 51, 50)
    assert beside.hosted_live_size() == (50, view.live_bytes)
    beside.compaction.cut()
    beside.rig.restart_service()
    assert beside.view.evict_floor == 51
