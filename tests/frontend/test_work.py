"""`/work` streams of a frontend at a real shard: how they end, and that their jobs are free again (api §9)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.live import DEADLINE_S, Live, Wire, on_loop, until
from tests.frontend.test_watch import cram, posts
from tests.kept import items_kept
from topics.core.errors import TopicsError
from topics.core.keys import KeyRing, parse_list
from topics.frontend.entry.access import Access, KeyLimits
from topics.frontend.entry.stalled_clients import STALL_MAX_MS
from topics.frontend.live.event_streams import StreamSlots
from topics.frontend.queues import work as module
from topics.frontend.queues.queue_routes import QueueServices
from topics.frontend.queues.work import WorkRoutes, WorkStream
from topics.frontend.shards import gateway
from topics.shm import messages
from topics.shm.queue_messages import Claim, WorkClose
from topics.shm.quotas import KeyCounts, Quota

KEYS = "worker:rw"


class Worker:
    """The routes of a frontend, and one request for jobs of the queue `q`."""

    def __init__(self, live: Live, keys: str | None = None) -> None:
        settings = live.rig.settings
        limits = KeyLimits(KeyCounts(live.rig.shared.key_counts, 1, 0), settings)
        self.access = Access(KeyRing(parse_list(keys) if keys else ()), limits)
        places = Quota("sse_connections", 0, "sse_admitted", live.cell, [live.cell])
        services = QueueServices(live.gateway, live.reader)
        self.routes = WorkRoutes(services, self.access, settings, StreamSlots(limits, places), live.cell, live.clock)
        self.wire = Wire()
        self.head_sent = asyncio.Event()
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.may_leave = asyncio.Event()
        self.may_leave.set()

    async def ask(self, most: int = 1) -> None:
        async def receive() -> dict[str, Any]:
            await until(lambda: self.wire.ended)
            await self.may_leave.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            self.head_sent.set()
            await self.may_begin.wait()

        query = b"node=w&max=%d&heartbeat_ms=60000" % most
        await self.routes.work(
            {
                "headers": [(b"authorization", b"Bearer worker")] if self.access.on else [],
                "query_string": query,
                "path_params": {"topic": "q"},
                "extensions": {"topics.push": lambda: self.wire},
            },
            receive,
            send,
        )


def leased(live: Live) -> int:
    return live.reader.get("q").view.jobs_in_flight


@pytest.mark.parametrize("end", ["drain", "forbidden"])
def test_a_stream_that_ends_while_it_is_opened_does_not_begin(tmp_path: Path, end: str) -> None:
    async def test(live: Live) -> None:
        await live.put("q", type="queue")
        await live.write("q", 2)
        worker = Worker(live, KEYS if end == "forbidden" else None)
        worker.may_begin.clear()
        asked = asyncio.create_task(worker.ask())
        await worker.head_sent.wait()
        await until(lambda: leased(live) == 1)
        if end == "drain":
            worker.routes.drain()
        else:
            worker.access.replace(KeyRing(parse_list("another:rw")))
        worker.may_begin.set()
        await asked
        assert worker.wire.kinds() == ["error"]
        await until(lambda: leased(live) == 0)

    on_loop(tmp_path, test)


@pytest.mark.long
def test_a_stream_that_a_full_ring_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await live.put("q", type="queue")
        cram(live)
        for _ in range(10):
            with pytest.raises(TopicsError) as refused:
                await Worker(live).ask()
            assert refused.value.code == "throttled"
        assert posts(live) == 0

    on_loop(tmp_path, test)


def test_a_stream_that_is_refused_while_its_restarted_shard_is_asked_again_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request for it reaches the shard, the first does not."""

    async def test(live: Live) -> None:
        await live.put("q", type="queue")
        await live.write("q", 1)
        live.shard_up = False
        ring = live.rig.shared.rings[0][0].requests
        for length in (10_000, 1000, 100, 10, 1):
            while ring.push(*messages.encode_call(1, WorkClose("n" * length, 1))):
                pass
        requests = live.gateway.links[0].requests
        monkeypatch.setattr(gateway, "ROOM_WAIT_S", DEADLINE_S)
        worker = Worker(live)
        refused = asyncio.create_task(worker.ask())
        await until(lambda: requests.waiting == 1)
        live.restart_shard()
        await until(lambda: requests.waiting == 2)
        requests.throttled.messages[0].expires_s = 0.0
        with pytest.raises(TopicsError) as error:
            await refused
        assert error.value.code == "throttled"
        live.shard_up = True
        await until(lambda: not requests.waiting and ring.empty)
        worker.wire = Wire()
        asked = asyncio.create_task(worker.ask())
        try:
            await until(lambda: worker.wire.writes and worker.wire.kinds() == ["job"])
        finally:
            worker.wire.ended = True
            await asked

    on_loop(tmp_path, test)


def stalled(test: Callable[[Live, Worker], Awaitable[None]]) -> Callable[[Live], Awaitable[None]]:
    """A worker that is behind."""

    async def with_worker(live: Live) -> None:
        await live.put("q", type="queue")
        await live.write("q", 3)
        worker = Worker(live)
        worker.wire.stop_reading(100_000)
        asked = asyncio.create_task(worker.ask())
        # Told to nobody and dealt to nobody: the worker has no room.
        await until(lambda: worker.wire.writes and leased(live) == 0)
        try:
            await test(live, worker)
        finally:
            worker.wire.ended = True
            await asked

    return with_worker


def test_a_worker_that_takes_nothing_is_told_so_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_CHECK_S", 0.001)

    async def test(live: Live, worker: Worker) -> None:
        live.clock.ms += STALL_MAX_MS
        await until(lambda: worker.wire.ended)
        assert "nothing was taken" in worker.wire.of("error")[0]["error"]

    on_loop(tmp_path, stalled(test))


def test_a_worker_that_takes_something_now_and_then_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_CHECK_S", 0.001)

    async def test(live: Live, worker: Worker) -> None:
        stream = next(iter(worker.routes._streams))
        for _ in range(5):
            worker.wire.buffered_bytes -= 1
            left_bytes = worker.wire.buffered_bytes
            await until(lambda: stream._stall is not None and stream._stall.progress_bytes == -left_bytes)
            live.clock.ms += STALL_MAX_MS - 1
        worker.wire.read_on()
        await until(lambda: worker.wire.of("job"))
        assert not worker.wire.ended

    on_loop(tmp_path, stalled(test))


LEASE_MS = 1000


async def deadly(live: Live) -> None:
    """The queue `q`, whose job is dead when it was handed out once."""
    await live.put("q", type="queue", max_deliveries=1, dead_letter="dead", lease_ms=LEASE_MS)
    await live.write("q", 1)


def carried_away(live: Live) -> bool:
    """Return whether the job is where dead jobs belong, and nowhere else."""
    try:
        return live.reader.get("dead").view.records == 1 and live.reader.get("q").view.records == 0
    except TopicsError:
        return False


async def begun(live: Live) -> tuple[Worker, asyncio.Task[None]]:
    """A worker that has the job."""
    worker = Worker(live)
    asked = asyncio.create_task(worker.ask())
    await until(lambda: worker.wire.writes and worker.wire.kinds() == ["job"])
    return worker, asked


@pytest.mark.parametrize("stream", ["that ends", "that is over"])
def test_dead_jobs_that_are_dealt_to_a_stream_without_a_client_are_carried_away(tmp_path: Path, stream: str) -> None:
    """Their shard does not know yet. No clock moves: in half a minute it would give them another chance."""

    async def test(live: Live) -> None:
        await deadly(live)
        worker, asked = await begun(live)
        live.shard_up = False
        worker.may_leave.clear()
        worker.wire.vanish()
        live.clock.ms += LEASE_MS
        live.rig.step()  # the job is dealt, and this loop has not seen it
        if stream == "that is over":
            asked.cancel()
            await asyncio.wait({asked})
        live.shard_up = True
        await until(lambda: carried_away(live))
        worker.may_leave.set()
        await asyncio.wait({asked})

    on_loop(tmp_path, test)


def test_dead_jobs_that_are_dealt_to_a_stream_which_never_begins_are_carried_away(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        await deadly(live)
        await live.gateway.call(0, Claim("q", "w", 1, None, 1))
        live.clock.ms += LEASE_MS
        worker = Worker(live)
        worker.may_begin.clear()
        asked = asyncio.create_task(worker.ask())
        await worker.head_sent.wait()
        await until(lambda: carried_away(live))
        worker.routes.drain()
        worker.may_begin.set()
        await asked

    on_loop(tmp_path, test)


def test_a_stream_that_is_over_leaves_no_listener_for_ever(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        live.gateway.shard_wait_s = 0.001
        await deadly(live)
        listeners = live.gateway.job_listeners
        before = items_kept(listeners)
        worker, asked = await begun(live)
        assert items_kept(listeners) > before
        worker.wire.vanish()
        await asked
        await until(lambda: items_kept(listeners) == before)

    on_loop(tmp_path, test)


@pytest.mark.parametrize("end", ["client", "service"])
def test_a_stream_that_is_over_waits_for_no_collector(tmp_path: Path, end: str) -> None:
    def streams() -> int:
        return sum(type(one) is WorkStream for one in gc.get_objects())

    async def test(live: Live) -> None:
        live.gateway.shard_wait_s = 0.001
        gc.collect()
        gc.disable()
        try:
            await live.put("q", type="queue")
            worker = Worker(live)
            asked = asyncio.create_task(worker.ask())
            await until(lambda: worker.wire.writes)
            assert streams() == 1
            if end == "client":
                worker.wire.vanish()
            else:
                worker.routes.drain()
            await asked
            worker.wire = Wire()
            await until(lambda: not streams())
        finally:
            gc.enable()

    on_loop(tmp_path, test)
