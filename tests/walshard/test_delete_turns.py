"""A delete by tag takes several turns of its shard: others come in between, and it ends where the head was (api §5)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core import tags
from topics.core.errors import TopicsError
from topics.core.topic import Topic
from topics.shm.arena_heap import LocationRing
from topics.shm.asks import Message
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.walshard.hosted import tag_search
from topics.walshard.hosted.tag_search import FrameTags

RECORDS = 40
Piece = tuple[list[tuple[int, bytes]], int]


pytestmark = pytest.mark.shard(segment_max_events="8")


@pytest.fixture
def rig(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(tag_search, "FOUND_MAX", 3)
    monkeypatch.setattr(tag_search, "CATCH_UP_RECORDS", 8)
    rig.append("t", *[b"%d" % seq for seq in range(1, RECORDS + 1)], tag=b"x")
    return rig


@pytest.fixture(params=["tail", "sealed", "sealed meanwhile"])
def compaction(request: pytest.FixtureRequest, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Compaction:
    compaction = Compaction(rig)
    if request.param == "sealed":
        compaction.cut()
    elif request.param == "sealed meanwhile":
        take = rig.call

        def cut_behind(call: Message, shard: int = 0) -> object:
            reply = take(call, shard)
            if isinstance(call, DeleteRecords) and call.from_seq in (7, 19):
                compaction.cut()
            return reply

        monkeypatch.setattr(rig, "call", cut_behind)
    return compaction


def test_what_is_written_between_two_turns_stays(compaction: Compaction) -> None:
    rig = compaction.rig
    rest: DeleteRecords | None = DeleteRecords("t", None, "eq", b"x")
    turns = deleted = 0
    while rest is not None:
        reply = rig.call(rest)
        assert reply.deleted <= 3
        deleted += reply.deleted
        rest = reply.rest
        turns += 1
        if turns < 5:
            rig.append("t", b"new", tag=b"x")
        if turns == 2:
            rig.boot()  # a shard that dies has forgotten nothing of it
            compaction.begin_again()
    assert (turns, deleted) == (14, RECORDS)
    assert [data for _, data in compaction.read("t")] == [b"new"] * 4
    view = rig.view("t")
    assert (view.earliest_seq, view.evict_floor, view.records) == (RECORDS + 1, 1, 4)


def test_what_others_take_meanwhile_is_not_counted(rig: Rig) -> None:
    reply = rig.call(DeleteRecords("t", None, "eq", b"x"))
    assert rig.call(DeleteRecords("t", 21, None, b"")).deleted == 17
    assert rig.delete(reply.rest) == 20


def test_the_rest_is_for_no_other_topic_of_that_name(rig: Rig) -> None:
    rest = rig.call(DeleteRecords("t", None, "eq", b"x")).rest
    rig.call(DeleteTopic("t", False))
    for _ in range(2):
        with pytest.raises(TopicsError, match="does not exist"):
            rig.call(rest)
        rig.append("t", b"another", tag=b"x")
    view = rig.view("t")
    assert view.records == 2


def test_a_turn_that_cannot_be_logged_takes_nothing_and_can_be_repeated(rig: Rig) -> None:
    rest = rig.call(DeleteRecords("t", None, "eq", b"x")).rest
    assert isinstance(rig.fs, FaultyFileSystem)
    rig.fs.arm(Fault(1, 28, calls=frozenset({"pwritev"})))
    with pytest.raises(TopicsError) as refused:
        rig.call(rest)
    assert refused.value.code == "storage_unavailable"
    rig.fs.arm(None)
    assert rig.delete(rest) == RECORDS - 3


def test_a_turn_ends_when_its_time_is_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn ends however little it has found: here it looks at some tags of the tail each time."""
    monkeypatch.setattr(tag_search, "TURN_MS", 0)
    rest: DeleteRecords | None = DeleteRecords("t", None, "eq", b"none")
    turns = 0
    while rest is not None:
        rest = rig.call(rest).rest
        turns += 1
    assert turns == RECORDS // 8
    assert rig.call(DeleteRecords("t", None, "eq", b"none")).rest is None, "all of them are known now"


def test_many_tags_are_gathered_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deletes in turns find their matches once each; matches that nobody comes back for are forgotten."""
    for number in range(10):
        rig.append("u", b"1", tag=b"u-%d" % number)
        rig.append("t", b"1", tag=b"t-%d" % number)
    for name in ("t", "u"):
        assert rig.delete(DeleteRecords(name, None, "eq", b"none")) == 0
    monkeypatch.setattr(tag_search, "TURN_MS", 0)
    monkeypatch.setattr(tag_search, "GATHERED_RECORDS", 1)
    calls = [DeleteRecords(name, None, "glob", b"%b-" % name.encode()) for name in ("t", "u")]
    turns = {"t": 0, "u": 0}
    deleted = 0
    gathered_from: list[int] = []
    seqs_of = tags.TagIndex.seqs_of

    def counting(index: tags.TagIndex, asked: Sequence[bytes], start: int, most: int) -> tuple[list[int], int]:
        gathered_from.append(start)
        return seqs_of(index, asked, start, most)

    monkeypatch.setattr(tags.TagIndex, "seqs_of", counting)
    while calls:
        reply = rig.call(call := calls.pop(0))
        turns[call.name] += 1
        deleted += reply.deleted
        calls += [] if reply.rest is None else [reply.rest]
    assert (turns, deleted, len(gathered_from)) == ({"t": 13, "u": 13}, 20, 20)
    rest = DeleteRecords("t", None, "glob", b"")
    for wait_ms, is_kept in ((0, False), (9_000, True), (11_000, False)):
        rig.clock.ms += wait_ms
        rig.shard.sweep()
        rest = rig.call(rest).rest
        assert (gathered_from[-1] > 0) == is_kept


def test_more_deletes_than_keep_what_they_found_do_not_stop_each_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        for name in ("t", "u", "v"):
            rig.append(name, b"1", tag=b"%b-%d" % (name.encode(), number))
    for name in ("t", "u", "v"):
        assert rig.delete(DeleteRecords(name, None, "eq", b"none")) == 0
    monkeypatch.setattr(tag_search, "TURN_MS", 0)
    monkeypatch.setattr(tag_search, "GATHERED_RECORDS", 1)
    monkeypatch.setattr(tag_search, "LEFT_MAX", 2)
    calls = [DeleteRecords(name, None, "glob", b"%b-" % name.encode()) for name in ("t", "u", "v")]
    deleted = turns = 0
    while calls:
        turns += 1
        assert turns < 200, "each loses what it found before its next turn"
        reply = rig.call(calls.pop(0))
        deleted += reply.deleted
        calls += [] if reply.rest is None else [reply.rest]
    assert deleted == 30


def test_tags_that_could_not_be_read_are_not_counted_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = FrameTags.tagged
    reads = 0

    def fails_once(frames: FrameTags, topic: Topic, ring: LocationRing, first_seq: int, last_seq: int) -> Piece:
        nonlocal reads
        reads += 1
        piece = tagged(frames, topic, ring, first_seq, last_seq)
        if reads == 2:
            raise OSError("unreadable")
        return piece

    monkeypatch.setattr(FrameTags, "tagged", fails_once)
    with pytest.raises(TopicsError, match="cannot be read to delete them"):
        rig.call(DeleteRecords("t", None, "eq", b"x"))
    assert rig.delete(DeleteRecords("t", None, "eq", b"x")) == RECORDS
    view = rig.view("t")
    assert view.records == 0


def test_idle_turns_index_what_comes_behind_a_delete_by_tag(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tag_search, "IDLE_RECORDS", 5)
    tagged = FrameTags.tagged
    asked: list[tuple[int, int]] = []

    def counting(frames: FrameTags, topic: Topic, ring: LocationRing, first_seq: int, last_seq: int) -> Piece:
        asked.append((first_seq, last_seq))
        return tagged(frames, topic, ring, first_seq, last_seq)

    monkeypatch.setattr(FrameTags, "tagged", counting)
    rig.append("u", b"1", tag=b"x")
    assert not rig.shard.upkeep.idle(), "nobody has deleted by tag"
    assert rig.delete(DeleteRecords("t", 3, "eq", b"x")) == 2
    asked.clear()
    while rig.shard.upkeep.idle():
        pass
    assert asked == [(first, min(first + 4, RECORDS)) for first in range(3, RECORDS + 1, 5)]
    rig.append("t", b"1", b"2", tag=b"y")
    assert rig.shard.upkeep.idle()
    asked.clear()
    assert rig.delete(DeleteRecords("t", None, "eq", b"y")) == 2
    assert asked == []
    rig.append("t", b"3", tag=b"y")
    Compaction(rig).cut()
    rig.append("t", *[b"4"] * 20, tag=b"z")
    Compaction(rig).cut()
    while rig.shard.upkeep.idle():
        pass
    assert rig.delete(DeleteRecords("t", None, "glob", b"")) == RECORDS - 2 + 21
    rig.append("t", b"5", tag=b"y")
    rig.call(DeleteTopic("t", False))
    assert not rig.shard.upkeep.idle()


def test_an_index_of_tags_that_starts_over_catches_up_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "FORGET_FROM", 4)
    monkeypatch.setattr(tag_search, "TURN_MS", 0)
    assert rig.delete(DeleteRecords("t", None, "eq", b"none")) == 0
    rig.call(DeleteRecords("t", RECORDS - 15, None, b""))
    tagged = FrameTags.tagged
    asked: list[int] = []

    def counting(frames: FrameTags, topic: Topic, ring: LocationRing, first_seq: int, last_seq: int) -> Piece:
        asked.append(last_seq - first_seq + 1)
        return tagged(frames, topic, ring, first_seq, last_seq)

    monkeypatch.setattr(FrameTags, "tagged", counting)
    assert rig.delete(DeleteRecords("t", None, "eq", b"x")) == 16
    assert asked == [8, 8]
