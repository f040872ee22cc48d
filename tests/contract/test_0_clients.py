"""Clients that behave badly: gone in the middle of a request, slow to read, slow to write."""

from __future__ import annotations

import json
import socket
import struct

import psutil
import pytest

from tests.contract.asking import diff, head_seq, long_polls, put, state, write
from tests.harness import Service, poll

RECORDS = b'{"records":[{"data":"' + b"x" * 50_000 + b'"}]}'


def connect(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=20)


def head(topic: str, length: int, route: str = "") -> bytes:
    return (
        f"POST /v0/topics/{topic}{route} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def own_connections(service: Service) -> int:
    """Return the number of connections that this process has to the service."""
    return sum(
        one.status == psutil.CONN_ESTABLISHED and bool(one.raddr) and one.raddr.port == service.port
        for one in psutil.Process().net_connections("tcp")
    )


def reset(connection: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("sent", [0, 1, 1000, len(RECORDS) - 1])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_gone_inside_its_body_appends_nothing(service: Service, topic: str, sent: int, how: str) -> None:
    put(service.client, topic)
    connection = connect(service)
    connection.sendall(head(topic, len(RECORDS)) + RECORDS[:sent])
    reset(connection) if how == "reset" else connection.close()
    # A later write on the same topic is ordered behind whatever the cut one might have done.
    assert write(service.client, topic, 1)["first_seq"] == 1
    assert head_seq(service.client, topic) == 1


def test_a_client_gone_before_its_answer_has_written_once_or_not_at_all(service: Service, topic: str) -> None:
    put(service.client, topic)
    for _ in range(30):
        connection = connect(service)
        connection.sendall(head(topic, len(RECORDS)) + RECORDS)
        reset(connection)
    last = write(service.client, topic, "last")["first_seq"]
    assert 1 <= last <= 31
    records = diff(service.client, topic, limit=1000, max_batch_bytes=8 << 20)["records"]
    assert [record["$seq"] for record in records] == list(range(1, len(records) + 1))


def test_clients_gone_while_they_poll_leave_no_connection_behind(service: Service, topic: str) -> None:
    put(service.client, topic)

    def are_counted() -> bool:
        """Return whether the service counts the connections of this process. It may notice broken ones of earlier tests
        late.
        """
        counted = sum(frontend["connections"] for frontend in service.status()["frontends"])
        return counted == own_connections(service)

    poll("the polls of others to be over", lambda: long_polls(service) == 0)
    body = b'{"wait_ms":30000}'
    waiting = [connect(service) for _ in range(20)]
    for connection in waiting:
        connection.sendall(head(topic, len(body), "/diff") + body)
    poll("the polls to wait", lambda: long_polls(service) == 20)
    poll("their connections to be counted", are_counted)
    for connection in waiting:
        connection.close()
    poll("the polls to be gone", lambda: long_polls(service) == 0)
    poll("their connections to be gone", are_counted)
    assert write(service.client, topic, 1)["first_seq"] == 1


def test_a_body_in_tiny_pieces_is_taken(service: Service, topic: str) -> None:
    body = b'{"records":[{"data":{ "slow" : true }}]}'
    with connect(service) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head(topic, len(body)) + body:
            connection.send(bytes([byte]))
        assert connection.recv(65536).startswith(b"HTTP/1.1 201")
    assert diff(service.client, topic)["records"][0]["data"] == {"slow": True}


def test_a_slow_reader_gets_its_page_and_holds_nobody_up(service: Service, topic: str) -> None:
    for _ in range(8):
        write(service.client, topic, "x" * 1_000_000)
    body = b'{"max_batch_bytes":8388608}'
    with connect(service) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(head(topic, len(body), "/diff") + body)
        # The page waits in the frontend's hands; everyone else is served meanwhile.
        for n in range(50):
            assert write(service.client, f"{topic}.other", n)["first_seq"] == n + 1
            assert state(service.client, topic)["head_seq"] == 8
        answer = b""
        while b"\r\n\r\n" not in answer:
            piece = slow.recv(4096)
            assert piece, "cut short"
            answer += piece
        header, _, content = answer.partition(b"\r\n\r\n")
        length = int(header.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        parts = [content]
        missing = length - len(content)
        while missing:
            parts.append(slow.recv(min(missing, 1 << 16)))
            assert parts[-1], "cut short"
            missing -= len(parts[-1])
    page = json.loads(b"".join(parts))
    assert [len(record["data"]) for record in page["records"]] == [1_000_000] * len(page["records"])
    assert len(page["records"]) >= 7
