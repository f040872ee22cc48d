"""Remembering keyed writes, so that a retry answers the first outcome (api §0.9)."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """What a keyed write committed."""

    first_seq: int
    records: int
    ts: int


class IdempotencyWindow:
    """Keys of the last `window_ms`, oldest first: commit times never decrease, so expiry is from the front."""

    __slots__ = ("_outcomes",)

    def __init__(self) -> None:
        self._outcomes: dict[bytes, Outcome] = {}

    def find(self, key: bytes, now_ms: int, window_ms: int) -> Outcome | None:
        """The outcome of this key, if it is not older than the window."""
        self._expire(now_ms, window_ms)
        return self._outcomes.get(key)

    def remember(self, key: bytes, outcome: Outcome) -> None:
        """Called once the write is committed; a key that expired and came again moves to the end."""
        self._outcomes.pop(key, None)
        self._outcomes[key] = outcome

    def unexpired(self, now_ms: int, window_ms: int) -> list[tuple[bytes, int, int, int]]:
        """(key, first_seq, records, ts) of all that may still be asked for, oldest first."""
        self._expire(now_ms, window_ms)
        return [(key, *outcome) for key, outcome in self._outcomes.items()]

    def _expire(self, now_ms: int, window_ms: int) -> None:
        outcomes = self._outcomes
        expired = []
        for key, outcome in outcomes.items():
            if now_ms - outcome.ts <= window_ms:
                break
            expired.append(key)
        for key in expired:
            del outcomes[key]

    def __len__(self) -> int:
        return len(self._outcomes)
