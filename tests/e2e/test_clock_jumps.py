"""A wall clock that somebody sets while the real service runs: what operations.md (When the clock jumps) promises, as
clients see it.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.contract.asking import diff, put, state, write
from tests.contract.stream import follow
from tests.contract.working import ask, claim, counts, queue, seqs
from tests.e2e.load import PATIENT
from tests.harness import Service, poll

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
JUMPS_MS = (DAY_MS, -HOUR_MS, 0, 61_000, -DAY_MS, 400 * DAY_MS, 0)
"""The wall clock is ahead of real time by each of these in turn."""
KEY_WINDOW_MS = 120_000
SHORT_MS = 1500
STEP_MS = 1000
"""A shard looks at the clock once for all requests that it takes together, and may stand still behind that."""
_SHIFTED: Final = """
import mmap, os, time
with open({path!r}, "r+b") as file:
    ahead_ms = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
real_ns, real_s = time.time_ns, time.time
time.time_ns = lambda: real_ns() + ahead_ms[0] * 1_000_000
time.time = lambda: real_s() + ahead_ms[0] / 1000
"""
"""Python runs it at the start of each process of the service."""


class Shifted:
    """A service whose processes have a wall clock that tests set."""

    def __init__(self, folder: Path) -> None:
        path = folder / "ahead"
        path.write_bytes(bytes(8))
        (folder / "sitecustomize.py").write_text(_SHIFTED.format(path=str(path)))
        with path.open("r+b") as file:
            self._ahead_ms = mmap.mmap(file.fileno(), 8)
        self.service = Service(env=PATIENT | {"PYTHONPATH": str(folder)})

    def put_ahead(self, ahead_ms: int) -> None:
        self._ahead_ms[:] = struct.pack("q", ahead_ms)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + int(struct.unpack("q", self._ahead_ms)[0])


@pytest.fixture
def shifted(tmp_path: Path) -> Iterator[Shifted]:
    made = Shifted(tmp_path)
    with made.service:
        yield made


def pids(service: Service) -> list[int]:
    return [process["pid"] for process in service.status()["processes"]]


def times(service: Service, topic: str) -> list[int]:
    return [record["$ts"] for record in diff(service.client, topic, limit=1000)["records"]]


def test_clients_of_a_service_whose_clock_jumps(shifted: Shifted) -> None:
    service, http = shifted.service, shifted.service.client
    put(http, "kept", ttl_ms=HOUR_MS // 2)
    for name in ("durable", "plain"):
        queue(http, name, leases_durable=name == "durable", lease_ms=HOUR_MS)
    before = pids(service)
    written = 0
    with follow(service, {"kept": {"from_seq": 0}}, heartbeat_ms=1000) as stream:
        for jump, ahead_ms in enumerate(JUMPS_MS):
            key = f"jump {jump}"
            first = write(http, "kept", key, idempotency_key=key)["seqs"]
            written += 1
            key_ms = state(http, "kept")["last_write_ts"]
            for name in ("durable", "plain"):
                write(http, name, "held", "short")
            held = {name: claim(http, name, lease_ms=HOUR_MS)[0] for name in ("durable", "plain")}
            asked_s = time.monotonic()
            for name in held:
                assert [job["data"] for job in claim(http, name, lease_ms=SHORT_MS)] == ["short"]
                body = {"records": [{"data": "delayed", "delay_ms": SHORT_MS}]}
                assert http.post(f"/v0/topics/{name}", json=body).status_code == 200
            polled: list[tuple[bool, float]] = []

            def poll_long(seq: int = first[0], polled: list[tuple[bool, float]] = polled) -> None:
                page = diff(http, "kept", from_seq=seq, wait_ms=SHORT_MS)
                polled.append((page["caught_up"], time.monotonic()))

            waiting = threading.Thread(target=poll_long)
            waiting.start()
            shifted.put_ahead(ahead_ms)

            # Leases, delays and long polls take their time, whatever the clock does.
            came: dict[tuple[str, str], float] = {}

            def all_came(came: dict[tuple[str, str], float] = came) -> bool:
                for name in ("durable", "plain"):
                    for job in claim(http, name, max=9):
                        came[name, job["data"]] = time.monotonic()
                        ask(http, name, "ack", job["$seq"])
                return len(came) == 4

            poll("the short leases and the delays to end", all_came)
            waiting.join(30)
            [(caught_up, polled_s)] = polled
            assert caught_up
            assert set(came) == {(name, data) for name in held for data in ("short", "delayed")}
            assert min(polled_s, *came.values()) >= asked_s + (SHORT_MS - STEP_MS) / 1000, "no sooner than it was told"
            for name, job in held.items():
                ended = ask(http, name, "ack", job["$seq"], lease_ids=[job["lease_id"]])
                assert ended["acked"] == 1, "the long lease holds"
                assert counts(http, name) == (0, 0, 0)

            # Keys go by the clock as it is; expiry waits; times never go back.
            again = write(http, "kept", key, idempotency_key=key)
            is_known = shifted.now_ms() - key_ms <= KEY_WINDOW_MS
            assert again["deduped"] == is_known, (jump, ahead_ms)
            written += not is_known
            kept = times(service, "kept")
            assert len(kept) == written, "nothing expires by a clock that was just put forward"
            assert kept == sorted(kept)
            stream.records_to(written)
            assert http.get("/v0/ready").status_code == 200
    assert pids(service) == before, "no process was taken for one that hangs"


@pytest.mark.parametrize(("ahead_ms", "is_over"), [(DAY_MS, True), (-HOUR_MS, False)])
def test_a_durable_lease_of_a_shard_that_is_killed_when_the_clock_has_jumped(
    shifted: Shifted, ahead_ms: int, is_over: bool
) -> None:
    """The rest of a lease is what the clock says, and never more than it was taken for."""
    service, http = shifted.service, shifted.service.client
    queue(http, "q", "short", "long", leases_durable=True)
    assert seqs(claim(http, "q", lease_ms=SHORT_MS)) == [1]
    assert seqs(claim(http, "q", lease_ms=HOUR_MS)) == [2]
    shifted.put_ahead(ahead_ms)
    for shard in range(2):
        service.wait_healed(service.kill("walshard", shard))
    came: set[int] = set()

    def short_came() -> bool:
        came.update(seqs(claim(http, "q", max=9)))
        return 1 in came

    poll("the short one to come back", short_came)
    assert (2 in came) == is_over
