"""Watch sessions as frontends keep them: at the shard that owns the wid, so that any frontend can go on with them.

What a session follows is written once. How far its streams came is written when one ends in order; while it is open
only this frontend knows, and a shard that was restarted is told again that it is.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Final

import msgspec

from topics.core.clock import Clock
from topics.core.errors import TopicsError, invalid
from topics.core.names import owner_shard
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.pending_requests import is_outcome_unknown
from topics.shm.topic_messages import (
    SessionAbandon,
    SessionClose,
    SessionGet,
    SessionOpen,
    SessionPut,
)

SESSION_TTL_MS: Final = 300_000
SESSION_BYTES_MAX: Final = 256 * 1024
RENEW_S: Final = 1.0
"""How soon a restarted shard hears of open streams; it collects sessions without one after SESSION_TTL_MS."""
_WID: Final = re.compile(r"wid_[A-Za-z0-9_-]{22}")
_WID_BYTES: Final = 16
_STREAM_NO_SHIFT: Final = 20
"""A stream's number is the ms it was opened in, and below that which one of that ms."""


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """One topic of a session: which instance of the name, and the position to start from."""

    topic_id: int
    from_seq: int


class Session(msgspec.Struct, array_like=True, frozen=True):
    """What a watch asked for, resolved and clamped."""

    topics: dict[str, Follow]
    nodes: list[bytes] | None
    limit: int
    max_batch_bytes: int
    heartbeat_ms: int
    include_tags: bool
    include_meta: bool
    include_data: bool
    strong: bool
    key_digest: bytes
    """Of the key that made it, which alone may stream it; empty when nobody had to authenticate."""


class Opened(msgspec.Struct, frozen=True):
    """A session as a stream of it begins. `positions`: where the last one that ended in order came to, without topics
    that had ended; None if none did. Without `exact` a later one may have come further.
    """

    wid: str
    stream_no: int
    session: Session
    positions: dict[str, int] | None
    exact: bool


def without_nodes(opened: Opened) -> Opened:
    """For as long as the stream is open: they may be most of it."""
    return msgspec.structs.replace(opened, session=msgspec.structs.replace(opened.session, nodes=None))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Session).decode


class SessionUse:
    """This frontend's use of all sessions."""

    def __init__(self, gateway: Gateway, arenas: Arenas, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._gateway = gateway
        self._arenas = arenas
        self._clock = clock
        self._last_stream_no = 0
        self._open: dict[int, str] = {}
        """Wid by stream."""
        self._generations = self._current_generations()
        self._timer: asyncio.TimerHandle | None = None

    async def create(self, session: Session) -> str:
        """A new session's wid; raises as `Gateway.call` does."""
        body = _encode(session)
        if len(body) > SESSION_BYTES_MAX:
            raise invalid(f"the watch is too large to be kept: {len(body)} bytes, at most {SESSION_BYTES_MAX}")
        wid = "wid_" + secrets.token_urlsafe(_WID_BYTES)
        await self._gateway.call(self._owner(wid), SessionPut(wid, body))
        return wid

    async def look(self, wid: str) -> Session:
        """The session as it was made, left alone. `404 not_found` for an unknown one."""
        _check(wid)
        return _decode((await self._gateway.call(self._owner(wid), SessionGet(wid))).body)

    async def open(self, wid: str) -> Opened:
        """A stream of the session begins here; `close` or `give_back` follows. `404 not_found` for an unknown one."""
        _check(wid)
        # Of all streams of a session, whatever frontends have them, the one opened last has the highest number.
        now = self._clock.monotonic_ms() << _STREAM_NO_SHIFT
        self._last_stream_no = stream_no = max(self._last_stream_no + 1, now)
        self.announce()
        try:
            reply = await self._gateway.call(self._owner(wid), SessionOpen(wid, stream_no))
        except (TopicsError, asyncio.CancelledError) as error:
            if is_outcome_unknown(error):
                # The shard may have it all the same, or will: a session with a stream is never collected.
                self._gateway.post(self._owner(wid), SessionAbandon(wid, stream_no))
            raise
        self._open[stream_no] = wid
        if self._timer is None:
            self._timer = self._loop.call_later(RENEW_S, self._renew)
        return Opened(wid, stream_no, _decode(reply.body), reply.positions, reply.exact)

    def close(self, opened: Opened, positions: dict[str, int] | None) -> None:
        """The stream has ended and sent everything up to `positions`. The shard is told, nobody waits for it."""
        self.announce()
        wid, stream_no = opened.wid, opened.stream_no
        del self._open[stream_no]
        # Posted, however full the ring is: a session whose stream never ends is never collected. And now, not in a
        # task: the same client's next GET comes behind it.
        owner = self._owner(wid)
        if not self._gateway.post(owner, SessionClose(wid, stream_no, positions), may_be_lost=True):
            # The session goes on at an earlier position, or at the client's Last-Event-ID.
            self._gateway.post(owner, SessionAbandon(wid, stream_no))

    def give_back(self, opened: Opened) -> None:
        """Instead of `close`, for a stream that has sent nothing: the session is as it was found."""
        if opened.exact:
            self.close(opened, opened.positions)
        else:
            del self._open[opened.stream_no]
            self._gateway.post(self._owner(opened.wid), SessionAbandon(opened.wid, opened.stream_no))

    def _renew(self) -> None:
        self.announce()
        self._timer = self._loop.call_later(RENEW_S, self._renew) if self._open else None

    def announce(self) -> None:
        """Tells shards that were restarted of the streams that are open."""
        generations = self._current_generations()
        if generations != self._generations:
            former, self._generations = self._generations, generations
            for stream_no, wid in self._open.items():
                owner = self._owner(wid)
                if generations.get(owner) != former.get(owner):
                    self._gateway.post(owner, SessionOpen(wid, stream_no))

    def _owner(self, wid: str) -> int:
        return owner_shard(wid, self._gateway.shards)

    def _current_generations(self) -> dict[int, int]:
        arenas = ((shard, self._arenas.of(shard)) for shard in range(self._gateway.shards))
        return {shard: arena.generation for shard, arena in arenas if arena is not None}


def _check(wid: str) -> None:
    if _WID.fullmatch(wid) is None:
        raise TopicsError("not_found", f"no watch session {wid[:64]!r}: POST /v0/watch makes one")
