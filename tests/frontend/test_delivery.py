"""Delivery to many streams, over a real shard (api §7): once each, in order, and nobody waits for anybody."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.live import OPTIONS, Live, Wire, delivered, on_loop, turns, until
from topics.core.scheduler import AGE_FULL_MS
from topics.frontend.entry import limits
from topics.frontend.entry.stalled_clients import STALL_CUT_MS, STALL_MAX_MS
from topics.frontend.live import delivery, step_cache
from topics.frontend.live.channels import PER_TURN_MAX, Channel
from topics.frontend.live.delivery import FAN_OUT_STEP, JOIN_STEP
from topics.frontend.live.step_cache import KnownTopics
from topics.frontend.reads.reading import RecordPage


def numbers(last: int, first: int = 1) -> list[int]:
    return list(range(first, last + 1))


# --- one stream


def test_backlog_then_live(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 3)
        wire, connection = live.follow({"t": 1})
        await until(lambda: wire.kinds() == ["record", "caught-up"])
        await live.write("t", 2)
        await until(lambda: wire.seqs() == [2, 3, 4, 5])
        assert wire.kinds() == ["record", "caught-up", "record"]
        assert connection.state.cursor() == {"t": 5}

    on_loop(tmp_path, test)


def test_the_counters(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 3)
        wires = [live.follow({"t": 0})[0] for _ in range(2)]
        await until(lambda: all(wire.kinds() == ["record", "caught-up"] for wire in wires))
        assert live.cell.get("sse_connections") == 2
        assert live.cell.get("sse_frames") == 4
        assert live.cell.get("records_out") == 6
        wires[0].vanish()
        assert live.cell.get("sse_connections") == 1

    on_loop(tmp_path, test)


def test_one_stream_of_many_topics(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        names = [f"t{n}" for n in range(100)]
        for name in names:
            await live.write(name)
        wire, _ = live.follow(dict.fromkeys(names, 0))
        await until(lambda: wire.kinds().count("caught-up") == 100)
        for name in reversed(names):
            live.submit(name)
        await until(lambda: all(wire.seqs(name) == [1, 2] for name in names))
        assert wire.frames()[-1].positions == dict.fromkeys(names, 2)

    on_loop(tmp_path, test)


def test_a_stream_with_a_pace_gets_what_came_meanwhile_in_one_frame(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t")
        quick, _ = live.follow({"t": 0})
        wire, connection = live.follow({"t": 0}, pace_ms=10**7)  # the test ends each pause itself
        await until(lambda: wire.kinds() == ["record", "caught-up"])
        for _ in range(3):
            await live.write("t")
        await delivered(quick, [1, 2, 3, 4])
        assert wire.seqs("t") == [1]
        live.hub.end_pace(connection, 0)
        await delivered(wire, [1, 2, 3, 4])
        assert wire.kinds() == ["record", "caught-up", "record"]
        live.hub.end_pace(connection, 0)  # nothing came: the next record does not wait
        await turns()
        await live.write("t")
        await delivered(wire, [1, 2, 3, 4, 5])
        live.hub.close(connection)
        live.hub.end_pace(connection, 0)  # it is gone

    on_loop(tmp_path, test)


@pytest.mark.parametrize("failing", ["find", "watch"])
def test_a_stream_that_could_not_be_opened_leaves_nothing_to_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def no_file(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    async def test(live: Live) -> None:
        await live.write("s")
        await live.write("t")
        with monkeypatch.context() as patch:
            good, _ = live.follow({"s": 0})
            if failing == "find":
                patch.setattr(KnownTopics, "find", no_file)
            else:
                patch.setattr(live.gateway.watches, "add", no_file)
            with pytest.raises(OSError, match="too many open files"):
                live.follow({"s": 0, "t": 0})
        assert live.cell.get("sse_connections") == 1
        wire, connection = live.follow({"t": 0})
        await until(lambda: wire.kinds() == ["record", "caught-up"])
        await live.write("t")
        await delivered(wire, [1, 2])
        await delivered(good, [1], "s")
        live.hub.close(connection)

    on_loop(tmp_path, test)


def test_streams_that_have_ended_leave_no_channel_to_the_garbage_collector(tmp_path: Path) -> None:
    def channels() -> int:
        return sum(type(one) is Channel for one in gc.get_objects())

    async def test(live: Live) -> None:
        for name in ("s", "t"):
            await live.write(name)
        before = channels()
        wires = [live.follow({"s": 0, "t": 0}) for _ in range(3)]
        await until(lambda: all(wire.seqs("t") == [1] for wire, _ in wires))
        assert channels() == before + 2
        gc.disable()
        try:
            wires[0][0].vanish()
            live.hub.close(wires[1][1])
            live.hub.close(wires[2][1])
            await turns()
            assert channels() == before
        finally:
            gc.enable()

    on_loop(tmp_path, test)


def count_joined(live: Live, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the channels made so far."""
    add, joined = live.gateway.watches.add, 0

    def counted(*args: Any) -> Any:
        nonlocal joined
        joined += 1
        return add(*args)

    monkeypatch.setattr(live.gateway.watches, "add", counted)
    return lambda: joined


async def make_many(live: Live) -> dict[str, int]:
    """Make more topics than a stream joins in one turn; return where a stream of them starts."""
    names = [f"t{number}" for number in range(3 * JOIN_STEP + 1)]
    for name in names:
        await live.put(name)
    return dict.fromkeys(names, 0)


def test_a_stream_of_many_topics_joins_them_while_others_have_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(live: Live) -> None:
        starts = await make_many(live)
        joined, seen = count_joined(live, monkeypatch), [0]
        wire, _ = live.follow(starts)
        while seen[-1] < len(starts):
            seen.append(joined())
            await asyncio.sleep(0)
        assert max(after - before for before, after in pairwise(seen)) <= JOIN_STEP
        await until(lambda: len(wire.of("caught-up")) == len(starts))
        await live.write(f"t{len(starts) - 1}")
        await delivered(wire, [1], f"t{len(starts) - 1}")

    on_loop(tmp_path, test)


def test_a_stream_that_ends_while_it_joins_its_topics_joins_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(live: Live) -> None:
        starts = await make_many(live)
        joined = count_joined(live, monkeypatch)
        wire, connection = live.follow(starts)
        wire.vanish()
        live.hub.close(connection)
        await turns()
        assert joined() == JOIN_STEP
        assert live.cell.get("sse_connections") == 0

    on_loop(tmp_path, test)


def test_a_stream_that_cannot_join_the_last_of_its_topics_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    async def test(live: Live) -> None:
        starts = await make_many(live)
        wire, _ = live.follow(starts)
        with monkeypatch.context() as patch:
            patch.setattr(live.gateway.watches, "add", no_file)
            await until(lambda: wire.aborted)
        assert live.cell.get("sse_connections") == 0
        again, _ = live.follow(starts)
        await until(lambda: len(again.of("caught-up")) == len(starts))

    on_loop(tmp_path, test)


# --- many streams


def test_a_frame_is_made_once_for_all_who_stand_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)

    async def test(live: Live) -> None:
        await live.put("t")
        await live.put("other")
        alone = [live.follow({"t": 0})[0] for _ in range(3 * FAN_OUT_STEP)]
        both = [live.follow({"t": 0, "other": 0})[0] for _ in range(5)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in alone))
        await until(lambda: all(wire.kinds() == ["caught-up"] * 2 for wire in both))
        await live.write("t")
        await until(lambda: all(wire.seqs() == [1] for wire in alone + both))
        assert len({id(wire.writes[-1]) for wire in both}) == 1
        # Also when slices of work have ended between them: the topic was the same.
        assert len({id(wire.writes[-1]) for wire in alone}) == 1

    on_loop(tmp_path, test)


def count_reads(live: Live, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the pages read so far."""
    read_page, reads = live.reader.read_page, 0

    def counted(*args: Any) -> RecordPage:
        nonlocal reads
        reads += 1
        return read_page(*args)

    monkeypatch.setattr(live.reader, "read_page", counted)
    return lambda: reads


def test_a_large_page_is_read_once_for_many_and_not_kept_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of it is a slice of its own, and it alone is more than what is kept."""
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)
    monkeypatch.setattr(step_cache, "KEPT_BYTES", 50_000)

    async def test(live: Live) -> None:
        await live.put("t")
        nodes = [None, frozenset([b"a"]), frozenset([b"b"])]
        groups = [[live.follow({"t": 0}, OPTIONS._replace(nodes=n))[0] for _ in range(20)] for n in nodes]
        wires = [wire for group in groups for wire in group]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires))
        reads = count_reads(live, monkeypatch)
        await live.write("t", data=b'"%b"' % (b"x" * 100_000))
        kept = 0
        while not all(wire.seqs() == [1] for wire in wires):
            await asyncio.sleep(0)
            cached = live.hub.steps._cached.get("t")
            kept = max(kept, sum(len(step.data) for step in cached.steps.values()) if cached is not None else 0)
        assert reads() == len(groups)
        assert 100_000 < kept < 150_000, "one page"

    on_loop(tmp_path, test)


def test_each_stream_gets_what_it_asked_for(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        everything, _ = live.follow({"t": 0})
        filtered, _ = live.follow({"t": 0}, OPTIONS._replace(nodes=frozenset([b"me"])))
        bare, _ = live.follow({"t": 0}, OPTIONS._replace(include_data=False))
        await live.write("t", node=b"me")
        await live.write("t", node=b"you")
        late, _ = live.follow({"t": 1})
        await until(lambda: everything.seqs() == bare.seqs() == [1, 2] and filtered.seqs() == late.seqs() == [2])
        assert all("data" not in record for frame in bare.of("record") for record in frame["records"])
        assert filtered.frames()[-1].positions == {"t": 2}

    on_loop(tmp_path, test)


def test_who_leaves_in_the_middle_of_a_pass_is_not_written_to(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        followers = [live.follow({"t": 0}) for _ in range(10)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire, _ in followers))
        leaving = followers[3][0]
        # A pass begins with the latest comer: its write is the moment.
        followers[-1][0].on_write = leaving.vanish
        await live.write("t")
        await until(lambda: all(wire.seqs() == [1] for wire, _ in followers if wire is not leaving))
        assert leaving.seqs() == []

    on_loop(tmp_path, test)


def test_a_long_backlog_does_not_hold_up_the_live_ones(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        backlog = await live.write("long", 9000)
        await live.put("t")
        slow, _ = live.follow({"long": 0}, OPTIONS._replace(limit=1))
        quick, _ = live.follow({"t": 0})
        await until(lambda: quick.kinds() == ["caught-up"])
        for seq in numbers(20):
            before = len(slow.writes)
            await live.write("t")
            await delivered(quick, numbers(seq))
            assert len(slow.writes) > before, "the backlog stood still meanwhile"
        assert len(slow.writes) < backlog, "the backlog went first"
        await until(lambda: len(slow.writes) > backlog)
        assert slow.seqs("long") == numbers(backlog)

    on_loop(tmp_path, test)


def test_what_changes_during_a_pass_is_another_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)
    monkeypatch.setattr(delivery, "FAN_OUT_STEP", 2)

    async def test(live: Live) -> None:
        await live.put("t")
        wires = [live.follow({"t": 0})[0] for _ in range(20)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires))
        for seq in numbers(30):
            await live.write("t")
            some = [wire.seqs() == numbers(seq) for wire in wires]
            assert not all(some), "a pass takes several slices here"
        await until(lambda: all(wire.seqs() == numbers(30) for wire in wires))

    on_loop(tmp_path, test)


def test_nothing_is_kept_of_who_is_gone(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 3)
        await live.put("idle")

        def come_and_go(vanish_at_once: bool) -> weakref.ref[Wire]:
            wire, _ = live.follow({"t": 0, "idle": 0}, OPTIONS._replace(limit=1), heartbeat_ms=20)
            if vanish_at_once:
                wire.vanish()
            return weakref.ref(wire)

        gone = [come_and_go(True) for _ in range(3)]
        await turns()
        gone += [come_and_go(False) for _ in range(3)]
        await turns(2)
        for reference in gone[3:]:
            wire = reference()
            assert wire is not None
            wire.stop_reading(1)
            del wire
        await turns()
        live.hub.drain()
        live.clock.ms += 20  # when they would have beaten
        live.follow({"idle": 0}, heartbeat_ms=20)
        live.clock.ms += 20

        def collected() -> bool:
            gc.collect()
            return all(reference() is None for reference in gone)

        await until(collected)

    on_loop(tmp_path, test)


def test_one_fault_does_not_stop_delivery(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        faults: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(repr(context["exception"])))
        wires = {}
        for name in ("high", "low"):
            await live.put(name, priority=1000 if name == "high" else 0)
            wires[name] = [live.follow({name: 0})[0] for _ in range(2)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for pair in wires.values() for wire in pair))

        def fail() -> None:
            raise RuntimeError("of the transport")

        wires["high"][1].on_write = fail  # the first of its pass, and that the first of the slice
        live.shard_up = False
        written = [live.submit(name) for name in wires]
        live.shard_up = True
        for future in written:
            await future
        for name in wires:
            await delivered(wires[name][0], [1], name)
        assert faults == ["RuntimeError('of the transport')"]
        wires["high"][1].on_write = lambda: None

    on_loop(tmp_path, test)


# --- who is next


def follow_live(live: Live, name: str, count: int = 1) -> list[Wire]:
    return [live.follow({name: live.reader.get(name).view.head_seq})[0] for _ in range(count)]


def test_what_is_urgent_is_delivered_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)
    priorities = {"low": -1000, "plain": 0, "high": 1000}

    async def test(live: Live) -> None:
        order: list[str] = []
        wires = {}
        for name, priority in priorities.items():
            await live.put(name, priority=priority)
            wires[name] = follow_live(live, name)[0]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires.values()))
        for name, wire in wires.items():
            wire.on_write = partial(order.append, name)
        # All in one group of the shard, so in one wake-up of the frontend.
        live.shard_up = False
        written = [live.submit(name) for name in priorities]
        live.shard_up = True
        for future in written:
            await future
        await until(lambda: len(order) == 3)
        assert order == ["high", "plain", "low"]

    on_loop(tmp_path, test)


def test_shares_of_saturated_delivery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics of two bands that are never caught up with: work done for them is as their weights."""
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)

    async def test(live: Live) -> None:
        await live.put("high", priority=1000)
        await live.put("low", priority=0)
        for name in ("high", "low"):
            await live.write(name, 9_000)
        one_by_one = OPTIONS._replace(limit=1)
        high, low = (live.follow({name: 0}, one_by_one)[0] for name in ("high", "low"))
        await until(lambda: len(high.writes) >= 8_000)
        assert len(low.writes) == pytest.approx(len(high.writes) / 8, rel=0.08)
        await until(lambda: len(low.writes) > 9_000)

    on_loop(tmp_path, test)


def test_a_topic_that_waits_shows_its_age(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t", priority=-500)
        wire = follow_live(live, "t")[0]
        await until(lambda: wire.kinds() == ["caught-up"])
        live.hub.pause(True)
        await live.write("t")
        await turns()
        assert live.hub.waiting_ms("t") == 0
        live.clock.ms += 4_000
        assert live.hub.waiting_ms("t") == 4_000
        await turns()
        assert wire.seqs() == []
        live.clock.ms += 1_000
        await until(lambda: wire.seqs() == [1])
        assert live.hub.waiting_ms("t") == 0
        await live.write("t")
        await turns()
        assert wire.seqs() == [1]
        live.hub.pause(False)
        await until(lambda: wire.seqs() == [1, 2])

    on_loop(tmp_path, test)


def test_age_is_for_all_who_waited_with_the_topic(tmp_path: Path) -> None:
    """Each page of a backlog is a turn of its own, and yet nobody waits for more than the 10 s."""

    async def test(live: Live) -> None:
        await live.put("t", priority=-1000)
        await live.write("t", 3)
        live.hub.pause(True)
        wires = [live.follow({"t": 0})[0] for _ in range(40)]
        await turns()
        assert not any(wire.kinds() for wire in wires)
        live.clock.ms += AGE_FULL_MS
        await until(lambda: all(wire.seqs() == [1, 2, 3] for wire in wires))
        late, _ = live.follow({"t": 0})
        await turns()
        assert late.kinds() == [], "its age is its own"

    on_loop(tmp_path, test)


def test_frames_of_one_topic_are_coalesced(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        await live.put("other")
        wire, other = follow_live(live, "t")[0], follow_live(live, "other")[0]
        await until(lambda: wire.kinds() == other.kinds() == ["caught-up"])
        live.clock.ms += 1_000
        live.hub.coalesce_ms = 500.0  # by the loop's clock: ten writes take less
        await live.write("t")
        await delivered(wire, [1])
        for _ in range(9):
            await live.write("t")
        await live.write("other")
        await delivered(other, [1], "other")
        assert wire.seqs() == [1], "it was served only just now"
        assert live.hub.waiting_ms("t") == 0
        live.clock.ms += 500
        await until(lambda: wire.seqs() == numbers(10))
        assert wire.kinds() == ["caught-up", "record", "record"]

    on_loop(tmp_path, test)


def test_who_leaves_while_a_frame_is_held_back(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        wire = follow_live(live, "t")[0]
        await until(lambda: wire.kinds() == ["caught-up"])
        live.hub.coalesce_ms = 20.0
        await live.write("t")
        await live.write("t")
        wire.vanish()
        live.clock.ms += 20
        await turns()
        again = live.follow({"t": 0})[0]
        await delivered(again, [1, 2])

    on_loop(tmp_path, test)


# --- slow clients


def test_a_slow_client_is_not_read_for_and_catches_up(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        slow, connection = live.follow({"t": 0}, OPTIONS._replace(limit=10))
        quick, _ = live.follow({"t": 0})
        await until(lambda: slow.kinds() == quick.kinds() == ["caught-up"])
        slow.stop_reading(100_000)
        for seq in numbers(50):
            await live.write("t")
            await delivered(quick, numbers(seq))
        assert slow.buffered_bytes == 100_000, "it was written to"
        assert connection.state.cursor() == {"t": 0}
        slow.read_on()
        await until(lambda: slow.seqs() == numbers(50))
        assert slow.kinds() == ["caught-up", *["record"] * 5, "caught-up"]

    on_loop(tmp_path, test)


def test_a_client_that_stands_still_is_told_and_let_go(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        stuck, connection = live.follow({"t": 0})
        crawling, _ = live.follow({"t": 0})
        await until(lambda: stuck.kinds() == crawling.kinds() == ["caught-up"])
        stuck.stop_reading(100_000)
        crawling.stop_reading(100_000)
        await live.write("t")
        await turns()
        live.clock.ms += STALL_MAX_MS - 1
        crawling.buffered_bytes -= 1
        await turns()
        live.clock.ms += 1
        await until(lambda: stuck.ended)
        final = stuck.frames()[-1]
        assert (final.event, final.json["code"], final.field("id")) == ("error", 410, None)
        assert connection.closed
        assert not crawling.ended
        crawling.read_on()
        await until(lambda: crawling.seqs() == [1])

    on_loop(tmp_path, test)


LARGE_BYTES = 100_000


def full_when_written(wire: Wire) -> None:
    """It buffers a large frame and takes nothing of it before `read_on`."""

    def on_write() -> None:
        if len(wire.writes[-1]) > LARGE_BYTES:
            wire.stop_reading(len(wire.writes[-1]))

    wire.on_write = on_write


async def followers_of_large_frames(live: Live, count: int) -> list[Wire]:
    await live.put("t")
    wires = [live.follow({"t": 0})[0] for _ in range(count)]
    await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires))
    for wire in wires:
        full_when_written(wire)
    return wires


def test_large_frames_for_many_wait_for_room_and_cut_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=3 * LARGE_BYTES))

    async def test(live: Live) -> None:
        wires = await followers_of_large_frames(live, 20)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        while not all(wire.seqs() == [1] for wire in wires):
            await turns()
            full = [wire for wire in wires if not wire.writable]
            assert 1 <= len(full) <= 2, "the third would be more than may be kept"
            live.clock.ms += 10  # quick readers, all of them
            for wire in full:
                wire.read_on()
        assert not any(wire.ended for wire in wires)
        for wire in wires:
            wire.read_on()
        await live.write("t")
        await until(lambda: all(wire.seqs() == [1, 2] for wire in wires))

    on_loop(tmp_path, test)


def test_a_large_page_is_made_for_who_has_room_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that share nothing, and clients that come and go meanwhile: room is given to one of them, not to all."""
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=3 * LARGE_BYTES))
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)
    monkeypatch.setattr(step_cache, "KEPT_BYTES", 0)

    async def test(live: Live) -> None:
        await live.put("t")
        wires = [live.follow({"t": 0}, OPTIONS._replace(nodes=frozenset([b"%d" % n])))[0] for n in range(20)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires))
        for wire in wires:
            full_when_written(wire)
        await live.put("small")
        reads = count_reads(live, monkeypatch)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        await until(lambda: reads() >= 20)
        await turns()
        passing = 0
        while not all(wire.seqs() == [1] for wire in wires):
            for wire in [wire for wire in wires if not wire.writable]:
                wire.read_on()
            leaver, _ = live.follow({"small": 0})
            leaver.vanish()
            passing += 1
            await turns()
        assert reads() <= 20 + 20 + passing, "one to know how large it is, one to send it"

    on_loop(tmp_path, test)


def test_newcomers_do_not_take_the_room_that_another_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=4 * LARGE_BYTES))

    async def test(live: Live) -> None:
        full = await followers_of_large_frames(live, 3)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        await until(lambda: not any(wire.writable for wire in full))
        await live.write("large", data=b'"%b"' % (b"x" * 2 * LARGE_BYTES))
        waiting, _ = live.follow({"large": 0})
        await turns()
        assert waiting.seqs("large") == []
        for _ in range(5):
            wire, _ = live.follow({"t": 0})
            full_when_written(wire)
            full.append(wire)
            await turns()
            next(wire for wire in full if not wire.writable).read_on()
            await turns()
        assert waiting.seqs("large") == [1]
        while not all(wire.seqs() == [1] for wire in full):
            for wire in full:
                wire.read_on()
            await turns()
        assert not any(wire.ended for wire in full)

    on_loop(tmp_path, test)


def test_clients_that_do_not_read_hold_up_large_frames_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=3 * LARGE_BYTES))

    async def test(live: Live) -> None:
        wires = await followers_of_large_frames(live, 2)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        await until(lambda: not any(wire.writable for wire in wires))
        live.clock.ms += STALL_CUT_MS - 1
        waiting, _ = live.follow({"t": 0})
        crawling = wires[1]
        await turns()
        assert waiting.seqs() == []
        await live.put("small")
        small, _ = live.follow({"small": 0})
        await live.write("small")
        await delivered(small, [1], "small")
        crawling.buffered_bytes -= 1
        live.clock.ms += 1
        await until(lambda: waiting.seqs() == [1])
        assert wires[0].aborted, "it has taken nothing"
        assert not crawling.ended
        assert live.cell.get("sse_connections") == 3
        crawling.read_on()
        await live.write("t")
        await until(lambda: crawling.seqs() == waiting.seqs() == [1, 2])

    on_loop(tmp_path, test)


def test_nobody_is_cut_for_what_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=3 * LARGE_BYTES))

    async def test(live: Live) -> None:
        wires = await followers_of_large_frames(live, 2)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        await until(lambda: not any(wire.writable for wire in wires))
        live.clock.ms += STALL_MAX_MS - 1
        live.hub._tick()
        assert not any(wire.ended for wire in wires)
        live.clock.ms += 1
        live.hub._tick()
        assert [wire.kinds()[-1] for wire in wires] == ["error", "error"]
        assert not any(wire.aborted for wire in wires)

    on_loop(tmp_path, test)


def test_who_waits_for_room_may_leave_or_lose_its_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=3 * LARGE_BYTES // 2))

    async def test(live: Live) -> None:
        wires = await followers_of_large_frames(live, 4)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        await until(lambda: not all(wire.writable for wire in wires))
        await turns()
        (full,) = (wire for wire in wires if not wire.writable)
        gone, *others = (wire for wire in wires if wire.writable)
        gone.vanish()
        await live.delete("t")
        await turns()
        assert not any(wire.seqs() for wire in others)
        full.read_on()
        await until(lambda: all(wire.kinds()[-1] == "topic-deleted" for wire in [full, *others]))

    on_loop(tmp_path, test)


def test_who_waits_for_room_in_one_topic_and_is_full_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KEPT_FRAMES", limits.KEPT_FRAMES._replace(most_bytes=3 * LARGE_BYTES // 2))

    async def test(live: Live) -> None:
        await live.put("t")
        await live.put("other")
        both, _ = live.follow({"t": 0, "other": 0})  # a pass ends with the first comer
        await until(lambda: both.kinds() == ["caught-up"] * 2)
        (full,) = await followers_of_large_frames(live, 1)
        await live.write("t", data=b'"%b"' % (b"x" * LARGE_BYTES))
        await until(lambda: not full.writable)
        await turns()
        both.stop_reading(1)
        await live.write("other")
        await turns()
        both.read_on()
        full.read_on()
        await delivered(both, [1], "other")
        await delivered(both, [1], "t")

    on_loop(tmp_path, test)


def test_a_turn_makes_few_pages_however_many_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that stand at the same place and share nothing: each has a page of its own to be made."""
    monkeypatch.setattr(delivery, "SLICE_S", 0.0)

    async def test(live: Live) -> None:
        await live.put("t")
        reads = count_reads(live, monkeypatch)
        wires = [live.follow({"t": 0}, OPTIONS._replace(nodes=frozenset([b"%d" % n])))[0] for n in range(64)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires))
        for seq, (data, most) in enumerate([(b"1", 5), (b'"%b"' % (b"x" * 300_000), 1)], start=1):
            reads_in_turn = 0
            await live.write("t", data=data)
            while not all(wire.seqs() == numbers(seq) for wire in wires):
                before = reads()
                await asyncio.sleep(0)
                reads_in_turn = max(reads_in_turn, reads() - before)
            assert 1 <= reads_in_turn <= most

    on_loop(tmp_path, test)


# --- heartbeats


def test_a_heartbeat_in_silence(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        wire, _ = live.follow({"t": 0}, heartbeat_ms=20)
        await until(lambda: wire.kinds() == ["caught-up"])
        written = len(wire.writes)
        live.clock.ms += 20
        await until(lambda: len(wire.writes) > written)
        assert wire.writes[-1] == b": hb %d\n\n" % live.clock.ms

    on_loop(tmp_path, test)


def test_heartbeats_of_many_streams_leave_the_event_loop_its_turns(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        wires = [live.follow({"t": 0}, heartbeat_ms=20)[0] for _ in range(5 * PER_TURN_MAX)]
        await until(lambda: all(wire.kinds() == ["caught-up"] for wire in wires))
        in_turn, most_in_turn = 0, 0

        def beat() -> None:
            nonlocal in_turn
            in_turn += 1

        for wire in wires:
            wire.on_write = beat
        before = sum(len(wire.writes) for wire in wires)
        live.clock.ms += 20
        while sum(len(wire.writes) for wire in wires) < before + len(wires):
            in_turn = 0
            await asyncio.sleep(0)
            most_in_turn = max(most_in_turn, in_turn)
        assert most_in_turn <= PER_TURN_MAX
        await turns()
        assert sum(len(wire.writes) for wire in wires) == before + len(wires), "one each"

    on_loop(tmp_path, test)


# --- deletion


def test_a_deleted_topic_ends_at_once_and_alone(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("gone", 2)
        await live.write("stays")
        wire, connection = live.follow({"gone": 0, "stays": 0})
        await until(lambda: wire.kinds().count("caught-up") == 2)
        await live.delete("gone")
        await until(lambda: wire.kinds()[-1] == "topic-deleted")
        assert wire.frames()[-1].json == {"topic": "gone", "head_seq": 2, "reason": "deleted"}
        assert connection.state.cursor() == {"stays": 1}
        await live.write("gone", 5)
        await live.write("stays")
        await until(lambda: wire.seqs("stays") == [1, 2])
        assert wire.seqs("gone") == [1, 2]

    on_loop(tmp_path, test)


def test_a_topic_made_again_in_the_same_moment_is_another_one(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 5)
        wire, _ = live.follow({"t": 0})
        await until(lambda: wire.kinds() == ["record", "caught-up"])
        live.shard_up = False
        gone = asyncio.create_task(live.delete("t"))
        await turns()
        again = live.submit("t", 9)
        live.shard_up = True
        await gone
        await again
        await until(lambda: wire.kinds()[-1] == "topic-deleted")
        assert wire.of("topic-deleted") == [{"topic": "t", "head_seq": 5, "reason": "deleted"}]
        await live.write("t")
        await turns()
        assert wire.seqs() == numbers(5)

    on_loop(tmp_path, test)


def test_a_client_behind_learns_of_the_end_when_it_reads_on(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 5)
        wire, _ = live.follow({"t": 0})
        await until(lambda: wire.kinds() == ["record", "caught-up"])
        wire.stop_reading(1)
        await live.write("t", 2)
        await turns()
        await live.delete("t")
        await turns()
        wire.read_on()
        await until(lambda: wire.kinds()[-1] == "topic-deleted")
        assert wire.of("topic-deleted")[0]["head_seq"] == 7

    on_loop(tmp_path, test)


@pytest.mark.parametrize("restarted", [False, True])
def test_who_joins_a_topic_made_again_beside_one_who_is_behind_is_told_of_what_is_new(
    tmp_path: Path, restarted: bool
) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 5)
        behind, _ = live.follow({"t": 0})
        await until(lambda: behind.kinds() == ["record", "caught-up"])
        behind.stop_reading(1)
        await live.write("t")
        await turns()
        for _ in range(2):
            await live.delete("t")
            await turns()  # the end is told while there is no topic
            if restarted:
                live.restart_shard()
                await turns()
            await live.write("t", 2)
            wire, _ = live.follow({"t": 0})
            await delivered(wire, [1, 2])
            await live.write("t")
            await delivered(wire, [1, 2, 3])
        behind.read_on()
        await until(lambda: behind.kinds()[-1] == "topic-deleted")
        again, connection = live.follow({"t": 3})
        await live.write("t")
        await delivered(again, [4])
        await delivered(wire, numbers(4))
        live.hub.close(connection)

    on_loop(tmp_path, test)


# --- the shard


def test_a_shard_restart_neither_loses_nor_repeats(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 3)
        wire, _ = live.follow({"t": 0})
        behind, _ = live.follow({"t": 0}, OPTIONS._replace(limit=1))
        await until(lambda: wire.seqs() == behind.seqs() == [1, 2, 3])
        behind.stop_reading(1)
        for turn in range(3):
            live.shard_up = False
            written = [live.submit("t") for _ in range(5)]
            await turns()
            live.restart_shard()
            live.shard_up = True
            for future in written:
                await future
            await delivered(wire, numbers(3 + 5 * (turn + 1)))
        behind.read_on()
        await until(lambda: behind.seqs() == numbers(18))
        await live.write("t")
        await until(lambda: wire.seqs() == behind.seqs() == numbers(19))

    on_loop(tmp_path, test)


def test_strong_waits_for_the_disk(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("t")
        eventual, _ = live.follow({"t": 0})
        strong, _ = live.follow({"t": 0}, strong=True)
        await live.write("t", 3)
        await until(lambda: eventual.seqs() == [1, 2, 3])
        await turns()
        assert strong.seqs() == []
        assert live.reader.get("t").view.durable_seq == 0
        live.clock.ms += 1000  # the background sync is due
        await until(lambda: strong.seqs() == [1, 2, 3])
        assert live.reader.get("t").view.durable_seq == 3

    on_loop(tmp_path, test)


def test_a_sync_that_nobody_announces_is_found(tmp_path: Path) -> None:
    """It ends after the stream has looked and before the shard knows of the watch."""

    async def test(live: Live) -> None:
        await live.write("t", 3)
        live.shard_up = False
        strong, _ = live.follow({"t": 0}, strong=True)
        await until(lambda: strong.kinds() == ["caught-up"])
        live.clock.ms += 1000
        for _ in range(2):  # it begins, it ends
            live.rig.shard.sync_in_background()
        assert live.reader.get("t").view.durable_seq == 3
        live.shard_up = True
        await until(lambda: strong.seqs() == [1, 2, 3])

    on_loop(tmp_path, test)


def test_a_strong_stream_says_that_its_topic_has_become_ephemeral_and_goes_on_when_it_is_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "RETRY_AFTER_MS", 20)

    async def test(live: Live) -> None:
        await live.put("t", durability="fsync")
        await live.write("t", 2)
        strong, _ = live.follow({"t": 0}, strong=True)
        await delivered(strong, [1, 2])
        await live.put("t", durability="ephemeral")
        await until(lambda: strong.kinds() == ["record", "caught-up", "error"])
        advisory = strong.of("error")[0]
        assert advisory | {"error": ""} == {"code": 429, "error": "", "retry_after_ms": 1000, "topics": ["t"]}
        assert "'t' is ephemeral" in advisory["error"]
        # One that is opened now, as that of a session may be, is told the same.
        late, _ = live.follow({"t": 0}, strong=True)
        await until(lambda: late.kinds() == ["error"])
        made = live.hub.steps.made
        await until(lambda: live.hub.steps.made > made + 4)  # tried again, by both
        assert (strong.kinds()[2:], late.kinds()) == (["error"], ["error"])
        await live.put("t", durability="fsync")
        await until(lambda: strong.kinds()[3:] == ["caught-up"])
        await live.write("t")
        await delivered(strong, [1, 2, 3])
        await delivered(late, [1, 2, 3])

    on_loop(tmp_path, test)


def test_what_cannot_be_read_is_said_and_tried_again(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 3)
        log_file = next(tmp_path.glob("wal/**/*.log"))
        os.rename(log_file, tmp_path / "away")
        wire, _ = live.follow({"t": 0})
        healthy, _ = live.follow({"t": 3})
        await until(lambda: wire.kinds() == ["error"])
        advisory = wire.frames()[0]
        assert advisory.json | {"error": ""} == {"code": 429, "error": "", "retry_after_ms": 1000, "topics": ["t"]}
        assert "'t'" in advisory.json["error"]
        await until(lambda: healthy.kinds() == ["caught-up"])
        os.rename(tmp_path / "away", log_file)
        await until(lambda: wire.kinds() == ["error", "record", "caught-up"])
        assert wire.seqs() == [1, 2, 3]

    on_loop(tmp_path, test)


# --- the end


def test_a_drain_ends_every_stream_in_order(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.write("t", 3)
        followers = [live.follow({"t": 0}) for _ in range(5)]
        await until(lambda: all(wire.seqs() == [1, 2, 3] for wire, _ in followers))
        live.hub.drain()
        assert all(wire.ended and connection.closed for wire, connection in followers)
        assert {tuple(connection.state.cursor().items()) for _, connection in followers} == {(("t", 3),)}
        assert live.hub.draining
        assert live.cell.get("sse_connections") == 0
        await live.write("t")
        await turns()

    on_loop(tmp_path, test)


# --- any order of events


@pytest.mark.parametrize(("slice_s", "fan_out_step"), [(0.0005, 64), (0.0, 1)])
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 40)),
            st.tuples(st.just("join"), st.integers(0, 3), st.just(0)),
            st.tuples(st.sampled_from(["stop", "go", "leave"]), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("restart"), st.just(0), st.just(0)),
            st.tuples(st.just("coalesce"), st.integers(0, 1), st.just(0)),
            st.tuples(st.just("pause"), st.integers(0, 1), st.just(0)),
            st.tuples(st.just("turn"), st.integers(1, 9), st.just(0)),
        ),
        max_size=25,
    )
)
def test_everybody_gets_everything_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, slice_s: float, fan_out_step: int, history: list[tuple[str, int, int]]
) -> None:
    async def test(live: Live) -> None:
        await live.put("b", priority=-1)
        heads = {"a": await live.write("a"), "b": await live.write("b")}
        joined: list[tuple[Wire, dict[str, int]]] = []
        left: list[Wire] = []
        for action, which, count in history:
            wire = joined[which % len(joined)][0] if joined else None
            if action == "write":
                name = "ab"[which]
                heads[name] = await live.write(name, count)
            elif action == "join":
                starts = {name: which * heads[name] // 3 for name in "ab"}
                joined.append((live.follow(starts, OPTIONS._replace(limit=7))[0], starts))
            elif action == "restart":
                live.restart_shard()
            elif action == "coalesce":
                live.hub.coalesce_ms = 20.0 * which
            elif action == "pause":
                live.hub.pause(bool(which))
            elif action == "turn":
                live.clock.ms += which
                await turns(which)
            elif wire is not None and wire not in left:
                if action == "stop":
                    wire.stop_reading(1)
                elif action == "go":
                    wire.read_on()
                else:
                    wire.vanish()
                    left.append(wire)
        live.hub.pause(False)
        live.clock.ms += 20
        for wire, starts in joined:
            if wire not in left:
                wire.read_on()
                for name in "ab":
                    await delivered(wire, numbers(heads[name], starts[name] + 1), name)
            else:
                for name in "ab":
                    got = wire.seqs(name)
                    assert got == numbers(starts[name] + len(got), starts[name] + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "SLICE_S", slice_s)
        patch.setattr(delivery, "FAN_OUT_STEP", fan_out_step)
        on_loop(tmp_path_factory.mktemp("data"), test)
