"""Clients that do not read what was sent to them: since when, and which of them are cut. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Final, Generic, TypeVar

import msgspec

from topics.frontend.entry.budget import Budget

STALL_MAX_MS: Final = 30_000
"""A client that reads nothing for so long is given up (api §7)."""
STALL_CUT_MS: Final = 2_000
"""A client that reads nothing for so long is cut when others need the memory that it holds."""


class ReadProgress(msgspec.Struct, eq=False):
    """The last progress of one client that is behind. `progress_bytes` is a counter that rises as it reads."""

    progress_bytes: int
    since_ms: int
    held_bytes: int = 0

    def timed_out(self, progress_bytes: int, now_ms: int) -> bool:
        """Note the client's progress, and return True if it has read nothing for STALL_MAX_MS."""
        if progress_bytes > self.progress_bytes:
            self.since_ms = now_ms
        self.progress_bytes = progress_bytes
        return now_ms - self.since_ms >= STALL_MAX_MS


ClientT = TypeVar("ClientT")
Measure = Callable[[ClientT], int]


class StalledClients(Generic[ClientT]):
    """All stalled clients. The bytes that are kept for them (`buffered_bytes(client)`) count in `budget`.
    `progress_bytes(client)` rises as it reads.
    """

    def __init__(self, budget: Budget, buffered_bytes: Measure[ClientT], progress_bytes: Measure[ClientT]) -> None:
        self._budget = budget
        self._buffered_bytes = buffered_bytes
        self._progress_bytes = progress_bytes
        self._clients: dict[ClientT, ReadProgress] = {}

    def add(self, client: ClientT, now_ms: int) -> None:
        """Count a client that has fallen behind. Idempotent."""
        if client not in self._clients:
            held_bytes = self._buffered_bytes(client)
            self._clients[client] = ReadProgress(self._progress_bytes(client), now_ms, held_bytes)
            self._budget.held_bytes += held_bytes

    def remove(self, client: ClientT) -> None:
        """Forget a client (caught up or closed). Idempotent. The budget's owner then admits those that wait."""
        progress = self._clients.pop(client, None)
        if progress is not None:
            self._budget.held_bytes -= progress.held_bytes

    def timed_out(self, now_ms: int) -> list[ClientT]:
        """Return the clients that have read nothing for STALL_MAX_MS. Progress is noticed here: call it often."""
        found = []
        for client, progress in self._clients.items():
            held_bytes = self._buffered_bytes(client)
            self._budget.held_bytes += held_bytes - progress.held_bytes
            progress.held_bytes = held_bytes
            if progress.timed_out(self._progress_bytes(client), now_ms):
                found.append(client)
        return found

    def to_cut(self, excess_bytes: int, now_ms: int, stalled_ms: int | None = None) -> list[ClientT]:
        """Return the clients whose end frees `excess_bytes`, longest without progress first. Fewer if not enough have
        read nothing for `stalled_ms` (STALL_CUT_MS).
        """
        last_ms = now_ms - (STALL_CUT_MS if stalled_ms is None else stalled_ms)
        holders = [(progress.since_ms, client) for client, progress in self._clients.items() if progress.held_bytes]
        found = []
        for since_ms, client in sorted(holders, key=itemgetter(0)):
            if excess_bytes <= 0 or since_ms > last_ms:
                break
            found.append(client)
            excess_bytes -= self._clients[client].held_bytes
        return found
