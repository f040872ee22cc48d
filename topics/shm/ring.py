"""A single-producer single-consumer ring of byte messages in shared memory, and the wake-up of its sleeping consumer.

     word 0     word 8      word 16 …
    +---------+-----------+---------------------------------------------+
    | written | consumed  | capacity_bytes of messages                  |
    +---------+-----------+---------------------------------------------+
      producer   consumer   each on its own cache line (64 bytes apart)

`written` and `consumed` are byte positions that only grow; position p is at byte p % capacity. A message is

    | len_bytes u64 | payload | padding to 8 |

and never wraps: if it does not fit before the end, a skip marker (len = SKIP) fills the rest. The producer stores the
payload first and `written` last, so a producer that is killed in between has published nothing. The consumer moves
`consumed` only when it is done with a message, so a consumer that is killed finds the message again in its next life.

`Wake` wakes a sleeping consumer, and costs no syscall while the consumer is awake. It is an eventfd and one word in
shared memory, "the owner is asleep", which only the owner writes. The owner sets the word, fences, checks its rings
once more and only then sleeps. A peer fills a ring, fences, and signals only if the word is set. Without a full fence
(`memory.py`: `FENCE_IS_FULL`) a wake-up may be lost, so the owner sleeps only shortly after recent traffic.

If the owner sleeps in an event loop, peers always signal, except while the word says LOOKING: then the owner looks at
its rings without sleeping.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

from topics.shm.memory import fence

HEADER_BYTES = 128
_WRITTEN = 0
_CONSUMED = 8
_SKIP = 2**64 - 1
_LOOKING = 2
"""Value of the word while an owner with an event loop looks at its rings and does not sleep."""


class Ring:
    """A ring from one process to another. `region` is its part of a shared object, filled with zeros when new."""

    def __init__(self, region: memoryview) -> None:
        self.capacity_bytes = (len(region) - HEADER_BYTES) & ~7
        assert self.capacity_bytes >= 1024
        self._words = region[: len(region) & ~7].cast("Q")
        self._data = region[HEADER_BYTES : HEADER_BYTES + self.capacity_bytes]
        self.message_max_bytes = self.capacity_bytes // 4
        """The longest message; longer ones go by reference."""

    # -- producer

    def push(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Append one message made of `parts`. Return False and write nothing when the ring is full."""
        length = sum(map(len, parts))
        assert 0 < length <= self.message_max_bytes, length
        words = self._words
        written = words[_WRITTEN]
        offset = written % self.capacity_bytes
        need = 8 + ((length + 7) & ~7)
        room_to_end = self.capacity_bytes - offset
        skipped = room_to_end if need > room_to_end else 0
        if written + skipped + need - words[_CONSUMED] > self.capacity_bytes:
            return False
        if skipped:
            words[(HEADER_BYTES + offset) >> 3] = _SKIP
            offset = 0
        words[(HEADER_BYTES + offset) >> 3] = length
        data = self._data
        at = offset + 8
        for part in parts:
            data[at : at + len(part)] = part
            at += len(part)
        words[_WRITTEN] = written + skipped + need
        return True

    # -- consumer

    def peek(self, position: int | None = None) -> Iterator[tuple[memoryview, int]]:
        """Yield (message, end) of what is not consumed, or behind `position`. `consume` makes a message invalid."""
        words = self._words
        at = words[_CONSUMED] if position is None else position
        end = words[_WRITTEN]
        capacity = self.capacity_bytes
        data = self._data
        while at < end:
            offset = at % capacity
            length = words[(HEADER_BYTES + offset) >> 3]
            if length == _SKIP:
                at += capacity - offset
                continue
            at += 8 + ((length + 7) & ~7)
            yield data[offset + 8 : offset + 8 + length], at

    def consume(self, position: int) -> None:
        """Free everything up to `position`."""
        self._words[_CONSUMED] = position

    @property
    def consumed(self) -> int:
        """The byte position of the oldest message that is not consumed."""
        return self._words[_CONSUMED]

    @property
    def written(self) -> int:
        """The byte position behind the newest message."""
        return self._words[_WRITTEN]

    @property
    def empty(self) -> bool:
        return self._words[_WRITTEN] == self._words[_CONSUMED]

    @property
    def pending_bytes(self) -> int:
        """The bytes that wait for the consumer."""
        return self._words[_WRITTEN] - self._words[_CONSUMED]


class Wake:
    """The wake-up of one process, created before the fork; `words[index]` is the owner's sleep flag."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self._index = index
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def signal(self) -> None:
        """Wake the owner if it sleeps. A peer calls it after it has filled a ring of the owner."""
        fence()
        if self._words[self._index]:
            self.signal_always()

    def signal_always(self) -> None:
        """Signal without a look at the flag, for an owner that sleeps in an event loop and keeps no flag."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # 2⁶⁴ − 2 signals wait already
            return

    def signal_unless_looking(self) -> None:
        """Signal an owner that sleeps in an event loop, unless it looks at its rings. A peer calls it after filling
        one.
        """
        fence()
        if self._words[self._index] != _LOOKING:
            self.signal_always()

    def begin_look(self) -> None:
        """Stop the signals of peers while the owner looks at its rings."""
        self._words[self._index] = _LOOKING

    def end_look(self) -> None:
        """Have peers signal again; the owner must check all its rings once more."""
        self._words[self._index] = 0
        fence()

    def announce_sleep(self) -> None:
        """Set the owner's flag; the owner must check its rings once more before `sleep`."""
        self._words[self._index] = 1
        fence()

    def awake(self) -> None:
        """Clear the owner's flag: peers stop signalling."""
        self._words[self._index] = 0

    def sleep(self, timeout_ms: int) -> None:
        """Sleep until a signal or the time-out, and drop the signal."""
        if self._poll.poll(timeout_ms):
            self.drain()

    def drain(self) -> None:
        """Drop the signals received so far."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # there was no signal
            return

    def close(self) -> None:
        """Close the eventfd; the end of the object does so too."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close
