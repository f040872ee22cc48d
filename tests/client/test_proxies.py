"""Clients behind a proxy, which answers 502 itself while it does not reach the service: that ends nobody's work."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.archive.test_following import following, follows, leading, promoted
from tests.harness import Service, poll
from topics.client import Client, Record, Retry, ServiceBusyError, UnreachableError, calls

BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\nContent-Length: 11\r\n\r\nbad gateway"
QUICK = Retry(total_s=0.4, pause_first_s=0.01, pause_max_s=0.05)


class Proxy:
    """Passes bytes on to the service, as nginx and Caddy do, and says 502 while there is none."""

    def __init__(self, service: Service) -> None:
        self.lead_to(service)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refused = 0
        """Requests that were answered 502."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, service: Service) -> None:
        """Have new connections go to this one, as to a virtual address that moves."""
        self._place = ("127.0.0.1", int(service.url.rpartition(":")[2]))

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            request = client.recv(1 << 16)
            try:
                service = socket.create_connection(self._place)
            except OSError:
                self.refused += 1
                client.sendall(BAD_GATEWAY)
                return
            with service:
                service.sendall(request)
                threading.Thread(target=_pass_on, args=(service, client), daemon=True).start()
                _pass_on(client, service)

    def close(self) -> None:
        self._listener.close()


def _pass_on(source: socket.socket, dest: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(1 << 16):
            dest.sendall(part)
    for end in (source, dest):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def behind() -> Iterator[tuple[Service, Proxy]]:
    with Service(shards=1, frontends=1) as service:
        proxy = Proxy(service)
        yield service, proxy
        proxy.close()


def test_a_write_a_producer_a_follower_and_a_worker_go_on(behind: tuple[Service, Proxy], topic: str) -> None:
    service, proxy = behind
    with Client(proxy.url) as client, client.producer(f"{topic}.p") as producer:
        client.append(topic, ["before"])
        client.put_topic(f"{topic}.q", type="queue")
        jobs = client.queue(f"{topic}.q").work()
        client.append(f"{topic}.q", [1, 2])
        with next(jobs) as job:
            assert job.data == 1
        followed = client.follow(topic)
        assert next(followed)[0] == topic
        assert producer.send("before").result(60) == 1

        service.kill_group()
        sent = producer.send("after")
        with ThreadPoolExecutor(1) as pool:
            appending = pool.submit(client.append, topic, ["after"])
            poll("requests to be refused by the proxy", lambda: proxy.refused >= 5, 60.0)
            service.start()  # in a thread it would end with its thread
            assert appending.result(60).first_seq == 2
        _, item = next(followed)
        assert isinstance(item, Record)
        assert item.data == "after"
        assert sent.result(60) == 2
        with next(jobs) as job:
            assert job.data == 2
        jobs.close()


def test_what_a_proxy_answered_is_not_repeated_where_it_may_have_been_done(
    behind: tuple[Service, Proxy], topic: str
) -> None:
    service, proxy = behind
    service.kill_group()
    with Client(proxy.url, retry=QUICK) as client:
        with pytest.raises(ServiceBusyError, match="bad gateway"):
            client.call(calls.claim(topic, "node"))
        assert proxy.refused == 1
        with pytest.raises(ServiceBusyError, match="bad gateway"):
            client.append(topic, [1])
        assert proxy.refused > 2
    service.start()


def test_a_proxy_without_its_service_is_not_the_last_address(behind: tuple[Service, Proxy], topic: str) -> None:
    service, proxy = behind
    with Service(shards=1, frontends=1) as other, Client([proxy.url, other.url], retry=QUICK) as client:
        service.kill_group()
        assert client.append(topic, [1]).first_seq == 1
    service.start()


def test_an_address_that_nobody_has_is_not_the_last_one_however_little_time_there_is(
    service: Service, topic: str
) -> None:
    nobody = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    with Client([*nobody, service.url], retry=Retry(total_s=0.0)) as client:
        assert client.append(topic, [1]).first_seq == 1
    with Client(nobody, retry=Retry(total_s=0.0)) as client, pytest.raises(UnreachableError):
        client.append(topic, [1])


@pytest.mark.long
def test_an_address_that_moves_to_a_follower_before_that_leads_ends_no_producer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "topics.client")
    with leading(tmp_path) as leader, Service(env=following(tmp_path)) as follower:
        proxy = Proxy(leader)
        with Client(proxy.url) as client, client.producer("t") as producer:
            assert client.append("u", [1]).first_seq == 1
            assert producer.send(1).result(60) == 1
            follows(follower, leader, "t", "u")
            leader.kill_group()
            proxy.lead_to(follower)
            sent = producer.send(2)
            with ThreadPoolExecutor(1) as pool:
                appending = pool.submit(client.append, "u", [2])
                poll("refusals", lambda: sum(line.endswith('503"') for line in caplog.messages) >= 6, 60.0)
                promoted(follower)
                assert appending.result(60).first_seq > 1
            assert sent.result(60) > 1
        proxy.close()
