"""Named cursors and producers through both clients, against the real service."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness import Service, poll
from topics.api.requests import Consistency
from topics.client import (
    AsyncClient,
    Client,
    ConflictError,
    CursorPage,
    InvalidRequestError,
    NewRecord,
    NotFoundError,
    Producer,
    ServiceBusyError,
    calls,
)
from topics.client.calls import put_cursor, read_cursor

BOTH: list[Consistency] = ["strictly_at_once", "at_least_once"]


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


def data(page: CursorPage) -> list[object]:
    return [record.data for record in page.records]


# -- cursors


@pytest.mark.parametrize("consistency", BOTH)
def test_a_cursor_is_made_read_looked_at_and_deleted(topics: Client, topic: str, consistency: Consistency) -> None:
    topics.append(topic, [NewRecord(number, tag="t", meta={"k": "v"}) for number in range(5)])
    cursor = topics.cursor(topic, "billing")
    made = cursor.put(consistency=consistency, persist_every=3)
    assert (made.topic, made.created, made.consistency, made.persist_every) == (topic, True, consistency, 3)
    page = cursor.read(limit=2)
    assert (data(page), page.cursor, page.cursor_seq, page.caught_up, page.tombstone) == (
        [0, 1],
        "billing",
        2,
        False,
        None,
    )
    assert (page.records[0].tag, page.records[0].meta) == ("t", {"k": "v"})
    assert data(cursor.read(checkpoint=False)) == [2, 3, 4]
    assert cursor.get().cursor_seq == 2
    assert data(cursor.read(max_bytes=1)) == [2]
    assert data(cursor.read()) == [3, 4]
    assert cursor.read().caught_up
    assert cursor.delete().deleted
    assert not cursor.delete().deleted
    with pytest.raises(NotFoundError) as missing:
        cursor.read()
    assert missing.value.code == "cursor_not_found"


def test_cursors_begin_and_move_where_they_are_told_to(topics: Client, topic: str) -> None:
    topics.append(topic, range(5))
    assert list(topics.list_cursors(topic)) == []
    late = topics.cursor(topic, "late")
    assert late.put(tail=True).cursor_seq == 5
    assert topics.cursor(topic, "from").put(from_seq=3).cursor_seq == 3
    again = late.put(consistency="strictly_at_once")
    assert (again.cursor_seq, again.created) == (5, False)
    assert late.put(from_seq=0).cursor_seq == 0
    assert [(one.cursor, one.cursor_seq) for one in topics.list_cursors(topic)] == [("from", 3), ("late", 0)]


def test_all_cursors_are_listed_over_the_pages(
    service: Service, topics: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def names() -> list[str]:
        async with AsyncClient(service.url) as client:
            return [one.cursor async for one in client.list_cursors(topic)]

    topics.put_topic(topic)
    for name in "abcde":
        topics.cursor(topic, name).put()
    monkeypatch.setattr(calls, "PAGE_SIZE", 2)
    assert [one.cursor for one in topics.list_cursors(topic)] == list("abcde")
    assert asyncio.run(names()) == list("abcde")


def test_a_cursor_that_was_overtaken_says_what_is_lost(topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=2)
    cursor = topics.cursor(topic, "slow")
    cursor.put()
    for number in range(5):
        topics.append(topic, [number])
    page = cursor.read()
    assert page.tombstone is not None
    assert (page.tombstone.gap_from, page.tombstone.gap_to, data(page)) == (1, 3, [3, 4])


def test_what_moves_a_cursor_is_not_sent_twice(topic: str) -> None:
    """A shard that hangs leaves open whether the read moved the cursor: a second one would go on behind it."""
    assert not read_cursor(topic, "c").repeatable
    assert read_cursor(topic, "c", checkpoint=False).repeatable
    assert [put_cursor(topic, "c", **move).repeatable for move in ({}, {"tail": True}, {"from_seq": 0})] == [
        True,
        False,
        False,
    ]


def test_a_read_that_a_hung_shard_leaves_open_is_its_readers_affair(
    topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "topics.client")
    with Service(shards=1, frontends=1, env={"TOPICS_SHARD_WAIT_MS": "200"}) as service, Client(service.url) as topics:
        topics.append(topic, range(5))
        cursor = topics.cursor(topic, "c")
        cursor.put()
        pid = service.pid_of("walshard")
        with ThreadPoolExecutor(2) as pool:
            os.kill(pid, signal.SIGSTOP)
            try:
                looking = pool.submit(cursor.read, checkpoint=False)
                poll("the look to be left open", lambda: '/read "HTTP/1.1 503' in caplog.text)
                with pytest.raises(ServiceBusyError, match="shard_unavailable"):
                    cursor.read()
            finally:
                os.kill(pid, signal.SIGCONT)
            assert data(looking.result(20)) == [0, 1, 2, 3, 4]
        # One that moves nothing is repeated, also when the shard is as late as 200 ms for another reason.
        assert data(cursor.read(checkpoint=False)) == [0, 1, 2, 3, 4]


def test_the_asynchronous_cursor_does_the_same(service: Service, topic: str) -> None:
    async def body() -> None:
        async with AsyncClient(service.url) as client:
            await client.append(topic, range(5))
            cursor = client.cursor(topic, "c")
            assert (await cursor.put(from_seq=1)).created
            assert data(await cursor.read(checkpoint=False, limit=1)) == [1]
            pages = await asyncio.gather(*(cursor.read(limit=1) for _ in range(4)))
            assert sorted(record.seq for page in pages for record in page.records) == [2, 3, 4, 5]
            assert [one.cursor_seq async for one in client.list_cursors(topic)] == [5]
            assert (await cursor.get()).cursor_seq == 5
            assert (await cursor.delete()).deleted
            with pytest.raises(NotFoundError):
                await cursor.get()

    asyncio.run(body())


# -- producers


def test_a_producer_writes_each_of_its_batches_once(topics: Client, topic: str) -> None:
    for n, batch in enumerate(("ab", "c")):
        assert not topics.append(topic, list(batch), producer=Producer("p", 1, n)).deduped
    again = topics.append(topic, list("x"), producer=Producer("p", 1, 1))
    assert (again.deduped, again.first_seq, again.head_seq) == (True, 3, 3)
    with pytest.raises(ConflictError) as skipped:
        topics.append(topic, list("x"), producer=Producer("p", 1, 3))
    assert (skipped.value.code, skipped.value.detail) == ("out_of_order", {"producer": "p", "epoch": 1, "n": 1})
    assert not topics.append(topic, list("d"), producer=Producer("p", 2, 0)).deduped
    with pytest.raises(ConflictError) as fenced:
        topics.append(topic, list("x"), producer=Producer("p", 1, 2))
    assert fenced.value.code == "fenced"
    with pytest.raises(InvalidRequestError, match="idempotency key"):
        topics.append(topic, list("x"), producer=Producer("p", 2, 1), idempotency_key="k")
    assert topics.get_topic(topic).count == 4


def test_an_asynchronous_producer_does_the_same(service: Service, topic: str) -> None:
    async def body() -> None:
        async with AsyncClient(service.url) as client:
            first = await client.append(topic, list("ab"), producer=Producer("p", 1, 0))
            again = await client.append(topic, list("ab"), producer=Producer("p", 1, 0))
            assert (first.deduped, again.deduped, again.head_seq) == (False, True, 2)

    asyncio.run(body())
