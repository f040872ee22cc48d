"""Watch sessions. The shard that owns a wid stores its session, so that any frontend can stream it.

The followed topics are stored once. The positions are stored when a stream ends in order; while it is open only this
frontend knows them, and tells a restarted shard that it is open.
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
from topics.shm.topic_messages import SessionAbandon, SessionClose, SessionGet, SessionOpen, SessionPut

SESSION_TTL_MS: Final = 300_000
SESSION_BYTES_MAX: Final = 256 * 1024
RENEW_S: Final = 1.0
"""Time in which a restarted shard hears of open streams. It drops sessions without one after SESSION_TTL_MS."""
_WID: Final = re.compile(r"wid_[A-Za-z0-9_-]{22}")
_WID_BYTES: Final = 16
_STREAM_NO_SHIFT: Final = 20
"""A stream's number is the ms in which it was opened, shifted by so many bits, plus a serial."""


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """One topic of a session: the instance of the name, and the position to start from."""

    topic_id: int
    from_seq: int


class Session(msgspec.Struct, array_like=True, frozen=True):
    """The request of a watch, resolved and clamped."""

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
    """Digest of the creating key, which alone may stream the session; empty if none was needed."""


class Opened(msgspec.Struct, frozen=True):
    """A session as a stream of it begins.

    `positions` are those of the last stream that ended in order, without topics that had ended; None if none did. If
    `exact` is false, a later stream may have read further.
    """

    wid: str
    stream_no: int
    session: Session
    positions: dict[str, int] | None
    exact: bool


def without_nodes(opened: Opened) -> Opened:
    """Return `opened` without its nodes, which may be most of it, to be kept while the stream is open."""
    return msgspec.structs.replace(opened, session=msgspec.structs.replace(opened.session, nodes=None))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Session).decode


class SessionClient:
    """Creates, opens and closes watch sessions at their shards, and owns the list of this frontend's open streams."""

    def __init__(self, gateway: Gateway, arenas: Arenas, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._gateway = gateway
        self._arenas = arenas
        self._clock = clock
        self._last_stream_no = 0
        self._open: dict[int, str] = {}
        """Wid by stream number."""
        self._generations = self._current_generations()
        self._timer: asyncio.TimerHandle | None = None

    async def create(self, session: Session) -> str:
        """Store a new session and return its wid. Raise as `Gateway.call` does."""
        body = _encode(session)
        if len(body) > SESSION_BYTES_MAX:
            raise invalid(f"the watch is too large to be stored: {len(body)} bytes, at most {SESSION_BYTES_MAX}")
        wid = "wid_" + secrets.token_urlsafe(_WID_BYTES)
        await self._gateway.call(self._owner(wid), SessionPut(wid, body))
        return wid

    async def get(self, wid: str) -> Session:
        """Return the session as it was created, without opening it. Raise `404 not_found`."""
        _check(wid)
        return _decode((await self._gateway.call(self._owner(wid), SessionGet(wid))).body)

    async def open(self, wid: str) -> Opened:
        """Begin a stream of the session, which ends with `close` or `abandon`. Raise `404 not_found`."""
        _check(wid)
        # Among all streams of a session, over all frontends, the one opened last has the highest number.
        now = self._clock.monotonic_ms() << _STREAM_NO_SHIFT
        self._last_stream_no = stream_no = max(self._last_stream_no + 1, now)
        self.tell_restarted()
        try:
            reply = await self._gateway.call(self._owner(wid), SessionOpen(wid, stream_no))
        except (TopicsError, asyncio.CancelledError) as error:
            if is_outcome_unknown(error):
                # The shard may have opened it, or will. A session with an open stream is never dropped.
                self._gateway.post(self._owner(wid), SessionAbandon(wid, stream_no))
            raise
        self._open[stream_no] = wid
        if self._timer is None:
            self._timer = self._loop.call_later(RENEW_S, self._renew)
        return Opened(wid, stream_no, _decode(reply.body), reply.positions, reply.exact)

    def close(self, opened: Opened, positions: dict[str, int] | None) -> None:
        """Tell the shard, without waiting, that the stream has ended and sent everything up to `positions`."""
        self.tell_restarted()
        wid, stream_no = opened.wid, opened.stream_no
        del self._open[stream_no]
        # Posted even if the ring is full: a session whose stream never ends is never dropped. Not in a task: it must
        # be before the same client's next GET.
        owner = self._owner(wid)
        if not self._gateway.post(owner, SessionClose(wid, stream_no, positions), may_be_lost=True):
            # The session continues at an earlier position, or at the client's Last-Event-ID.
            self._gateway.post(owner, SessionAbandon(wid, stream_no))

    def abandon(self, opened: Opened) -> None:
        """End a stream that has sent nothing, instead of `close`, and leave the session as it was."""
        if opened.exact:
            self.close(opened, opened.positions)
        else:
            del self._open[opened.stream_no]
            self._gateway.post(self._owner(opened.wid), SessionAbandon(opened.wid, opened.stream_no))

    def _renew(self) -> None:
        self.tell_restarted()
        self._timer = self._loop.call_later(RENEW_S, self._renew) if self._open else None

    def tell_restarted(self) -> None:
        """Tell shards that were restarted which streams are open."""
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
        raise TopicsError("not_found", f"no watch session {wid[:64]!r}: create one with POST /v0/watch")
