"""Acks of one queue, sent together: an HTTP request costs its client more than all the rest of a job that is short.

An ack waits for no company: when none is under way it is sent, and what is done meanwhile is gathered for the next one.
So one worker alone waits for its own ack only, and many share the requests of which there are as many as fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from topics.api.answers import JobAnswer
from topics.client.errors import LeaseLostError

ACK_MAX_JOBS: Final = 1000
PATIENCE_S: Final = 1.0
"""One that hangs for longer, with its frontend perhaps, holds up no others."""

Outcome = asyncio.Future[bool | None]


class Acks:
    """`settle` sends the ack of some jobs, no two of one seq, and says of each what `Shift` wants to know."""

    def __init__(self, topic: str, settle: Callable[[Sequence[JobAnswer]], Awaitable[list[bool | None]]]) -> None:
        self._topic = topic
        self._settle = settle
        self._gathered: list[tuple[JobAnswer, Outcome]] = []
        self._latest: asyncio.Task[None] | None = None
        """Whose end, or whose patience, the gathered ones wait for."""
        self._under_way: set[asyncio.Task[None]] = set()

    async def add(self, job: JobAnswer) -> bool | None:
        """What `settle` says of this job, or raises."""
        outcome: Outcome = asyncio.get_running_loop().create_future()
        self._gathered.append((job, outcome))
        if self._latest is None:
            self._send()
        return await outcome

    async def close(self) -> None:
        """Gives up what is gathered or under way: LeaseLostError for who waits for it."""
        gathered, self._gathered = self._gathered, []
        self._give_up(gathered)
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send(self) -> None:
        task = asyncio.create_task(self._carry_out())
        self._latest = task
        self._under_way.add(task)
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._over, task)

        def ended(_: asyncio.Task[None]) -> None:
            timer.cancel()
            self._under_way.discard(task)
            self._over(task)

        task.add_done_callback(ended)

    def _over(self, task: asyncio.Task[None]) -> None:
        if self._latest is task:
            self._latest = None
            if self._gathered:
                self._send()

    async def _carry_out(self) -> None:
        """One request, with all that was gathered until now: whoever came in the same round of the loop is in it."""
        batch = self._take()
        try:
            settled = await self._settle([job for job, _ in batch])
        except Exception as error:  # noqa: BLE001 — it is raised to everyone who waits
            for _, outcome in batch:
                if not outcome.done():  # by being cancelled: the job is done all the same
                    outcome.set_exception(error)
        else:
            for (_, outcome), ours in zip(batch, settled, strict=True):
                if not outcome.done():
                    outcome.set_result(ours)
        finally:
            self._give_up(batch)

    def _take(self) -> list[tuple[JobAnswer, Outcome]]:
        """The next batch. Answers name seqs, so a job that was lost and came again is not beside its former lease."""
        batch: dict[int, tuple[JobAnswer, Outcome]] = {}
        rest: list[tuple[JobAnswer, Outcome]] = []
        for entry in self._gathered:
            seq = entry[0].seq
            if len(batch) < ACK_MAX_JOBS and seq not in batch:
                batch[seq] = entry
            else:
                rest.append(entry)
        self._gathered = rest
        return list(batch.values())

    def _give_up(self, entries: Sequence[tuple[JobAnswer, Outcome]]) -> None:
        for job, outcome in entries:
            if not outcome.done():
                outcome.set_exception(LeaseLostError(self._topic, job.seq))
