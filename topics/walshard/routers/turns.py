"""Whose turn it is among the dests of routers on one shard."""

from __future__ import annotations


class FeedTurns:
    """By topic id of the dest: those that may have something to copy, first come first served, and those that had to
    wait and try again at a time of their own (monotonic ms), or when somebody says so.
    """

    def __init__(self) -> None:
        self._ready: dict[int, None] = {}
        self._waiting: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether it is anybody's turn."""
        return bool(self._ready)

    def __contains__(self, dest_id: int) -> bool:
        return dest_id in self._ready

    @property
    def anybody_waits(self) -> bool:
        return bool(self._waiting)

    def give(self, dest_id: int) -> None:
        """It may have something to copy, or to copy again."""
        self._waiting.pop(dest_id, None)
        self._ready[dest_id] = None

    def wake(self, dest_id: int) -> None:
        """What it waits for may be there, if it does."""
        if dest_id in self._waiting:
            self.give(dest_id)

    def wait(self, dest_id: int, until_ms: int) -> None:
        """It cannot go on before."""
        self._ready.pop(dest_id, None)
        self._waiting[dest_id] = until_ms

    def look(self, now_ms: int) -> None:
        """Those whose time has come have a turn again."""
        for dest_id in [dest_id for dest_id, until_ms in self._waiting.items() if until_ms <= now_ms]:
            self.give(dest_id)

    def take(self) -> int:
        """Whose turn it is; somebody's it must be."""
        dest_id = next(iter(self._ready))
        del self._ready[dest_id]
        return dest_id
