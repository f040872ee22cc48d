"""Acks of one queue, sent together: for a short job the ack's HTTP request is most of the client's cost.

An ack waits for nothing when none is in progress. Those that are added meanwhile go together in the next request. So a
single worker waits for its own ack only, and many workers share a few requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from topics.api.answers import JobAnswer
from topics.client.errors import LeaseLostError

ACK_MAX_JOBS: Final = 1000
HOLD_UP_MAX_S: Final = 1.0
"""The longest time for which a request holds up the next one: its frontend may hang."""

Outcome = asyncio.Future[bool | None]


class Acks:
    """The acks that wait and those in progress.

    `settle` sends the ack of some jobs, no two with the same seq, and returns for each what `Shift._settle` does.
    """

    def __init__(self, topic: str, settle: Callable[[Sequence[JobAnswer]], Awaitable[list[bool | None]]]) -> None:
        self._topic = topic
        self._settle = settle
        self._waiting: list[tuple[JobAnswer, Outcome]] = []
        self._latest: asyncio.Task[None] | None = None
        """The request that holds up the waiting acks."""
        self._requests: set[asyncio.Task[None]] = set()

    async def add(self, job: JobAnswer) -> bool | None:
        """Ack a job; return or raise what `settle` does for it."""
        outcome: Outcome = asyncio.get_running_loop().create_future()
        self._waiting.append((job, outcome))
        if self._latest is None:
            self._send()
        return await outcome

    async def close(self) -> None:
        """Give up all acks that are not answered: their callers get a LeaseLostError."""
        waiting, self._waiting = self._waiting, []
        self._give_up(waiting)
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    def _send(self) -> None:
        request = asyncio.create_task(self._request())
        self._latest = request
        self._requests.add(request)
        timer = asyncio.get_running_loop().call_later(HOLD_UP_MAX_S, self._send_next, request)

        def ended(_: asyncio.Task[None]) -> None:
            timer.cancel()
            self._requests.discard(request)
            self._send_next(request)

        request.add_done_callback(ended)

    def _send_next(self, request: asyncio.Task[None]) -> None:
        if self._latest is request:
            self._latest = None
            if self._waiting:
                self._send()

    async def _request(self) -> None:
        """Send what waits by now, acks added in the same round of the event loop included."""
        batch = self._next_batch()
        try:
            settled = await self._settle([job for job, _ in batch])
        except Exception as error:  # noqa: BLE001 — every waiting caller gets it
            for _, outcome in batch:
                if not outcome.done():  # a cancelled caller: its job is acked all the same
                    outcome.set_exception(error)
        else:
            for (_, outcome), ours in zip(batch, settled, strict=True):
                if not outcome.done():
                    outcome.set_result(ours)
        finally:
            self._give_up(batch)

    def _next_batch(self) -> list[tuple[JobAnswer, Outcome]]:
        """Take the next batch. Answers name seqs, so two leases of one job, lost and claimed again, go in two."""
        batch: dict[int, tuple[JobAnswer, Outcome]] = {}
        rest: list[tuple[JobAnswer, Outcome]] = []
        for entry in self._waiting:
            seq = entry[0].seq
            if len(batch) < ACK_MAX_JOBS and seq not in batch:
                batch[seq] = entry
            else:
                rest.append(entry)
        self._waiting = rest
        return list(batch.values())

    def _give_up(self, entries: Sequence[tuple[JobAnswer, Outcome]]) -> None:
        for job, outcome in entries:
            if not outcome.done():
                outcome.set_exception(LeaseLostError(self._topic, job.seq))
