"""A client that knows several addresses of one service: it finds who leads, and goes on after a takeover."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.archive.test_archiver import archiver
from tests.archive.test_following import following, follows, leading, promoted
from tests.contract.asking import ok, put, refused, state, write
from tests.contract.socket_client import Socket
from tests.harness import Service, poll
from topics.api.answers import Record, TombstoneAnswer
from topics.client import AsyncClient, Client, ClientError, Retry, calls
from topics.client.errors import ApiError, ConflictError, UnreachableError
from topics.client.http import ServiceAddress
from topics.client.links import Link, LinkPool
from topics.client.servers import GIVEN_UP_MAX, Server, Servers, make_servers, split_urls


class _Pool(LinkPool):
    def __init__(self) -> None: ...


def _servers(*urls: str) -> Servers:
    return Servers([Server(ServiceAddress(url, None, None), _Pool()) for url in urls])


def test_the_next_one_is_asked_in_order() -> None:
    servers = _servers("http://a", "http://b", "http://c")
    asked = []
    for _ in range(4):
        asked.append(servers.current.address.url)
        servers.move_on(servers.current)
    assert asked == ["http://a", "http://b", "http://c", "http://a"]


def test_of_those_that_fail_at_once_the_first_moves_on() -> None:
    servers = _servers("http://a", "http://b", "http://c")
    failed = servers.current
    servers.move_on(failed)
    servers.move_on(failed)
    assert servers.current.address.url == "http://b"


@pytest.mark.parametrize(("named", "asked"), [("http://c", "http://c"), ("http://evil", "http://b"), (7, "http://b")])
def test_a_leader_that_is_named_is_asked_if_it_was_given(named: object, asked: str) -> None:
    servers = _servers("http://a", "http://b", "http://c")
    servers.move_on(servers.current, ApiError(503, "not_leader", "", {"leader": named}))
    assert servers.current.address.url == asked


def test_followers_that_name_a_dead_leader_do_not_keep_a_client_from_the_new_one() -> None:
    servers = _servers("http://dead", "http://b", "http://c", "http://leads")
    servers.move_on(servers.current)
    asked: list[str] = []
    while (url := servers.current.address.url) != "http://leads" and len(asked) < 9:
        asked.append(url)
        servers.move_on(servers.current, ApiError(503, "not_leader", "", {"leader": "http://dead"}))
    assert asked == ["http://b", "http://c"]
    servers.move_on(servers.current)
    assert servers.current.address.url == "http://dead", "all have failed: a new round"


def test_callers_with_little_time_leave_an_address_that_hangs() -> None:
    """Each gave up before the client had waited long enough to move on, so it asked that address for ever."""
    hung = socket.create_server(("127.0.0.1", 0))
    listener = socket.create_server(("127.0.0.1", 0))
    url, hung_url = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (listener, hung))
    body = b'{"status":"ok","version":"1","uptime_ms":1,"performance":{"server_total_ms":1}}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 16):
                connection.sendall(answer)

    async def run() -> None:
        async with AsyncClient([hung_url, url]) as client:
            for _ in range(GIVEN_UP_MAX):
                asking = asyncio.create_task(client.call(calls.health()))
                connection, _ = await asyncio.to_thread(hung.accept)  # so the request was on its way
                with connection:
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
            assert (await client.call(calls.health())).version == "1"

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with hung, listener:
        asyncio.run(run())
    thread.join()


def test_an_address_that_answers_in_between_is_kept() -> None:
    servers = _servers("http://a", "http://b")
    for _ in range(GIVEN_UP_MAX):
        for _ in range(GIVEN_UP_MAX - 1):
            servers.give_up(servers.current, time.monotonic())
        servers.given_up = 0
    assert servers.current.address.url == "http://a"


def test_requests_that_are_given_up_together_count_once() -> None:
    """A TaskGroup cancels all of its tasks when one fails: the leader is none the worse for it."""
    servers = _servers("http://a", "http://b")
    asked, asked_s = servers.current, time.monotonic()
    for _ in range(5 * GIVEN_UP_MAX):
        servers.give_up(asked, asked_s)
    assert servers.current is asked


def test_what_an_address_that_was_left_does_not_answer_says_nothing_of_the_next() -> None:
    servers = _servers("http://a", "http://b")
    left = servers.current
    servers.move_on(left)
    asked = servers.current
    for _ in range(GIVEN_UP_MAX):
        servers.give_up(left, time.monotonic())
    servers.give_up(asked, time.monotonic())
    assert servers.current is asked


def test_urls_are_a_text_or_a_list() -> None:
    assert split_urls("http://a, http://b") == split_urls(["http://a", "http://b"]) == ["http://a", "http://b"]
    for wrong in ("", "http://a,", [], [""]):
        with pytest.raises(ClientError, match="does not name a service"):
            split_urls(wrong)


def test_only_who_may_ask_somebody_else_needs_a_leader() -> None:
    def needs(url: str, reads: Any) -> list[bool]:
        writes, _ = make_servers(url, reads, None, None, Link.connect)
        return [b"Topics-Leader: required" in server.address.request("GET", "/", None) for server in writes.every]

    assert needs("http://a", "leader") == [False]
    assert needs("http://a,http://b", "leader") == [True, True]
    assert needs("http://a,http://b", "any") == [False, False]


@contextmanager
def _pair(place: Path) -> Iterator[tuple[Service, Service]]:
    """A leader, and one that follows it."""
    with leading(place) as leader, Service(env=following(place)) as follower:
        yield leader, follower


@pytest.mark.long
def test_a_client_goes_on_at_the_new_leader(tmp_path: Path) -> None:
    with _pair(tmp_path / "archive") as (leader, follower):
        put(leader.client, "bank", durability="archived")
        with (
            Client([follower.url, leader.url]) as client,
            Client(f"{follower.url},{leader.url}", reads="any") as reader,
            client.producer("orders", "importer") as producer,
        ):
            assert client.append("bank", [1]).first_seq == 1, "it finds the leader"
            assert _data(client, "bank") == [1], "and reads what it wrote"
            poll("the follower has it", lambda: _has(reader, "bank", 1))
            assert producer.send("before").result() == 1
            follow = client.follow("bank", tombstones="yield")
            assert _seq_of(next(follow)) == 1

            poll("the follower has that, too", lambda: _has(reader, "orders", 1))
            leader.kill_group()
            assert promoted(follower)["topics"] >= 1
            assert _data(client, "bank") == [1]
            gap = next(follow)[1]
            assert isinstance(gap, TombstoneAnswer)
            assert gap.reason == "restored"
            written = client.append("bank", [2])
            assert _seq_of(next(follow)) == written.first_seq
            assert producer.send("after").result() > 1
            follow.close()


@pytest.mark.long
def test_producers_hear_of_acknowledged_writes_that_a_takeover_lost(tmp_path: Path) -> None:
    with _pair(tmp_path / "archive") as (leader, follower):
        with (
            Client([follower.url, leader.url]) as client,
            client.producer("orders", "known") as known,
            client.producer("orders", "idle") as idle,
            client.producer("orders", "unknown") as unknown,
            client.producer("new") as of_lost_topic,
        ):
            assert [one.send("kept").result(60) for one in (known, idle)] == [1, 2]
            follows(follower, leader, "orders")
            os.kill(leader.pid_of("archiver"), signal.SIGSTOP)
            for one in (known, unknown, of_lost_topic):
                one.send("lost").result(60)
            leader.kill_group()
            promoted(follower)
            assert idle.send("after").result(60) > 2
            for one, n in ((known, 1), (unknown, 0), (of_lost_topic, 0)):
                with pytest.raises(ConflictError) as told:
                    one.send("after").result(60)
                assert (told.value.code, told.value.detail["n"]) == ("out_of_order", n)
                with pytest.raises(ConflictError):
                    one.close()
            with client.producer("orders", "unknown") as again:
                assert again.last() is None
                assert again.send("again").result(60) > 2
        assert "new" not in {topic.topic for topic in Client(follower.url).list_topics()}


def _data(client: Client, topic: str) -> list[Any]:
    return [item.data for item in client.read(topic, tombstones="yield") if not isinstance(item, TombstoneAnswer)]


def _seq_of(found: tuple[str, Any]) -> int:
    return int(found[1].seq)


def _has(client: Client, topic: str, head_seq: int) -> bool:
    try:
        return client.get_topic(topic).head_seq >= head_seq
    except ApiError:
        return False


@pytest.mark.long
def test_streams_leave_a_leader_that_lives_on_when_another_one_took_over(tmp_path: Path) -> None:
    of_leader = {"Topics-Leader": "required"}
    with _pair(tmp_path / "archive") as (leader, follower):
        urls = [leader.url, follower.url]
        put(leader.client, "jobs", type="queue")
        with (
            ThreadPoolExecutor(2) as pool,  # its threads end with their clients
            Client(urls) as client,
            Client(urls) as watcher,
            Client(urls) as worker,
            ExitStack() as at_end,
            Socket(leader) as of_anybody,
            Socket(leader, headers=of_leader) as socket,
        ):
            client.append("orders", [1])
            client.append("jobs", ["a"])
            queue = worker.queue("jobs")
            at_end.callback(queue.stop)
            frames, jobs = watcher.follow("orders", tombstones="yield"), queue.work()
            assert _seq_of(next(frames)) == 1
            assert next(jobs).data == "a"
            gap, job = pool.submit(next, frames), pool.submit(next, jobs)
            with Client(follower.url) as reader:
                poll("the follower has all", lambda: _has(reader, "orders", 1) and not _count(follower, "jobs"))

            assert promoted(follower)["topics"] == 2

            def has_noticed() -> bool:
                leader.client.post("/v0/topics/others", json={"records": [{"data": 1}]})  # it looks when it has news
                return bool(archiver(leader)["taken_over"])

            poll("it notices", has_noticed)
            written = client.append("orders", [2])
            client.append("jobs", ["b"])
            assert isinstance(gap.result(60)[1], TombstoneAnswer)
            assert _seq_of(next(frames)) == written.first_seq
            assert job.result(60).data == "b"
            assert socket.next("error")["code"] == "not_leader"
            with pytest.raises(ConnectionClosed, match="another service leads"):
                socket.text()
            assert of_anybody.ask("ping", request_id=1)["op"] == "pong"
            frames.close()
            jobs.close()
        refused(leader.client.get("/v0/topics/jobs/work?node=n"), 503, "not_leader")
        wid = ok(leader.client.post("/v0/watch", json={"topics": {"orders": {}}}))["wid"]
        refused(leader.client.get(f"/v0/watch/{wid}", headers=of_leader), 503, "not_leader")
        with pytest.raises(InvalidStatus, match="503"):
            Socket(leader, headers=of_leader)


def _count(service: Service, topic: str) -> int:
    return int(state(service.client, topic)["count"])


@pytest.mark.long
def test_who_reads_from_any_asks_the_leader_for_what_was_just_written(tmp_path: Path) -> None:
    with _pair(tmp_path / "archive") as (leader, follower), Client(leader.url) as writer, ExitStack() as at_end:
        put(leader.client, "jobs", type="queue")
        write(leader.client, "jobs", "of the former queue")
        with Client(follower.url) as reader:
            poll("the follower has it", lambda: _has(reader, "jobs", 1))
        former_epoch = state(leader.client, "jobs")["epoch"]
        pid = follower.pid_of("follower")
        os.kill(pid, signal.SIGSTOP)  # it stays behind
        at_end.callback(os.kill, pid, signal.SIGCONT)
        with writer.producer("orders", "importer") as producer:
            producer.send("last")
        ok(leader.client.delete("/v0/topics/jobs"))
        put(leader.client, "jobs", type="queue")
        write(leader.client, "jobs", "new")

        with Client([follower.url, leader.url], reads="any") as client:
            assert client.get_topic("jobs").epoch == former_epoch
            with client.producer("orders", "importer") as producer:
                last = producer.last()
                assert last is not None
                assert last.data == "last"
            jobs = client.queue("jobs").work()
            with next(jobs) as job:
                assert job.key == f"jobs:{state(leader.client, 'jobs')['epoch']}:1"
            jobs.close()


@pytest.mark.long
def test_an_asyncio_client_goes_on_at_the_new_leader(tmp_path: Path) -> None:
    with _pair(tmp_path / "archive") as (leader, follower):

        async def use() -> None:
            async with AsyncClient([follower.url, leader.url]) as client:
                assert (await client.append("orders", [1])).first_seq == 1
                async with AsyncClient(follower.url) as reader:
                    while [item async for item in reader.list_topics()] == []:
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(leader.kill_group)
                await asyncio.to_thread(promoted, follower)
                assert (await client.append("orders", [2])).first_seq > 1

        asyncio.run(use())


def test_a_follower_alone_takes_no_writes(tmp_path: Path) -> None:
    with _pair(tmp_path / "archive") as (leader, follower):
        write(leader.client, "orders", 1)
        with Client([follower.url, "http://127.0.0.1:1"], retry=Retry(total_s=0.5)) as client:
            with pytest.raises((ApiError, UnreachableError)):
                client.append("orders", [2])
            with pytest.raises((ApiError, UnreachableError)):
                list(client.read("orders"))
        with Client(follower.url) as client:
            poll("the follower has it", lambda: _has(client, "orders", 1))
            refused(follower.client.get("/v0/topics", headers={"Topics-Leader": "required"}), 503, "not_leader")
            with pytest.raises(ApiError, match="follows another one") as refusal:
                client.append("orders", [2])
            assert refusal.value.code == "not_leader"
            producer = client.producer("orders")
            with pytest.raises(ApiError, match="follows another one"):
                producer.send(2).result(60)
            with pytest.raises(ApiError, match="follows another one"):
                producer.close()
            assert _data(client, "orders") == [1]


@contextmanager
def _silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """An address that takes connections and says nothing: its URL, and the connections."""
    taken: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                taken.append(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for one in taken:
            one.close()


NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("first", ["nobody", "one that hangs"])
def test_an_address_that_does_not_answer_is_not_the_last_one(
    service: Service, topic: str, kind: type[Client] | type[AsyncClient], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both kinds of client, for a write, a long poll, a follower, a producer and a worker."""
    monkeypatch.setattr("topics.client.links.ANSWER_MAX_S", 0.2)
    put(service.client, f"{topic}.q", type="queue")
    with _silent() as (silent, _):
        urls = [NOBODY if first == "nobody" else silent, service.url]

        def use() -> list[Any]:
            with Client(urls) as one, Client(urls) as two, Client(urls) as three, Client(urls) as four:
                found: list[Any] = [one.append(topic, [1]).first_seq]
                found.append(two.diff(topic, wait_ms=100).records[0].data)
                with closing(three.follow(topic)) as frames:
                    _, record = next(frames)
                    assert isinstance(record, Record)
                    found.append(record.seq)
                with one.producer(topic) as producer:
                    found.append(producer.send(2).result(60))
                one.append(f"{topic}.q", ["job"])
                with closing(four.queue(f"{topic}.q").work()) as jobs:
                    found.append(next(jobs).data)
                return found

        async def use_async() -> list[Any]:
            async with AsyncClient(urls) as one, AsyncClient(urls) as two, AsyncClient(urls) as three:
                found: list[Any] = [(await one.append(topic, [1])).first_seq]
                found.append((await two.diff(topic, wait_ms=100)).records[0].data)
                async with aclosing(three.follow(topic)) as frames:
                    _, record = await anext(frames)
                    assert isinstance(record, Record)
                    found.append(record.seq)
                async with AsyncClient(urls) as four, four.producer(topic) as producer:
                    found.append(await (await producer.send(2)))
                await one.append(f"{topic}.q", ["job"])
                async with AsyncClient(urls) as five, aclosing(five.queue(f"{topic}.q").work()) as jobs:
                    found.append((await anext(jobs)).data)
                return found

        assert (use() if kind is Client else asyncio.run(use_async())) == [1, 1, 1, 2, "job"]


def test_requests_that_wait_for_their_turn_go_where_those_before_them_moved(
    service: Service, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would have waited for the time-out of an answer again."""
    monkeypatch.setattr("topics.client.links.ANSWER_MAX_S", 0.2)
    monkeypatch.setattr("topics.client.clients.REQUESTS_MAX", 1)

    async def use(silent: str) -> set[int]:
        async with AsyncClient([silent, service.url]) as client:
            return {one.first_seq for one in await asyncio.gather(*(client.append(topic, [n]) for n in range(5)))}

    with _silent() as (silent, taken):
        assert asyncio.run(use(silent)) == {1, 2, 3, 4, 5}
        assert len(taken) == 1
