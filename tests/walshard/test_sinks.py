"""The shard's part in transactions, with a driver that may be anyone, at any time, and more than once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.kept import items_kept
from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.killing import MODULES, at_every_line, is_killed_at_line, serve
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.frontend.txn.coordinator import Stages
from topics.shm.asks import Message
from topics.shm.topic_messages import (
    DeleteTopic,
    PutTopic,
    StagePublish,
    StagesOver,
    TxnBegin,
    TxnEnd,
    TxnForget,
    TxnGet,
    TxnPending,
)
from topics.storage import layout
from topics.storage.frame import lay_out
from topics.storage.segment_check import FileKind
from topics.storage.txn_files import claimed_id, sink_name
from topics.storage.verify import verify

KILLED_IN = (*MODULES, "/topics/storage/filesystem.py")
StageList = list[tuple[str, str]]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    one = Rig(str(tmp_path / "data"))
    yield one
    one.close()


def stages_of(rig: Rig) -> Stages:
    return Stages(rig.settings.data_dir, rig.settings.stage_ttl_ms, lambda: sys.maxsize)


def stage(rig: Rig, *contents: tuple[str, list[bytes]]) -> StageList:
    store = stages_of(rig)
    return [
        (store.make(topic, "txn", lay_out([(b"", b"", piece, b"") for piece in data])), topic)
        for topic, data in contents
    ]


def publish_calls(sink: str, batch: int, stages: StageList) -> list[Message]:
    return [StagePublish(topic, one, sink, batch) for one, topic in stages]


def drive(rig: Rig, sink: str, batch: int, stages: StageList) -> None:
    """Drive a batch to its end, as `frontend/txn/coordinator.py` does."""
    for call in publish_calls(sink, batch, stages):
        rig.call(call)
    rig.call(TxnEnd(sink, batch))
    stages_of(rig).drop([one for one, _topic in stages])
    for topic in {topic for _one, topic in stages}:
        rig.post_call(StagesOver(topic, sink, batch))
    rig.run()


def data(rig: Rig, topic: str) -> list[bytes]:
    return [piece for _seq, piece in rig.read(topic)] if rig.exists(topic) else []


def test_a_batch_is_published_once_and_remembered(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"]))
    assert rig.call(TxnGet("s")).outcome == "none"
    assert rig.call(TxnBegin("s", 0, stages)).outcome == "begun"
    assert (data(rig, "a"), data(rig, "b")) == ([], [])
    drive(rig, "s", 0, stages)
    assert (data(rig, "a"), data(rig, "b")) == ([b"1", b"2", b"4"], [b"3"])
    rig.restart_service()
    again = rig.call(TxnBegin("s", 0, stage(rig, ("a", [b"1", b"2"]))))
    assert (again.outcome, again.batch, again.pending) == ("committed", 0, [])
    assert rig.call(TxnBegin("s", 1, stage(rig, ("a", [b"5"])))).outcome == "begun"


def test_an_unfinished_batch_is_found_and_finished_before_the_next(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]), ("b", [b"2"]))
    rig.call(TxnBegin("s", 3, stages))
    rig.call(publish_calls("s", 3, stages)[0])
    rig.restart_service()
    assert rig.call(TxnPending()).batches == [("s", 3, stages)]
    told = rig.call(TxnBegin("s", 4, stage(rig, ("a", [b"9"]))))
    assert (told.outcome, told.batch, told.pending) == ("pending", 3, stages)
    drive(rig, "s", told.batch, told.pending)
    assert (data(rig, "a"), data(rig, "b")) == ([b"1"], [b"2"])
    assert rig.call(TxnPending()).batches == []


def test_what_is_decided_for_a_topic_that_is_then_made_again_goes_with_the_former_one(rig: Rig) -> None:
    rig.append("a", b"former")
    rig.append("lost", b"former")
    store, records = stages_of(rig), partial(lay_out, [(b"", b"", b"staged", b"")])
    stages = [
        (store.make(topic, "txn", records(), rig.view(topic).topic_id), topic) for topic in ("a", "lost", "lost")
    ] + stage(rig, ("b", [b"new"]))
    rig.call(TxnBegin("s", 0, stages))
    rig.call(DeleteTopic("a", False))
    rig.append("a", b"next")
    rig.call(DeleteTopic("lost", False))  # as where the log lost it: it is made again, for all stages of the batch
    for _driver in range(2):
        for call in publish_calls("s", 0, stages):
            rig.call(call)
        assert (data(rig, "a"), data(rig, "lost"), data(rig, "b")) == ([b"next"], [b"staged"] * 2, [b"new"])
        rig.restart_service()
    drive(rig, "s", 0, stages)
    assert (data(rig, "a"), data(rig, "lost"), data(rig, "b")) == ([b"next"], [b"staged"] * 2, [b"new"])


def test_what_is_decided_for_a_topic_that_a_power_loss_took_is_published_into_the_next(rig: Rig) -> None:
    """All or none: the other topics of the batch have their part."""
    rig.append("a", b"next")
    lost_id = rig.view("a").topic_id + 1
    stages = [(stages_of(rig).make("a", "txn", lay_out([(b"", b"", b"staged", b"")]), lost_id), "a")]
    rig.call(TxnBegin("s", 0, stages))
    drive(rig, "s", 0, stages)
    assert data(rig, "a") == [b"next", b"staged"]
    rig.restart_service()
    assert data(rig, "a") == [b"next", b"staged"]


def test_a_late_driver_publishes_nothing_twice(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]), ("b", [b"2"]))
    rig.call(TxnBegin("s", 0, stages))
    first, second = publish_calls("s", 0, stages)
    assert not rig.call(first).deduped
    assert rig.call(first).deduped
    rig.call(second)
    rig.call(TxnEnd("s", 0))
    # The first driver dies here: files and pins stay. The next batch takes the pins of one topic.
    following = stage(rig, ("a", [b"3"]))
    rig.call(TxnBegin("s", 1, following))
    rig.call(publish_calls("s", 1, following)[0])
    for call in (first, second):
        with pytest.raises(TopicsError, match="is not being published") as late:
            rig.call(call)
        assert late.value.code == "fenced"
    assert (data(rig, "a"), data(rig, "b")) == ([b"1", b"3"], [b"2"])


def test_a_driver_is_told_of_no_publication_of_another_that_the_log_refuses(rig: Rig) -> None:
    rig.append("a", b"0")
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 0, stages))
    assert isinstance(rig.fs, FaultyFileSystem)
    rig.fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"pwritev"})))
    (publish,) = publish_calls("s", 0, stages)
    first, second = rig.post_call(publish), rig.post_call(publish)
    rig.run()
    assert isinstance(rig.replies[first], TopicsError)
    assert not rig.replies[second].deduped, "it would end the batch"
    assert data(rig, "a") == [b"0", b"1"]


def test_pins_outlast_windows_and_restarts_and_go_with_the_batch(rig: Rig) -> None:
    rig.call(PutTopic("a", TopicConfig(idempotency_window_ms=0), False))
    stages = stage(rig, ("a", [b"1"]), ("a", [b"2"]))
    rig.call(TxnBegin("s", 0, stages))
    calls = publish_calls("s", 0, stages)
    rig.call(calls[0])
    rig.clock.ms += 30 * 86_400_000
    rig.restart_service()
    assert rig.call(calls[0]).deduped
    drive(rig, "s", 0, stages)
    assert data(rig, "a") == [b"1", b"2"]


def pins(rig: Rig) -> int:
    return sum(len(stages) for _sink, _batch, stages in rig.hosted("a").topic.idempotency.published_stages())


def after_a_cut(rig: Rig) -> int:
    """Make a cut; return the number of pins that a start from the new snapshot has."""
    compaction = Compaction(rig)
    assert compaction.cut()
    rig.restart_service()
    return pins(rig)


@pytest.mark.parametrize("left", ["forgotten", "over", "later"])
def test_pins_of_batches_that_are_over_leave_the_snapshots(rig: Rig, left: str) -> None:
    compaction = Compaction(rig)
    for n in range(3):
        sink = f"job.{n}"
        stages = stage(rig, ("a", [b"1"]), ("a", [b"2"]))
        rig.call(TxnBegin(sink, 0, stages))
        drive(rig, sink, 0, stages)
        if left == "forgotten":
            rig.call(TxnForget(sink))
        elif left == "later":
            rig.call(TxnBegin(sink, 1, stage(rig, ("b", [b"3"]))))
        # Nothing more than two stages came since the last one.
        assert compaction.cut()
        (topic,) = [one for one in compaction.compactor.shard_copies[0].fold.topics.values() if one.name == "a"]
        assert topic.idempotency.published_stages() == []
    rig.restart_service()
    assert pins(rig) == 0
    assert [piece for _seq, piece in compaction.read("a")] == [b"1", b"2"] * 3


def test_pins_of_a_batch_that_is_not_over_are_in_the_snapshots(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]), ("a", [b"2"]))
    rig.call(TxnBegin("s", 0, stages))
    first, second = publish_calls("s", 0, stages)
    rig.call(first)
    # Also without its file, which somebody took away: or the batch would never be over.
    stages_of(rig).drop([stages[0][0]])
    assert after_a_cut(rig) == 1
    assert rig.call(first).deduped
    assert not rig.call(second).deduped
    assert after_a_cut(rig) == 2
    drive(rig, "s", 0, stages)
    assert after_a_cut(rig) == 0
    assert [piece for _seq, piece in Compaction(rig).read("a")] == [b"1", b"2"]


def test_a_pin_stays_as_long_as_its_stage_could_be_published_again(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 0, stages))
    (publish,) = publish_calls("s", 0, stages)
    rig.call(publish)
    assert rig.call(TxnEnd("s", 0)) is not None
    # The driver dies here, and the sink is forgotten: the stage is there for a later commit.
    rig.call(TxnForget("s"))
    assert after_a_cut(rig) == 1
    assert rig.call(TxnBegin("s", 0, stages)).outcome == "begun"
    assert rig.call(publish).deduped
    drive(rig, "s", 0, stages)
    assert after_a_cut(rig) == 0
    assert [piece for _seq, piece in Compaction(rig).read("a")] == [b"1"]


@pytest.mark.parametrize("damage", ["sink", "no stages"])
def test_pins_stay_where_the_files_do_not_say_that_they_may_go(rig: Rig, damage: str) -> None:
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 0, stages))
    drive(rig, "s", 0, stages)
    if damage == "sink":
        Path(layout.sinks_dir(rig.settings.data_dir), sink_name("s")).write_bytes(b"TSNK")
    else:
        Path(layout.stages_dir(rig.settings.data_dir)).rmdir()
    assert after_a_cut(rig) == 1


def test_a_cut_reads_one_file_for_each_sink_with_pins_and_none_without(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    fs_open = rig.fs.open

    def noted(path: str, flags: int, mode: int = 0o600) -> int:
        opened.append(path)
        return fs_open(path, flags, mode)

    compaction = Compaction(rig)
    assert compaction.cut()
    stages = stage(rig, *[("a", [b"1"]), ("b", [b"2"])] * 4)
    rig.call(TxnBegin("s", 0, stages))
    drive(rig, "s", 0, stages)
    monkeypatch.setattr(rig.fs, "open", noted)
    for expected in (1, 0):
        opened.clear()
        assert compaction.cut()
        assert sum(path.endswith(".sink") for path in opened) == expected


def test_published_records_are_synced_whatever_the_class(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 0, stages))
    before = rig.cell.get("wal_fsyncs")
    rig.call(publish_calls("s", 0, stages)[0])
    assert rig.cell.get("wal_fsyncs") == before + 1


def test_a_stage_that_is_not_there_or_not_whole_decides_nothing(rig: Rig) -> None:
    (one, topic), *_ = stages = stage(rig, ("a", [b"1"]))
    stages_of(rig).drop([one])
    with pytest.raises(TopicsError, match=f"there is no stage '{one}': dropped, expired, or another batch's"):
        rig.call(TxnBegin("s", 0, [(claimed_id(one, "s", 0), topic)]))
    assert rig.call(TxnGet("s")).outcome == "none"
    stages = stage(rig, ("a", [b"1"]))
    path = Path(rig.settings.data_dir, "txn", "stages", f"{stages[0][0]}.stage")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    rig.call(TxnBegin("s", 0, stages))
    with pytest.raises(TopicsError, match="checksum is wrong"):
        rig.call(publish_calls("s", 0, stages)[0])
    assert data(rig, topic) == []


def test_a_commit_that_lost_one_of_its_stages_is_told_which(rig: Rig) -> None:
    """Stages are claimed in order, so that those behind the one that was lost are still there under their own ids."""
    first, second = sorted([*stage(rig, ("a", [b"1"])), *stage(rig, ("b", [b"2"]))])
    os.unlink(os.path.join(rig.settings.data_dir, "txn", "stages", f"{first[0]}.stage"))
    wanted = [(claimed_id(one, "s", 0), topic) for one, topic in (second, first)]
    with pytest.raises(TopicsError, match=f"there is no stage '{first[0]}'"):
        rig.call(TxnBegin("s", 0, wanted))


def test_what_is_taken_back_is_not_decided_any_more_and_what_was_decided_is_published(rig: Rig) -> None:
    """A frontend that drops stages asks which are decided. A commit may be on its way to the shard meanwhile."""
    decided, late = stage(rig, ("a", [b"1"])), stage(rig, ("a", [b"2"]))
    rig.call(TxnBegin("s", 0, decided))
    stages_of(rig).take_back([one for one, _topic in [*decided, *late]])
    with pytest.raises(TopicsError, match="there is no stage"):
        rig.call(TxnBegin("other", 0, late))
    assert rig.call(TxnPending()).batches == [("s", 0, decided)]
    drive(rig, "s", 0, decided)
    assert data(rig, "a") == [b"1"]


def test_a_decided_batch_makes_its_topics_where_there_is_room_for_no_more(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path), max_topics="1")
    rig.append("a", b"0")
    with pytest.raises(TopicsError, match="at most 1 topics"):
        rig.append("c", b"0")
    stages = stage(rig, ("a", [b"1"]), ("b", [b"2"]))
    rig.call(TxnBegin("s", 0, stages))
    drive(rig, "s", 0, stages)
    assert (data(rig, "a"), data(rig, "b"), rig.cell.get("topics")) == ([b"0", b"1"], [b"2"], 2)
    with pytest.raises(TopicsError, match="at most 1 topics"):
        rig.append("c", b"0")
    rig.close()


def test_a_full_topic_takes_what_is_decided(rig: Rig) -> None:
    rig.append("a", b"0", config=TopicConfig(cap_records=1, discard="reject"))
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 0, stages))
    drive(rig, "s", 0, stages)
    assert data(rig, "a") == [b"0", b"1"]


def test_a_sink_can_be_forgotten_once_its_batch_is_over(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 5, stages))
    with pytest.raises(TopicsError, match="is being published"):
        rig.call(TxnForget("s"))
    drive(rig, "s", 5, stages)
    assert isinstance(rig.fs, FaultyFileSystem)
    begun = len(rig.fs.log)
    assert rig.call(TxnForget("s")).outcome == "committed"
    assert rig.fs.log[begun:] == ["unlink", "fsync_dir"], "or a power loss brings it back"
    rig.restart_service()
    assert rig.call(TxnForget("s")).outcome == "none"
    assert rig.call(TxnBegin("s", 0, stage(rig, ("a", [b"2"])))).outcome == "begun"


def test_asking_for_sinks_that_are_not_costs_no_memory(rig: Rig) -> None:
    sinks, others = rig.parts.sinks, (rig.fs, rig.parts.catalog, rig.parts.logs)
    none = items_kept(sinks, *others)
    assert [rig.call(TxnGet(f"s{number}")).outcome for number in range(50)] == ["none"] * 50
    assert items_kept(sinks, *others) == none
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s1", 5, stages))
    drive(rig, "s1", 5, stages)
    assert rig.call(TxnGet("s1")).outcome == "committed"
    rig.call(TxnForget("s1"))
    assert rig.call(TxnGet("s1")).outcome == "none"
    assert items_kept(sinks, *others) == none


def test_a_damaged_sink_is_said_and_is_not_a_new_one(rig: Rig) -> None:
    stages = stage(rig, ("a", [b"1"]))
    rig.call(TxnBegin("s", 0, stages))
    (path,) = Path(rig.settings.data_dir, "txn", "sinks").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    rig.restart_service()
    with pytest.raises(TopicsError, match=r"cannot be used"):
        rig.call(TxnBegin("s", 0, stages))
    assert rig.call(TxnPending()).batches == []


def test_the_file_of_another_sink_is_not_taken_for_its_own(rig: Rig) -> None:
    """Its higher batch would have this sink's next ones count as committed, and nobody would publish them."""
    for sink, batch in (("s", 3), ("other", 9)):
        stages = stage(rig, ("a", [b"1"]))
        rig.call(TxnBegin(sink, batch, stages))
        drive(rig, sink, batch, stages)
    other, own = (Path(layout.sinks_dir(rig.settings.data_dir), sink_name(sink)) for sink in ("other", "s"))
    own.write_bytes(other.read_bytes())
    rig.restart_service()
    with pytest.raises(TopicsError, match="it is of sink 'other'"):
        rig.call(TxnBegin("s", 4, stage(rig, ("a", [b"2"]))))
    assert rig.call(TxnGet("other")).batch == 9
    (finding,) = verify(rig.settings.data_dir, lambda *_: None).damage
    assert (finding.kind, finding.path) == (FileKind.SINK, str(own))


# -- killed anywhere


def commit(rig: Rig, batch: int, contents: list[tuple[str, list[bytes]]]) -> None:
    """A client that commits until it is told that the batch is committed, each time with stages of its own."""
    while True:
        told = rig.call(TxnBegin("s", batch, stage(rig, *contents)))
        if told.outcome == "committed":
            return
        drive(rig, "s", told.batch, told.pending)


CONTENTS = [("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"])]


def check_kill_at(n: int, data_dir: str, whole_service: bool) -> bool:
    """Return False when the work has fewer lines than n."""
    rig = Rig(data_dir)
    try:
        rig.append("a", b"0")
        stages = stage(rig, *CONTENTS)
        rig.post_call(TxnBegin("s", 7, stages))
        for call in publish_calls("s", 7, stages):
            rig.post_call(call)
        rig.post_call(TxnEnd("s", 7))
        is_killed = is_killed_at_line(n, lambda: serve(rig), KILLED_IN)
        if whole_service:
            rig.restart_service()
        else:
            rig.boot()
            rig.run()
        decided = rig.call(TxnGet("s"))
        if decided.outcome == "none":
            assert (data(rig, "a"), data(rig, "b")) == ([b"0"], [])
        for sink, batch, left in rig.call(TxnPending()).batches:
            drive(rig, sink, batch, left)
        if decided.outcome != "none":
            assert (data(rig, "a"), data(rig, "b")) == ([b"0", b"1", b"2", b"4"], [b"3"])
        commit(rig, 7, CONTENTS)
        commit(rig, 8, [("b", [b"5"])])
        assert (data(rig, "a"), data(rig, "b")) == ([b"0", b"1", b"2", b"4"], [b"3", b"5"])
        told = rig.call(TxnGet("s"))
        assert (told.outcome, told.batch, told.pending) == ("committed", 8, [])
    finally:
        rig.close()
    return is_killed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole_service", [False, True])
def test_killed_at_every_line_it_is_all_or_none_and_once(tmp_path: Path, whole_service: bool) -> None:
    at_every_line(tmp_path, 101, 500, partial(check_kill_at, whole_service=whole_service))
