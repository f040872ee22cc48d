"""The gateway against real rings, the test itself being the shard."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from topics.core.config import TopicConfig
from topics.core.errors import TopicsError, topic_not_found
from topics.core.topic import Topic
from topics.frontend.entry import limits
from topics.frontend.shards import gateway as gateway_module
from topics.frontend.shards import notices
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import SIGNALLED_AT_ONCE_BYTES, Gateway
from topics.settings import load
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendOptions, AppendReply
from topics.shm.arena import ArenaWriter
from topics.shm.arena_heap import LocationRing
from topics.shm.asks import Message
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.messages import MessageKind
from topics.shm.shm_names import SHM_ROOT, objects
from topics.shm.topic_messages import (
    DeleteTopic,
    Expire,
    Hello,
    PutTopic,
    PutTopicReply,
    SessionOpen,
    SessionOpenReply,
    TxnPending,
    Unwatch,
    Watch,
)
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import LaidOut, lay_out
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.hosted.topic_index import TopicIndex

RING_BYTES = 64 * 1024
REPLY = AppendReply(5, 1, 5, False, False, "disk", 12, 0)
DEADLINE_S = 60.0


class Shard:
    """The other end of the rings. It takes what comes and answers when the test says so."""

    def __init__(self, identity: str) -> None:
        self.shared = SharedMemory.create(identity, 1, 1, RING_BYTES)
        self.pair = self.shared.rings[0][0]
        self.cell = self.shared.control.cell(Role.WALSHARD, 0)
        self.arena = ArenaWriter(identity, 0, 1)
        self.cell.set("generation", 1)
        self.arrived = 0  # requests that the frontend is told of
        self._read = 0

    def take(self) -> list[tuple[int, int, memoryview]]:
        """(kind, request id, message) of every new request; they stay in the ring."""
        taken = []
        for message, position in self.pair.requests.peek(self._read):
            self._read = position
            kind, request_id, _count = messages.head(message)
            taken.append((kind, request_id, message))
        return taken

    def is_asked(self) -> bool:
        """Return whether there is a request that was not taken."""
        return self.pair.requests.written > self._read

    def calls(self) -> list[Message]:
        return [messages.decode(message) for kind, _id, message in self.take() if kind == MessageKind.CALL]

    def answer(self, encoded: bytearray) -> None:
        assert self.pair.replies.push(encoded)

    def free(self) -> None:
        """Makes room: everything taken so far is done with."""
        self.pair.requests.consume(self._read)

    def wake(self) -> None:
        self.shared.frontend_wakes[0].signal_always()

    def host(self, name: str, topic_id: int) -> Hosted:
        index = TopicIndex(topic_id, LocationRing(self.arena.heap, 1), SegmentFiles(OsFileSystem(), "nowhere", 64))
        holdings = Holdings(self.shared.control, 0, load({}, {"wal_shards": 1, "frontends": 1}))
        hosted = Hosted(self.arena, Topic(topic_id, name, TopicConfig(), index), index, holdings)
        hosted.announce()
        return hosted


@pytest.fixture
def shard(identity: str) -> Shard:
    return Shard(identity)


def on_loop(
    shard: Shard, test: Callable[[Gateway], Awaitable[None]], wait_ms: int = 10_000, incarnation: int = 1
) -> None:
    """Runs a test with a started gateway."""

    async def main() -> None:
        cell = shard.shared.control.cell(Role.FRONTEND, 0)
        gateway = Gateway(
            shard.shared, 0, incarnation, Arenas(shard.shared), cell, wait_ms, 1000, lambda: shard.arrived
        )
        gateway.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(gateway)
        finally:
            gateway.close()

    asyncio.run(main())


def one_record(size_bytes: int = 10) -> LaidOut:
    return lay_out([(b"", b"", b'"' + b"x" * size_bytes + b'"', b"")])


def append(gateway: Gateway, size_bytes: int = 10, unthrottled: bool = False) -> asyncio.Future[AppendReply]:
    return gateway.submit_append(0, AppendOptions("t"), one_record(size_bytes), unthrottled)


def fill(shard: Shard, gateway: Gateway) -> list[asyncio.Future[AppendReply]]:
    """Until the ring is full; those who are in it, and one who waits."""
    futures = []
    while not shard.shared.control.cell(Role.FRONTEND, 0).get("ring_full"):
        futures.append(append(gateway, 4000))
    return futures


async def until(condition: Callable[[], bool]) -> None:
    """Polls; the deadline is the test's own."""
    while not condition():
        await asyncio.sleep(0.001)


def refusal(future: asyncio.Future[AppendReply]) -> TopicsError:
    error = future.exception()
    assert isinstance(error, TopicsError)
    return error


def test_it_says_hello_first(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        append(gateway)
        (first, _, hello), (second, _, _) = shard.take()
        assert (first, messages.decode(hello), second) == (MessageKind.CALL, Hello(7), MessageKind.APPEND)

    on_loop(shard, test, incarnation=7)


def test_each_answer_finds_its_request(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        futures = [append(gateway) for _ in range(3)]
        ids = [request_id for kind, request_id, _ in shard.take() if kind == MessageKind.APPEND]
        assert all(request_id >> 40 == 1 for request_id in ids)
        for seq, request_id in reversed(list(enumerate(ids, 1))):
            shard.answer(
                append_messages.encode_append_reply(request_id, AppendReply(seq, 1, 3, True, False, "fsync", 1, 2))
            )
        shard.wake()
        replies = [await future for future in futures]
        assert [reply.first_seq for reply in replies] == [1, 2, 3]
        assert replies[0] == AppendReply(1, 1, 3, True, False, "fsync", 1, 2)

    on_loop(shard, test)


def test_calls_and_their_errors(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        put = asyncio.create_task(gateway.call(0, PutTopic("t", TopicConfig(), True)))
        delete = asyncio.create_task(gateway.call(0, DeleteTopic("t", False)))
        await asyncio.sleep(0)
        _hello, first, second = shard.take()
        shard.answer(messages.encode_reply(first[1], PutTopicReply(True, TopicConfig(ttl_ms=3))))
        shard.answer(messages.encode_error(second[1], topic_not_found("t")))
        shard.wake()
        assert (await put).config.ttl_ms == 3
        with pytest.raises(TopicsError) as refused:
            await delete
        assert (refused.value.code, refused.value.detail) == ("topic_not_found", {"topic": "t"})

    on_loop(shard, test)


def test_answers_nobody_waits_for_are_dropped(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        future = append(gateway)
        ((request_id,)) = [request_id for kind, request_id, _ in shard.take() if kind == MessageKind.APPEND]
        former_life = request_id - (1 << 40) + 5
        for one in (former_life, request_id, request_id):  # the last: a shard that died before it saw the first
            shard.answer(append_messages.encode_append_reply(one, REPLY))
        shard.wake()
        assert (await future) == REPLY
        await until(lambda: shard.pair.replies.empty)

    on_loop(shard, test, incarnation=2)


def test_one_iteration_of_the_loop_is_one_signal(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        wake = shard.shared.shard_wakes[0]
        await asyncio.sleep(0.01)
        wake.announce_sleep()
        wake.drain()
        for _ in range(20):
            append(gateway)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(wake.fd)
        await asyncio.sleep(0)
        assert os.eventfd_read(wake.fd) == 1

    on_loop(shard, test)


def test_a_long_request_is_signalled_before_the_next_one_is_parsed(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        wake = shard.shared.shard_wakes[0]
        await asyncio.sleep(0.01)
        wake.announce_sleep()
        wake.drain()
        append(gateway, SIGNALLED_AT_ONCE_BYTES)
        assert os.eventfd_read(wake.fd) == 1

    on_loop(shard, test)


def test_a_lost_wake_up_costs_a_moment_only(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        future = append(gateway)
        shard.answer(append_messages.encode_append_reply(shard.take()[-1][1], REPLY))
        assert (await future) == REPLY  # without shard.wake()

    on_loop(shard, test)


def test_a_dead_shard_is_unavailable_after_a_while(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        futures = [append(gateway), append(gateway)]
        await asyncio.wait(futures)
        assert [refusal(future).code for future in futures] == ["shard_unavailable"] * 2
        # The answer that comes too late is of no harm.
        for _kind, request_id, _ in shard.take():
            shard.answer(append_messages.encode_append_reply(request_id, REPLY))
        shard.wake()
        await until(lambda: shard.pair.replies.empty)

    on_loop(shard, test, wait_ms=50)


def test_nothing_is_sent_before_the_shard_has_recovered(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        shard.cell.set("generation", 0)
        shard.cell.set("progress_ppm", 500_000)
        shard.take()
        with pytest.raises(TopicsError) as refused:
            append(gateway)
        assert (refused.value.code, refused.value.detail) == ("not_ready", {"replay_progress": 0.5})
        with pytest.raises(TopicsError):
            await gateway.call(0, Expire("t"))
        assert shard.take() == []

    on_loop(shard, test)


@pytest.fixture
def much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is refused because the test itself was late."""
    monkeypatch.setattr(gateway_module, "ROOM_WAIT_S", DEADLINE_S)


@pytest.mark.usefixtures("much_patience")
def test_a_full_ring_is_waited_for(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        futures = []
        while not shard.shared.control.cell(Role.FRONTEND, 0).get("ring_full"):
            futures.append(append(gateway, 4000))
        futures += [append(gateway, 10) for _ in range(5)]  # small ones do not overtake
        answered = 0
        while answered < len(futures):
            for kind, request_id, _ in shard.take():
                if kind == MessageKind.APPEND:
                    answered += 1
                    reply = AppendReply(answered, 1, answered, False, False, "disk", 1, 0)
                    shard.answer(append_messages.encode_append_reply(request_id, reply))
            shard.free()
            shard.wake()
            await asyncio.sleep(0.001)
        assert [(await future).first_seq for future in futures] == list(range(1, len(futures) + 1))

    on_loop(shard, test)


def test_a_ring_that_stays_full_throttles(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        futures = []
        while not shard.shared.control.cell(Role.FRONTEND, 0).get("ring_full"):
            futures.append(append(gateway, 4000))
        last = futures.pop()
        await asyncio.wait([last])
        error = refusal(last)
        assert (error.code, error.detail) == ("throttled", {"retry_after_ms": 100})
        assert not any(future.done() for future in futures)
        # It was never sent, and the others are all there.
        assert sum(kind == MessageKind.APPEND for kind, _, _ in shard.take()) == len(futures)

    on_loop(shard, test)


def test_who_waits_for_room_is_bounded(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RING_WAITERS", limits.RING_WAITERS._replace(most_count=3))

    async def test(gateway: Gateway) -> None:
        futures = []
        while not shard.shared.control.cell(Role.FRONTEND, 0).get("ring_full"):
            futures.append(append(gateway, 4000))
        waiting = [futures[-1], append(gateway), append(gateway)]
        one_more = append(gateway)
        assert one_more.done()
        assert refusal(one_more).code == "throttled"
        assert not any(future.done() for future in waiting)

    on_loop(shard, test)


@pytest.mark.usefixtures("much_patience")
def test_a_crowd_that_does_not_wait_long_takes_no_place_of_an_unthrottled_write(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RING_WAITERS", limits.RING_WAITERS._replace(most_count=2))

    async def test(gateway: Gateway) -> None:
        fill(shard, gateway)
        append(gateway)
        assert refusal(append(gateway)).code == "throttled", "the crowd is as large as it may be"
        unthrottled = [append(gateway, unthrottled=True) for _ in range(3)]
        assert [future.done() for future in unthrottled] == [False, False, True]
        error = refusal(unthrottled[2])
        assert error.code == "shard_unavailable"
        assert "for too long" not in error.message
        assert "wait already" in error.message
        await asyncio.wait(unthrottled[:2])
        waited = re.search(r"full for (\d+\.\d\d) s", refusal(unthrottled[0]).message)
        assert waited is not None
        assert float(waited[1]) >= 0.1
        assert shard.shared.control.cell(Role.FRONTEND, 0).get("throttled") == 1, "what is unavailable is not throttled"

    on_loop(shard, test, wait_ms=100)


def test_at_the_top_of_the_ladder_a_full_ring_refuses_soon_a_throttled_request(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "ROOM_WAIT_S", DEADLINE_S)

    async def test(gateway: Gateway) -> None:
        fill(shard, gateway)
        gateway.pressed, gateway.retry_after_ms = True, 990
        throttled, unthrottled = append(gateway, 4000), append(gateway, 4000, unthrottled=True)
        own = gateway.submit(0, TxnPending(), unthrottled=True)  # the service's own work is not what is too much
        await asyncio.wait([throttled])
        error = refusal(throttled)
        assert (error.code, error.detail) == ("throttled", {"retry_after_ms": 990})
        assert shard.shared.control.cell(Role.FRONTEND, 0).get("throttled") >= 1
        assert not unthrottled.done()
        assert not own.done()
        assert gateway.fullness == 1.0
        shard.take()
        shard.free()
        shard.take()  # what was freed is asked for again
        await until(lambda: gateway.fullness < 1.0)
        room = append(gateway)
        assert not room.done(), "with room in the ring nobody is refused"

    on_loop(shard, test)


@pytest.mark.usefixtures("much_patience")
def test_how_long_a_write_was_held_up_is_told(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        held_up = fill(shard, gateway)[-1]
        await asyncio.sleep(0.01)
        taken = shard.take()
        shard.free()
        await until(lambda: gateway.fullness < 1.0)
        taken += shard.take()
        for kind, request_id, _ in taken:
            if kind == MessageKind.APPEND:
                shard.answer(append_messages.encode_append_reply(request_id, REPLY))
        shard.wake()
        assert (await held_up).throttled_us >= 10_000

    on_loop(shard, test)


def test_patience_ends_when_a_dead_shard_would_be_given_up(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        fill(shard, gateway)
        unthrottled = append(gateway, unthrottled=True)
        await asyncio.wait([unthrottled])
        assert refusal(unthrottled).code == "shard_unavailable"

    on_loop(shard, test, wait_ms=300)


@pytest.mark.parametrize("size_bytes", [20_000, 3_000_000], ids=["by the loop", "by a thread"])
def test_what_is_too_long_for_the_ring_goes_by_reference(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    removed_by: list[int] = []
    unlink = os.unlink

    def noted(path: str, **options: Any) -> None:
        removed_by.append(threading.get_ident())
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", noted)

    async def test(gateway: Gateway) -> None:
        assert size_bytes > shard.pair.requests.message_max_bytes
        shard.take()
        future = append(gateway, size_bytes)
        await until(shard.is_asked)
        ((kind, request_id, message),) = shard.take()
        assert kind == MessageKind.APPEND | messages.BY_REFERENCE
        path = messages.decode_reference(message)
        with open(path, "rb") as file:
            whole = memoryview(file.read())
        assert messages.head(whole)[1] == request_id
        request = append_messages.decode_append(whole)
        assert (request.options.name, request.count) == ("t", 1)
        assert request.frames == one_record(size_bytes).buffer
        shard.answer(append_messages.encode_append_reply(request_id, REPLY))
        shard.wake()
        assert (await future) == REPLY
        await until(lambda: not os.path.exists(path))
        assert (removed_by[0] == threading.get_ident()) == (size_bytes == 20_000)

    on_loop(shard, test)


def test_a_long_request_that_timed_out_keeps_its_file_until_the_answer(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        shard.take()
        future = append(gateway, 20_000)
        await asyncio.wait([future])
        assert refusal(future).code == "shard_unavailable"
        ((_, request_id, message),) = shard.take()
        path = messages.decode_reference(message)
        assert os.path.exists(path)
        shard.answer(append_messages.encode_append_reply(request_id, REPLY))
        shard.wake()
        await until(lambda: not os.path.exists(path))

    on_loop(shard, test, wait_ms=20)


@pytest.mark.parametrize("size_bytes", [20_000, 3_000_000], ids=["by the loop", "by a thread"])
def test_no_room_for_a_long_request(shard: Shard, monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(limits, "SPILLS", limits.SPILLS._replace(most_bytes=size_bytes + 1000))

    async def test(gateway: Gateway) -> None:
        shard.take()
        first, second = append(gateway, size_bytes), append(gateway, size_bytes)
        assert refusal(second).code == "throttled"
        await until(shard.is_asked)
        ((_, request_id, message),) = shard.take()
        path = messages.decode_reference(message)
        shard.answer(append_messages.encode_append_reply(request_id, REPLY))
        shard.wake()
        assert (await first) == REPLY
        # Memory is full for another reason.
        for later in (2, 3):
            with open(f"{path.removesuffix(str(request_id))}{request_id + later}", "wb"):
                refused = append(gateway, size_bytes)
                await asyncio.wait([refused])
            assert refusal(refused).code == "throttled"
        # A thread removes a long one.
        await until(lambda: not [name for name in objects(shard.shared.identity) if "spill" in name])

    with capture_logs() as lines:
        on_loop(shard, test)
    assert len([line for line in lines if "no room" in line["event"]]) == 1, "a line for each would fill the log"


def test_what_a_former_life_spilled_is_swept_up(shard: Shard) -> None:
    identity = shard.shared.identity
    mine, anothers = (f"{SHM_ROOT}/topics-{identity}-spill-{frontend}-77" for frontend in (0, 1))
    for path in (mine, anothers):
        with open(path, "wb") as file:
            file.write(b"x")

    async def test(gateway: Gateway) -> None:
        names = [f"{SHM_ROOT}/{name}" for name in objects(identity)]
        assert mine not in names
        assert anothers in names

    on_loop(shard, test, incarnation=2)


def test_an_answer_too_long_for_the_ring(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        call = asyncio.create_task(gateway.call(0, SessionOpen("w", 1)))
        await asyncio.sleep(0)
        request_id = shard.take()[-1][1]
        reply = SessionOpenReply(b"x" * 200_000, {"t": 1}, True)
        path = f"{SHM_ROOT}/topics-{shard.shared.identity}-reply-0-{request_id}"
        for _ in range(2):  # the second time the file is gone: as after a death between reading and freeing
            with open(path, "wb") as file:
                file.write(messages.encode_reply(request_id, reply))
            shard.answer(bytearray().join(messages.encode_reference(MessageKind.CALL, request_id, path)))
        shard.wake()
        assert (await call) == reply
        assert not os.path.exists(path)
        assert shard.pair.replies.empty

    on_loop(shard, test)


def test_closing_answers_everybody(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        future = append(gateway)
        gateway.close()
        assert refusal(future).code == "shutting_down"
        assert refusal(append(gateway)).code == "shutting_down"

    on_loop(shard, test)


# -- watches


def test_listeners_of_a_topic_share_one_watch(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        hosted = shard.host("t", 9)
        hosted.topic.head_seq = 4
        hosted.publish()
        found = Arenas(shard.shared).require(0).look_up("t")
        assert found is not None
        calls: list[str] = []
        shard.calls()
        first = gateway.watches.add(0, "t", found[1], lambda: calls.append("first"))
        second = gateway.watches.add(0, "t", found[1], lambda: calls.append("second"))
        ((watch,)) = shard.calls()
        assert isinstance(watch, Watch)
        assert (watch.name, watch.seen_topic_id, watch.seen_head_seq) == ("t", 9, 4)
        await asyncio.sleep(0.01)
        assert calls == []
        shard.answer(messages.encode_notify([watch.token, watch.token + 1]))
        shard.wake()
        await until(lambda: calls == ["first", "second"])
        second.cancel()
        shard.answer(messages.encode_notify([watch.token]))
        shard.wake()
        await until(lambda: calls == ["first", "second", "first"])
        first.cancel()
        first.cancel()

    on_loop(shard, test)


def test_a_listener_that_knows_an_older_state_is_called_at_once(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        hosted = shard.host("t", 9)
        arenas = Arenas(shard.shared)
        found = arenas.require(0).look_up("t")
        assert found is not None
        hosted.topic.durable_seq = 1
        hosted.publish()
        calls: list[int] = []
        handle = gateway.watches.add(0, "t", found[1], lambda: calls.append(1))
        assert calls == []  # never within the call
        await until(lambda: calls == [1])
        handle.cancel()
        late = gateway.watches.add(0, "t", found[1], lambda: calls.append(2))
        late.cancel()
        await asyncio.sleep(0.01)
        assert calls == [1]

    on_loop(shard, test)


def test_one_listeners_fault_is_not_the_others(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        shard.host("t", 9)
        shard.calls()
        calls: list[int] = []

        def fault() -> None:
            raise ValueError

        gateway.watches.add(0, "t", None, fault)
        gateway.watches.add(0, "t", None, lambda: calls.append(1))
        ((watch,)) = shard.calls()
        assert isinstance(watch, Watch)
        await until(lambda: calls == [1])
        shard.answer(messages.encode_notify([watch.token]))
        shard.wake()
        await until(lambda: calls == [1, 1])

    on_loop(shard, test)


def test_a_restarted_shard_is_asked_to_watch_again(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        shard.host("t", 9)
        found = Arenas(shard.shared).require(0).look_up("t")
        assert found is not None
        calls: list[int] = []
        gateway.watches.add(0, "t", found[1], lambda: calls.append(1))
        (first,) = [call for call in shard.calls() if isinstance(call, Watch)]
        shard.arena = ArenaWriter(shard.shared.identity, 0, 2)
        shard.host("other", 8)
        shard.host("t", 9)
        shard.cell.set("generation", 2)
        shard.answer(messages.encode_generation())
        shard.wake()
        await until(lambda: calls == [1])
        assert shard.calls() == [first]

    on_loop(shard, test)


def test_a_name_that_is_made_again_is_watched_again(shard: Shard) -> None:
    async def test(gateway: Gateway) -> None:
        old = shard.host("t", 9)
        calls: list[int] = []
        gateway.watches.add(0, "t", None, lambda: calls.append(1))
        await until(lambda: calls == [1])
        (first,) = [call for call in shard.calls() if isinstance(call, Watch)]
        old.retire()
        shard.host("t", 10)
        shard.answer(messages.encode_notify([first.token]))
        shard.wake()
        await until(lambda: calls == [1, 1])
        ((again,)) = shard.calls()
        assert again == Watch(first.token, "t", 10, 0)

    on_loop(shard, test)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_name_that_is_made_again_later_is_watched_for_who_finds_it(shard: Shard, restarted: bool) -> None:
    async def test(gateway: Gateway) -> None:
        arenas = Arenas(shard.shared)
        old = shard.host("t", 9)
        calls: list[int] = []
        handle = gateway.watches.add(0, "t", None, lambda: calls.append(1))
        await until(lambda: calls == [1])
        (first,) = [call for call in shard.calls() if isinstance(call, Watch)]
        for topic_id in (10, 11):
            old.retire()
            if restarted:
                shard.arena = ArenaWriter(shard.shared.identity, 0, topic_id)
                shard.cell.set("generation", topic_id)
                shard.answer(messages.encode_generation())
            else:
                shard.answer(messages.encode_notify([first.token]))
            shard.wake()
            await until(partial(lambda told: len(calls) == told, topic_id - 8))
            old = shard.host("t", topic_id)
            found = arenas.require(0).look_up("t")
            assert found is not None
            handle.found(found[1])
            handle.found(found[1])
            assert shard.calls() == [Watch(first.token, "t", topic_id, 0)]

    on_loop(shard, test)


def test_a_topic_that_is_polled_while_too_much_waits_is_watched_once(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(gateway: Gateway) -> None:
        shard.host("t", 9)
        for hour in range(1, 4):
            posts = gateway.links[0].requests.posts.budget
            monkeypatch.setattr(posts, "limit", posts.limit._replace(most_count=0))
            gateway.watches.add(0, "t", None, lambda: None).cancel()
            gateway.watches.sweep(asyncio.get_running_loop().time() + 3600 * hour)
        told = shard.calls()
        (watch,) = [call for call in told if isinstance(call, Watch)]
        assert not any(isinstance(call, Unwatch) for call in told)
        monkeypatch.undo()
        gateway.watches.sweep(asyncio.get_running_loop().time() + 3600 * 5)
        assert shard.calls() == [Unwatch(watch.token, "t")]

    on_loop(shard, test)


def test_a_watch_ends_some_time_after_its_last_listener(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "LINGER_S", 0.0)

    async def test(gateway: Gateway) -> None:
        shard.host("t", 9)
        gateway.watches.add(0, "t", None, lambda: None).cancel()
        (watch,) = [call for call in shard.calls() if isinstance(call, Watch)]
        seen: list[Message] = []

        def unwatched() -> bool:
            seen.extend(shard.calls())
            return bool(seen)

        await until(unwatched)
        assert seen == [Unwatch(watch.token, "t")]

    on_loop(shard, test)
