"""`/v0/health`, `/v0/ready` (api §8): answered from the control page alone, so always."""

from __future__ import annotations

import time
from typing import Any

from topics import __version__
from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.frontend.answers import send_object
from topics.frontend.asgi import Receive, Scope, Send
from topics.shm.control import ControlPage, ProcessState, Role, replay_progress


class ProbeRoutes:
    """Health: this process answers. Ready: every shard has recovered, so that all topics can be read."""

    def __init__(self, control: ControlPage, clock: Clock) -> None:
        self._control = control
        self._clock = clock
        self._shards = [control.cell(Role.WALSHARD, shard) for shard in range(control.shards)]

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        uptime_ms = max(0, self._clock.now_ms() - self._control.header.get("started_ms"))
        answer: dict[str, Any] = {"status": "ok", "version": __version__, "uptime_ms": uptime_ms}
        await send_object(send, dict(scope["headers"]), 200, answer, time.perf_counter_ns())

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        waiting = [cell for cell in self._shards if cell.get("generation") == 0]
        if waiting:
            raise TopicsError(
                "not_ready",
                f"{len(waiting)} of {len(self._shards)} shards still replay their log",
                {"replay_progress": replay_progress(self._shards)},
            )
        # A shard that is being restarted is read from where it was; only its writes wait.
        recovering = [n for n, cell in enumerate(self._shards) if cell.get("state") != ProcessState.READY]
        read_only = [n for n, cell in enumerate(self._shards) if cell.get("wal_read_only")]
        answer: dict[str, Any] = {
            "status": "ready",
            "wal_replay_complete": not recovering,
            "topics": sum(cell.get("topics") for cell in self._shards),
            "pressure": round(self._control.pressure(), 3),
        }
        if recovering:
            answer["recovering_shards"] = recovering
        if read_only:
            answer["read_only_shards"] = read_only
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns)
