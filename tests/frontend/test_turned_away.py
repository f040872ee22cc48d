"""One connection too many: it is told why, and has the time to read that, however much it has sent."""

from __future__ import annotations

from array import array

import pytest

from tests.frontend.http1_server import Server, until
from topics.frontend.http import http1
from topics.frontend.http.deadlines import HttpLimits
from topics.shm.control import Cell
from topics.shm.quotas import Quota


def one_place() -> Quota:
    cell = Cell(memoryview(array("Q", [0])), ("held",))
    return Quota("connections", 1, "held", cell, [cell])


def test_it_stays_until_its_client_has_closed() -> None:
    limits = HttpLimits(linger_ms=60_000)
    with Server(places=one_place(), limits=limits) as server, server.client() as first:
        assert first.get("/echo").answer().status == 200
        with server.client() as second:
            # More than the socket holds: it gets through only if somebody takes it.
            second.post("/echo", b"x" * 20_000_000)
            answer = second.answer()
            assert (answer.status, answer.code) == (429, "throttled")
            assert second.is_closed()
            assert server.connections.turned_away == 1
        until(lambda: server.connections.turned_away == 0, "it is forgotten")
        assert first.get("/echo").answer().status == 200
        first.close()

        def room() -> bool:
            with server.client() as third:
                return third.get("/echo").answer().status == 200

        until(room, "its place is free")


def test_it_does_not_stay_for_ever() -> None:
    limits = HttpLimits(linger_ms=50)
    with Server(places=one_place(), limits=limits) as server, server.client() as first:
        assert first.get("/echo").answer().status == 200
        with server.client() as second:
            assert second.answer().status == 429
            until(lambda: server.connections.turned_away == 0, "it is let go although its client is there")


def test_of_too_many_at_once_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "TURNED_AWAY_MAX", 0)
    limits = HttpLimits(linger_ms=60_000)
    with Server(places=one_place(), limits=limits) as server, server.client() as first:
        assert first.get("/echo").answer().status == 200
        with server.client() as second:
            assert second.answer().status == 429
            assert second.is_closed()
            assert server.connections.turned_away == 0
