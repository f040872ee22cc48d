"""The first moments of a service: requests wait for their shards, as they do when a shard restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

from topics.frontend.asgi import AsgiApp, Receive, Scope, Send
from topics.shm.control import ProcessCell

_GATED: Final = ("/v0/topics", "/v0/routers", "/v0/watch", "/v0/txn", "/v0/ws")
"""Beginnings of the paths that need a shard. Those that say how the service is never wait."""
_POLL_S: Final = 0.01


class StartGate:
    """An ASGI application that lets requests through to `app` as soon as every shard has read its log.

    A recovery that takes longer than `wait_s` is not waited for: then `app` answers `not_ready`, with its progress.
    Once open, the gate stays open.
    """

    def __init__(self, app: AsgiApp, shards: Sequence[ProcessCell], wait_s: float):
        self._app = app
        self._shards = shards
        self._opens_s = asyncio.get_running_loop().time() + wait_s
        self._is_open = False

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._is_open or not scope["path"].startswith(_GATED):
            return self._app(scope, receive, send)
        return self._wait(scope, receive, send)

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self._opens_s and any(cell.get("generation") == 0 for cell in self._shards):
            await asyncio.sleep(_POLL_S)
        self._is_open = True
        await self._app(scope, receive, send)
