"""Reads from the cold tier, which may be slow, hang or fail, without holding up anything else.

A page is made on the event loop from bytes in memory. If it needs bytes that only the cold tier has, `extent` raises
ColdMissError. A caller that can wait then awaits `fetch` and makes the page again. Fetched blocks are kept for a while.
Sequential readers fetch long runs of blocks, each once. If there is room the next runs are fetched in advance, since a
bucket takes a while to answer. Other readers fetch single blocks.
Each read has its own thread, and there are few. One that hangs keeps its place until it returns, long after its readers
were told so. The end of the process waits for none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Final, Generic, TypeVar

from topics.core.clock import Clock
from topics.core.errors import TopicsError, storage_unavailable
from topics.frontend.entry import limits
from topics.log import get_logger
from topics.storage.segment_store import SegmentSource

BLOCK_BYTES: Final = 1 << 16
RUN_BYTES: Final = 1 << 20
"""Bytes that a sequential reader fetches at once. `AHEAD_RUNS` such runs are fetched in advance."""
AHEAD_RUNS: Final = 4
CACHE_BYTES: Final = 32 << 20
"""Size of the cache of fetched blocks. It is no less than the longest page needs at once."""
IN_FLIGHT_MAX: Final = 8
PREFETCH_MAX: Final = IN_FLIGHT_MAX // 2
"""Nothing is fetched in advance while so many reads are under way: a tier that hangs leaves places for readers."""
LAST_MAX: Final = 256
"""Objects for which the place of the last read is remembered."""
FRESH_MS: Final = 1000
"""Age up to which a damaged block is not read again, however many readers meet the damage."""


class ColdMissError(TopicsError):
    """Bytes start..end of an object are not in memory. It is the answer of a request that cannot wait for them."""

    def __init__(self, name: str, start: int, end: int, data_bytes: int) -> None:
        super().__init__(
            "storage_unavailable",
            f"segment {name} is in the cold tier and has to be fetched; ask again",
            {"segment": name},
        )
        self.name = name
        self.start = start
        self.end = end
        self.data_bytes = data_bytes

    @property
    def key(self) -> tuple[str, int, int]:
        """A key that is equal for all misses of the same blocks."""
        return self.name, self.start // BLOCK_BYTES, (self.end - 1) // BLOCK_BYTES


@dataclass(eq=False)
class _RangedRead:
    """One read of neighbouring blocks, `start..end` in bytes. `done` gets None, or the error."""

    name: str
    blocks: range
    start: int
    end: int
    done: asyncio.Future[Exception | None]
    waiters: int = 0


class ColdTier:
    """The reads of one frontend from the cold tier, and the blocks it keeps. All calls are on one event loop."""

    def __init__(self, store: SegmentSource, clock: Clock, timeout_ms: int, cache_bytes: int = CACHE_BYTES) -> None:
        """`timeout_ms` is the longest that a reader waits for the tier."""
        self._store = store
        self._clock = clock
        self.timeout_ms = timeout_ms
        self._blocks: OrderedDict[tuple[str, int], tuple[bytes, int]] = OrderedDict()
        """Fetched blocks, each with the monotonic ms at which it was read."""
        self._blocks_max = cache_bytes // BLOCK_BYTES
        self._unread: set[tuple[str, int]] = set()
        """Fetched blocks that nobody has read yet."""
        self._reads: dict[tuple[str, int], _RangedRead] = {}
        """Reads that are waiting or under way, by each of their blocks."""
        self._last: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Start and end of the last read of each object, the oldest first."""
        self._waiting: deque[_RangedRead] = deque()
        self._in_flight = 0

    def extent(
        self, name: str, start: int, end: int, data_bytes: int, following: Iterable[tuple[str, int]] = ()
    ) -> tuple[bytes, int]:
        """Return bytes that include start..end of an object of `data_bytes`, and their start. Raise ColdMissError.

        A reader that begins within the last read of the object, or at its end, counts as sequential. The next runs are
        then fetched in advance; behind the end of this object, those of the `following` ones (names and sizes).
        """
        pieces = []
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            block = self._blocks.get((name, number))
            if block is None:
                raise ColdMissError(name, start, end, data_bytes)
            pieces.append(block[0])
        is_sequential = self._is_sequential(name, start)
        for number in range(first, last + 1):
            self._unread.discard((name, number))
            if not is_sequential:  # else it goes before what is yet to be read
                self._blocks.move_to_end((name, number))
        self._last[name] = start, end
        self._last.move_to_end(name)
        if is_sequential:
            self._read_ahead(name, last + 1, data_bytes, following)
        while len(self._last) > LAST_MAX:
            self._last.popitem(last=False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), first * BLOCK_BYTES

    def forget(self, name: str) -> bool:
        """Drop blocks of a damaged object that are older than FRESH_MS. True: there were some, so read it again."""
        old_ms = self._clock.monotonic_ms() - FRESH_MS
        old = [key for key, (_data, read_ms) in self._blocks.items() if key[0] == name and read_ms <= old_ms]
        for key in old:
            del self._blocks[key]
            self._unread.discard(key)
        return bool(old)

    async def fetch(self, miss: ColdMissError) -> None:
        """Fetch missing bytes. Raise FileNotFoundError, or `storage_unavailable` if the tier fails or is too slow."""
        name = miss.name
        wanted = range(miss.start // BLOCK_BYTES, (miss.end - 1) // BLOCK_BYTES + 1)
        absent = [n for n in wanted if (name, n) not in self._blocks and (name, n) not in self._reads]
        if absent:
            end = absent[-1] + 1
            if self._is_sequential(name, miss.start):
                end = self._run_behind(name, end - 1, miss.data_bytes)
            self._begin(name, range(absent[0], end), miss.data_bytes)
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

    def _is_sequential(self, name: str, start: int) -> bool:
        last_start, last_end = self._last.get(name, (start, start))
        return last_start < start <= last_end

    def _run_behind(self, name: str, first: int, data_bytes: int) -> int:
        """Return the end of the absent blocks from `first` on: at a block that is fetched, or at the end of its run."""
        in_run, blocks = RUN_BYTES // BLOCK_BYTES, -(-data_bytes // BLOCK_BYTES)
        end = first + 1
        while end % in_run and end < blocks and (name, end) not in self._blocks and (name, end) not in self._reads:
            end += 1
        return end

    def _read_ahead(self, name: str, number: int, data_bytes: int, following: Iterable[tuple[str, int]]) -> None:
        """Fetch blocks from `number` on in advance, unless others wait. If that fails, the reader will ask for them."""
        left = AHEAD_RUNS * (RUN_BYTES // BLOCK_BYTES)
        if self._blocks_max < IN_FLIGHT_MAX * left // AHEAD_RUNS or len(self._unread) >= self._blocks_max // 2:
            return  # the cache would lose what its readers are about to read
        behind = iter(following)
        while left > 0:
            if number * BLOCK_BYTES >= data_bytes:
                found = next(behind, None)
                if found is None:
                    return
                (name, data_bytes), number, left = found, 0, left - 1
                self._last.setdefault(name, (-1, 0))
            elif (name, number) in self._blocks or (name, number) in self._reads:
                number, left = number + 1, left - 1
            elif self._waiting or self._in_flight >= PREFETCH_MAX:
                return
            else:
                end = self._run_behind(name, number, data_bytes)
                self._begin(name, range(number, end), data_bytes)
                number, left = end, left - (end - number)

    def _begin(self, name: str, blocks: range, data_bytes: int) -> None:
        most = limits.COLD_READS.most_count
        if len(self._waiting) >= most:
            raise _unavailable(name, f"{most} reads are waiting for it already")
        start, end = blocks.start * BLOCK_BYTES, min(blocks.stop * BLOCK_BYTES, data_bytes)
        read = _RangedRead(name, blocks, start, end, asyncio.get_running_loop().create_future())
        for number in blocks:
            self._reads.setdefault((name, number), read)
        self._waiting.append(read)
        self._start_some()

    def _start_some(self) -> None:
        while self._waiting and self._in_flight < IN_FLIGHT_MAX:
            read = self._waiting.popleft()
            self._in_flight += 1
            # A daemon, so that the end of the process does not wait for a tier that hangs.
            thread = Thread(target=self._run, args=(read,), name="cold-read", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                # Not within this call: `fetch` has yet to find the read, and `_finish` starts others.
                read.done.get_loop().call_soon(self._finish, read, b"", error)

    def _run(self, read: _RangedRead) -> None:
        """Read from the store. Runs in a thread."""
        data, error = b"", None
        try:
            data = self._store.read_range(read.name, read.start, read.end - read.start)
        except Exception as failure:  # noqa: BLE001 — each kind of store has its own errors; all go to the readers
            error = failure.with_traceback(None)  # it would name this call, which would name it
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            read.done.get_loop().call_soon_threadsafe(self._finish, read, data, error)

    def _finish(self, read: _RangedRead, data: bytes, error: Exception | None) -> None:
        self._in_flight -= 1
        self._forget(read)
        if error is None:
            now_ms = self._clock.monotonic_ms()
            for at, number in enumerate(read.blocks):
                key = read.name, number
                self._blocks[key] = data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], now_ms
                self._blocks.move_to_end(key)
                self._unread.add(key)
            while len(self._blocks) > max(self._blocks_max, len(read.blocks)):
                self._unread.discard(self._blocks.popitem(last=False)[0])
        read.done.set_result(error)
        self._start_some()

    def _forget(self, read: _RangedRead) -> None:
        for number in read.blocks:
            if self._reads.get((read.name, number)) is read:
                del self._reads[read.name, number]


def _unavailable(name: str, reason: str) -> TopicsError:
    return storage_unavailable(
        f"segment {name} is in the cold tier, which cannot be read now: {reason}", segment=name, reason=reason
    )


Waiter = TypeVar("Waiter")

log = get_logger()


class ColdWaits(Generic[Waiter]):
    """The waiters for fetches. Those that miss the same blocks wait for one fetch. All calls are on one event loop."""

    def __init__(
        self, fetch: Callable[[ColdMissError], Awaitable[None]], on_fetched: Callable[[Waiter, str | None], None]
    ) -> None:
        """`on_fetched(waiter, failure)` is called once for each waiter. `failure` is a message, or None."""
        self._fetch = fetch
        self._on_fetched = on_fetched
        self._waiters: dict[tuple[str, int, int], list[Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def wait(self, miss: ColdMissError, waiter: Waiter) -> None:
        """Fetch the missing bytes for a waiter, unless that is under way."""
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
            # Most likely it was dropped or rewritten in the meantime. A new view of the topic does not name it then.
            failure = f"segment {miss.name} is not in the cold tier: {error}"
        except Exception:  # the waiters are called in any case
            log.exception("a segment could not be fetched", segment=miss.name)
            failure = f"segment {miss.name} cannot be read"
        finally:
            waiters = self._waiters.pop(miss.key)
        for waiter in waiters:
            self._on_fetched(waiter, failure)
