"""`/v0/archive/tail`: the committed bytes of the logs, for services that follow this one and know its archive.

A follower asks again and again, and says where its logs end. It gets a piece of the archive that may not be in the
archive yet (`storage/origin.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

import msgspec

from topics.core.clock import Clock
from topics.core.errors import TopicsError, forbidden
from topics.core.keys import KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import limits
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.budget import Budget
from topics.frontend.entry.responses import reserve_room, send_whole
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest
from topics.shm.control import ControlPage
from topics.shm.durations import Route
from topics.storage.archive_objects import LogEnd
from topics.storage.origin import TAIL_BYTES, Origin, OriginGoneError, read_tail

WAIT_MS_MAX: Final = 1000
POLL_S: Final = 0.005
BODY_BYTES_MAX: Final = 64 << 10
_ROOM_BYTES: Final = 2 * TAIL_BYTES
"""Memory of one answer, and of the parts from which it is put together."""
_MEDIA: Final = "application/octet-stream"
_ANSWER: Final = {200: api.Answer("A piece of the archive that has no number; empty if nothing came", {_MEDIA: None})}


class TailQuestion(msgspec.Struct, frozen=True):
    """The ends of all logs that a follower has, by shard, and how long it waits for more, in ms, at most 1000."""

    ends: list[LogEnd]
    wait_ms: int = 0


@dataclass(eq=False)
class TailRoutes:
    """The requests of followers to this frontend. Owns the budget for their answers."""

    page: ControlPage
    origin: Origin
    clock: Clock
    leader_url: str
    _budget: Budget = field(default_factory=lambda: Budget(limits.TAILS))

    @api.asgi_route("POST", "/v0/archive/tail", Route.OTHER, KeyScope.READ | KeyScope.ADMIN, "service")
    @api.describe("What the logs have behind these ends, for a follower", _ANSWER, "head_mismatch")
    @api.takes(body=TailQuestion)
    async def read(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ApiRequest(scope, receive)
        if not caller_of(scope).covers(""):
            raise forbidden("this key has prefixes: the logs have all topics, so use a key without")
        asked = await request.decoded(TailQuestion, BODY_BYTES_MAX)
        await self._wait_for_more([end.position.word for end in asked.ends], asked.wait_ms)
        await reserve_room(scope, _ROOM_BYTES)
        if not self._budget.try_reserve(_ROOM_BYTES):
            most = limits.TAILS.most_bytes // _ROOM_BYTES
            raise limits.TAILS.refused(f"{most} followers are answered already; ask again later", most)
        try:
            body = await self._read(asked.ends)
            await send_whole(send, request.headers, 200, (b"content-type", _MEDIA.encode()), body)
        finally:
            self._budget.release(_ROOM_BYTES)

    async def _wait_for_more(self, words: list[int], wait_ms: int) -> None:
        """Wait until the logs have other ends than these."""
        until_ms = self.clock.monotonic_ms() + min(wait_ms, WAIT_MS_MAX)
        while self.page.moment_ends() in (words, None) and self.clock.monotonic_ms() < until_ms:
            await asyncio.sleep(POLL_S)

    async def _read(self, ends: list[LogEnd]) -> bytes:
        try:
            body = await asyncio.to_thread(read_tail, self.origin, ends, self.clock.now_ms(), self.leader_url)
        except OriginGoneError as error:
            raise TopicsError("head_mismatch", f"{error}: take the archive instead") from error
        if body is None:
            raise TopicsError("not_ready", "a shard recovers, or transactions follow each other too fast; ask again")
        return body
