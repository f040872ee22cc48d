"""Reads from the cold tier for routers, each in a thread of its own. A tier that is slow, hangs or fails holds up one
router, and nothing else of its shard.

Nothing here blocks. A router whose bytes are not read yet tries again later, as with anything it has to wait for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Thread
from typing import Final

import msgspec

from topics.storage.segment_store import SegmentSource

READ_BYTES: Final = 2 << 20
"""Bytes that one read takes, unless more are asked for: a router will page through the segment."""
KEPT_READS: Final = 8
IN_FLIGHT_MAX: Final = 4
"""Reads under way at most. A read that hangs keeps its thread and its place."""
FAILURE_KEPT_MS: Final = 10_000
"""Time for which a failure is kept. If no router asks meanwhile, none needs the bytes now; a later one reads again."""
FRESH_MS: Final = 1000
"""Age up to which bytes that turn out to be damaged are not read again."""


class UnknownError(Exception):
    """No answer yet: a shard recovers, a topic has just changed, or bytes are being read. The caller asks again."""


class _ThreadRead(msgspec.Struct):
    """One read. Its thread sets `outcome` once: the bytes, or why there are none."""

    name: str
    offset: int
    length: int
    outcome: bytes | Exception | None = None


class ColdReads:
    """The cold reads of one shard, by object and offset. It owns their threads, and keeps the last few results."""

    def __init__(self, store: SegmentSource, monotonic_ms: Callable[[], int]) -> None:
        self._store = store
        self._monotonic_ms = monotonic_ms
        self._kept: OrderedDict[tuple[str, int], tuple[bytes, int]] = OrderedDict()
        """Bytes that were read, and the monotonic ms at which they came; the latest used last."""
        self._failed: dict[tuple[str, int], tuple[Exception, int]] = {}
        """Errors of failed reads, and the monotonic ms at which they came; the oldest first."""
        self._reads: dict[tuple[str, int], _ThreadRead] = {}

    def get(self, name: str, start: int, end: int, data_bytes: int) -> memoryview:
        """Return bytes start..end of an object. Raise UnknownError until they are read, OSError or ValueError if they
        cannot be. `data_bytes` is the object's length.
        """
        self._take_finished()
        for (kept_name, offset), (content, _) in self._kept.items():
            if kept_name == name and offset <= start and end <= offset + len(content):
                self._kept.move_to_end((kept_name, offset))
                return memoryview(content)[start - offset : end - offset]
        key = (name, start)
        failure, _ = self._failed.pop(key, (None, 0))
        if isinstance(failure, OSError):
            raise failure
        if failure is not None:
            raise ValueError(f"segment {name} cannot be read from the cold tier: {failure}") from failure
        if key not in self._reads and len(self._reads) < IN_FLIGHT_MAX:
            length = min(data_bytes - start, max(end - start, READ_BYTES))
            read = self._reads[key] = _ThreadRead(name, start, length)
            # The process must not wait for a hanging tier when it ends, so the thread is a daemon.
            Thread(target=self._run, args=(read,), name="cold-read", daemon=True).start()
        raise UnknownError

    def forget(self, name: str, at: int) -> None:
        """Have a damaged part of an object read again, since it may be restored, unless its bytes have just come."""
        old_ms = self._monotonic_ms() - FRESH_MS
        for key, (content, since_ms) in list(self._kept.items()):
            if key[0] == name and key[1] <= at < key[1] + len(content) and since_ms <= old_ms:
                del self._kept[key]

    def _take_finished(self) -> None:
        now_ms = self._monotonic_ms()
        for key, read in list(self._reads.items()):
            outcome = read.outcome
            if isinstance(outcome, bytes):
                self._kept[key] = outcome, now_ms
                while len(self._kept) > KEPT_READS:
                    self._kept.popitem(last=False)
            elif outcome is not None:
                self._failed[key] = (outcome, now_ms)
            else:
                continue
            del self._reads[key]
        while self._failed:
            key, (_, since_ms) = next(iter(self._failed.items()))
            if now_ms - since_ms < FAILURE_KEPT_MS:
                break
            del self._failed[key]

    def _run(self, read: _ThreadRead) -> None:
        """Read, in the read's own thread."""
        try:
            read.outcome = self._store.read_range(read.name, read.offset, read.length)
        except Exception as error:  # noqa: BLE001 — each kind of store fails in its own ways; `get` raises what failed
            read.outcome = error
