"""A write until its copy is read: one client, one connection, no other load.

The client writes to the source of a router, and reads the dest once its write is acknowledged: a read of a dest sees
every record that its source acknowledged before.
"""

from __future__ import annotations

import re
import time
from array import array
from typing import Final, NamedTuple

from bench import wire
from bench.load import LoadError, percentiles, read_cpu
from bench.queue_depth import Connection

SETTLE_COPIES: Final = 50
_COUNT: Final = re.compile(rb'"next_from_seq":(\d+)')


class CopyPlan(NamedTuple):
    """The load: so many writes to `source`, each followed by a read of `dest`. The CPU time of `pids` is taken."""

    port: int
    source: str
    dest: str
    duration_s: float
    pids: tuple[int, ...] = ()


class CopyOutcome(NamedTuple):
    """The result: µs from just before a write was sent until its ack, and until its copy was read; the CPU time of each
    process, and of the load, for one of these.
    """

    copies: int
    ack_p50_us: float
    p50_us: float
    p99_us: float
    cpu_us: tuple[float, ...]


def read_copies(plan: CopyPlan) -> CopyOutcome:
    """Run the plan in this process; LoadError when a read lacks the copy."""
    with Connection(plan.port) as connection:
        write = wire.write(plan.source, 1)
        seq = 0
        for _ in range(SETTLE_COPIES):
            _write_and_read(connection, write, plan.dest, seq)
            seq += 1
        acks_us: array[int] = array("Q")
        copies_us: array[int] = array("Q")
        before = read_cpu(plan.pids)
        stop_ns = time.perf_counter_ns() + int(plan.duration_s * 1e9)
        while time.perf_counter_ns() < stop_ns:
            ack_us, copy_us = _write_and_read(connection, write, plan.dest, seq)
            seq += 1
            acks_us.append(ack_us)
            copies_us.append(copy_us)
        used = [(now - then) / 1000 / len(copies_us) for now, then in zip(read_cpu(plan.pids), before, strict=True)]
    acks, copies = percentiles(acks_us), percentiles(copies_us)
    p50_us, p99_us = (copies.get_value_at_percentile(percent) for percent in (50, 99))
    return CopyOutcome(len(copies_us), acks.get_value_at_percentile(50), p50_us, p99_us, tuple(used))


def _write_and_read(connection: Connection, write: bytes, dest: str, seq: int) -> tuple[int, int]:
    read = wire.diff(dest, seq, 10)
    _, ack_us = connection.ask(write)
    page, read_us = connection.ask(read)
    found = _COUNT.search(page)
    if found is None or int(found[1]) != seq + 1:
        raise LoadError(f"the copy of record {seq + 1} is not in {page[:500].decode(errors='replace')}")
    return int(ack_us), int(ack_us + read_us)
