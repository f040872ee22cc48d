"""Who waits for jobs of one queue at its shard: `/work` streams, and claims that gather in a window (api §9)."""

from __future__ import annotations

from typing import NamedTuple

from topics.core.dealing import deal
from topics.core.jobs import Holder, Now
from topics.core.leases import Leased, Leases


class Worker:
    """A stream that is to have `most` jobs at any time, or (`once`) a claim of at most that many."""

    __slots__ = ("lease_ms", "most", "node", "once", "where")

    def __init__(self, where: Holder, node: str, most: int, lease_ms: int | None, once: bool) -> None:
        self.where = where
        self.node = node
        self.most = most
        self.lease_ms = lease_ms
        self.once = once

    @property
    def holder(self) -> Holder | None:
        """Whose leases end with the connection; a claim's do not."""
        return None if self.once else self.where


class Hand(NamedTuple):
    """What one of them was dealt."""

    worker: Worker
    leased: Leased
    dead: list[int]


class Workers:
    """Of one queue; in turn: who got something goes to the end."""

    def __init__(self) -> None:
        self._workers: dict[Holder, Worker] = {}
        self.window_ends_ms: int | None = None
        """Monotonic; None while nobody waits for the end of a window."""

    def __len__(self) -> int:
        return len(self._workers)

    def put(self, worker: Worker) -> None:
        """One more, or another `most` of one that is there."""
        self._workers[worker.where] = worker

    def remove(self, where: Holder) -> None:
        self._workers.pop(where, None)

    def remove_frontend(self, frontend: int) -> None:
        """That process is gone, and all that it had."""
        for where in [where for where in self._workers if where[0] == frontend]:
            del self._workers[where]

    def clear(self) -> list[Worker]:
        """The queue is gone; returns whom to tell."""
        workers, self._workers = list(self._workers.values()), {}
        return workers

    def may_deal(self, ready: int, jitter_ms: int, now: Now) -> bool:
        """Whether it is time to deal. With a window, it opens with the first who could have something (a claim wants
        an answer in any case) and everybody who comes before its end takes part.
        """
        if self.window_ends_ms is None:
            claims = any(worker.once for worker in self._workers.values())
            if not claims and not ready:
                return False
            if not jitter_ms:
                return True
            self.window_ends_ms = now.mono_ms + jitter_ms
        return now.mono_ms >= self.window_ends_ms

    def deal(self, leases: Leases, lease_ms: int, deliveries_max: int, now: Now) -> list[Hand]:
        """Leases what is ready among all of them; claims are over then, whatever they got."""
        self.window_ends_ms = None
        workers = list(self._workers.values())
        wanted = [worker.most - (0 if worker.once else leases.held_by(worker.where)) for worker in workers]
        wanted = [max(0, count) for count in wanted]
        takers = [(worker, count) for worker, count in zip(workers, wanted, strict=True) if count or worker.once]
        if not takers:
            return []
        seqs, dead = leases.take(sum(count for _, count in takers), deliveries_max, takers[0][0].where[0], now)
        hands = []
        for (worker, _), hand in zip(takers, deal(seqs, [count for _, count in takers]), strict=True):
            if hand or dead or worker.once:
                leased = leases.lease(hand, worker.node, worker.lease_ms or lease_ms, now, worker.holder)
                hands.append(Hand(worker, leased, dead))
                dead = []
                del self._workers[worker.where]
                if not worker.once:
                    self._workers[worker.where] = worker
        return hands
