"""`python -m bench.churn`: what a frontend keeps of connections that have come and gone.

A service of one frontend runs with `bench.churn_probe` in it. Each kind of client comes and goes in three steps, a few
at a time. What the frontend has behind each step is compared with what it had before: what is kept for ever grows with
each step, a table that is full or a kept page of memory does not. `--kinds` shows of which kind there is more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import h2.events

from bench import wire
from bench.churn_probe import Count
from bench.cycles import Http2, cut
from bench.mass_close import CLOSE_FRAME, TOPIC, Kind, ask, connect, opened, resets
from tests.harness import Service, poll

ROOT: Final = Path(__file__).parents[1]
AT_ONCE: Final = 4
SETTLE_S: Final = 3.0
"""Longer than a frontend gives an app whose client is gone."""
FULL: Final = 64
"""TOPICS_MAX_CONNECTIONS, for clients that are turned away."""
COMMAND: Final = """#!{python}
import sys
sys.path.insert(0, {root!r})
from bench.churn_probe import install
install({directory!r})
from topicsd import topics_supervisor
sys.exit(topics_supervisor())
"""
GET: Final = b"GET /v0/topics/%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % TOPIC.encode()
Visit = Callable[[int, socket.socket], None]
"""One client comes and goes: the service's port, and a connection that stays."""


class Probed:
    """A service with a probe in its frontend."""

    def __init__(self, service: Service, directory: Path) -> None:
        self.port = service.port
        self._path = directory / str(service.pid_of("frontend"))

    def count(self) -> Count:
        """Return what the frontend has now."""
        os.kill(int(self._path.name), signal.SIGUSR1)
        poll("what it has", self._path.exists)
        found = Count(*json.loads(self._path.read_text()))
        self._path.unlink()
        return found

    def visit(self, visit: Visit, times: int) -> None:
        """Have so many clients come and go."""

        def some(share: int) -> None:
            with connect(self.port) as staying:
                for _ in range(share):
                    visit(self.port, staying)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(some, [times // AT_ONCE] * AT_ONCE))


def get(port: int, _staying: socket.socket) -> None:
    with connect(port) as client:
        ask(client, GET)


def get_and_reset(port: int, _staying: socket.socket) -> None:
    with connect(port) as client:
        resets(client)
        client.sendall(GET)


def half_a_head(port: int, _staying: socket.socket) -> None:
    with connect(port) as client:
        client.sendall(GET[:30])


def nonsense(port: int, _staying: socket.socket) -> None:
    with connect(port) as client:
        assert ask(client, b"what is this?\r\n\r\n").startswith(b'{"error"')


def turned_away(port: int, _staying: socket.socket) -> None:
    with connect(port) as client:
        assert b"max_connections" in ask(client, b"")


def stream(kind: Kind, *, cuts: bool = False, last: bytes = b"") -> Visit:
    def visit(port: int, staying: socket.socket) -> None:
        with opened(port, kind, staying) as client:
            if cuts:
                resets(client)
            if last:
                client.sendall(last)
                while client.recv(65536):
                    pass

    return visit


def http2_get(port: int, _staying: socket.socket) -> None:
    one = Http2(port)
    one.wait(one.ask("GET", f"/v0/topics/{TOPIC}"), h2.events.StreamEnded)
    one.go_away()


def http2_stream(port: int, staying: socket.socket) -> None:
    body = json.dumps({"topics": {TOPIC: {"from_seq": 0}}}).encode()
    path: str = json.loads(ask(staying, wire.post("/v0/watch", body)))["stream_url"]
    one = Http2(port)
    one.wait(one.ask("GET", path, accept="text/event-stream"), h2.events.DataReceived)
    cut(one.socket)


VISITS: Final[dict[str, tuple[Visit, float]]] = {
    "a GET each": (get, 10),
    "a GET each, reset": (get_and_reset, 5),
    "half a head, closed": (half_a_head, 5),
    "no HTTP": (nonsense, 5),
    "turned away": (turned_away, 5),
    "an event stream, closed": (stream(Kind.STREAMS), 1),
    "an event stream, reset": (stream(Kind.STREAMS, cuts=True), 1),
    "a WebSocket, closed in order": (stream(Kind.WEBSOCKETS, last=CLOSE_FRAME), 1),
    "a WebSocket, reset": (stream(Kind.WEBSOCKETS, cuts=True), 1),
    "HTTP/2, a GET each": (http2_get, 0.4),
    "HTTP/2, an event stream, reset": (http2_stream, 0.2),
}
"""Each kind of client, and how many thousands of it come in the first step."""
TURNED_AWAY: Final = "turned away"


@contextmanager
def running(env: dict[str, str] | None = None) -> Iterator[Probed]:
    """Run a service with a probe in its frontend, and TOPIC."""
    with tempfile.TemporaryDirectory(prefix="topics-churn-") as kept:
        directory, command = Path(kept) / "counts", Path(kept) / "topics-supervisor"
        directory.mkdir()
        command.write_text(COMMAND.format(python=sys.executable, root=str(ROOT), directory=str(directory)))
        command.chmod(0o755)
        with Service(shards=1, frontends=1, env=env, command=command) as service:
            service.client.post(f"/v0/topics/{TOPIC}", json={"records": [{"data": 1}]}).raise_for_status()
            yield Probed(service, directory)


def measure(probed: Probed, visit: Visit, steps: list[int], settle_s: float = SETTLE_S) -> Iterator[Count]:
    """Return what the frontend has before and behind each step."""
    yield probed.count()
    for times in steps:
        probed.visit(visit, times)
        time.sleep(settle_s)
        yield probed.count()


def run(what: str, steps: list[int], shows_kinds: bool) -> None:
    full: list[socket.socket] = []
    with running({"TOPICS_MAX_CONNECTIONS": str(FULL)} if what == TURNED_AWAY else None) as probed:
        if what == TURNED_AWAY:
            while not full or b"max_connections" not in ask(full[-1], GET):
                full.append(connect(probed.port))
        before: Count | None = None
        for times, count in zip([0, *steps], measure(probed, VISITS[what][0], steps), strict=True):
            each = "" if before is None else f"{(count.own_bytes - before.own_bytes) / times:.0f}"
            objects = sum(count.kinds.values())
            print(
                f"| {what} | {times:,} | {count.own_bytes / 1e6:.2f} | {count.blocks:,} | {objects:,} | {each} |",
                flush=True,
            )
            if shows_kinds and before is not None:
                print(f"    {count.since(before)}", flush=True)
            before = count
        for client in full:
            client.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.churn", description="Measure what is kept of closed connections.")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="kinds whose name contains this")
    parser.add_argument("--times", type=int, default=1000, help="clients in the first step, times 0.2 to 10")
    parser.add_argument("--kinds", action="store_true", help="show of which kinds of objects there are more")
    arguments = parser.parse_args()
    print("| client | came and went | own MB | blocks | objects | own bytes each |\n|---|---|---|---|---|---|")
    for what, (_, weight) in VISITS.items():
        if not arguments.only or any(part in what for part in arguments.only):
            first = int(arguments.times * weight)
            run(what, [first, 4 * first, 15 * first], arguments.kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
