"""The workers that wait for jobs of a queue: `/work` streams, and claims that gather in a window (api §9)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import msgspec

from topics.core.config import TopicConfig
from topics.core.job import Holder, Now, deal
from topics.core.leases import LeasedSeqs, Leases
from topics.core.topic import Topic
from topics.shm.queue_messages import Dealt


class Worker(msgspec.Struct, eq=False, frozen=True):
    """A stream that holds up to `most` jobs at any time, or (`once`) a waiting claim of up to `most` jobs."""

    where: Holder
    node: str
    most: int
    lease_ms: int | None
    once: bool

    @property
    def holder(self) -> Holder | None:
        """The stream whose end ends the worker's leases; None for a claim."""
        return None if self.once else self.where


class Workers:
    """The workers of one queue. They take turns: a worker that got jobs goes to the end.

    The cost of dealing depends on the jobs dealt and the claims answered, not on the number of open streams: `deal`
    looks only at workers that may have room, and at no more of them than there are jobs.
    """

    def __init__(self) -> None:
        self._workers: dict[Holder, Worker] = {}
        self._hungry: OrderedDict[Holder, Worker] = OrderedDict()
        """Workers that may have room, in the order of turns. A plain dict would find its front in O(n) after removals.
        """
        self._claims: dict[Holder, Worker] = {}
        self.window_ends_ms: int | None = None
        """Monotonic ms at which the open window ends; None without one."""
        self.held_since_ms: int | None = None
        """Monotonic ms since when jobs are held back from streams."""

    def __len__(self) -> int:
        return len(self._workers)

    def put(self, worker: Worker) -> None:
        """Add a worker, or change the `most` of a known one."""
        self._workers[worker.where] = self._hungry[worker.where] = worker
        if worker.once:
            self._claims[worker.where] = worker

    def have_room(self, holders: Iterable[Holder]) -> None:
        """Note that leases of these holders ended, so that they may have room."""
        for where in holders:
            worker = self._workers.get(where)
            if worker is not None:
                self._hungry.setdefault(where, worker)

    def remove(self, where: Holder) -> None:
        """Forget a worker."""
        for known in (self._workers, self._hungry, self._claims):
            known.pop(where, None)

    def remove_frontend(self, frontend: int) -> None:
        """Forget the workers of a frontend."""
        for where in [where for where in self._workers if where[0] == frontend]:
            self.remove(where)

    def clear(self) -> list[Worker]:
        """Forget all workers, and return them."""
        workers = list(self._workers.values())
        for known in (self._workers, self._hungry, self._claims):
            known.clear()
        return workers

    def hold(self, patience_ms: int, ready: int, now: Now) -> bool:
        """Return whether ready jobs are held back from streams, for `patience_ms` at most."""
        if not patience_ms or not ready or not self._hungry:
            self.held_since_ms = None
            return False
        if self.held_since_ms is None:
            self.held_since_ms = now.mono_ms
        return now.mono_ms - self.held_since_ms < patience_ms

    def may_deal(self, ready: int, jitter_ms: int, now: Now, held: bool = False) -> bool:
        """Return whether it is time to deal. The first worker that could get a job, or any claim, opens a window of
        `jitter_ms`; all workers that come before its end take part. With `held`, streams neither open it nor take part.
        """
        if self.window_ends_ms is None:
            if not self._claims and not (ready and self._hungry and not held):
                return False
            if not jitter_ms:
                return True
            self.window_ends_ms = now.mono_ms + jitter_ms
        return now.mono_ms >= self.window_ends_ms

    def deal(
        self, leases: Leases, lease_ms: int, deliveries_max: int, now: Now, held: bool = False
    ) -> list[tuple[Worker, LeasedSeqs, list[int]]]:
        """Lease ready jobs to all workers, or only to claims if streams are `held`. Forget the claims, whatever they
        got. Return (worker, its leased jobs, dead jobs that its frontend has to move) for each that gets something.
        """
        self.window_ends_ms = None
        if not held:
            self.held_since_ms = None
        takers = self._takers(leases, held)
        if not takers:
            return []
        wanted = list(takers.values())
        seqs, dead = leases.take(sum(wanted), deliveries_max, next(iter(takers)).where[0], now)
        hands = []
        for (worker, most), hand in zip(takers.items(), deal(seqs, wanted), strict=True):
            if hand or dead or worker.once:
                leased = leases.lease(hand, worker.node, worker.lease_ms or lease_ms, now, worker.holder)
                hands.append((worker, leased, dead))
                dead = []
            if worker.once:
                self.remove(worker.where)
            elif len(hand) == most:
                del self._hungry[worker.where]
            elif hand:
                self._hungry.move_to_end(worker.where)
        return hands

    def _takers(self, leases: Leases, held: bool) -> dict[Worker, int]:
        """Return how many jobs each taking worker has room for, in the order of turns. All claims are among them."""
        takers: dict[Worker, int] = {}
        full = []
        ready = leases.ready
        for where, worker in () if held else self._hungry.items():
            if len(takers) >= ready:
                break
            most = worker.most if worker.once else worker.most - leases.held_by(where)
            if most > 0:
                takers[worker] = most
            else:
                full.append(where)
        for where in full:
            del self._hungry[where]
        for worker in self._claims.values():
            takers.setdefault(worker, worker.most)
        return takers


def deliveries_max(config: TopicConfig) -> int:
    """Return how often a job is delivered at most; 0 (no bound) for a queue without a dead-letter topic."""
    return 0 if config.dead_letter is None else config.max_deliveries


def dealt_of(stream: int, leased: LeasedSeqs, dead: list[int], leases: Leases, topic: Topic) -> Dealt:
    """Return the message to the frontend about jobs that were dealt to a stream or claim."""
    jobs = leased.seqs, leased.first_lease_no, leased.deadline_ms, leased.deliveries, leases.ready
    dead_ones = dead, leases.deliveries_of(dead), leases.order_keys_of(dead), topic.config.dead_letter or ""
    return Dealt(stream, *jobs, *dead_ones, topic_id=topic.id)


class Timers:
    """The next monotonic ms at which each queue is due, by topic id. Replaced times stay in the heap, ignored."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._of: dict[int, int] = {}

    @property
    def next_ms(self) -> int | None:
        """The earliest time, None if there is none."""
        return self._heap[0][0] if self._heap else None

    def set(self, topic_id: int, name: str, at_ms: int) -> None:
        """Make a queue due at this time, unless it is due earlier."""
        known_ms = self._of.get(topic_id)
        if known_ms is not None and known_ms <= at_ms:
            return
        self._of[topic_id] = at_ms
        heappush(self._heap, (at_ms, topic_id, name))
        if len(self._heap) > 64 + 4 * len(self._of):
            # Most of the heap are replaced times: drop them.
            self._heap = [timer for timer in set(self._heap) if self._of.get(timer[1]) == timer[0]]
            heapify(self._heap)

    def take_due(self, now_ms: int) -> Iterator[tuple[int, str]]:
        """Yield (topic id, name) of each queue that is due, and forget its time."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, topic_id, name = heappop(self._heap)
            if self._of.get(topic_id) == at_ms:
                del self._of[topic_id]
                yield topic_id, name

    def forget(self, topic_id: int) -> None:
        """Forget a queue."""
        self._of.pop(topic_id, None)
