"""Limits over several processes that do not ask each other (api §11): quotas of the service, and counts of API keys.

A limit bounds the sum of one word over several processes; each process writes only its own word. A process that claims
an amount *first* adds it to its own word, *then* sums up all words, and takes the amount back if the sum is too high.

A full barrier lies between the store and the loads, so at least one of two simultaneous claims sees the other, and the
sum of all grants never exceeds the limit. If there is room for only one of the two, both may be refused.

`Quota` counts in a field of the processes' cells. `KeyCounts` counts event streams, and requests that are being served,
by API key:

    block of frontend 0 | block of frontend 1 | …        each written by its frontend alone

    block    | version u64 × 1, 3 unused | slot 0 | slot 1 | …          SLOTS of them
    slot     | first 16 bytes of the key's digest u64 × 2 | streams u64 | requests u64 |

A frontend gives a key any slot of its block that counts nothing, and lets `version` grow. When `version` has grown, the
other frontends search the block again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from topics.core.errors import TopicsError, throttled
from topics.shm.control import Cell
from topics.shm.memory import fence


class Quota:
    """A limit of `most` (0: none) on the sum of `field` over `every` cell; this process claims with its `own` cell."""

    def __init__(self, limit: str, most: int, field: str, own: Cell, every: Sequence[Cell]) -> None:
        self.most = most
        self._limit = limit
        self._field = field
        self._own = own
        self._every = every

    def claim(self, amount: int = 1) -> bool:
        """Take `amount` more. Return False and take nothing if there is no room for it."""
        if not self.most:
            return True
        self._own.add(self._field, amount)
        fence()
        if sum([cell.get(self._field) for cell in self._every]) <= self.most:
            return True
        self._own.add(self._field, -amount)
        return False

    def require(self, amount: int) -> None:
        """Raise `throttled` if there is no room for `amount`, and take nothing."""
        if self.most and amount and sum([cell.get(self._field) for cell in self._every]) + amount > self.most:
            raise self.reached()

    def release(self, amount: int = 1) -> None:
        """Give back a claimed amount."""
        if self.most:
            self._own.add(self._field, -amount)

    def reached(self) -> TopicsError:
        """Return the error for a claim that was not granted."""
        return quota_reached(self._limit, self.most)


def quota_reached(limit: str, most: int) -> TopicsError:
    """Return the error for a request that would exceed a quota of the service."""
    return throttled(
        f"the service may have at most {most} {limit.replace('_', ' ')}; remove some, or raise"
        f" TOPICS_MAX_{limit.upper()}",
        limit=f"max_{limit}",
        max=most,
    )


SLOTS: Final = 1024
_SLOT_WORDS: Final = 4
_BLOCK_WORDS: Final = (SLOTS + 1) * _SLOT_WORDS


class Counted(IntEnum):
    """The words of a slot that count."""

    STREAMS = 2
    REQUESTS = 3


class KeyCounts:
    """The counts of all frontends, as the frontend `own` reads and writes them."""

    def __init__(self, words: memoryview, frontends: int, own: int) -> None:
        """Clear the counts of a former life of this frontend."""
        self._words = words
        self._own = own * _BLOCK_WORDS
        self._slots: dict[bytes, int] = {}
        """The first word of each key's slot in our block, by the key's digest."""
        self._others = [_Other(words, block * _BLOCK_WORDS) for block in range(frontends) if block != own]
        for word in range(self._own + 1, self._own + _BLOCK_WORDS):
            words[word] = 0
        words[self._own] += 1

    @staticmethod
    def size_bytes(frontends: int) -> int:
        return frontends * _BLOCK_WORDS * 8

    def claim(self, digest: bytes, what: Counted, most: int) -> bool:
        """Take one more for the key of this digest. Return False and take nothing if it has `most`."""
        slot = self._slots.get(digest)
        if slot is None:
            slot = self._new_slot(digest)
            if slot is None:
                return False
        words = self._words
        words[slot + what] += 1
        fence()
        if words[slot + what] + sum([other.count(digest, what) for other in self._others]) <= most:
            return True
        words[slot + what] -= 1
        return False

    def release(self, digest: bytes, what: Counted) -> None:
        """Give back a claimed one."""
        self._words[self._slots[digest] + what] -= 1

    def _new_slot(self, digest: bytes) -> int | None:
        """Return a slot for a new key; None when SLOTS other keys are busy here."""
        words = self._words
        first = self._own + _SLOT_WORDS
        if len(self._slots) >= SLOTS:
            former = next((d for d, at in self._slots.items() if not any(words[at + what] for what in Counted)), None)
            if former is None:
                return None
            slot = self._slots.pop(former)
        else:
            slot = first + len(self._slots) * _SLOT_WORDS
        self._slots[digest] = slot
        words[slot], words[slot + 1] = _identity(digest)
        words[self._own] += 1
        return slot


class _Other:
    """The block of another frontend."""

    def __init__(self, words: memoryview, block: int) -> None:
        self._words = words
        self._block = block
        self._version = -1
        self._slots: dict[tuple[int, int], int] = {}

    def count(self, digest: bytes, what: Counted) -> int:
        words = self._words
        if words[self._block] != self._version:
            self._version = words[self._block]
            first = self._block + _SLOT_WORDS
            entries = words[first : self._block + _BLOCK_WORDS].tolist()
            identities = zip(entries[::_SLOT_WORDS], entries[1::_SLOT_WORDS], strict=True)
            self._slots = {known: first + at * _SLOT_WORDS for at, known in enumerate(identities) if known != (0, 0)}
        identity = _identity(digest)
        slot = self._slots.get(identity)
        if slot is None or (words[slot], words[slot + 1]) != identity:
            return 0
        count: int = words[slot + what]
        return count


def _identity(digest: bytes) -> tuple[int, int]:
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
