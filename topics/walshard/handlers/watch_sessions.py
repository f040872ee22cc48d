"""Watch sessions of one shard (api §7): which stream has them, and from where the next one goes on.

A session outlives the frontend that made it and a crash of this shard (it is in the RAM log), not a restart of the
service. While a stream is open only its frontend knows how far it is; it says so when it closes. If the frontend dies
instead, the stored positions are a lower bound, and the client's Last-Event-ID knows better: `exact` tells which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from topics.core.control_bodies import SessionFrameBody, encode_body
from topics.core.errors import TopicsError
from topics.shm.asks import Done
from topics.shm.topic_messages import (
    SessionAbandon,
    SessionClose,
    SessionGet,
    SessionOpen,
    SessionOpenReply,
    SessionPut,
)
from topics.storage.frame import FrameType
from topics.storage.topic_frames import control_frame
from topics.walshard.commit.draft import AloneHandler, Draft, GroupHandler, LogWrite, Steps
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.step_clock import StepClock

SESSION_TTL_MS = 300_000


class WatchSession:
    """`stream` is (frontend, number) while one is open; `idle_since_ms` counts from the last close. Numbers grow with
    time, also from frontend to frontend; `newest_stream` is the highest that was heard of.
    """

    __slots__ = ("body", "exact", "idle_since_ms", "newest_stream", "positions", "stream")

    def __init__(self, body: bytes, positions: dict[str, int] | None, exact: bool, now_ms: int) -> None:
        self.body = body
        self.positions = positions
        self.exact = exact
        self.stream: tuple[int, int] | None = None
        self.newest_stream = 0
        self.idle_since_ms = now_ms


class WatchSessions:
    """The watch sessions of one shard as its log has them. Times are monotonic ms."""

    def __init__(self) -> None:
        self.by_wid: dict[str, WatchSession] = {}

    def __len__(self) -> int:
        return len(self.by_wid)

    def recovered(self, sessions: dict[str, SessionFrameBody], now_ms: int) -> None:
        """A crash of the shard: streams may be open that it knows nothing of, so no position is exact."""
        for wid, session in sessions.items():
            assert session.body is not None
            self.by_wid[wid] = WatchSession(session.body, session.positions, False, now_ms)

    def put(self, wid: str, body: bytes, now_ms: int) -> None:
        self.by_wid[wid] = WatchSession(body, None, True, now_ms)

    def look(self, wid: str) -> SessionOpenReply:
        """What `open` would answer; `404 not_found` for an unknown session."""
        session = self.by_wid.get(wid)
        if session is None:
            raise TopicsError("not_found", f"no watch session {wid!r}: it was never made, or collected when idle")
        return SessionOpenReply(session.body, session.positions, session.exact and session.stream is None)

    def open(self, wid: str, frontend: int, stream: int) -> SessionOpenReply:
        """A stream begins, or a frontend tells a restarted shard that it has one. An older one of the same session no
        longer counts: told of after a newer one, it changes nothing, or its end could take positions back.
        """
        reply = self.look(wid)
        session = self.by_wid[wid]
        if stream >= session.newest_stream:
            session.stream = (frontend, stream)
            session.newest_stream = stream
            session.exact = False
        return reply

    def abandoned(self, wid: str, frontend: int, stream: int, now_ms: int) -> None:
        """That stream never began; what the positions were worth before is not known any more."""
        session = self.by_wid.get(wid)
        if session is not None and session.stream == (frontend, stream):
            session.stream = None
            session.idle_since_ms = now_ms

    def closing(
        self, wid: str, frontend: int, stream: int, positions: dict[str, int] | None
    ) -> SessionFrameBody | None:
        """What to log when this stream ends; None when it is not the session's stream.

        One that was replaced, and is closed long after, may not take the positions back: they count as exact.
        """
        session = self.by_wid.get(wid)
        if session is None or session.stream != (frontend, stream):
            return None
        return SessionFrameBody(wid, session.body, positions, exact=True)

    def closed(self, wid: str, positions: dict[str, int] | None, now_ms: int) -> None:
        session = self.by_wid[wid]
        session.stream = None
        session.positions = positions
        session.exact = True
        session.idle_since_ms = now_ms

    def frontend_died(self, frontend: int, now_ms: int) -> None:
        """Its streams ended without a word."""
        for session in self.by_wid.values():
            if session.stream is not None and session.stream[0] == frontend:
                session.stream = None
                session.idle_since_ms = now_ms

    def overdue(self, now_ms: int) -> list[str]:
        """Sessions without a stream for longer than SESSION_TTL_MS."""
        return [
            wid
            for wid, session in self.by_wid.items()
            if session.stream is None and now_ms - session.idle_since_ms > SESSION_TTL_MS
        ]

    def remove(self, wid: str) -> None:
        self.by_wid.pop(wid, None)

    def ram_frames(self, now_ms: int) -> list[bytes]:
        """Return SESSION of every session, to be repeated where older files of the RAM log go (at a wall time)."""
        return [
            _session_frame(SessionFrameBody(wid, session.body, session.positions, session.exact), now_ms)
            for wid, session in self.by_wid.items()
        ]


class SessionCalls:
    """Handles the requests about watch sessions: what is to outlive a crash goes to the RAM log."""

    def __init__(self, sessions: WatchSessions, holdings: Holdings, time: StepClock) -> None:
        self._sessions = sessions
        self._holdings = holdings
        self._time = time

    @property
    def routes(self) -> dict[type, GroupHandler]:
        """The requests that are handled here in a group."""
        return {SessionGet: self.look, SessionOpen: self.open, SessionAbandon: self.abandon}

    @property
    def alone_routes(self) -> dict[type, AloneHandler]:
        """The requests that are handled here by themselves."""
        return {SessionPut: self.put, SessionClose: self.close}

    def put(self, call: SessionPut, _frontend: int) -> Steps[Done]:
        """Makes a session."""
        self._holdings.claim_session()
        now_ms = self._time.now.mono_ms
        body = SessionFrameBody(call.wid, call.body)
        yield from self._log(body, lambda: self._sessions.put(call.wid, call.body, now_ms))
        return Done()

    def look(self, call: SessionGet, _frontend: int, _group: Draft) -> SessionOpenReply:
        """Shows a session without opening it."""
        return self._sessions.look(call.wid)

    def open(self, call: SessionOpen, frontend: int, _group: Draft) -> SessionOpenReply:
        """A stream of a session begins."""
        return self._sessions.open(call.wid, frontend, call.stream)

    def close(self, call: SessionClose, frontend: int) -> Steps[Done]:
        """A stream of a session ends: the next one goes on from its positions."""
        sessions, now_ms = self._sessions, self._time.now.mono_ms
        closed = sessions.closing(call.wid, frontend, call.stream, call.positions)
        if closed is not None:
            # The stream has ended whether or not the log can take how far it came.
            ended = partial(sessions.abandoned, call.wid, frontend, call.stream, now_ms)
            yield from self._log(closed, lambda: sessions.closed(call.wid, call.positions, now_ms), ended)
        return Done()

    def abandon(self, call: SessionAbandon, frontend: int, _group: Draft) -> None:
        """A stream that was opened never began. Nobody waits for a reply."""
        self._sessions.abandoned(call.wid, frontend, call.stream, self._time.now.mono_ms)

    def collect(self) -> Steps[None]:
        """Ends sessions that had no stream for too long."""
        for wid in self._sessions.overdue(self._time.now.mono_ms):
            yield from self._log(SessionFrameBody(wid, None), partial(self._sessions.remove, wid))

    def _log(
        self, body: SessionFrameBody, apply: Callable[[], None], undo: Callable[[], None] | None = None
    ) -> Steps[None]:
        entry = _session_frame(body, self._time.now.wall_ms)
        yield Draft(ram=[LogWrite([entry], apply, undo=undo)], reply=Done())


def _session_frame(body: SessionFrameBody, now_ms: int) -> bytes:
    return control_frame(FrameType.SESSION, 0, now_ms, encode_body(body))
