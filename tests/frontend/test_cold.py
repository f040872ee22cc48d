"""The cold tier as a frontend reads it: slow, hanging or failing, it costs those who read from it and nobody else."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from topics.core.clock import SystemClock
from topics.core.errors import TopicsError
from topics.frontend.entry.limits import COLD_READS
from topics.frontend.reads.cold import BLOCK_BYTES, IN_FLIGHT_MAX, PREFETCH_MAX, RUN_BYTES, ColdMissError, ColdTier

DEADLINE_S = 60.0
NAME = "0000000000000007/seg-00000000000000000001.data"
BYTES = bytes(range(256)) * (4 * BLOCK_BYTES // 256) + b"the end"
LONG = bytes(range(256)) * (6 * RUN_BYTES // 256) + b"the end"


class Gated:
    """A store whose reads wait until the test opens the gate, and then do what `outcome` says."""

    def __init__(self, is_open: bool = True) -> None:
        self.gate = threading.Event()
        self.content = BYTES
        self.outcome: Callable[[bytes], bytes] = lambda data: data
        self.calls: list[tuple[str, int, int]] = []
        self.threads: list[threading.Thread] = []
        if is_open:
            self.gate.set()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self.threads.append(threading.current_thread())
        self.calls.append((name, offset, length))
        assert self.gate.wait(DEADLINE_S)
        return self.outcome(self.content[offset : offset + length])

    def unused(self, *_: object) -> Any:
        raise AssertionError("a frontend only reads ranges")

    put = delete = list = exists = len = place = unused


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test()

    asyncio.run(main())


def miss(start: int, end: int, name: str = NAME) -> ColdMissError:
    return ColdMissError(name, start, end, len(BYTES))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.0005)


def test_what_was_fetched_is_at_hand() -> None:
    async def test() -> None:
        store = Gated()
        tier = ColdTier(store, SystemClock(), 5000)
        with pytest.raises(ColdMissError) as missed:
            tier.extent(NAME, 10, 20, len(BYTES))
        await tier.fetch(missed.value)
        buffer, base = tier.extent(NAME, 10, 20, len(BYTES))
        assert (base, buffer) == (0, BYTES[:BLOCK_BYTES])
        assert tier.extent(NAME, 0, BLOCK_BYTES, len(BYTES)) == (buffer, 0)
        with pytest.raises(ColdMissError):
            tier.extent("another", 10, 20, len(BYTES))
        assert store.calls == [(NAME, 0, BLOCK_BYTES)]

    on_loop(test)


def test_neighbouring_blocks_are_one_read_and_what_is_at_hand_is_not_read_again() -> None:
    async def test() -> None:
        store = Gated()
        tier = ColdTier(store, SystemClock(), 5000)
        await tier.fetch(miss(BLOCK_BYTES - 5, BLOCK_BYTES + 5))
        assert store.calls == [(NAME, 0, 2 * BLOCK_BYTES)]
        end = len(BYTES)
        await tier.fetch(miss(BLOCK_BYTES + 5, end))
        assert store.calls[1:] == [(NAME, 2 * BLOCK_BYTES, end - 2 * BLOCK_BYTES)]
        buffer, base = tier.extent(NAME, BLOCK_BYTES + 5, end, end)
        assert (buffer, base) == (BYTES[BLOCK_BYTES:], BLOCK_BYTES)

    on_loop(test)


def test_many_readers_of_one_place_are_one_read() -> None:
    async def test() -> None:
        store = Gated(is_open=False)
        tier = ColdTier(store, SystemClock(), 5000)
        readers = [asyncio.create_task(tier.fetch(miss(n, n + 100))) for n in range(50)]
        await until(lambda: store.calls)
        store.gate.set()
        await asyncio.gather(*readers)
        assert len(store.calls) == 1

    on_loop(test)


def test_a_read_that_fails_leaves_nothing_to_the_collector() -> None:
    """The error names the frames of its thread, in which is what was read."""

    class Gathered: ...

    found: list[weakref.ref[Gathered]] = []

    def fail(_data: bytes) -> bytes:
        gathered = Gathered()
        found.append(weakref.ref(gathered))
        raise OSError(errno.EIO, "the tier is damaged")

    async def fetch(tier: ColdTier) -> None:
        with pytest.raises(TopicsError):
            await tier.fetch(miss(10, 20))

    async def test() -> None:
        store = Gated()
        store.outcome = fail
        await fetch(ColdTier(store, SystemClock(), 5000))
        store.threads[0].join(DEADLINE_S)
        assert [one() for one in found] == [None]

    gc.disable()
    try:
        on_loop(test)
    finally:
        gc.enable()


def test_only_so_much_is_kept() -> None:
    async def test() -> None:
        tier = ColdTier(Gated(), SystemClock(), 5000, cache_bytes=2 * BLOCK_BYTES)
        for number in (0, 1, 2):
            await tier.fetch(miss(number * BLOCK_BYTES, number * BLOCK_BYTES + 1))
            tier.extent(NAME, number * BLOCK_BYTES, number * BLOCK_BYTES + 1, len(BYTES))
        with pytest.raises(ColdMissError):
            tier.extent(NAME, 0, 1, len(BYTES))
        tier.extent(NAME, BLOCK_BYTES, BLOCK_BYTES + 1, len(BYTES))
        # However little is kept, bytes that were just fetched are there.
        await tier.fetch(miss(0, 4 * BLOCK_BYTES))
        tier.extent(NAME, 0, 4 * BLOCK_BYTES, len(BYTES))

    on_loop(test)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), EOFError("ends early"), ValueError("odd")])
def test_a_read_that_fails_is_said_to_all_its_readers_and_made_again(error: Exception) -> None:
    async def test() -> None:
        store = Gated(is_open=False)

        def fail(_: bytes) -> bytes:
            raise error

        store.outcome = fail
        tier = ColdTier(store, SystemClock(), 5000)
        readers = [asyncio.create_task(tier.fetch(miss(0, 10))) for _ in range(3)]
        await until(lambda: store.calls)
        store.gate.set()
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, TopicsError)
            assert (outcome.code, outcome.status) == ("storage_unavailable", 503)
            assert NAME in outcome.message
            assert str(error) in outcome.message
        store.outcome = lambda data: data
        await tier.fetch(miss(0, 10))
        tier.extent(NAME, 0, 10, len(BYTES))

    on_loop(test)


def test_an_object_that_is_gone_is_not_a_failure_of_the_tier() -> None:
    async def test() -> None:
        store = Gated()

        def gone(_: bytes) -> bytes:
            raise FileNotFoundError(2, "No such file", NAME)

        store.outcome = gone
        with pytest.raises(FileNotFoundError):
            await ColdTier(store, SystemClock(), 5000).fetch(miss(0, 10))

    on_loop(test)


def test_a_tier_that_hangs_holds_few_threads_and_its_readers_only_so_long() -> None:
    async def test() -> None:
        store = Gated(is_open=False)
        tier = ColdTier(store, SystemClock(), 30)
        names = [f"segment-{n}" for n in range(3 * IN_FLIGHT_MAX)]
        for _ in range(2):
            outcomes = await asyncio.gather(*[tier.fetch(miss(0, 10, name)) for name in names], return_exceptions=True)
            assert all(isinstance(outcome, TopicsError) and "30 ms" in outcome.message for outcome in outcomes)
        await until(lambda: len(store.calls) >= IN_FLIGHT_MAX)  # a thread may begin late
        assert len(store.calls) == IN_FLIGHT_MAX
        assert all(thread.daemon for thread in store.threads), "the end of the process does not wait for them"
        # It answers again: what hung is there, and there is room for others. Who gave up waiting is not read for.
        store.gate.set()
        await until(lambda: not any(thread.is_alive() for thread in store.threads))
        tier.timeout_ms = 10_000
        await tier.fetch(miss(0, 10, "another"))
        assert len(store.calls) == IN_FLIGHT_MAX + 1
        for name, _, _ in store.calls:
            tier.extent(name, 0, 10, len(BYTES))

    on_loop(test)


def test_reads_that_have_no_thread_yet_are_bounded() -> None:
    async def test() -> None:
        store = Gated(is_open=False)
        tier = ColdTier(store, SystemClock(), 10_000)
        names = [f"segment-{n}" for n in range(IN_FLIGHT_MAX + COLD_READS.most_count)]
        readers = [asyncio.create_task(tier.fetch(miss(0, 10, name))) for name in names]
        await asyncio.sleep(0)
        with pytest.raises(TopicsError) as refused:
            await tier.fetch(miss(0, 10, "one more"))
        assert str(COLD_READS.most_count) in refused.value.message
        for reader in readers[IN_FLIGHT_MAX:]:
            reader.cancel()
        await asyncio.gather(*readers[IN_FLIGHT_MAX:], return_exceptions=True)
        store.gate.set()
        await asyncio.gather(*readers[:IN_FLIGHT_MAX])
        await tier.fetch(miss(0, 10, "one more"))
        assert len(store.calls) == IN_FLIGHT_MAX + 1, "nobody waited for the cancelled ones"

    on_loop(test)


def test_reads_for_which_no_thread_can_be_started_fail_and_keep_no_place() -> None:
    """The process may have no more threads: their stacks are longer than all of memory here."""

    async def test() -> None:
        store = Gated()
        tier = ColdTier(store, SystemClock(), 5000)
        names = [f"segment-{n}" for n in range(COLD_READS.most_count)]
        former = threading.stack_size(1 << 47)
        try:
            outcomes = await asyncio.gather(*[tier.fetch(miss(0, 10, name)) for name in names], return_exceptions=True)
        finally:
            threading.stack_size(former)
        for outcome in outcomes:
            assert isinstance(outcome, TopicsError)
            assert "can't start new thread" in outcome.message
        assert not store.calls
        await asyncio.gather(*[tier.fetch(miss(0, 10, name)) for name in names[: 2 * IN_FLIGHT_MAX]])
        assert len(store.calls) == 2 * IN_FLIGHT_MAX

    on_loop(test)


def test_the_next_runs_of_a_sequential_reader_are_on_their_way_before_they_are_needed() -> None:
    async def test() -> None:
        store = Gated()
        store.content = LONG
        tier = ColdTier(store, SystemClock(), 5000)
        following = ("another", 10), ("third", 10)

        async def page(start: int, end: int) -> None:
            await tier.fetch(ColdMissError(NAME, start, end, len(LONG)))
            tier.extent(NAME, start, end, len(LONG), following)

        await page(5 * RUN_BYTES, 5 * RUN_BYTES + 10)
        await page(0, 10)
        assert [length for _, _, length in store.calls] == [BLOCK_BYTES] * 2, "a page here and there is no sequence"
        await page(10, 20)
        await until(lambda: len(store.calls) == 2 + PREFETCH_MAX)
        ahead = [(BLOCK_BYTES, RUN_BYTES - BLOCK_BYTES), *((number * RUN_BYTES, RUN_BYTES) for number in (1, 2, 3))]
        assert sorted(store.calls[2:]) == [(NAME, *part) for part in ahead]
        await page(20, RUN_BYTES + BLOCK_BYTES + 10)
        await until(lambda: len(store.calls) == 8)
        left = 5 * RUN_BYTES + BLOCK_BYTES, RUN_BYTES - BLOCK_BYTES
        assert sorted(store.calls[6:]) == [(NAME, 4 * RUN_BYTES, RUN_BYTES), (NAME, *left)], "no block is read again"
        await page(RUN_BYTES + 10, 4 * RUN_BYTES)
        await page(4 * RUN_BYTES, len(LONG))
        await until(lambda: len(store.calls) == 11)
        behind = [(NAME, 6 * RUN_BYTES, 7), ("another", 0, 10), ("third", 0, 10)]
        assert sorted(store.calls[8:]) == behind, "further objects are behind it"

    on_loop(test)


def test_readers_that_are_ahead_take_no_bytes_from_each_other() -> None:
    """With eight of them each byte was fetched ten times: what one had fetched in advance had to go for another's."""

    async def test() -> None:
        store = Gated()
        store.content = LONG
        tier = ColdTier(store, SystemClock(), 5000)
        names = [f"{NAME}{n}" for n in range(8)]
        step = 100_000
        for start in range(0, len(LONG) - step, step):
            for name in names:
                while True:
                    try:
                        tier.extent(name, start, start + step, len(LONG))
                    except ColdMissError as miss:
                        await tier.fetch(miss)
                    else:
                        break
        assert sum(length for _, _, length in store.calls) <= 1.5 * len(names) * len(LONG)

    on_loop(test)


def test_objects_of_no_bytes_are_not_passed_over_without_end() -> None:
    async def test() -> None:
        tier = ColdTier(Gated(), SystemClock(), 5000)
        asked = []

        def following() -> Iterator[tuple[str, int]]:
            for number in range(10_000):
                asked.append(number)
                yield f"empty-{number}", 0

        for start in (0, 10):
            await tier.fetch(miss(start, start + 10))
            tier.extent(NAME, start, start + 10, len(BYTES), following())
        assert 0 < len(asked) < 100

    on_loop(test)


def test_a_sequential_reader_who_was_not_waited_for_fetches_a_run() -> None:
    async def test() -> None:
        store = Gated()
        store.content = LONG
        tier = ColdTier(store, SystemClock(), 5000, cache_bytes=2 * RUN_BYTES)
        for start, end in ((0, 10), (10, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES + 10)):
            await tier.fetch(ColdMissError(NAME, start, end, len(LONG)))
            tier.extent(NAME, start, end, len(LONG))
        assert store.calls == [(NAME, 0, BLOCK_BYTES), (NAME, BLOCK_BYTES, RUN_BYTES - BLOCK_BYTES)]

    on_loop(test)


def test_what_is_fetched_in_advance_takes_no_place_from_readers_when_the_tier_hangs() -> None:
    async def test() -> None:
        store = Gated()
        tier = ColdTier(store, SystemClock(), 5000)
        names = [f"{NAME}{n}" for n in range(IN_FLIGHT_MAX)]
        for name in names:
            await tier.fetch(miss(0, BLOCK_BYTES, name))
            tier.extent(name, 0, 10, len(BYTES))
        store.gate.clear()
        before = len(store.calls)
        for name in names:
            tier.extent(name, 10, 20, len(BYTES))
        await until(lambda: len(store.calls) == before + PREFETCH_MAX)
        reader = asyncio.create_task(tier.fetch(miss(0, 10)))
        await until(lambda: len(store.calls) == before + PREFETCH_MAX + 1)
        store.gate.set()
        await reader

    on_loop(test)
