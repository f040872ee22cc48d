"""Reading from the cold tier, which may be slow, hang or fail, without anything else noticing.

A page is made on the event loop from bytes that are at hand. Where it needs some that only the cold tier has, `extent`
raises ColdMissError, and whoever can wait awaits `fetch` and makes the page again. What was fetched stays for a while,
in blocks: a reader that pages through a cold segment asks for each block once, and so do many readers together.

Each read has a thread of its own, and there are few: one that hangs keeps its place until it returns, however long ago
its readers were told that the tier does not answer. No other thread of the process is ever used, and none of these
holds up its end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Thread
from typing import Final, Generic, NamedTuple, TypeVar

from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.frontend.entry import limits
from topics.log import get_logger
from topics.storage.segment_store import SegmentStore

BLOCK_BYTES: Final = 1 << 20
CACHE_BYTES: Final = 32 << 20
"""Kept of what was fetched; no less than the longest page needs at once."""
IN_FLIGHT_MAX: Final = 8
FRESH_MS: Final = 1000
"""What was read no longer ago is not read again for being damaged, however many meet that damage."""


class ColdMissError(TopicsError):
    """Bytes start..end of an object are not at hand. Who cannot wait answers with it as it is."""

    def __init__(self, name: str, start: int, end: int, data_bytes: int) -> None:
        super().__init__(
            "storage_unavailable",
            f"segment {name} is in the cold tier and not at hand; ask again",
            {"segment": name},
        )
        self.name = name
        self.start = start
        self.end = end
        self.data_bytes = data_bytes

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal for those that the same read answers."""
        return self.name, self.start // BLOCK_BYTES, (self.end - 1) // BLOCK_BYTES


class _Block(NamedTuple):
    """`read_ms`: when it came, monotonic."""

    data: bytes
    read_ms: int


class _RangedRead:
    """One ranged read of neighbouring blocks. `done` is None, or what it failed with."""

    __slots__ = ("blocks", "done", "length", "name", "offset", "waiters")

    def __init__(self, name: str, blocks: range, data_bytes: int, done: asyncio.Future[Exception | None]) -> None:
        self.name = name
        self.blocks = blocks
        self.offset = blocks.start * BLOCK_BYTES
        self.length = min(blocks.stop * BLOCK_BYTES, data_bytes) - self.offset
        self.done = done
        self.waiters = 0


class ColdTier:
    """The cold tier as one frontend reads it. All calls on one event loop."""

    def __init__(self, store: SegmentStore, clock: Clock, timeout_ms: int, cache_bytes: int = CACHE_BYTES) -> None:
        """`timeout_ms`: how long a reader waits for it."""
        self._store = store
        self._clock = clock
        self.timeout_ms = timeout_ms
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self._blocks_max = cache_bytes // BLOCK_BYTES
        self._reads: dict[tuple[str, int], _RangedRead] = {}
        """By each block they bring."""
        self._waiting: deque[_RangedRead] = deque()
        self._in_flight = 0

    def extent(self, name: str, start: int, end: int, data_bytes: int) -> tuple[bytes, int]:
        """Bytes that include start..end of an object of `data_bytes`, and where they begin. Raises ColdMissError."""
        pieces = []
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            block = self._blocks.get((name, number))
            if block is None:
                raise ColdMissError(name, start, end, data_bytes)
            pieces.append(block.data)
        for number in range(first, last + 1):
            self._blocks.move_to_end((name, number))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), first * BLOCK_BYTES

    def forget(self, name: str) -> bool:
        """What was read of this object is damaged. True if some of it is so old that it may have been restored since:
        that is gone then, and read anew by who asks next.
        """
        old_ms = self._clock.monotonic_ms() - FRESH_MS
        old = [key for key, block in self._blocks.items() if key[0] == name and block.read_ms <= old_ms]
        for key in old:
            del self._blocks[key]
        return bool(old)

    async def fetch(self, miss: ColdMissError) -> None:
        """Gets what was missed. Raises FileNotFoundError when there is no such object (any more), `storage_unavailable`
        when the tier fails or does not answer in time.
        """
        name = miss.name
        wanted = range(miss.start // BLOCK_BYTES, (miss.end - 1) // BLOCK_BYTES + 1)
        absent = [n for n in wanted if (name, n) not in self._blocks and (name, n) not in self._reads]
        if absent:
            self._begin(name, range(absent[0], absent[-1] + 1), miss.data_bytes)
        reads = {read for n in wanted if (read := self._reads.get((name, n))) is not None}
        for read in reads:
            read.waiters += 1
        try:
            if reads:
                _, late = await asyncio.wait([read.done for read in reads], timeout=self.timeout_ms / 1000)
                if late:
                    raise _unavailable(name, f"it has not answered within {self.timeout_ms} ms")
        finally:
            for read in reads:
                read.waiters -= 1
                if not read.waiters and read in self._waiting:
                    self._waiting.remove(read)
                    self._forget(read)
        for read in reads:
            error = read.done.result()
            if isinstance(error, FileNotFoundError):
                raise error
            if error is not None:
                raise _unavailable(name, str(error)) from error

    def _begin(self, name: str, blocks: range, data_bytes: int) -> None:
        most = limits.COLD_READS.most_count
        if len(self._waiting) >= most:
            raise _unavailable(name, f"{most} reads are waiting for it already")
        read = _RangedRead(name, blocks, data_bytes, asyncio.get_running_loop().create_future())
        for number in blocks:
            self._reads.setdefault((name, number), read)
        self._waiting.append(read)
        self._start_some()

    def _start_some(self) -> None:
        while self._waiting and self._in_flight < IN_FLIGHT_MAX:
            read = self._waiting.popleft()
            self._in_flight += 1
            # A daemon: the end of the process does not wait for a tier that hangs.
            thread = Thread(target=self._run, args=(read,), name="cold-read", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more of them
                # Not within this call: `fetch` is still to find the read, and `_finish` starts others.
                read.done.get_loop().call_soon(self._finish, read, b"", error)

    def _run(self, read: _RangedRead) -> None:
        """In a thread of its own."""
        data, error = b"", None
        try:
            data = self._store.read_range(read.name, read.offset, read.length)
        except Exception as failure:  # noqa: BLE001 — a store of any kind fails in its own ways; each is for its readers
            error = failure
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            read.done.get_loop().call_soon_threadsafe(self._finish, read, data, error)

    def _finish(self, read: _RangedRead, data: bytes, error: Exception | None) -> None:
        self._in_flight -= 1
        self._forget(read)
        if error is None:
            now_ms = self._clock.monotonic_ms()
            for at, number in enumerate(read.blocks):
                self._blocks[read.name, number] = _Block(data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], now_ms)
                self._blocks.move_to_end((read.name, number))
            while len(self._blocks) > max(self._blocks_max, len(read.blocks)):
                self._blocks.popitem(last=False)
        read.done.set_result(error)
        self._start_some()

    def _forget(self, read: _RangedRead) -> None:
        for number in read.blocks:
            if self._reads.get((read.name, number)) is read:
                del self._reads[read.name, number]


def _unavailable(name: str, reason: str) -> TopicsError:
    return TopicsError(
        "storage_unavailable",
        f"segment {name} is in the cold tier, which cannot be read now: {reason}",
        {"segment": name, "reason": reason},
    )


Waiter = TypeVar("Waiter")

_log = get_logger()


class ColdWaits(Generic[Waiter]):
    """The waiters of each fetch. All that lack the same wait for one fetch. Everything is called on one event loop."""

    def __init__(
        self,
        fetch: Callable[[ColdMissError], Awaitable[None]],
        on_fetched: Callable[[Waiter, str | None], None],
    ) -> None:
        """`on_fetched(waiter, failure)` comes once for each waiter; `failure` is a message, None when it is there."""
        self._fetch = fetch
        self._on_fetched = on_fetched
        self._waiters: dict[tuple[str, int, int], list[Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def wait(self, miss: ColdMissError, waiter: Waiter) -> None:
        """Fetch what is missed, unless that is under way."""
        waiters = self._waiters.get(miss.key)
        if waiters is not None:
            waiters.append(waiter)
            return
        self._waiters[miss.key] = [waiter]
        task = asyncio.get_running_loop().create_task(self._get(miss))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _get(self, miss: ColdMissError) -> None:
        failure = None
        try:
            await self._fetch(miss)
        except TopicsError as error:
            failure = error.message
        except FileNotFoundError as error:
            # Dropped or rewritten meanwhile, most likely: the next look at the topic will not lead there again.
            failure = f"segment {miss.name} is not in the cold tier: {error}"
        except Exception:  # noqa: BLE001 — whoever waits is told in any case
            _log.exception("a segment could not be fetched", segment=miss.name)
            failure = f"segment {miss.name} cannot be read"
        finally:
            waiters = self._waiters.pop(miss.key)
        for waiter in waiters:
            self._on_fetched(waiter, failure)
