"""Watch sessions of one shard (api §7): the open stream of each, and the positions from which the next one goes on.

A session is in the RAM log. So it outlives the frontend that made it and a crash of this shard, but not a restart of
the service. While a stream is open only its frontend knows its positions; it sends them when the stream closes. If the
frontend dies, the stored positions are no longer `exact`: they are a lower bound, and the client's Last-Event-ID
knows better.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Final

import msgspec

from topics.core.control_bodies import SessionFrameBody, encode_body
from topics.core.errors import TopicsError
from topics.shm.asks import Done
from topics.shm.topic_messages import (
    SESSION_TTL_MS,
    SessionAbandon,
    SessionClose,
    SessionGet,
    SessionOpen,
    SessionOpenReply,
    SessionPut,
)
from topics.storage.frame import FrameType
from topics.storage.topic_frames import control_frame
from topics.walshard.commit.draft import Draft, LogWrite, Steps, Then
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.step_clock import StepClock

COLLECTED_AT_ONCE: Final = 512
"""Sessions that one call of `collect` removes at most."""


class WatchSession(msgspec.Struct, eq=False):
    """One session. `stream` is (frontend, number) while a stream is open. `idle_since_ms` is when the last one closed.
    Numbers of streams grow with time over all frontends; `newest_stream` is the highest so far.
    """

    body: bytes
    positions: dict[str, int] | None
    exact: bool
    idle_since_ms: int
    stream: tuple[int, int] | None = None
    newest_stream: int = 0

    def end_stream(self, stream: tuple[int, int], now_ms: int) -> None:
        """End a stream without its positions, if it is the session's."""
        if self.stream == stream:
            self.stream = None
            self.idle_since_ms = now_ms


class WatchSessions:
    """Owns the watch sessions of one shard, and handles requests about them. The RAM log keeps them over a crash."""

    def __init__(self, holdings: Holdings, time: StepClock) -> None:
        self._holdings = holdings
        self._time = time
        self.by_wid: dict[str, WatchSession] = {}

    def recovered(self, sessions: dict[str, SessionFrameBody]) -> None:
        """Take over the sessions of the RAM log after a crash. None is exact: frontends may have streams open."""
        for wid, session in sessions.items():
            assert session.body is not None
            self._set(wid, WatchSession(session.body, session.positions, False, self._time.now.mono_ms))

    def put(self, call: SessionPut, _frontend: int) -> Steps[Done]:
        """Make a session."""
        self._holdings.claim_session()
        session = WatchSession(call.body, None, True, self._time.now.mono_ms)
        yield from self._log(SessionFrameBody(call.wid, call.body), partial(self._set, call.wid, session))
        return Done()

    def look(self, call: SessionGet, _frontend: int, _group: Draft) -> SessionOpenReply:
        """Return a session without opening it."""
        return self._find(call.wid)[1]

    def open(self, call: SessionOpen, frontend: int, _group: Draft) -> SessionOpenReply:
        """Note that a frontend begins a stream of a session, or had it open when this shard restarted. A stream older
        than the newest one changes nothing: when it ends it could move positions back.
        """
        session, reply = self._find(call.wid)
        if call.stream >= session.newest_stream:
            session.stream = (frontend, call.stream)
            session.newest_stream = call.stream
            session.exact = False
        return reply

    def close(self, call: SessionClose, frontend: int) -> Steps[Done]:
        """End a stream and keep its positions, which are exact, for the next one, unless another has replaced it."""
        session, stream, now_ms = self.by_wid.get(call.wid), (frontend, call.stream), self._time.now.mono_ms
        if session is not None and session.stream == stream:
            body = SessionFrameBody(call.wid, session.body, call.positions, exact=True)

            def closed() -> None:
                session.end_stream(stream, now_ms)
                session.positions, session.exact = call.positions, True

            # The stream has ended even if the log refuses its positions.
            yield from self._log(body, closed, partial(session.end_stream, stream, now_ms))
        return Done()

    def abandon(self, call: SessionAbandon, frontend: int, _group: Draft) -> None:
        """End a stream that never began. Its session is not exact any more. Nobody waits for a reply."""
        session = self.by_wid.get(call.wid)
        if session is not None:
            session.end_stream((frontend, call.stream), self._time.now.mono_ms)

    def frontend_died(self, frontend: int) -> None:
        """End the streams of a dead frontend. Their last positions are lost."""
        for session in self.by_wid.values():
            if session.stream is not None and session.stream[0] == frontend:
                session.end_stream(session.stream, self._time.now.mono_ms)

    def collect(self) -> Steps[None]:
        """Remove up to COLLECTED_AT_ONCE sessions that had no stream for SESSION_TTL_MS; the next call goes on."""
        now = self._time.now
        idle = (
            wid
            for wid, session in self.by_wid.items()
            if session.stream is None and now.mono_ms - session.idle_since_ms > SESSION_TTL_MS
        )
        ends = [
            LogWrite([_session_frame(SessionFrameBody(wid, None), now.wall_ms)], partial(self._set, wid, None))
            for wid in islice(idle, COLLECTED_AT_ONCE)
        ]
        if ends:
            yield Draft(ram=ends)

    def ram_frames(self, now_ms: int) -> list[bytes]:
        """Return a SESSION frame of every session, to be repeated in the RAM log. `now_ms` is wall time."""
        return [
            _session_frame(SessionFrameBody(wid, session.body, session.positions, session.exact), now_ms)
            for wid, session in self.by_wid.items()
        ]

    def _find(self, wid: str) -> tuple[WatchSession, SessionOpenReply]:
        """Return a session and the reply about it. Raise `404 not_found` if it is unknown."""
        session = self.by_wid.get(wid)
        if session is None:
            raise TopicsError("not_found", f"no watch session {wid!r}: it was never made, or collected when idle")
        return session, SessionOpenReply(session.body, session.positions, session.exact and session.stream is None)

    def _set(self, wid: str, session: WatchSession | None) -> None:
        if session is None:
            self.by_wid.pop(wid, None)
        else:
            self.by_wid[wid] = session
        self._holdings.sessions = len(self.by_wid)

    def _log(self, body: SessionFrameBody, apply: Then, undo: Then = None) -> Steps[None]:
        entry = _session_frame(body, self._time.now.wall_ms)
        yield Draft(ram=[LogWrite([entry], apply, undo=undo)], reply=Done())


def _session_frame(body: SessionFrameBody, now_ms: int) -> bytes:
    return control_frame(FrameType.SESSION, 0, now_ms, encode_body(body))
