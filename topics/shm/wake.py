"""Waking a process that sleeps, without a syscall when it does not.

`Wake` is an eventfd plus one word in shared memory, "the owner is asleep", written by the owner alone.
The owner sets it, fences, looks at its rings once more and only then sleeps; a peer fills a ring, fences and
signals only if the word is set. On x86 the fence is real; elsewhere a wake-up may be lost, so there the owner
bounds its sleep while there was traffic lately (`shm/memory.py`: `FENCE_IS_FULL`).
"""

from __future__ import annotations

import os
import select

from topics.shm.memory import fence


class Wake:
    """Made before the fork; `words[index]` is the owner's sleep flag."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self._index = index
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def signal(self) -> None:
        """By a peer, after it put something where the owner looks."""
        fence()
        if self._words[self._index]:
            self.signal_always()

    def signal_always(self) -> None:
        """By a peer, for an owner that sleeps in an event loop and keeps no flag."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:  # signalled 2⁶⁴ − 2 times and not yet seen: that will do
            return

    def announce_sleep(self) -> None:
        """By the owner; it must look at its rings once more before `sleep`."""
        self._words[self._index] = 1
        fence()

    def awake(self) -> None:
        """By the owner: stop signalling me."""
        self._words[self._index] = 0

    def sleep(self, timeout_ms: int) -> None:
        """By the owner: until a signal or the time-out; consumes the signal."""
        if self._poll.poll(timeout_ms):
            self.drain()

    def drain(self) -> None:
        """By the owner: forget signals received so far."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # none
            return

    def close(self) -> None:
        """Also when nobody has it any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close
