"""Reading from the cold tier for routers: in threads made for it, so that a tier that is slow, hangs or fails holds up
one router and nothing else of its shard.

Nobody waits here. Who finds that bytes are not at hand tries again later, as with anything a router has to wait for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Thread
from typing import Final, NamedTuple

from topics.storage.segment_store import SegmentStore

READ_BYTES: Final = 2 << 20
"""As much is read at once, or what is asked for if that is more: a router pages through a segment."""
KEPT_READS: Final = 8
IN_FLIGHT_MAX: Final = 4
"""A read that hangs keeps its thread, and its place; no other does."""
FAILURE_KEPT_MS: Final = 10_000
"""For who asked, whose next try is long due by then: its topic went, or has other segments. Asked later, it is read."""
FRESH_MS: Final = 1000
"""What came no longer ago is not read again for being damaged, however often it is asked for."""


class NotReadYetError(Exception):
    """The bytes are being read, or will be: ask again."""


class _ThreadRead:
    """`outcome` is set by its thread, once: the bytes, or why there are none."""

    __slots__ = ("length", "name", "offset", "outcome")

    def __init__(self, name: str, offset: int, length: int) -> None:
        self.name = name
        self.offset = offset
        self.length = length
        self.outcome: bytes | Exception | None = None


class _Kept(NamedTuple):
    """`since_ms`: when it came."""

    content: bytes
    since_ms: int


class ColdReads:
    """Of one shard. Reads of an object are named by where they begin. `monotonic_ms`: milliseconds."""

    def __init__(self, store: SegmentStore, monotonic_ms: Callable[[], int]) -> None:
        self._store = store
        self._monotonic_ms = monotonic_ms
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()
        self._failed: dict[tuple[str, int], tuple[Exception, int]] = {}
        """Why, and when that was seen; the oldest first."""
        self._reads: dict[tuple[str, int], _ThreadRead] = {}
        """Under way."""

    def get(self, name: str, start: int, end: int, data_bytes: int) -> memoryview:
        """Bytes start..end of an object of `data_bytes`. NotReadYetError as long as they are not here; OSError and
        ValueError when they cannot be read: asked again, it is tried again.
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
            # A daemon: the end of the process does not wait for a tier that hangs.
            Thread(target=self._run, args=(read,), name="cold-read", daemon=True).start()
        raise NotReadYetError

    def forget(self, name: str, at: int) -> None:
        """The byte there of an object is damaged. Unless it has just come, whoever asks next has it read anew, for it
        may have been restored.
        """
        old_ms = self._monotonic_ms() - FRESH_MS
        for key, (content, since_ms) in list(self._kept.items()):
            if key[0] == name and key[1] <= at < key[1] + len(content) and since_ms <= old_ms:
                del self._kept[key]

    def _take_finished(self) -> None:
        now_ms = self._monotonic_ms()
        for key, read in list(self._reads.items()):
            outcome = read.outcome
            if isinstance(outcome, bytes):
                self._kept[key] = _Kept(outcome, now_ms)
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
        """In a thread of its own."""
        try:
            read.outcome = self._store.read_range(read.name, read.offset, read.length)
        except Exception as error:  # noqa: BLE001 — a store of any kind fails in its own ways; each is for who asked
            read.outcome = error
