"""Input that this process holds for clients which have shown no key: heads and frames that are not whole."""

from __future__ import annotations

from typing import Protocol

from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget


class InputHolder(Protocol):
    """The transport of a connection."""

    def abort(self) -> None: ...


class UnadmittedInput:
    """The unadmitted input of all connections of one process. It cuts those that have held some for longest.

    Clients send a head in one go, so the oldest parts of heads belong to clients that do not mean to send the rest.
    """

    def __init__(self) -> None:
        self.budget = Budget(limits.UNADMITTED_INPUT)
        self._held_bytes: dict[InputHolder, int] = {}  # in the order in which they began to hold some

    def resize(self, holder: InputHolder, size_bytes: int) -> None:
        """Count `size_bytes` for this connection from now on. Idempotent."""
        self.budget.held_bytes += size_bytes - self._held_bytes.get(holder, 0)
        if size_bytes:
            self._held_bytes[holder] = size_bytes
        else:
            self._held_bytes.pop(holder, None)
        while self.budget.held_bytes > self.budget.most_bytes:
            oldest = next(iter(self._held_bytes))
            self.budget.held_bytes -= self._held_bytes.pop(oldest)
            oldest.abort()
