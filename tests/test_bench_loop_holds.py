"""The probe in an event loop notes what holds it, and what the table says of that."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import uvloop

from bench.loop_holds import Held, Hold, Row, table
from bench.loop_probe import Probe, watch_shards

BURNT_MS = 30


def burn() -> None:
    """Take so much CPU time, however long that lasts."""
    until_ns = time.thread_time_ns() + BURNT_MS * 1_000_000
    while time.thread_time_ns() < until_ns:
        pass


def test_a_probe_notes_a_hold_and_where_the_loop_was(tmp_path: Path) -> None:
    async def work() -> int:
        await asyncio.sleep(0.05)  # the probe does not count what sets the loop up
        began_ns = time.monotonic_ns()
        burn()
        await asyncio.sleep(0.05)
        return began_ns

    def make() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        Probe(loop, str(tmp_path))
        return loop

    with asyncio.Runner(loop_factory=make) as runner:
        began_ns = runner.run(work())
    (path,) = tmp_path.iterdir()
    held = [hold for hold in map(Hold.read, path.read_text().splitlines()) if hold.at_ns > began_ns]
    longest = max(held, key=lambda hold: hold.cpu_us)
    assert longest.cpu_us >= BURNT_MS * 1000
    assert longest.clock_us >= BURNT_MS * 1000
    assert "test_bench_loop_holds.burn:" in longest.where


def test_a_step_of_a_shard_is_noted_too(tmp_path: Path) -> None:
    class Shard:
        def serve(self) -> bool:
            burn()
            return True

        def copy(self) -> bool:
            return True

    watch_shards(str(tmp_path), ((Shard, Shard.serve), (Shard, Shard.copy)))
    shard = Shard()
    assert shard.serve()
    assert shard.copy()
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("shard-")
    longest = max(map(Hold.read, path.read_text().splitlines()), key=lambda hold: hold.cpu_us)
    assert longest.cpu_us >= BURNT_MS * 1000
    assert "test_bench_loop_holds.burn:" in longest.where


def test_the_table_says_where_a_loop_was_held_for_too_long() -> None:
    longest = Hold(1, 23_500, 40_000, "c.d:2 > e.f:3")
    rows = [
        Row("a list", Held.of([Hold(1, 4_000, 9_000, "a.b:1")]), Held.of([])),
        Row("a large body", Held.of([longest, Hold(2, 10_001, 11_000, "")]), Held.of([Hold(3, 12_000, 12_100, "s:4")])),
    ]
    assert table(rows).splitlines()[2:] == [
        "| a list | 4.0 | 9.0 | 0 | < 3 | < 6 | 0 |  |",
        "| a large body | 23.5 | 40.0 | 2 | 12.0 | 12.1 | 1 | `c.d:2 > e.f:3` `s:4` |",
    ]
