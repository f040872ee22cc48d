"""Streams that catch up through the cold tier, over a real shard: nobody waits for them, whatever that tier does."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.frontend.live import COLD_TIMEOUT_MS, DEADLINE_S, OPTIONS, Live, Wire, delivered, on_loop, until
from topics.core.errors import TopicsError
from topics.frontend.reads.cold import RUN_BYTES, ColdTier

RECORDS = 90
SHORT_MS = 200
"""Time-out of a tier that does not answer: it is to pass."""


async def old_topic(live: Live) -> None:
    """A topic whose records are all in the cold tier."""
    await live.write("old", RECORDS)
    await live.checkpoint("old", records_max=40)
    await live.relocate("old")


def numbers(last: int, first: int = 1) -> list[int]:
    return list(range(first, last + 1))


def test_a_backlog_from_the_cold_tier_then_live(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await old_topic(live)
        wires = [live.follow({"old": 0})[0] for _ in range(20)]
        for wire in wires:
            await delivered(wire, numbers(RECORDS), "old")
            assert wire.kinds()[-1] == "caught-up"
        assert live.store.reads == 3, "one for each segment, however many ask"
        await live.write("old", 2)
        for wire in wires:
            await delivered(wire, numbers(RECORDS + 2), "old")
            assert wire.kinds().count("caught-up") == 1

    on_loop(tmp_path, test)


async def goes_on(live: Live, wire: Wire, from_seq: int) -> int:
    """Writes and their delivery, elsewhere, now."""
    for seq in numbers(from_seq + 20, from_seq + 1):
        assert await live.write("t") == seq
        await delivered(wire, numbers(seq))
    return from_seq + 20


def hang_until(gate: threading.Event) -> Callable[[], None]:
    def hang() -> None:
        assert gate.wait(DEADLINE_S)

    return hang


def test_writes_and_live_delivery_do_not_notice_a_tier_that_hangs(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await old_topic(live)
        gate = threading.Event()
        live.store.before_read = hang_until(gate)
        await live.put("t")
        current, _ = live.follow({"t": 0, "old": RECORDS})
        late = [live.follow({"old": n, "t": 0})[0] for n in range(60)]
        await until(lambda: live.store.reads)
        # Those that wait for old records have the new ones of their other topics, too.
        last = await goes_on(live, current, 0)
        for wire in late:
            await delivered(wire, numbers(last))
            assert wire.seqs("old") == []
        gate.set()
        for n, wire in enumerate(late):
            await delivered(wire, numbers(RECORDS, n + 1), "old")
            assert "tombstone" not in wire.kinds()
        await goes_on(live, current, last)

    on_loop(tmp_path, test)


def test_a_tier_that_does_not_answer_is_said_once_and_tried_again(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await old_topic(live)
        gate = threading.Event()
        live.store.before_read = hang_until(gate)
        wire, _ = live.follow({"old": 0})
        await until(lambda: wire.of("error"))
        (error,) = wire.of("error")
        assert (error["code"], error["topics"]) == (429, ["old"])
        assert f"{SHORT_MS} ms" in error["error"]
        reads = live.store.reads
        live.tier.timeout_ms = COLD_TIMEOUT_MS
        gate.set()
        await delivered(wire, numbers(RECORDS), "old")
        assert len(wire.of("error")) == 1
        assert live.store.reads - reads <= 3

    on_loop(tmp_path, test, cold_timeout_ms=SHORT_MS)


def test_a_tier_that_fails_and_recovers(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await old_topic(live)

        def fail() -> None:
            raise OSError(5, "Input/output error")

        live.store.before_read = fail
        await live.put("t")
        wire, _ = live.follow({"t": 0, "old": 0})
        await until(lambda: wire.of("error"))
        assert "Input/output error" in wire.of("error")[0]["error"]
        await goes_on(live, wire, 0)
        live.store.before_read = lambda: None
        await delivered(wire, numbers(RECORDS), "old")

    on_loop(tmp_path, test)


def test_a_stream_that_ends_while_it_waits(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await old_topic(live)
        gate = threading.Event()
        live.store.before_read = hang_until(gate)
        wire, connection = live.follow({"old": 0})
        await until(lambda: live.store.reads)
        wire.vanish()
        assert connection.closed
        other, _ = live.follow({"old": 85})
        gate.set()
        await delivered(other, numbers(RECORDS, 86), "old")
        assert wire.seqs("old") == []

    on_loop(tmp_path, test)


def test_a_topic_deleted_while_its_stream_waits(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await old_topic(live)
        gate = threading.Event()
        live.store.before_read = hang_until(gate)
        wire, _ = live.follow({"old": 0})
        await until(lambda: live.store.reads)
        await live.delete("old")
        gate.set()
        await until(lambda: "topic-deleted" in wire.kinds())

    on_loop(tmp_path, test)


def asked(fault: Callable[[], None]) -> Callable[[Live], Awaitable[None]]:
    """A page asked for while the tier does that."""

    async def test(live: Live) -> None:
        await old_topic(live)
        live.store.before_read = fault
        with pytest.raises(TopicsError) as refused:
            await live.reader.fetch_page(live.reader.get("old"), 0, OPTIONS)
        assert (refused.value.code, refused.value.status) == ("storage_unavailable", 503)
        live.store.before_read = lambda: None
        live.tier.timeout_ms = COLD_TIMEOUT_MS
        page = await live.reader.fetch_page(live.reader.get("old"), 85, OPTIONS)
        assert (page.count, page.cold_segments) == (5, 1)

    return test


def test_a_page_is_refused_when_the_tier_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    on_loop(tmp_path, asked(fail))


def test_a_page_is_refused_when_the_tier_hangs(tmp_path: Path) -> None:
    gate = threading.Event()
    try:
        on_loop(tmp_path, asked(hang_until(gate)), cold_timeout_ms=SHORT_MS)
    finally:
        gate.set()


def test_a_stream_gets_past_own_records_that_are_more_than_what_is_kept_of_the_tier(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        live.reader.stores.cold = ColdTier(live.store, live.clock, COLD_TIMEOUT_MS, 3 * RUN_BYTES)
        await live.put("old", dedupe_node=True)
        await live.write("old", 48, node=b"me", data=b'"%b"' % (b"x" * (RUN_BYTES // 8)))
        await live.write("old")
        await live.checkpoint("old", records_max=64)
        await live.relocate("old")
        wire, _ = live.follow({"old": 0}, OPTIONS._replace(nodes=frozenset([b"me"])))
        await delivered(wire, [49], "old")
        assert wire.kinds() == ["record", "caught-up"]
        assert live.store.reads < 48

    on_loop(tmp_path, test)
