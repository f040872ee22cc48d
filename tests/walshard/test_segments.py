"""A shard whose records are in segments, put there by the real compactor, beside it in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.walshard.compaction import Compaction, Life
from tests.walshard.rig import Rig
from topics.compactor.checkpoints import SEGMENTS_PER_STEP
from topics.core.config import TopicConfig
from topics.core.segment_list import SEALED
from topics.shm.topic_messages import (
    Checkpoint,
    CheckpointReply,
    DeleteRecords,
    DeleteTopic,
    Expire,
    PutTopic,
    TopicCheckpoint,
)
from topics.storage import kill_points, layout
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import KillPoint
from topics.storage.recovery import BATCH_FRAMES
from topics.storage.segment_writer import SegmentWriter

pytestmark = pytest.mark.shard(segment_max_events="8")


def fill(compaction: Compaction, count: int, name: str = "t", start: int = 1, tag: bytes = b"") -> None:
    for number in range(start, start + count):
        compaction.rig.append(name, b"%d" % number, tag=tag)


def numbers(compaction: Compaction, name: str = "t") -> list[int]:
    records = compaction.read(name)
    assert [seq for seq, _ in records] == [int(data) for _, data in records]
    return [seq for seq, _ in records]


def test_records_leave_the_ring_for_segments_and_stay_what_they_are(compaction: Compaction) -> None:
    fill(compaction, 20)
    compaction.cut()
    fill(compaction, 3, start=21)
    assert numbers(compaction) == list(range(1, 24))
    infos = compaction.segments("t")
    assert [(info.first_seq, info.last_seq, info.flags) for info in infos] == [
        (1, 8, SEALED),
        (9, 16, SEALED),
        (17, 20, 0),
    ]
    view = compaction.rig.view("t")
    assert (view.base_seq, view.head_seq, view.records) == (21, 23, 23)


def test_a_start_reads_the_snapshot_and_what_follows_it(compaction: Compaction) -> None:
    fill(compaction, 20)
    compaction.rig.append("keyed", b"1", key=b"k")
    compaction.cut()
    fill(compaction, 3, start=21)
    frames = []
    for restart in (compaction.rig.boot, compaction.rig.restart_service):
        restart()
        compaction.begin_again()
        assert numbers(compaction) == list(range(1, 24))
        assert compaction.rig.append("keyed", b"1", key=b"k").deduped
        compaction.cut()
        frames.append(len(compaction.segments("t")))
        assert numbers(compaction) == list(range(1, 24))
    assert frames == [3, 3]


def test_a_long_log_is_read_in_steps_that_can_be_stopped_between(compaction: Compaction) -> None:
    """A stop gives the compactor little time: it must notice that within what one batch takes."""
    compaction.cut()
    fill(compaction, 4 * BATCH_FRAMES)
    steps = compaction.life.steps
    compaction.compactor.follow(0)
    assert compaction.life.steps - steps >= 4


def test_many_small_segments_are_written_in_steps_that_can_be_stopped_between(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All segments of 65,536 records were one step. A long gap behind a restore kept a stop waiting until it killed."""
    made = [0]
    create = SegmentWriter.create

    def creating(fs: FileSystem, directory: str, first_seq: int) -> SegmentWriter:
        made[-1] += 1
        return create(fs, directory, first_seq)

    monkeypatch.setattr(SegmentWriter, "create", creating)
    monkeypatch.setattr(Life, "alive", lambda _life: made.append(0))
    fill(compaction, 20 * SEGMENTS_PER_STEP)
    compaction.cut()
    assert sum(made) > 2 * SEGMENTS_PER_STEP
    assert max(made) <= SEGMENTS_PER_STEP


def test_log_files_go_once_two_snapshots_have_what_they_say(compaction: Compaction) -> None:
    directory = layout.wal_dir(compaction.rig.settings.data_dir)
    for turn in range(4):
        for number in range(10):
            compaction.rig.append("big", b'"%d%s"' % (number, b"x" * 200_000))
        compaction.cut()
        names = sorted(name for name in os.listdir(directory) if name.startswith("wal-"))
        assert len(names) <= 6, (turn, names)
    assert names[0] > layout.log_name(5)
    compaction.rig.restart_service()
    assert len(compaction.read("big")) == 40


@pytest.mark.parametrize("cut_before_delete", [True, False])
def test_deletes_by_tag_wherever_the_records_are(compaction: Compaction, cut_before_delete: bool) -> None:
    for number in range(1, 31):
        compaction.rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"even-%d" % (number % 3))
        if cut_before_delete and number in (20, 27):
            compaction.cut()
    reply = compaction.rig.call(DeleteRecords("t", 26, "eq", b"odd"))
    assert (reply.deleted, reply.earliest_seq, reply.records) == (13, 2, 17)
    reply = compaction.rig.call(DeleteRecords("t", None, "glob", b"even-"))
    assert (reply.deleted, reply.earliest_seq, reply.records) == (15, 27, 2)
    assert numbers(compaction) == [27, 29]
    compaction.cut()
    assert numbers(compaction) == [27, 29]
    for restart in (compaction.rig.boot, compaction.rig.restart_service):
        restart()
        compaction.begin_again()
        assert numbers(compaction) == [27, 29]
        compaction.cut()
    view = compaction.rig.view("t")
    assert (view.records, view.evict_floor) == (2, 1)


def test_deletes_after_the_snapshot_are_read_back(compaction: Compaction) -> None:
    fill(compaction, 20, tag=b"x")
    compaction.cut()
    compaction.rig.append("t", b"21", tag=b"y")
    compaction.rig.call(DeleteRecords("t", 15, "eq", b"x"))
    view = compaction.rig.view("t")
    compaction.rig.boot()
    again = compaction.rig.view("t")
    assert (again.records, again.live_bytes, again.earliest_seq) == (view.records, view.live_bytes, view.earliest_seq)
    assert numbers(compaction) == list(range(15, 22))


def test_caps_and_expiry_take_from_segments(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.call(PutTopic("t", TopicConfig(cap_records=18, ttl_ms=1000), True))
    fill(compaction, 20)
    compaction.cut()
    assert numbers(compaction) == list(range(3, 21))
    fill(compaction, 5, start=21)
    assert numbers(compaction) == list(range(8, 26))
    rig.clock.ms += 1001
    fill(compaction, 1, start=26)
    rig.call(Expire("t"))
    assert numbers(compaction) == [26]
    view = rig.view("t")
    assert (view.earliest_seq, view.evict_floor) == (26, 26)
    compaction.cut()
    assert [info.first_seq for info in compaction.segments("t")] == [26]
    rig.restart_service()
    assert numbers(compaction) == [26]


def test_a_delete_right_after_an_eviction_is_read_back(compaction: Compaction) -> None:
    """The eviction is not in the log yet when the delete is written; both are read back, and the delete counts."""
    rig = compaction.rig
    rig.call(PutTopic("t", TopicConfig(cap_records=4), True))
    for number in range(1, 7):
        rig.append("t", b"%d" % number, tag=b"x" if number == 4 else b"")
    assert rig.call(DeleteRecords("t", None, "eq", b"x")).records == 3
    rig.boot()
    assert numbers(compaction) == [3, 5, 6]
    view = rig.view("t")
    assert (view.records, view.evict_floor) == (3, 3)


def test_rewritten_segments_keep_what_lives(compaction: Compaction) -> None:
    for number in range(1, 25):
        compaction.rig.append("t", b"%d" % number, tag=b"a" if number % 4 else b"b")
    compaction.cut()
    compaction.rig.call(DeleteRecords("t", None, "eq", b"a"))
    compaction.cut()
    compaction.upkeep()
    assert {info.version for info in compaction.segments("t")} == {1}
    assert numbers(compaction) == [4, 8, 12, 16, 20, 24]
    # The old version counts for the snapshot, the new one in the log behind it.
    compaction.rig.boot()
    assert numbers(compaction) == [4, 8, 12, 16, 20, 24]
    reply = compaction.rig.call(DeleteRecords("t", None, "eq", b"b"))
    assert reply.deleted == 6
    compaction.rig.restart_service()
    assert numbers(compaction) == []


def test_memory_of_the_ring_is_given_back(tmp_path: Path, compaction: Compaction) -> None:
    compaction.rig.close()
    compaction = Compaction(Rig(str(tmp_path / "roomy")))
    for _ in range(64):
        compaction.rig.append("t", *[b"1"] * 500)
    view = compaction.rig.view("t")
    assert view.ring_capacity == 32768
    compaction.cut()
    view = compaction.rig.view("t")
    assert view.ring_capacity == 16
    assert len(compaction.read("t")) == 32_000
    compaction.rig.close()


def test_what_cannot_be_is_refused_and_changes_nothing(compaction: Compaction) -> None:
    fill(compaction, 20)
    compaction.cut()
    fill(compaction, 4, start=21)
    view = compaction.rig.view("t")
    last = compaction.segments("t")[-1]
    wrong = [
        [last.__class__(21, 30, 1, 1, 10, 0, 0)],  # beyond the head
        [last.__class__(23, 24, 1, 1, 10, 0, 0)],  # 21 and 22 are in none
        [last.__class__(19, 24, 1, 1, 10, 0, 0)],  # overlaps
    ]
    for segments in wrong:
        reply = compaction.rig.call(Checkpoint([TopicCheckpoint(view.topic_id, 24, segments)]))
        assert reply == CheckpointReply([], [view.topic_id])
    assert compaction.rig.call(Checkpoint([TopicCheckpoint(5, 24, [last])])) == CheckpointReply([5], [])
    assert numbers(compaction) == list(range(1, 25))
    assert compaction.segments("t")[-1] == last


def test_a_deleted_topic_and_its_namesake(compaction: Compaction) -> None:
    fill(compaction, 20)
    compaction.cut()
    compaction.rig.call(DeleteTopic("t", False))
    fill(compaction, 3)
    assert numbers(compaction) == [1, 2, 3]
    compaction.cut()
    compaction.rig.restart_service()
    assert numbers(compaction) == [1, 2, 3]
    view = compaction.rig.view("t")
    assert view.recreated


def test_records_of_an_ephemeral_topic_that_became_durable(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.call(PutTopic("t", TopicConfig(durability="ephemeral"), True))
    fill(compaction, 10)
    compaction.cut()
    assert compaction.segments("t") == ()
    rig.call(PutTopic("t", TopicConfig(), True))
    fill(compaction, 2, start=11)
    compaction.cut()
    assert numbers(compaction) == list(range(1, 13))
    assert compaction.segments("t")
    for restart in (rig.boot, rig.restart_service):
        restart()
        assert numbers(compaction) == list(range(1, 13))
        view = rig.view("t")
        assert (view.records, view.head_seq, view.earliest_seq) == (12, 12, 1)


# -- what happens between the steps


class Died(BaseException):
    """The process ended there; not an Exception, so that no handler keeps it alive."""


@pytest.fixture
def kill_point() -> Iterator[None]:
    yield
    kill_points.arm(None, lambda: None)


def once(point: KillPoint, action: Callable[[], None]) -> None:
    def act() -> None:
        kill_points.arm(None, lambda: None)
        action()

    kill_points.arm(point, act)


def die() -> None:
    raise Died


def at(point: KillPoint, compaction: Compaction, delete: str, *, shard_dies: bool = False) -> None:
    """Records with this tag are deleted at that point; then perhaps the shard dies before it has taken over."""

    def act() -> None:
        assert compaction.rig.call(DeleteRecords("t", None, "eq", delete.encode())).deleted
        if shard_dies:
            once("mark.logged", die)

    once(point, act)


@pytest.mark.usefixtures("kill_point")
@pytest.mark.parametrize("shard_dies", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_delete_while_records_are_on_their_way(compaction: Compaction, shard_dies: bool, restarts: bool) -> None:
    for number in range(1, 21):
        compaction.rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"even")
    at("checkpoint.synced", compaction, "odd", shard_dies=shard_dies)
    if shard_dies:
        with pytest.raises(Died):
            compaction.cut()
        compaction.rig.boot()
        compaction.begin_again()
    else:
        compaction.cut()
    assert numbers(compaction) == list(range(2, 21, 2))
    view = compaction.rig.view("t")
    assert (view.records, view.base_seq) == (10, 21)
    if restarts:
        compaction.rig.restart_service()
        compaction.begin_again()
    compaction.cut()
    compaction.cut()
    compaction.rig.restart_service()
    assert numbers(compaction) == list(range(2, 21, 2))
    assert compaction.rig.call(DeleteRecords("t", None, "eq", b"odd")).deleted == 0


@pytest.mark.usefixtures("kill_point")
@pytest.mark.parametrize("shard_dies", [False, True])
def test_a_delete_while_a_segment_is_rewritten(compaction: Compaction, shard_dies: bool) -> None:
    for number in range(1, 17):
        tag = {1: b"kept", 7: b"even", 0: b"even"}.get(number % 8, b"odd")
        compaction.rig.append("t", b"%d" % number, tag=tag)
    compaction.cut()
    compaction.rig.call(DeleteRecords("t", None, "eq", b"odd"))
    compaction.cut()
    at("rewrite.synced", compaction, "even", shard_dies=shard_dies)
    left = [1, 9]
    if shard_dies:
        with pytest.raises(Died):
            compaction.upkeep()
        compaction.rig.boot()
        compaction.begin_again()
    else:
        compaction.upkeep()
    assert compaction.segments("t")[0].version == 1
    assert numbers(compaction) == left
    compaction.upkeep()
    compaction.cut()
    compaction.rig.restart_service()
    assert numbers(compaction) == left
    view = compaction.rig.view("t")
    assert (view.evict_floor, view.records) == (1, 2)


@pytest.mark.usefixtures("kill_point")
@pytest.mark.parametrize("point", ["mark.logged", "mark.applied"])
def test_the_shard_dies_between_mark_and_answer(compaction: Compaction, point: KillPoint) -> None:
    fill(compaction, 20)
    once(point, die)
    with pytest.raises(Died):
        compaction.cut()
    compaction.rig.boot()
    assert numbers(compaction) == list(range(1, 21))
    assert [info.last_seq for info in compaction.segments("t")] == [8, 16, 20]
    compaction.begin_again()
    fill(compaction, 5, start=21)
    compaction.cut()
    assert [info.last_seq for info in compaction.segments("t")] == [8, 16, 24, 25]
    compaction.rig.restart_service()
    assert numbers(compaction) == list(range(1, 26))
