"""Looks at a queue over and over: what somebody held who is gone has to be delivered again once its lease is over.

Time is counted in which the service answered and somebody was there to work: a machine that stands still for seconds, a
shard that is started again, or workers that are all just starting are no job's being stuck.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from tests.harness import poll
from topics.client import Client, ClientError, PeekedJob, Retry

NAP_S = 0.02
STRIDE_MAX_S = 0.2
"""The part of the time between two looks that counts at most."""
LOOK_RETRY = Retry(total_s=1.0)


class _Held(NamedTuple):
    """A lease as it was first seen."""

    seq: int
    leased_to: str | None
    deadline: int | None
    deliveries: int


class LeaseWatch:
    """`gone(node)`: whether nobody is there any more who could end a lease of this node. `staffed()`: whether somebody
    is there to take a job. A context manager: at its end every look is over.
    """

    def __init__(
        self, url: str, queue: str, lease_s: float, gone: Callable[[str], bool], staffed: Callable[[], bool]
    ) -> None:
        self._url = url
        self._queue = queue
        self._lease_s = lease_s
        self._gone = gone
        self._staffed = staffed
        self._clock_s = 0.0
        self._open: dict[_Held, tuple[float, float]] = {}
        """Time at which it was first seen, by our clock, and how long it may take from then."""
        self.looks = 0
        self.seen = 0
        self.longest_s = 0.0
        self.stuck: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def wait_seen(self) -> None:
        """Until it has looked once more, from begin to end."""
        looks = self.looks
        poll("two looks at the queue", lambda: self.looks >= looks + 2)

    def _watch(self) -> None:
        with Client(self._url, retry=LOOK_RETRY) as topics:
            queue = topics.queue(self._queue)
            before_s = time.monotonic()
            while not self._over.wait(NAP_S):
                try:
                    jobs = queue.peek(max_jobs=1000).jobs
                except ClientError:
                    jobs = None
                now_s = time.monotonic()
                if jobs is not None:
                    if self._staffed():
                        self._clock_s += min(now_s - before_s, STRIDE_MAX_S)
                    self._look({job.seq: job for job in jobs})
                    self.looks += 1
                before_s = now_s

    def _look(self, jobs: dict[int, PeekedJob]) -> None:
        for held, (since_s, within_s) in list(self._open.items()):
            took_s = self._clock_s - since_s
            job = jobs.get(held.seq)
            if job is None or job.deliveries > held.deliveries or (job.state == "leased" and _held(job) != held):
                del self._open[held]
                self.longest_s = max(self.longest_s, took_s)
            elif took_s > within_s:
                self._open[held] = (since_s, math.inf)
                self.stuck.append(f"{held} was not delivered again within {took_s:.1f} s, it is {job.state}")
        for job in jobs.values():
            held = _held(job)
            if job.state == "leased" and held not in self._open and self._gone(job.leased_to or ""):
                self.seen += 1
                left_s = ((job.deadline or 0) - time.time_ns() // 1_000_000) / 1000
                # Its own lease, and less than another one until somebody has it.
                self._open[held] = (self._clock_s, min(max(left_s, 0.0), self._lease_s) + self._lease_s)


def _held(job: PeekedJob) -> _Held:
    return _Held(job.seq, job.leased_to, job.deadline, job.deliveries)
