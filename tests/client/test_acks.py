"""Acks are sent at once, and gathered while one is under way. The test answers the requests, there is no service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from topics.client import ClaimedJob, LeaseLostError, UnreachableError, shift
from topics.client.shift import ACK_MAX_JOBS, Acks


def job(seq: int, lease_id: str = "lease_1") -> ClaimedJob:
    return ClaimedJob(seq, 1, msgspec.Raw(b"1"), lease_id=lease_id, deadline=1, deliveries=1)


class Requests:
    """Requests that were sent, each waiting for its answer."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self._answers: list[asyncio.Future[list[bool | None]]] = []

    async def settle(self, jobs: Sequence[ClaimedJob]) -> list[bool | None]:
        self.sent.append([job.seq for job in jobs])
        self._answers.append(asyncio.get_running_loop().create_future())
        return await self._answers[-1]

    def answer(self, number: int, lost: Sequence[int] = ()) -> None:
        self._answers[number].set_result([seq not in lost for seq in self.sent[number]])

    def fail(self, number: int, error: Exception) -> None:
        self._answers[number].set_exception(error)

    async def until(self, count: int) -> None:
        while len(self.sent) < count:
            await asyncio.sleep(0)


def run(body: Callable[[Acks, Requests], Awaitable[None]]) -> None:
    async def in_time() -> None:
        requests = Requests()
        await asyncio.wait_for(body(Acks("q", requests.settle), requests), 20)

    asyncio.run(in_time())


def add(to: Acks, *seqs: int) -> list[asyncio.Task[bool | None]]:
    return [asyncio.create_task(to.add(job(seq))) for seq in seqs]


def test_one_after_the_other_each_is_sent_at_once() -> None:
    async def body(to: Acks, requests: Requests) -> None:
        for number in range(3):
            (task,) = add(to, number + 1)
            await requests.until(number + 1)
            requests.answer(number)
            assert await task is True
        assert requests.sent == [[1], [2], [3]]

    run(body)


def test_what_is_done_while_one_is_under_way_goes_together() -> None:
    async def body(to: Acks, requests: Requests) -> None:
        first = add(to, 1)
        await requests.until(1)
        rest = add(to, *range(2, ACK_MAX_JOBS + 5))
        await asyncio.sleep(0)
        assert requests.sent == [[1]]
        requests.answer(0)
        await requests.until(2)
        requests.answer(1, lost=[7])
        await requests.until(3)
        requests.answer(2)
        assert await first[0] is True
        assert [number for number, task in enumerate(rest, 2) if not await task] == [7]
        assert requests.sent[1:] == [[*range(2, ACK_MAX_JOBS + 2)], [*range(ACK_MAX_JOBS + 2, ACK_MAX_JOBS + 5)]]

    run(body)


def test_a_job_that_came_again_is_not_beside_its_former_lease() -> None:
    async def body(to: Acks, requests: Requests) -> None:
        former, again = (asyncio.create_task(to.add(job(1, lease))) for lease in ("lease_1", "lease_2"))
        await requests.until(1)
        requests.answer(0, lost=[1])
        await requests.until(2)
        requests.answer(1)
        assert [await former, await again] == [False, True]
        assert requests.sent == [[1], [1]]

    run(body)


def test_one_that_hangs_holds_up_the_others_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "HOLD_UP_MAX_S", 0.01)

    async def body(to: Acks, requests: Requests) -> None:
        hanging = add(to, 1)
        await requests.until(1)
        others = add(to, 2, 3)
        await requests.until(2)
        requests.answer(1)
        assert [await task for task in others] == [True, True]
        # The end of the one that hung does not send what waits for another one.
        monkeypatch.setattr(shift, "HOLD_UP_MAX_S", 60.0)
        fourth = add(to, 4)
        await requests.until(3)
        fifth = add(to, 5)
        requests.answer(0)
        assert await hanging[0] is True
        await asyncio.sleep(0)
        assert requests.sent == [[1], [2, 3], [4]]
        requests.answer(2)
        await requests.until(4)
        requests.answer(3)
        assert [await task for task in fourth + fifth] == [True, True]

    run(body)


def test_an_error_is_everybodys_and_the_next_one_is_sent() -> None:
    async def body(to: Acks, requests: Requests) -> None:
        failing = add(to, 1, 2)
        await requests.until(1)
        requests.fail(0, UnreachableError("gone"))
        for task in failing:
            with pytest.raises(UnreachableError, match="gone"):
                await task
        (task,) = add(to, 3)
        await requests.until(2)
        requests.answer(1)
        assert await task is True

    run(body)


def test_a_job_whose_waiter_was_cancelled_is_acked_all_the_same() -> None:
    async def body(to: Acks, requests: Requests) -> None:
        first = add(to, 1)
        await requests.until(1)
        second, third = add(to, 2, 3)
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        requests.answer(0)
        await requests.until(2)
        assert requests.sent == [[1], [2, 3]]
        requests.answer(1)
        assert [await first[0], await third] == [True, True]

    run(body)


def test_the_end_says_to_all_who_wait_that_their_jobs_may_come_again() -> None:
    async def body(to: Acks, requests: Requests) -> None:
        waiting = add(to, 1)
        await requests.until(1)
        waiting += add(to, 2)
        await asyncio.sleep(0)
        await to.close()
        for seq, task in enumerate(waiting, 1):
            with pytest.raises(LeaseLostError, match=f"job {seq} of 'q'"):
                await task
        assert requests.sent == [[1]]
        # Who acks later finds out what became of it.
        (late,) = add(to, 3)
        await requests.until(2)
        requests.answer(1, lost=[3])
        assert await late is False

    run(body)
