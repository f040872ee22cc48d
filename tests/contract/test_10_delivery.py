"""api §10 `at_least_once`: nothing is left out that the service still had when a client or a frontend went away."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import h2.config
import h2.connection
import h2.settings
import httpx
import pytest

from tests.contract.asking import write
from tests.contract.test_10_crashes import frames
from tests.contract.test_10_cursors import look, make, read
from tests.harness import Service, poll

pytestmark = pytest.mark.long

RECORD_BYTES: Final = 900 * 1024
LONG_PAGE: Final = 9
"""Records of a page of 8 MiB: more than the kernel takes off a frontend whose client reads nothing."""
RECEIVE_BUFFER_BYTES: Final = 4096


@pytest.fixture(scope="module")
def full() -> Iterator[Service]:
    """One frontend; topic `long` has a page of 8 MiB and one record more, `short` a thousand of 2 kB."""
    with Service(shards=1, frontends=1, wal_file_bytes=None) as service:
        for _ in range(LONG_PAGE + 1):
            write(service.client, "long", "x" * RECORD_BYTES)
        write(service.client, "short", *["x" * 2000] * 1000)
        yield service


def connected(service: Service) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    client.settimeout(15)
    client.connect(("127.0.0.1", service.port))
    return client


def ask(service: Service) -> socket.socket:
    """A reader of cursor `c` of `long` that reads nothing of its answer."""
    client = connected(service)
    body = b'{"max_bytes":8388608}'
    client.sendall(
        b"POST /v0/topics/long/cursors/c/read HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    poll("the cursor to move", lambda: look(service.client, "long")["cursor_seq"] == LONG_PAGE)
    return client


def kill(service: Service, client: socket.socket) -> None:
    """Kill the frontend; the client still gets the part of the answer that the kernel had."""
    pid = service.pid_of("frontend")
    os.kill(pid, signal.SIGKILL)
    got = 0
    try:
        while data := client.recv(1 << 20):
            got += len(data)
    except ConnectionResetError:
        pass
    assert got < LONG_PAGE * RECORD_BYTES
    client.close()
    service.wait_healed(pid)


def close(service: Service, client: socket.socket) -> None:
    assert client.recv(4096)
    client.close()


def reset(service: Service, client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("end", [kill, close, reset])
def test_at_least_once_what_the_frontend_still_had_comes_again(
    full: Service, end: Callable[[Service, socket.socket], None]
) -> None:
    make(full.client, "long", from_seq=0)
    end(full, ask(full))
    poll("it to be given back", lambda: look(full.client, "long")["cursor_seq"] == 0)
    assert len(read(full.client, "long", max_bytes=8 << 20)) == LONG_PAGE
    poll("it to be passed on", lambda: look(full.client, "long")["persisted_seq"] == LONG_PAGE)
    assert len(read(full.client, "long")) == 1


def test_strictly_at_once_nothing_of_it_comes_again(full: Service) -> None:
    make(full.client, "long", from_seq=0, consistency="strictly_at_once")
    close(full, ask(full))
    assert len(read(full.client, "long")) == 1
    make(full.client, "long", from_seq=0, consistency="at_least_once")


class Stalled:
    """A reader over HTTP/2 that gives its stream no window: its answer stays under way."""

    def __init__(self, service: Service, topic: str, limit: int) -> None:
        self._socket = connected(service)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        head = {
            ":method": "POST",
            ":scheme": "http",
            ":authority": "localhost",
            ":path": f"/v0/topics/{topic}/cursors/c/read",
            "content-type": "application/json",
        }
        self._h2.send_headers(1, list(head.items()))
        self._h2.send_data(1, b'{"limit":%d,"max_bytes":8388608}' % limit, end_stream=True)
        began = look(service.client, topic)["cursor_seq"]
        self._flush()
        poll("the cursor to move", lambda: look(service.client, topic)["cursor_seq"] == began + limit)

    def reset(self) -> None:
        self._h2.reset_stream(1)
        self._flush()

    def close(self) -> None:
        self._socket.close()

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize("end", [Stalled.reset, Stalled.close])
def test_at_least_once_what_waited_for_a_window_comes_again(full: Service, end: Callable[[Stalled], None]) -> None:
    make(full.client, "short", from_seq=0)
    with Stalled(full, "short", 500) as reader:
        end(reader)
        poll("it to be given back", lambda: look(full.client, "short")["cursor_seq"] == 0)
    assert seqs(full.client, limit=1) == [1]


def test_at_least_once_who_takes_long_takes_back_nobody_else(full: Service) -> None:
    make(full.client, "short", from_seq=0)
    with Stalled(full, "short", 500) as reader:
        assert seqs(full.client, limit=300) == list(range(501, 801))
        assert look(full.client, "short")["cursor_seq"] == 800
        reader.reset()
        poll("its records to be given back", lambda: look(full.client, "short")["cursor_seq"] == 0)
    assert seqs(full.client, limit=300) == list(range(1, 301))
    assert seqs(full.client, limit=300) == list(range(301, 501))
    assert seqs(full.client, limit=300) == list(range(801, 1001))
    poll("all to be persisted", lambda: look(full.client, "short")["persisted_seq"] == 1000)


def test_at_least_once_a_crash_brings_again_what_was_under_way_and_at_most_n_reads() -> None:
    """The bound holds however much others read while one reader takes long."""
    every, taken_long = 3, 500
    with Service(shards=1, frontends=1) as service:
        write(service.client, "short", *["x" * 2000] * 1000)
        make(service.client, "short", persist_every=every)
        with Stalled(service, "short", taken_long):
            before = frames(service)
            reads = [seqs(service.client, limit=10) for _ in range(31)]
            logged = taken_long + 10 * (len(reads) // every * every)
            poll("30 of them to be logged", lambda: frames(service) == before + len(reads) // every)
            service.wait_healed(service.kill("walshard"))
            again = seqs(service.client, limit=1000)
            assert again == list(range(1, taken_long + 1))
            again = seqs(service.client, limit=1000)
            assert again == list(range(logged + 1, 1001))
            assert len({*again} & {seq for read in reads for seq in read}) <= 10 * every


def test_at_least_once_a_stop_brings_again_what_was_under_way_alone() -> None:
    # Half of it is what the answer is waited for, a quarter is what a frontend has until it is killed for that.
    with Service(shards=1, frontends=1, env={"TOPICS_SHUTDOWN_GRACE_MS": "16000"}) as service:
        write(service.client, "short", *["x" * 2000] * 1000)
        make(service.client, "short", persist_every=100)
        with Stalled(service, "short", 500):
            assert seqs(service.client, limit=300) == list(range(501, 801))
            service.restart()
        assert seqs(service.client, limit=1000) == list(range(1, 501))
        assert seqs(service.client, limit=1000) == list(range(801, 1001))


@pytest.mark.parametrize("body", [{}, {"persist_every": 2}, {"consistency": "strictly_at_once"}])
def test_put_without_a_position_leaves_it_and_what_is_under_way(full: Service, body: dict[str, Any]) -> None:
    make(full.client, "short", from_seq=0, persist_every=1, consistency="at_least_once")
    with Stalled(full, "short", 500) as reader:
        assert len(seqs(full.client, limit=300)) == 300
        assert make(full.client, "short", **body)["cursor_seq"] == 800
        shown = look(full.client, "short")
        assert shown["cursor_seq"] == 800
        assert {name: shown[name] for name in body} == body
        assert seqs(full.client, limit=100) == list(range(801, 901))
        reader.reset()
        poll("its records to be given back", lambda: look(full.client, "short")["cursor_seq"] == 0)
    assert seqs(full.client, limit=1000) == list(range(1, 501))
    assert seqs(full.client, limit=1000) == list(range(901, 1001))


def test_put_with_a_position_ends_what_is_under_way(full: Service) -> None:
    make(full.client, "short", from_seq=0, consistency="at_least_once")
    with Stalled(full, "short", 500) as reader:
        assert make(full.client, "short", from_seq=700)["cursor_seq"] == 700
        reader.reset()
        assert seqs(full.client, limit=100) == list(range(701, 801))
    assert seqs(full.client, limit=1000) == list(range(801, 1001))


def test_what_is_gone_of_a_lost_answer_is_passed_over(full: Service) -> None:
    """An empty page would say that there is nothing to read."""
    write(full.client, "gone", *range(20))
    make(full.client, "gone")
    with Stalled(full, "gone", 10) as reader:
        assert len(read(full.client, "gone", limit=5)) == 5
        deletion = full.client.post("/v0/topics/gone/delete", json={"before_seq": 11})
        assert deletion.status_code == 200
        reader.reset()
        poll("its records to be given back", lambda: look(full.client, "gone")["cursor_seq"] == 0)
    assert read(full.client, "gone") == [15, 16, 17, 18, 19]
    poll("all to be persisted", lambda: look(full.client, "gone")["persisted_seq"] == 20)


def test_what_floors_took_of_a_lost_answer_is_its_tombstone_alone(full: Service) -> None:
    assert full.client.put("/v0/topics/capped", json={"cap_records": 12}).status_code == 201
    write(full.client, "capped", *range(10))
    make(full.client, "capped")
    with Stalled(full, "capped", 4) as reader:
        assert read(full.client, "capped") == [4, 5, 6, 7, 8, 9]
        write(full.client, "capped", *range(10, 20))
        reader.reset()
        poll("its records to be given back", lambda: look(full.client, "capped")["cursor_seq"] == 0)
    answer = full.client.post("/v0/topics/capped/cursors/c/read", json={}).json()
    assert (answer["records"], answer["next_from_seq"], answer["cursor_seq"]) == ([], 4, 4)
    gap = answer["tombstone"]
    assert (gap["gap_from"], gap["gap_to"], gap["missed_estimate"]) == (1, 4, 4)
    assert read(full.client, "capped") == list(range(10, 20))


def seqs(client: httpx.Client, **body: Any) -> list[int]:
    """Return the seqs of one page of `short`."""
    answer = client.post("/v0/topics/short/cursors/c/read", json={"max_bytes": 8 << 20, **body})
    return [record["$seq"] for record in json.loads(answer.content)["records"]]
