"""Both clients against the real service: the same promises, written once, kept by threads and by asyncio."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import msgspec
import pytest

from tests.harness import Service, poll
from topics.client import (
    AsyncClient,
    Client,
    ClientError,
    ConflictError,
    GapError,
    InvalidRequestError,
    NewRecord,
    NotAllowedError,
    NotFoundError,
    Record,
    Retry,
    Tombstone,
    TopicFullError,
    TopicGone,
    UnreachableError,
)
from topics.client.attempts import Attempts
from topics.client.http import Event
from topics.client.walks import Following

QUICK = Retry(total_s=0.4, pause_first_s=0.01, pause_max_s=0.05)


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


def in_async(service: Service, body: Callable[[AsyncClient], Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(service.url) as client:
            return await body(client)

    return asyncio.run(run())


def records(items: list[Any]) -> list[Any]:
    return [item.data for item in items if isinstance(item, Record)]


def test_what_was_written_is_read_byte_for_byte(topics: Client, topic: str) -> None:
    raw = msgspec.Raw(b'{"a": 1.50, "a": "\\u00e9"}')
    written = topics.append(topic, [NewRecord(raw, tag="x", node="n", meta={"k": "v"}), {"b": 2}, "three"])
    assert (written.first_seq, written.last_seq, written.created, written.deduped) == (1, 3, True, False)
    first, second, third = topics.read(topic)
    assert (bytes(first.raw), first.tag, first.node, first.meta) == (bytes(raw), "x", "n", {"k": "v"})
    assert records([second, third]) == [{"b": 2}, "three"]


@pytest.mark.parametrize("one", [{"item": "tea"}, "tea", b"tea"])
def test_one_record_that_is_no_list_is_refused(topics: Client, topic: str, one: Any) -> None:
    """Its keys, or its letters, would be the records."""
    with pytest.raises(TypeError, match="records are a list"):
        topics.append(topic, one)
    with pytest.raises(NotFoundError):
        topics.get_topic(topic)


def test_what_an_exactly_once_router_adds_is_read(service: Service, topics: Client, topic: str) -> None:
    route = {"source": topic, "dest": f"{topic}.d", "guarantee": "exactly_once"}
    topics.put_topic(topic)
    assert service.client.put(f"/v0/routers/{topic}", json=route).status_code == 201
    topics.append(topic, [NewRecord(1, meta={"k": "v"})])
    # A read waits for what is to be copied, but not for ever (api §6).
    (copy,) = poll("the copy", lambda: list(topics.read(f"{topic}.d")) or None)
    assert copy.meta is not None
    assert (copy.meta["k"], copy.meta["_topics_router"]["source_seq"]) == ("v", 1)


def test_reading_goes_over_pages_to_the_head(topics: Client, topic: str) -> None:
    topics.append(topic, range(25))
    assert records(list(topics.read(topic, 3, limit=7))) == list(range(3, 25))


def test_a_key_of_ones_own_makes_a_repeat_safe(topics: Client, topic: str) -> None:
    topics.append(topic, [1], idempotency_key="k")
    again = topics.append(topic, [1], idempotency_key="k")
    assert (again.deduped, again.head_seq) == (True, 1)
    assert topics.append(topic, [1]).head_seq == 2, "without a key of one's own every call is a write of its own"


def test_a_gap_is_an_error_or_a_value_never_nothing(topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=3)
    for number in range(5):
        topics.append(topic, [number])
    with pytest.raises(GapError, match=r"records 1 to 2 are gone \(reason: cap\)") as gap:
        list(topics.read(topic))
    assert gap.value.tombstone.earliest_seq == 3
    assert records(list(topics.read(topic, gap.value.tombstone.next_from_seq))) == [2, 3, 4]
    tombstone, *rest = topics.read(topic, tombstones="yield")
    assert isinstance(tombstone, Tombstone)
    assert (tombstone.gap_from, tombstone.gap_to, records(rest)) == (1, 2, [2, 3, 4])


def test_a_topic_that_was_made_again_is_read_from_its_first_record(topics: Client, topic: str) -> None:
    topics.append(topic, range(9))
    topics.delete_topic(topic)
    topics.append(topic, ["a", "b"])
    with pytest.raises(GapError, match=r"made again, .* read on from 0,") as gap:
        list(topics.read(topic, 9))
    assert records(list(topics.read(topic, gap.value.tombstone.next_from_seq))) == ["a", "b"]


def test_a_follower_that_loses_its_session_behind_a_tombstone_begins_at_the_next_record() -> None:
    """In a topic that was made again that is the first one, before the end of the gap."""
    gap = {"topic": "t", "gap_from": 1, "gap_to": 2, "earliest_seq": 1, "head_seq": 2}
    for reason, position in (("recreated", 0), ("cap", 2)):
        following = Following({"t": 9}, "yield", {}, lambda what: Attempts(QUICK, True, what))
        frame = Event("tombstone", msgspec.json.encode(gap | {"reason": reason}), "")
        assert [name for name, _ in following.take(frame)] == ["t"]
        assert following.positions == {"t": position}


def test_where_gaps_are_raised_the_types_of_a_read_have_records_alone(topics: Client, topic: str) -> None:
    topics.append(topic, [1, 2])
    assert_type(topics.read(topic), Iterator[Record])
    assert_type(topics.read(topic, tombstones="yield"), Iterator[Record | Tombstone])
    for _, record in topics.follow(topic):
        assert_type(record, Record | TopicGone)
        assert isinstance(record, Record)
        if record.seq == 2:
            break


def test_a_waiting_read_goes_on_with_what_comes(topics: Client, topic: str) -> None:
    topics.append(topic, ["before"])
    reading = topics.read(topic, wait=True)
    first = next(reading)
    writer = threading.Thread(target=lambda: topics.append(topic, ["after"]))
    writer.start()
    second = next(reading)
    writer.join()
    assert records([first, second]) == ["before", "after"]


def test_topics_are_made_listed_and_removed(topics: Client, topic: str) -> None:
    names = [f"{topic}-{number}" for number in range(3)]
    made = [topics.put_topic(name, durability="fsync") for name in names]
    assert all(one.created and one.config["durability"] == "fsync" for one in made)
    assert [entry.topic for entry in topics.list_topics(f"{topic}-")] == names
    assert topics.get_topic(names[0]).head_seq == 0
    assert topics.delete_topic(names[0]).deleted
    assert not topics.delete_topic(names[0]).deleted
    with pytest.raises(NotFoundError):
        topics.get_topic(names[0])


def test_deletion_by_seq_and_by_tag(topics: Client, topic: str) -> None:
    topics.append(topic, [NewRecord(number, tag="odd" if number % 2 else "even") for number in range(6)])
    assert topics.delete_records(topic, match="odd").deleted == 3
    assert topics.delete_records(topic, before_seq=3).count == 2
    assert records(list(topics.read(topic))) == [2, 4]


def test_refusals_have_their_types(topics: Client, topic: str) -> None:
    with pytest.raises(NotFoundError) as missing:
        list(topics.read(topic))
    assert (missing.value.code, missing.value.detail) == ("topic_not_found", {"topic": topic})
    with pytest.raises(InvalidRequestError, match="durability"):
        topics.put_topic(topic, durability="eternal")
    topics.append(topic, [1])
    with pytest.raises(ConflictError) as mismatch:
        topics.append(topic, [2], if_head_seq=7)
    assert (mismatch.value.code, mismatch.value.detail) == ("head_mismatch", {"head_seq": 1})
    topics.put_topic(topic, cap_records=1, discard="reject")
    with pytest.raises(TopicFullError):
        topics.append(topic, [2])


def test_nothing_there_ends_in_one_clear_error(topic: str) -> None:
    line = rf"GET http://127\.0\.0\.1:1/v0/topics/{topic}: .*refused"
    with Client("http://127.0.0.1:1", retry=QUICK) as nowhere, pytest.raises(UnreachableError, match=line):
        nowhere.get_topic(topic)
    with pytest.raises(ClientError, match="like http://127"):
        Client("127.0.0.1:4000")


def test_a_key_is_sent_and_a_wrong_one_refused(topic: str) -> None:
    with Service(env={"TOPICS_API_KEYS": "secret:rw"}) as service:
        with Client(service.url, token="secret") as client:
            client.append(topic, [1])
            assert next(iter(client.follow(topic)))[0] == topic
        with Client(service.url, token="wrong") as client, pytest.raises(NotAllowedError):
            client.append(topic, [2])


@pytest.mark.long
def test_a_follower_sees_each_record_once_over_killed_frontends_and_restarts(topic: str) -> None:
    """The stream dies with its frontend, the session with the service; a writer goes on all the time."""
    with Service(shards=1, frontends=2) as service:
        done = threading.Event()
        with Client(service.url) as writer, Client(service.url) as reader:
            writer.append(topic, [0])
            committed = [0]

            def write() -> None:
                for number in itertools.count(1):
                    if done.is_set():
                        return
                    writer.append(topic, [number])
                    committed.append(number)

            thread = threading.Thread(target=write)
            thread.start()
            seen = []
            try:
                disturbances: Iterator[Callable[[], object]] = iter(
                    [
                        lambda: service.kill("frontend", 0),
                        lambda: service.kill("frontend", 1),
                        lambda: service.kill("walshard", 0),
                        service.restart,
                    ]
                )
                for _, item in reader.follow(topic):
                    assert isinstance(item, Record)
                    seen.append(item.data)
                    if len(seen) % 50 == 0:
                        disturb = next(disturbances, None)
                        if disturb is None:
                            break
                        disturb()
            finally:
                done.set()
                thread.join()
        assert seen == list(range(len(seen)))
        assert committed == list(range(len(committed)))


def test_a_follower_is_told_of_gaps_and_of_the_end(topics: Client, topic: str) -> None:
    other = f"{topic}-other"
    topics.put_topic(topic, cap_records=2)
    topics.append(topic, range(4))
    topics.append(other, ["kept"])
    with pytest.raises(GapError):
        list(topics.follow({topic: 1}))
    seen = []
    for name, item in topics.follow({topic: 1, other: 0}, tombstones="yield"):
        seen.append((name, item))
        if len(seen) == 4:
            topics.delete_topic(topic)
        if isinstance(item, TopicGone) and name == topic:
            topics.delete_topic(other)
    of_topic = [item for name, item in seen if name == topic]
    assert isinstance(of_topic[0], Tombstone)
    assert of_topic[0].gap_to == 2
    assert records(of_topic) == [2, 3]
    assert of_topic[-1] == TopicGone(4)
    assert [item for name, item in seen if name == other][-1] == TopicGone(1)


def test_a_follower_may_ask_for_no_data(topics: Client, topic: str) -> None:
    topics.append(topic, [NewRecord({"a": 1}, tag="x")])
    _, item = next(iter(topics.follow(topic, include_data=False)))
    assert isinstance(item, Record)
    assert (item.seq, item.tag, item.data) == (1, "x", None)


@pytest.mark.long
def test_a_topic_deleted_while_the_service_was_away_ends_and_the_others_go_on(topic: str) -> None:
    other = f"{topic}-other"
    with Service(shards=1, frontends=1) as service, Client(service.url) as topics:
        topics.append(topic, [1])
        topics.append(other, ["a"])
        following = topics.follow({topic: 0, other: 0})
        seen = [next(following), next(following)]
        service.restart()
        topics.delete_topic(topic)
        topics.append(other, ["b"])
        seen += [next(following), next(following)]
        service.restart()
        topics.delete_topic(other)
        seen += following
    assert [item for name, item in seen if name == topic][1:] == [TopicGone(1)]
    of_other = [item for name, item in seen if name == other]
    assert records(of_other) == ["a", "b"]
    assert of_other[-1] == TopicGone(2)


def test_the_asynchronous_client_does_the_same(service: Service, topic: str) -> None:
    async def collect(items: AsyncIterator[Any], count: int) -> list[Any]:
        seen = []
        async for item in items:
            seen.append(item)
            if len(seen) == count:
                break
        return seen

    async def body(client: AsyncClient) -> None:
        await client.put_topic(topic, cap_records=30)
        await client.append(topic, range(25))
        assert records(await collect(client.read(topic, 3, limit=7), 22)) == list(range(3, 25))
        followed = asyncio.ensure_future(collect(client.follow({topic: 20}), 8))
        await client.append(topic, ["a", "b", "c"])
        assert [item.data for _, item in await followed] == [20, 21, 22, 23, 24, "a", "b", "c"]
        await client.append(topic, range(20))
        with pytest.raises(GapError):
            await collect(client.read(topic), 1)
        first = (await collect(client.read(topic, tombstones="yield"), 1))[0]
        assert isinstance(first, Tombstone)
        assert [entry.topic async for entry in client.list_topics(topic)] == [topic]
        assert (await client.delete_records(topic, before_seq=40)).count == 9
        assert (await client.get_topic(topic)).earliest_seq == 40
        with pytest.raises(ConflictError):
            await client.append(topic, [1], if_head_seq=1)
        assert (await client.delete_topic(topic)).deleted
        with pytest.raises(NotFoundError):
            await client.diff(topic)

    in_async(service, body)


@pytest.mark.long
def test_an_asynchronous_follower_lives_through_a_restart(topic: str) -> None:
    async def body(client: AsyncClient, service: Service) -> None:
        await client.append(topic, [0])
        seen = []
        async for _, item in client.follow(topic):
            assert isinstance(item, Record)
            seen.append(item.data)
            if len(seen) == 1:
                service.restart()  # in a thread it would end with its thread
                await client.append(topic, [1, 2])
            if len(seen) == 3:
                break
        assert seen == [0, 1, 2]

    with Service() as service:

        async def run() -> None:
            async with AsyncClient(service.url) as client:
                await body(client, service)

        asyncio.run(run())
