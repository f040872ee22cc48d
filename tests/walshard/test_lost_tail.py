"""A log that may have lost its end, cut anywhere behind what was synced: no reader takes another record for one that it
has seen, and none misses one without a gap.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.storage.test_move_anywhere import move
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_queues import MINUTE_MS, ack, claim, counts, queue
from tests.walshard.test_routing import put, route
from topics.core.ceilings import TAIL_STEP
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.idempotency import ProducerTurn, producer_key
from topics.core.location import LOCATION_LOST
from topics.core.routers import HOPS_MAX, RouterSpec
from topics.core.topic import Topic
from topics.shm.control import ProcessState
from topics.shm.topic_messages import CatchUp, DeleteRecords, EnsureTopic, PutRouter, PutTopic, SyncRouters
from topics.storage import layout
from topics.storage.frame import TYPE_AT, FrameType
from topics.storage.logfile import note_committed
from topics.storage.verify import verify
from topics.walshard.commit import commits
from topics.walshard.commit.commits import Commits
from topics.walshard.commit.draft import LogWrite, deletion_write
from topics.walshard.routers import copier

NAMES = ("a", "b", "c")


class Step(NamedTuple):
    """A write to a topic of so many records, then perhaps a background sync or a cut of the compactor."""

    name: str
    records: int
    then: str


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(NAMES),
        st.sampled_from((1, 2, 5, TAIL_STEP // 2, TAIL_STEP * 3)),
        st.sampled_from(("", "", "", "sync", "cut", "fsync")),
    ),
    min_size=1,
    max_size=25,
)


def sync(rig: Rig) -> None:
    rig.clock.ms += 2_000
    for _ in range(2):
        rig.shard.sync_in_background()
    assert not rig.parts.logs.wal.unsynced_bytes


def lose_power(rig: Rig, *shares: float) -> Rig:
    """Cut each shard's log somewhere behind what is synced, and start on another boot with nothing of the former
    memory. `shares`: how much of what is not synced comes through, by shard.
    """
    directories = [layout.group_dir(rig.settings.data_dir, shard, len(shares)) for shard in range(len(shares))]
    wals = [parts.logs.wal for parts in rig.every]
    ends = [(wal.file_no, wal.synced.offset, wal.offset) for wal in wals]
    rig.close()
    for directory, (file_no, synced, end), share in zip(directories, ends, shares, strict=True):
        note_committed(rig.fs, directory, None)
        path = layout.log_path(directory, file_no)
        size_bytes = os.path.getsize(path)
        os.truncate(path, synced + int((end - synced) * share))
        os.truncate(path, size_bytes)
    assert verify(rig.settings.data_dir, lambda *_: None).damage == []
    after = Rig(rig.settings.data_dir, shards=len(shares))
    after.clock.ms = rig.clock.ms + 1  # ids of topics carry the time
    return after


def lost_from(rig: Rig, name: str, seq: int) -> bool:
    """Return whether a reader at this seq is told that it is lost."""
    topic = rig.hosted(name).topic
    if seq < topic.evict_floor:
        return True
    compaction = Compaction(rig)
    for info in compaction.segments(name):
        if info.first_seq <= seq <= info.last_seq:
            return compaction.lost(name, info, seq)
    return bool(rig.hosted(name).ring.entries(seq, seq)[3] >> 32 & LOCATION_LOST)


@contextmanager
def data_dirs() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as data_dir:
        yield data_dir


LIVES = st.lists(st.tuples(STEPS, st.floats(0, 1)), min_size=1, max_size=3)


@settings(max_examples=8)
@given(LIVES)
@example([([Step("a", 5, "sync"), Step("a", 5, "")], 0.0), ([Step("a", 7, "")], 0.0)])
@example([([Step("a", 1, "")], 0.0)])
def test_every_reader_sees_each_record_or_a_gap(lives: list[tuple[list[Step], float]]) -> None:
    _check_readers(lives)


@pytest.mark.long
@settings(max_examples=60)
@given(LIVES)
def test_every_reader_sees_each_record_or_a_gap_in_many_lives(lives: list[tuple[list[Step], float]]) -> None:
    _check_readers(lives)


def _check_readers(lives: list[tuple[list[Step], float]]) -> None:
    with data_dirs() as data_dir:
        rig = Rig(data_dir)
        seen: dict[tuple[str, int], dict[int, bytes]] = {}
        number = 0
        try:
            for steps, share in lives:
                compaction = Compaction(rig)
                for step in steps:
                    if step.then == "fsync":
                        rig.call(PutTopic("f", TopicConfig(durability="fsync"), type_given=False))
                        rig.append("f", b"1")
                    data = [b"%d" % (number + at) for at in range(step.records)]
                    number += step.records
                    first_seq = rig.append(step.name, *data).first_seq
                    known = seen.setdefault((step.name, rig.hosted(step.name).topic.id), {})
                    assert not known or first_seq > max(known), "no seq is given out twice"
                    known.update(enumerate(data, first_seq))
                    if step.then == "sync":
                        sync(rig)
                    elif step.then == "cut":
                        compaction.cut()
                rig = lose_power(rig, share)
                # The gap is part of the log: later readers come to the same.
                for again in (None, rig.boot, rig.restart_service):
                    if again is not None:
                        again()
                    _check(rig, seen)
                assert verify(data_dir, lambda *_: None).damage == []
            compaction = Compaction(rig)
            compaction.cut()
            rig.restart_service()
            _check(rig, seen)
        finally:
            rig.close()


def _check(rig: Rig, seen: dict[tuple[str, int], dict[int, bytes]]) -> None:
    for (name, topic_id), known in seen.items():
        hosted = rig.parts.catalog.find(name)
        if hosted is None or hosted.topic.id != topic_id:
            continue  # its creation was lost: another topic, another epoch
        assert hosted.topic.head_seq >= max(known)
        live = dict(Compaction(rig).read(name))
        for seq, data in known.items():
            if seq in live:
                assert live[seq] == data
            else:
                assert lost_from(rig, name, seq), (name, seq)


def five_and_five(rig: Rig, key: bytes = b"") -> None:
    """Write ten records of which a power loss takes the last five."""
    for number in range(5):
        rig.append("t", b"%d" % number)
    sync(rig)
    for number in range(5, 10):
        rig.append("t", b"%d" % number, key=key if number == 9 else b"")


def test_seqs_go_on_above_the_ceiling_with_a_reason(rig: Rig) -> None:
    five_and_five(rig)
    ceiling = rig.hosted("t").topic.ceilings.seq
    rig = lose_power(rig, 0.0)
    topic = rig.hosted("t").topic
    assert topic.head_seq == topic.durable_seq == ceiling >= 10
    assert rig.append("t", b"next").first_seq == ceiling + 1
    entries = rig.hosted("t").ring.entries(6, ceiling)
    assert set(entries[2::4]) == {EvictReason.LOST_TAIL}
    rig.close()


def test_a_lost_tail_of_many_pages_is_one_seq_of_a_dest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    page_records = 16
    monkeypatch.setattr(copier, "PAGE_RECORDS", page_records)
    route(rig, "r", "t", "copies")
    five_and_five(rig)
    rig.run()
    rig = lose_power(rig, 0.0)
    source, dest = rig.hosted("t").topic, rig.hosted("copies").topic
    assert source.head_seq > 5 * page_records
    before_seq = dest.head_seq
    rig.run()
    rig.append("t", b"next")
    rig.run()
    assert dest.head_seq == before_seq + 2, "one for the tail, one for the next record"
    rig.close()


@pytest.mark.parametrize("ending", ["kill", "shard", "stop", "kill in recovery"])
def test_nothing_is_lost_without_a_power_loss(rig: Rig, ending: str) -> None:
    five_and_five(rig)
    for _ in range(3):
        if ending == "shard":
            rig.boot()
        else:
            if ending == "stop":
                rig.shard.close()
            elif ending == "kill in recovery":
                rig.cell.begin_life(2, 0, ProcessState.RECOVERING)
            rig.restart_service()
        topic = rig.hosted("t").topic
        assert (topic.head_seq, topic.evict_floor, topic.records) == (10, 1, 10)
    assert rig.append("t", b"next").first_seq == 11


def test_a_lost_tail_that_cannot_be_logged_is_not_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after the power loss, and the shard is killed before the log takes a frame."""
    five_and_five(rig)
    ceiling = rig.hosted("t").topic.ceilings.seq
    refusal = TopicsError("storage_unavailable", "the disk is full")
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Commits, "log_lost_end", Mock(side_effect=refusal))
        rig = lose_power(rig, 0.0)
    rig.cell.begin_life(2, 0, ProcessState.RECOVERING)
    rig.boot()
    assert rig.append("t", b"next").first_seq == ceiling + 1
    rig.close()


def lost_deletions(rig: Rig, monkeypatch: pytest.MonkeyPatch, log: Callable[..., None]) -> Rig:
    """Return the rig after a power loss that took deletions which a segment has; `log` stands in the way of logging."""
    compaction = Compaction(rig)
    for number in range(9):
        rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"even")
    compaction.cut()
    rig.append("t", b"9")
    sync(rig)
    rig.call(DeleteRecords("t", 8, "eq", b"odd"))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Commits, "_log", log)
        return lose_power(rig, 0.0)


def test_lost_deletions_whose_logging_is_cut_short_are_logged_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log takes the heads, and what comes with them, and then the disk is full."""
    write = Commits._log
    calls: list[Commits] = []

    def until_full(own: Commits, writes: list[LogWrite]) -> None:
        calls.append(own)
        if len(calls) > 1:
            raise TopicsError("storage_unavailable", "the disk is full")
        write(own, writes)

    rig = lost_deletions(rig, monkeypatch, until_full)
    rig.cell.begin_life(2, 0, ProcessState.RECOVERING)
    logged: list[LogWrite] = []

    def note(own: Commits, writes: list[LogWrite]) -> None:
        logged.extend(writes)
        write(own, writes)

    with monkeypatch.context() as noting:
        noting.setattr(Commits, "_log", note)
        rig.boot()
    assert FrameType.DELETE in [buffer[TYPE_AT] for each in logged for buffer in each.buffers]
    rig.close()


@pytest.mark.shard(segment_max_events="4")
def test_a_segment_that_cannot_be_read_hides_no_lost_deletions_of_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = TopicsError("storage_unavailable", "the disk is full")
    rig = lost_deletions(rig, monkeypatch, Mock(side_effect=refusal))
    first, second, *_ = Compaction(rig).segments("t")
    path = layout.segment_idx_path(layout.topic_dir(rig.settings.data_dir, rig.hosted("t").topic.id), first.first_seq)
    os.rename(path, f"{path}.away")
    logged: list[Sequence[int]] = []

    def note(topic: Topic, seqs: Sequence[int], ts: int) -> LogWrite:
        logged.append(seqs)
        return deletion_write(topic, seqs, ts)

    rig.cell.begin_life(2, 0, ProcessState.RECOVERING)
    with monkeypatch.context() as noting:
        noting.setattr(commits, "deletion_write", note)
        rig.boot()
    assert [seq for seqs in logged for seq in seqs] == [
        seq for seq in (2, 4, 6, 8) if seq >= second.first_seq and seq < 8
    ]
    rig.close()


def test_no_write_is_logged_with_older_floors_than_the_lost_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the start, and the first write that it takes is a deletion."""
    rig = lost_deletions(rig, monkeypatch, Mock(side_effect=TopicsError("storage_unavailable", "the disk is full")))
    with pytest.raises(TopicsError, match="send it again"):
        rig.call(DeleteRecords("t", None, "eq", b"even"))
    rig.call(DeleteRecords("t", None, "eq", b"even"))
    records = rig.hosted("t").topic.records
    rig.append("t", b"next", tag=b"x")
    assert rig.call(DeleteRecords("t", None, "eq", b"x")).deleted == 1
    rig.restart_service()
    assert rig.hosted("t").topic.records == records
    assert b"next" not in [data for _seq, data in rig.read("t")]
    rig.close()


def test_no_ack_is_logged_with_an_older_revision_than_the_lost_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    compaction = Compaction(rig)
    queue(rig, 0, leases_durable=True)
    for number in range(1, 10):
        rig.append("q", b"%d" % number, tag=b"odd" if number % 2 else b"even")
    claim(rig, 6)
    compaction.cut()
    sync(rig)
    rig.call(DeleteRecords("q", None, "eq", b"even"))
    refusal = TopicsError("storage_unavailable", "the disk is full")
    with monkeypatch.context() as full_disk:
        full_disk.setattr(Commits, "_log", Mock(side_effect=refusal))
        rig = lose_power(rig, 0.0)
    with pytest.raises(TopicsError, match="send it again"):
        ack(rig, 3)
    ack(rig, 3)
    rig.restart_service()
    assert rig.hosted("q").topic.records == 4
    rig.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_deletion_that_segments_have_and_the_log_has_lost_counts_once(rig: Rig, share: float) -> None:
    """A shard marks a deletion when it is logged, and the marks may be on the disk before the log is."""
    compaction = Compaction(rig)
    for number in range(9):
        rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"even")
    compaction.cut()
    sync(rig)
    for tag in (b"odd", b"even"):
        rig.call(DeleteRecords("t", 8, "eq", tag))
    rig = lose_power(rig, share)
    for again in (rig.boot, rig.shard.close, rig.restart_service):
        topic = rig.hosted("t").topic
        assert (topic.records, topic.live_bytes) == topic.index.live_size(topic.earliest_seq, topic.head_seq)
        assert topic.records == 2
        again()
    Compaction(rig).cut()
    assert verify(rig.settings.data_dir, lambda *_: None).damage == []
    assert [seq for seq, _data in Compaction(rig).read("t")] == [8, 9]
    rig.close()


@pytest.mark.parametrize(("on_ack", "left"), [("delete", [1, 5, 7, 9]), ("keep", [1, 3, 5, 7, 9])])
def test_jobs_whose_deletion_the_log_has_lost_do_not_count_as_ready(rig: Rig, on_ack: str, left: list[int]) -> None:
    compaction = Compaction(rig)
    queue(rig, 0, on_ack=on_ack, leases_durable=True)
    for number in range(1, 10):
        rig.append("q", b"%d" % number, tag=b"odd" if number % 2 else b"even")
    claim(rig, 6)
    ack(rig, 4)
    compaction.cut()
    sync(rig)
    ack(rig, 3)
    rig.call(DeleteRecords("q", None, "eq", b"even"))
    rig = lose_power(rig, 0.0)
    rig.clock.ms += MINUTE_MS
    assert claim(rig, 10).seqs == left
    assert counts(rig) == (0, len(left), 0)
    rig.close()


def test_a_lost_topic_without_live_records_says_so_by_its_floor(rig: Rig) -> None:
    rig.call(PutTopic("t", TopicConfig(), type_given=False))
    rig.append("t", b"1")
    rig = lose_power(rig, 0.0)
    topic = rig.hosted("t").topic
    assert (topic.earliest_seq, topic.evict_floor) == (TAIL_STEP + 1, TAIL_STEP + 1)
    assert topic.evict_reason == EvictReason.LOST_TAIL
    rig.close()


def test_an_fsync_topic_loses_nothing(rig: Rig) -> None:
    rig.call(PutTopic("t", TopicConfig(durability="fsync"), type_given=False))
    rig.append("t", b"1")
    rig.append("other", b"1")
    rig = lose_power(rig, 0.0)
    assert rig.hosted("t").topic.head_seq == 1
    rig.close()


def test_seqs_of_copies_in_an_fsync_topic_are_not_given_out_twice(rig: Rig) -> None:
    """Its own writes are on the disk before anybody sees them; what routers copy into it is not."""
    put(rig, "b", durability="fsync")
    route(rig, "r", "a", "b")
    rig.append("a", b"1")
    sync(rig)
    rig.append("a", b"2")
    assert rig.read("b") == [(1, b"1"), (2, b"2")]
    after = lose_power(rig, 0.0)
    try:
        first_seq = after.append("b", b"3").first_seq
        assert first_seq > 2
        assert lost_from(after, "b", 2)
        assert after.read("b")[0] == (1, b"1")
        assert after.hosted("b").topic.ceilings.seq > first_seq
    finally:
        after.close()


def test_an_fsync_topic_that_was_of_another_class_loses_nothing(rig: Rig) -> None:
    rig.append("t", b"1")
    put(rig, "t", durability="fsync")
    rig.append("t", b"2")
    after = lose_power(rig, 0.0)
    try:
        assert after.append("t", b"3").first_seq == 3
    finally:
        after.close()


@pytest.mark.parametrize("shares", [(0.0, 1.0), (1.0, 0.0), (0.3, 1.0), (1.0, 0.3), (0.6, 1.0), (0.6, 0.3)])
@pytest.mark.shard(shards=2)
def test_copies_that_are_made_again_go_around_a_cycle_once_more(rig: Rig, shares: tuple[float, float]) -> None:
    """One shard has lost copies of a record, and the other one still has what was copied from them."""
    x, y = (next(name for name in "abcdefgh" if rig.owner(name) == shard) for shard in (0, 1))
    for name, source, dest in (("there", x, y), ("back", y, x)):
        router = rig.call(PutRouter(name, RouterSpec(source, dest, allow_cycle=True))).router
        rig.call(EnsureTopic(dest), rig.owner(dest))
        for _ in range(3):
            reply = rig.call(SyncRouters(dest, router.id, router.version), rig.owner(dest))
        assert reply.begun
    rig.clock.ms += 2_000
    for shard in rig.shards:
        shard.sync_in_background()
        shard.sync_in_background()
    rig.append(x, b"1")
    assert [len(rig.read(name)) for name in (x, y)] == [HOPS_MAX, HOPS_MAX]
    after = lose_power(rig, *shares)
    try:
        for name in (x, y):
            after.call(CatchUp(name), after.owner(name))
        copies = [len(after.read(name)) for name in (x, y)]
        assert max(copies) <= 2 * HOPS_MAX
        assert min(copies) >= 1
        after.append(x, b"2")
        for name in (x, y):
            assert [data for _, data in after.read(name)].count(b"2") == HOPS_MAX
    finally:
        after.close()


def test_keys_and_producers_go_on(rig: Rig) -> None:
    def key(n: int) -> bytes:
        return producer_key(b"p", ProducerTurn(1, n))

    rig.append("t", b"1", key=key(1))
    rig.append("t", b"1", key=b"kept")
    sync(rig)
    rig.append("t", b"2", key=key(2))
    rig.append("t", b"3", key=key(3))
    rig.append("t", b"4", key=b"lost")
    rig = lose_power(rig, 0.0)
    head_seq = rig.hosted("t").topic.head_seq
    assert rig.append("t", b"1", key=b"kept").first_seq == 2
    assert rig.append("t", b"4", key=b"lost").first_seq == head_seq + 1
    assert rig.append("t", b"5", key=key(4)).first_seq == head_seq + 2
    with pytest.raises(TopicsError, match="5 is next and not 6"):
        rig.append("t", b"7", key=key(6))
    rig.close()


def test_another_number_of_shards_hides_nothing(rig: Rig) -> None:
    data_dir = rig.settings.data_dir
    five_and_five(rig)
    wal = rig.parts.logs.wal
    path, synced = layout.log_path(layout.wal_dir(data_dir), wal.file_no), wal.synced.offset
    ceiling = rig.hosted("t").topic.ceilings.seq
    rig.close()
    note_committed(rig.fs, layout.wal_dir(data_dir), None)
    os.truncate(path, synced)
    for shards in (3, 1):
        move(data_dir, shards)
    after = Rig(data_dir)
    assert after.append("t", b"next").first_seq == ceiling + 1
    after.close()


def test_a_complete_log_stays_so_with_another_number_of_shards(rig: Rig) -> None:
    data_dir = rig.settings.data_dir
    five_and_five(rig)
    rig.close()
    for shards in (3, 1):
        move(data_dir, shards)
    after = Rig(data_dir)
    assert after.append("t", b"next").first_seq == 11
    after.close()
