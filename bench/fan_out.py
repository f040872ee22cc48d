"""The cost of routers: one source, and as many dests as copy it.

The case asks over HTTP alone. So this file, and `__main__.py` that names it, measure any version with the same API:
copy both into its checkout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import psutil

from bench import wire
from bench.cases import MILLION, Bench, make_topic, plural
from bench.figures import Figure
from bench.load import Plan, closed_loop
from tests.harness import Service, poll

SHARDS: Final = 2
SOURCE: Final = "source"
DESTS: Final = (0, 1, 10, 100)
"""Names decide the shard: SOURCE is on shard 1, the first dest on shard 0, and each shard has about half of 100."""
WRITERS: Final = 4
BATCH: Final = 100
WARM_UP_BATCHES: Final = 10
"""Batches that each writer sends before the clock starts."""
COPIES_MAX: Final = 8_000_000
"""The writers stop early when their records make so many copies: all of them stay in memory and in the log."""
ARRIVED_DEADLINE_S: Final = 120.0
LOOK_EVERY_S: Final = 0.02


class Meters(NamedTuple):
    """Values that only grow: the clock, the CPU time of all processes of the service, the bytes written to its logs."""

    at_s: float
    cpu_s: float
    log_bytes: float


def fan_out(bench: Bench) -> list[Figure]:
    """Measure writers in a closed loop, then the wait for the last copy; a fresh service for each number of dests."""
    figures: list[Figure] = []
    source_bytes = 0.0
    for dests in DESTS:
        with bench.service(shards=SHARDS) as service:
            records, values, used = _measure(bench, service, dests)
            service.kill_group()  # a stop would make a last cut of all that
        if dests:
            copies = records * dests
            values["copies_per_s"] = copies / used.at_s
            values["cpu_of_million_s"] = used.cpu_s * MILLION / copies
            values["log bytes a copy"] = round((used.log_bytes - records * source_bytes) / copies, 2)
        else:
            source_bytes = used.log_bytes / records
            values["cpu_of_million_s"] = used.cpu_s * MILLION / records
            values["log bytes a record"] = round(source_bytes, 2)
        figures.append(Figure("fan_out", plural(dests, "dest") if dests else "alone", values))
    return figures


def _measure(bench: Bench, service: Service, dests: int) -> tuple[int, dict[str, float], Meters]:
    """Return (records written, what their writers saw, what the service used until the last copy was there)."""
    make_topic(service, SOURCE, "disk")
    names = [f"dest-{number:03}" for number in range(dests)]
    for name in names:
        service.client.put(f"/v0/routers/{name}", json={"source": SOURCE, "dest": name}).raise_for_status()
    requests = [[wire.write(SOURCE, BATCH)] for _ in range(WRITERS)]
    bench.run(service, requests, WARM_UP_BATCHES)
    warmed_up = WARM_UP_BATCHES * BATCH * WRITERS
    wait_copied(service, warmed_up * dests)

    copies_max = COPIES_MAX // 10 if bench.quick else COPIES_MAX
    rounds = max(1, copies_max // (dests * BATCH * WRITERS)) if dests else 0
    plan = Plan(service.port, requests, duration_s=bench.seconds, rounds=rounds)
    before = _read_meters(service)
    outcome = bench.pool.submit(closed_loop, plan).result()
    records = outcome.answers * BATCH
    wait_copied(service, (warmed_up + records) * dests)
    used = Meters(*(now - then for now, then in zip(_read_meters(service), before, strict=True)))
    _verify(service, names, warmed_up + records)
    values = {"records_per_s": outcome.per_s * BATCH, "ack_p50_us": outcome.p50_us, "ack_p99_us": outcome.p99_us}
    return records, values, used


def _read_meters(service: Service) -> Meters:
    log_bytes = _read_metric(service, "topics_wal_bytes_written_total")
    times = [psutil.Process(pid).cpu_times() for pid in service.family()]
    return Meters(time.perf_counter(), sum(one.user + one.system for one in times), log_bytes)


def _read_metric(service: Service, name: str) -> float:
    answer = service.client.get("/v0/metrics", headers={"Accept": "application/json"}).raise_for_status()
    return float(answer.json()[name])


def wait_copied(service: Service, copies: int) -> float:
    """Wait for the copies and return for how many seconds. No topic is asked: a read of a dest has it copied at once,
    which is not measured here.
    """
    began_s = time.perf_counter()

    def arrived() -> bool:
        return _read_metric(service, "topics_router_copies_total") >= copies

    poll(f"{copies} copies", arrived, ARRIVED_DEADLINE_S, every_s=LOOK_EVERY_S)
    return time.perf_counter() - began_s


def _verify(service: Service, dests: list[str], records: int) -> None:
    """Check that each of these topics, and the source, has so many records."""
    answer = service.client.get("/v0/topics", params={"page_size": 1000}).raise_for_status()
    found = {topic["topic"]: (topic["head_seq"], topic["count"]) for topic in answer.json()["topics"]}
    wanted = dict.fromkeys([SOURCE, *dests], (records, records))
    assert found == wanted, f"not all copies: {[item for item in found.items() if item[1] != (records, records)][:5]}"


CASES: Final[dict[str, Callable[[Bench], list[Figure]]]] = {"fan_out": fan_out}
