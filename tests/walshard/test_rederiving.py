"""Copies that readers have seen and no log holds are made again, with their seqs, in whatever life comes next."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.rig import Rig
from tests.walshard.test_routing import logged_types, put, route
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.routers import RouterSpec
from topics.frontend.live import following
from topics.frontend.reads.log_files import LogFiles
from topics.frontend.reads.reading import Page, TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Arenas
from topics.shm.arena import TopicView
from topics.shm.instance import SharedMemory
from topics.shm.queue_messages import CursorPut
from topics.shm.topic_messages import (
    DeleteRecords,
    DeleteRouter,
    DeleteTopic,
    DeleteTopicReply,
    EnsureTopic,
    PutRouter,
    PutTopic,
    SyncRouters,
)
from topics.storage.frame import FrameType
from topics.storage.layout import group_dir, log_path
from topics.walshard.routers.links import LetGo
from topics.walshard.routers.rederiving import UNREADABLE_MAX_MS


def topic_on(rig: Rig, shard: int, prefix: str) -> str:
    """A name that this shard has."""
    return next(name for name in (f"{prefix}{at}" for at in range(100)) if rig.owner(name) == shard)


def put_on(rig: Rig, name: str, **config: Any) -> None:
    rig.call(PutTopic(name, TopicConfig(**config), type_given=False), rig.owner(name))


def route_on(rig: Rig, source: str, dest: str, **fields: Any) -> None:
    """As `route`, of topics of any shard."""
    router = rig.call(PutRouter(f"{source}-{dest}", RouterSpec(source, dest, **fields))).router
    rig.call(EnsureTopic(dest), rig.owner(dest))
    for _ in range(10):
        reply = rig.call(SyncRouters(dest, router.id, router.version), rig.owner(dest))
        if reply.begun and reply.held:
            return
    raise AssertionError(f"the router into {dest} does not begin: {reply}")


def head_of(rig: Rig, name: str) -> int:
    found = rig.reader_of(rig.owner(name)).look_up(name)
    assert found is not None, f"{name} does not exist"
    return found[1].head_seq


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Rig]:
    """Two shards."""
    rig = Rig(str(tmp_path), shards=2)
    yield rig
    rig.close()


LIVES: list[Callable[[Rig], None]] = [Rig.boot, Rig.restart_service]


@pytest.mark.parametrize("end", LIVES)
def test_a_cap_on_all_bytes_keeps_no_copy_from_being_made_again(tmp_path: Path, end: Callable[[Rig], None]) -> None:
    """A shard that starts has not said what it holds, so nobody knows how much is left of the cap."""
    rig = Rig(str(tmp_path), max_total_bytes="100000000")
    try:
        put(rig, "a")
        route(rig, "r", "a", "b")
        rig.append("a", b"1", b"2", b"3")
        end(rig)
        view = rig.view("b")
        assert view is not None
        assert view.head_seq == 3, "before anybody sees the shard"
        assert rig.append("b", b"direct").first_seq == 4
    finally:
        rig.close()


def test_a_service_at_its_cap_holds_after_a_crash_what_it_held(tmp_path: Path) -> None:
    rig = Rig(str(tmp_path), max_total_bytes="1000")
    try:
        put(rig, "a")
        route(rig, "r", "a", "b")
        rig.append("a", b"1" * 150, b"2" * 150)
        expected = rig.read("b")
        assert len(expected) == 2
        assert rig.cell.get("bytes_live") > 1000 - 2 * 150, "no room to claim the copies twice"
        rig.boot()
        assert rig.read("b") == expected
    finally:
        rig.close()


@pytest.mark.parametrize("end", LIVES)
def test_what_waited_at_the_cap_of_the_service_waits_after_a_start(tmp_path: Path, end: Callable[[Rig], None]) -> None:
    """Nobody had seen those copies: they are not made again, but for the first time."""
    rig = Rig(str(tmp_path), max_total_bytes="1200")
    try:
        put(rig, "a")
        dests = ["b", "c", "d", "e"]
        for dest in dests:
            route(rig, f"r-{dest}", "a", dest)
        rig.append("a", b"1" * 300)
        held = rig.cell.get("bytes_live")
        expected = {dest: rig.read(dest) for dest in dests}
        assert sorted(map(len, expected.values())) == [0, 0, 1, 1], "there was room for two"
        for _ in range(2):
            end(rig)
            seconds_pass(rig, 2)
            assert rig.cell.get("bytes_live") == held
            assert {dest: rig.read(dest) for dest in dests} == expected
            assert not any(view_of(rig, dest).rederiving for dest in dests)
        rig.call(DeleteTopic("b", if_empty=False))
        rig.call(DeleteTopic("c", if_empty=False))
        seconds_pass(rig, 2)
        left = [rig.read(dest) for dest in ("d", "e")]
        assert left == [[(1, b"1" * 300)]] * 2, "there is room for them now"
    finally:
        rig.close()


@pytest.mark.parametrize("end", LIVES)
def test_what_only_ram_has_of_a_source_that_was_ephemeral_is_copied_into_the_log(
    rig: Rig, end: Callable[[Rig], None]
) -> None:
    """A dest was behind when its source became durable: its records before that are lost with the service."""
    put(rig, "a", durability="ephemeral")
    route(rig, "r", "a", "b")
    route(rig, "q", "b", "c")
    rig.post_append("a", [b"1", b"2", b"3"])
    rig.post_call(PutTopic("a", TopicConfig(), type_given=False))
    rig.run()
    expected = [(1, b"1"), (2, b"2"), (3, b"3")]
    assert rig.read("b") == rig.read("c") == expected
    end(rig)
    assert rig.read("b") == rig.read("c") == expected
    rig.append("a", b"4")
    assert rig.read("b") == rig.read("c") == [*expected, (4, b"4")]
    logged = logged_types(rig)
    assert logged.count(FrameType.APPEND) == 3 + 1, "what follows is derived again"


@pytest.mark.parametrize("end", LIVES)
def test_copies_of_a_source_that_is_deleted_are_in_the_log_before_its_routers_go(
    two: Rig, end: Callable[[Rig], None]
) -> None:
    """The shard that has the routers is away: until it is back, they stay."""
    source, dest = topic_on(two, 1, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    assert head_of(two, dest) == 3
    two.post_call(DeleteTopic(source, if_empty=False), 1)
    while two.shards[1].step():
        pass
    (feed,) = two.shards[1].routing.feeds.by_dest.values()
    assert feed.registered(), "its router is still there"
    end(two)
    assert head_of(two, dest) == 3
    two.run()
    assert not two.shards[1].routing.feeds.by_dest
    assert two.append(dest, b"direct").first_seq == 4


def restart_first_alone(rig: Rig) -> None:
    """A new service, of which the first shard is at work and the second still reads its log."""
    rig.shared.destroy()
    rig._close_readers()
    rig.shared = SharedMemory.create(rig.identity, 2, 1, 1 << 20)
    rig.shards = [rig._recover(0)]


def start_second(rig: Rig) -> None:
    rig.shards.append(rig._recover(1))


def view_of(rig: Rig, name: str) -> TopicView:
    found = rig.reader_of(rig.owner(name)).look_up(name)
    assert found is not None, f"{name} does not exist"
    return found[1]


def assert_awaited(rig: Rig, dest: str, source: str) -> None:
    """The dest says that it is less than it was, and gives its seqs to nobody."""
    assert view_of(rig, dest).rederiving
    shard = rig.owner(dest)
    refused = [
        rig.post_append(dest, [b"direct"]),
        rig.post_call(DeleteRecords(dest, 2, None, b""), shard),
        rig.post_call(PutTopic(dest, TopicConfig(cap_records=1), type_given=False), shard),
        rig.post_call(DeleteTopic(dest, if_empty=True), shard),
        rig.post_call(CursorPut(dest, "new", None, None, None, tail=True), shard),
    ]
    rig.run()
    for request in refused:
        reply = rig.replies[request]
        assert isinstance(reply, TopicsError)
        assert reply.detail is not None
        assert (reply.code, reply.detail["topic"], reply.detail["source"]) == ("not_ready", dest, source)
        assert 0 <= reply.detail["replay_progress"] <= 1


def seconds_pass(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.clock.ms += 1000
        for shard in rig.shards:
            shard.sweep()
        rig.run()
        for shard in rig.shards:
            shard.sync_in_background()


def test_a_dest_whose_source_is_not_there_yet_keeps_the_seqs_of_its_copies(two: Rig) -> None:
    source, dest, other = topic_on(two, 1, "a"), topic_on(two, 0, "b"), topic_on(two, 0, "c")
    put_on(two, source)
    put_on(two, other)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    expected = two.read(dest)
    assert len(expected) == 3
    restart_first_alone(two)
    two.run()
    assert_awaited(two, dest, source)
    seconds_pass(two, 3)
    assert_awaited(two, dest, source)
    assert head_of(two, dest) == 0
    assert two.append(other, b"1").first_seq == 1, "nobody else waits"
    start_second(two)
    seconds_pass(two, 2)
    assert two.read(dest) == expected
    assert not view_of(two, dest).rederiving
    assert two.append(dest, b"direct").first_seq == 4
    two.append(source, b"4")
    assert two.read(dest) == [*expected, (4, b"direct"), (5, b"4")]


@pytest.mark.parametrize("write_to_last", [False, True])
def test_a_chain_over_two_shards_is_there_again_from_its_beginning(two: Rig, write_to_last: bool) -> None:
    """What has copied more than its source has for now goes on where it was, though the source has less."""
    first, middle, last = topic_on(two, 1, "a"), topic_on(two, 0, "b"), topic_on(two, 1, "c")
    put_on(two, first)
    route_on(two, first, middle)
    route_on(two, middle, last)
    two.append(first, b"1", b"2", b"3")
    if write_to_last:  # its log has the copies then, and the middle's has not
        two.append(last, b"own")
    expected_head_seq = head_of(two, last)
    assert expected_head_seq == 3 + write_to_last
    restart_first_alone(two)
    assert_awaited(two, middle, first)
    start_second(two)
    assert head_of(two, last) == (expected_head_seq if write_to_last else 0)
    assert_awaited(two, last, middle)
    seconds_pass(two, 2)
    assert head_of(two, middle) == 3
    assert head_of(two, last) == expected_head_seq
    assert two.append(middle, b"4").first_seq == 4
    assert head_of(two, last) == expected_head_seq + 1
    assert two.append(last, b"5").first_seq == expected_head_seq + 2


def test_topics_of_a_cycle_over_two_shards_do_not_wait_for_each_other(two: Rig) -> None:
    one, other = topic_on(two, 0, "a"), topic_on(two, 1, "b")
    put_on(two, one)
    route_on(two, one, other)
    route_on(two, other, one, allow_cycle=True)
    two.append(one, b"1")
    two.append(other, b"2")
    heads = head_of(two, one), head_of(two, other)
    assert min(heads) > 8
    expected = two.read(one)
    restart_first_alone(two)
    assert_awaited(two, one, other)
    start_second(two)
    seconds_pass(two, 2)
    assert (head_of(two, one), head_of(two, other)) == heads
    assert two.read(one) == expected
    assert two.append(one, b"3").first_seq == heads[0] + 1


def test_a_router_that_is_deleted_before_its_source_is_there_leaves_its_copies(two: Rig) -> None:
    source, dest = topic_on(two, 1, "a"), topic_on(two, 0, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    restart_first_alone(two)
    assert two.call(DeleteRouter(f"{source}-{dest}")).deleted
    assert not two.call(SyncRouters(dest, 0, 0)).begun
    assert_awaited(two, dest, source)
    start_second(two)
    seconds_pass(two, 2)
    assert not two.shards[0].routing.feeds.by_dest
    assert head_of(two, dest) == 3
    two.append(source, b"4")
    assert two.append(dest, b"direct").first_seq == 4


def test_a_dest_does_not_wait_for_a_source_that_was_deleted(two: Rig) -> None:
    source, dest = topic_on(two, 1, "a"), topic_on(two, 0, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1")
    two.append(dest, b"own")
    two.post_call(DeleteTopic(source, if_empty=False), 1)
    while two.shards[1].step():
        pass
    two.take_replies()
    restart_first_alone(two)
    assert_awaited(two, dest, source)
    start_second(two)
    seconds_pass(two, 2)
    assert two.append(dest, b"direct").first_seq == 3


def test_a_dest_does_not_wait_for_what_is_damaged(two: Rig) -> None:
    """Nobody makes the copy again, and nothing is gained by a topic that takes no writes."""
    source, dest = topic_on(two, 1, "a"), topic_on(two, 0, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1")
    two.append(dest, b"own")
    two.append(source, b'"damaged"')
    assert head_of(two, dest) == 3
    restart_first_alone(two)
    start_second(two)
    path = Path(log_path(group_dir(two.settings.data_dir, 1, 2), 1))
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"damaged"', b'"demaged"'))
    seconds_pass(two, 2)
    assert two.append(dest, b"direct").first_seq == 3


@pytest.mark.parametrize("lost", ["EIO", "ENOENT"])
def test_a_dest_waits_for_a_source_that_cannot_be_read_but_not_for_ever(tmp_path: Path, lost: str) -> None:
    fs = FaultyFileSystem()
    rig = Rig(str(tmp_path), fs, shards=2)
    try:
        source, dest = topic_on(rig, 1, "a"), topic_on(rig, 0, "b")
        put_on(rig, source)
        route_on(rig, source, dest)
        rig.append(source, b"1")
        rig.append(dest, b"own")
        rig.append(source, b"2")
        assert head_of(rig, dest) == 3
        restart_first_alone(rig)
        start_second(rig)
        path = Path(log_path(group_dir(rig.settings.data_dir, 1, 2), 1))
        away = path.with_suffix(".away")
        if lost == "EIO":
            fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"pread"})))
        else:
            path.rename(away)
        seconds_pass(rig, 1)
        assert_awaited(rig, dest, source)
        seconds_pass(rig, UNREADABLE_MAX_MS // 1000 - 2)
        assert_awaited(rig, dest, source)
        request = rig.post_append(dest, [b"x"])
        rig.run()
        assert "cannot be read" in rig.replies[request].message
        seconds_pass(rig, 3)
        assert not view_of(rig, dest).rederiving
        assert rig.append(dest, b"direct").first_seq == 3
        if lost == "EIO":
            fs.arm(None)
        else:
            away.rename(path)
        seconds_pass(rig, 3)
        assert rig.read(dest)[2:] == [(3, b"direct"), (4, b"2")], "it is copied when it can be read"
        hosted = rig.shards[1]._catalog.find(source)
        assert hosted is not None
        rig.shards[1].routing.lets_go(hosted, 2)
        rig.run()
        assert rig.shards[1].routing.lets_go(hosted, 2)
    finally:
        rig.close()


def test_a_source_that_can_be_read_again_in_time_has_its_copies_made_again(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    rig = Rig(str(tmp_path), fs, shards=2)
    try:
        source, dest = topic_on(rig, 1, "a"), topic_on(rig, 0, "b")
        put_on(rig, source)
        route_on(rig, source, dest)
        rig.append(source, b"1")
        restart_first_alone(rig)
        start_second(rig)
        fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"pread"})))
        seconds_pass(rig, UNREADABLE_MAX_MS // 1000 - 2)
        fs.arm(None)
        seconds_pass(rig, 2)
        assert rig.append(dest, b"direct").first_seq == 2
    finally:
        rig.close()


def test_a_checkpoint_of_a_source_waits_for_dests_that_are_not_there_again(two: Rig) -> None:
    """In a segment may be fewer records than were copied: those that were deleted since are not in it."""
    first, middle, last = topic_on(two, 0, "a"), topic_on(two, 1, "b"), topic_on(two, 0, "c")
    put_on(two, first)
    route_on(two, first, middle)
    route_on(two, middle, last)
    two.append(first, b"1", b"2", b"3")
    restart_first_alone(two)
    (feed,) = two.shards[0].routing.feeds.by_dest.values()
    two.shards[0].routing._following.let_go(LetGo(middle, feed.source_topic_id, 3))
    seconds_pass(two, 2)
    assert feed.released_seq == 0
    start_second(two)
    seconds_pass(two, 2)
    assert head_of(two, last) == 3
    two.shards[0].routing._following.let_go(LetGo(middle, feed.source_topic_id, 3))
    two.run()
    assert feed.logged_source_seq == 3


def test_a_source_knows_its_follower_when_both_shards_have_crashed(two: Rig) -> None:
    """In the ring of the dest's shard lie an answer to its former life and, behind it, the greeting of the source's."""
    source, dest = topic_on(two, 1, "a"), topic_on(two, 0, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1", b"2")
    (feed,) = two.shards[0].routing.feeds.by_dest.values()
    feed.told = None
    two.shards[0].routing._following.follow(feed)
    two.shards[0].routing._links.flush()
    assert two.shards[1].step(), "it answers"
    two.shards[1] = two._recover(1)
    two.shards[0] = two._recover(0)
    two.run()
    seconds_pass(two, 1)
    assert list(two.shards[1].routing._followers._by_name) == [source]
    hosted = two.shards[1]._catalog.find(source)
    assert hosted is not None
    two.shards[1].routing.lets_go(hosted, 2)
    two.run()
    assert two.shards[1].routing.lets_go(hosted, 2), "a checkpoint is not kept waiting for ever"
    two.append(source, b"3")
    assert head_of(two, dest) == 3, "without a sweep"


def test_a_reader_waits_where_it_is_for_what_it_has_seen(two: Rig) -> None:
    """It is neither told of a former topic nor led back to the head; a topic is itself again when it has its copies."""
    source, dest = topic_on(two, 1, "a"), topic_on(two, 0, "b")
    put_on(two, source)
    put_on(two, dest)
    two.call(DeleteTopic(dest, if_empty=False))
    put_on(two, dest)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    restart_first_alone(two)
    arenas = Arenas(two.shared)
    files = LogFiles(two.settings.data_dir, two.shared.ram_dir, 2)
    reader = TopicReader(arenas, files, 2, two.clock)

    def page(from_seq: int) -> Page:
        return reader.read_page(reader.get(dest), from_seq, PageOptions(10, 1 << 20), two.clock.now_ms())

    try:
        ref = reader.get(dest)
        assert (ref.view.recreated, ref.view.rederiving, ref.view.head_seq) == (True, True, 0)
        found = page(3)
        assert (found.count, found.next_from_seq, found.caught_up, found.tombstone) == (0, 3, True, None)
        assert following.resolve(reader, ref, following.StartBody(from_seq=3)) == 3
        for start in (following.StartBody(tail=True), following.StartBody(from_ts=two.clock.now_ms() + 1)):
            with pytest.raises(TopicsError, match="nobody knows where it ends") as refused:
                following.resolve(reader, ref, start)
            assert refused.value.code == "not_ready"
        assert following.place(reader, ref, 3)["from_seq"] == 3
        start_second(two)
        seconds_pass(two, 2)
        ref = reader.get(dest)
        assert (ref.view.rederiving, ref.view.head_seq) == (False, 3)
        assert following.resolve(reader, ref, following.StartBody(tail=True)) == 3
        found = page(3)
        assert (found.count, found.next_from_seq, found.caught_up, found.tombstone) == (0, 3, True, None)
        assert page(2).count == 1
        assert page(4).tombstone is not None, "nobody had that of this topic"
    finally:
        arenas.close()


def assert_gap(rig: Rig, dest: str, live: list[tuple[int, bytes]], gap_to: int) -> None:
    """The dest has these records, and lost its source's behind them."""
    assert rig.read(dest) == live
    view = view_of(rig, dest)
    assert (view.head_seq, view.records) == (gap_to, len(live))


@pytest.mark.parametrize("shards", [1, 2])
def test_what_was_acknowledged_just_before_a_source_was_deleted_is_a_gap(tmp_path: Path, shards: int) -> None:
    rig = Rig(str(tmp_path), shards=shards)
    try:
        source, dest = topic_on(rig, shards - 1, "a"), topic_on(rig, 0, "b")
        put_on(rig, source)
        route_on(rig, source, dest)
        rig.append(source, b"1")
        written = rig.post_append(source, [b"2", b"3"])
        rig.post_call(DeleteTopic(source, if_empty=False), shards - 1)
        rig.run()
        assert rig.replies[written].first_seq == 2
        assert_gap(rig, dest, [(1, b"1")], 3)
        seconds_pass(rig, 2)
        assert not rig.shards[0].routing.feeds.by_dest
        assert rig.append(dest, b"own").first_seq == 4
        rig.restart_service()
        assert_gap(rig, dest, [(1, b"1"), (4, b"own")], 4)
    finally:
        rig.close()


def test_the_end_of_a_source_is_known_to_the_next_life_of_the_shard_of_its_dest(two: Rig) -> None:
    """It crashed with copies that only RAM had, and nobody can make them again."""
    source, dest = topic_on(two, 0, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    assert head_of(two, dest) == 3
    two.post_call(DeleteTopic(source, if_empty=False))
    while two.shards[0].step():
        pass
    two.take_replies()
    two.shards[1] = two._recover(1)
    assert_gap(two, dest, [], 3)
    assert two.append(dest, b"own").first_seq == 4
    assert_gap(two, dest, [(4, b"own")], 4)


@pytest.mark.parametrize("filters", [["wanted"], ["wanted", None], [None, None, "wanted"]])
@pytest.mark.parametrize("wanted", [0, 3])
def test_what_no_router_let_pass_is_no_loss_when_its_source_ends(
    two: Rig, filters: list[str | None], wanted: int
) -> None:
    """The log has the cursor where something was copied. With several routers there are more copies than records."""
    source, dest = topic_on(two, 0, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    for number, tag in enumerate(filters):
        two.call(PutRouter(f"r{number}", RouterSpec(source, dest, filter=tag)))
    two.call(EnsureTopic(dest), 1)
    for _ in range(3):
        two.call(SyncRouters(dest, 0, 0), 1)
    two.append(dest, b"own")
    for _ in range(wanted):
        two.append(source, b"1", tag=b"wanted")
    two.append(source, *[b"2"] * 100)
    (feed,) = two.shards[1].routing.feeds.by_dest.values()
    assert (feed.source_seq, feed.logged_source_seq) == (wanted + 100, 0), "no log says what was passed over"
    former_seq = head_of(two, dest)
    assert former_seq == 1 + wanted * len(filters) + 100 * filters.count(None)
    two.post_call(DeleteTopic(source, if_empty=False))
    while two.shards[0].step():
        pass
    two.take_replies()
    two.shards[1] = two._recover(1)
    assert_gap(two, dest, [(1, b"own")], former_seq)
    seconds_pass(two, 2)
    assert two.append(dest, b"own").first_seq == former_seq + 1


def test_of_what_waited_before_the_service_started_nobody_knows_how_many_there_were(two: Rig) -> None:
    source, dest = topic_on(two, 0, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    put_on(two, dest, cap_records=2, discard="reject")
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3", b"4", b"5")
    two.post_call(DeleteTopic(source, if_empty=False))
    while two.shards[0].step():
        pass
    two.restart_service()
    two.run()
    assert_gap(two, dest, [(1, b"1"), (2, b"2")], 3)


@pytest.mark.parametrize("end", LIVES)
def test_a_deletion_that_settles_waits_for_logs_to_have_the_copies(two: Rig, end: Callable[[Rig], None]) -> None:
    """The shard of the dest is away, with copies that only RAM has; it crashes once more when the source is gone."""
    source, dest = topic_on(two, 0, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    written = two.post_append(source, [b"4"])
    asked = [two.post_call(DeleteTopic(source, if_empty=False, settle=True)) for _ in range(2)]
    while two.shards[0].step():
        pass
    two.take_replies()
    assert two.replies[written].first_seq == 4
    assert [two.replies[request] for request in asked] == [DeleteTopicReply(False, held=True)] * 2
    two.shards[1] = two._recover(1)
    two.run()
    assert two.call(DeleteTopic(source, if_empty=False, settle=True)) == DeleteTopicReply(True)
    end(two)
    assert two.read(dest) == [(at, b"%d" % at) for at in range(1, 5)]


def test_a_deletion_that_settles_does_not_wait_for_room_in_a_dest(two: Rig) -> None:
    source, dest = topic_on(two, 0, "a"), topic_on(two, 1, "b")
    put_on(two, source)
    put_on(two, dest, cap_records=2, discard="reject")
    route_on(two, source, dest)
    two.append(source, b"1", b"2", b"3")
    two.call(DeleteTopic(source, if_empty=False, settle=True))
    assert two.call(DeleteTopic(source, if_empty=False, settle=True)) == DeleteTopicReply(True)
    two.run()
    assert_gap(two, dest, [(1, b"1"), (2, b"2")], 3)
