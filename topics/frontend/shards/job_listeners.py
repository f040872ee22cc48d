"""The streams and claims that shards deal jobs to after their first answer."""

from __future__ import annotations

from collections.abc import Callable

from topics.shm.queue_messages import Dealt

JobListener = Callable[[Dealt], None]


class JobListeners:
    """The listeners of one frontend, by the number of their stream or claim, which no incarnation uses twice."""

    def __init__(self, incarnation: int) -> None:
        self._last_number = incarnation << 32
        self._listeners: dict[int, JobListener] = {}

    def __len__(self) -> int:
        return len(self._listeners)

    def new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def listen(self, number: int, listener: JobListener) -> None:
        """Give `listener` the jobs for this number, until `forget` or another `listen`."""
        self._listeners[number] = listener

    def forget(self, number: int, listener: JobListener) -> None:
        """Forget a listener, unless another one has taken its place. Idempotent."""
        if self._listeners.get(number) == listener:
            del self._listeners[number]

    def hand_over(self, dealt: Dealt) -> None:
        """Give jobs to their listener. Jobs without one stay leased until the shard takes them back."""
        listener = self._listeners.get(dealt.stream)
        if listener is not None:
            listener(dealt)
