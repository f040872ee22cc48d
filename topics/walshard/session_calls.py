"""What a shard does with requests about watch sessions (api §7): what is to outlive a crash goes to the RAM log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from topics.core.control_bodies import SessionBody, encode_body
from topics.shm import messages
from topics.shm.messages import Done
from topics.shm.topic_messages import (
    SessionAbandon,
    SessionCall,
    SessionClose,
    SessionLook,
    SessionOpen,
    SessionPut,
)
from topics.storage import frame
from topics.storage.frame import FrameType
from topics.walshard.group_commit import GroupCommit
from topics.walshard.holdings import Holdings
from topics.walshard.operation import Answer, Operation
from topics.walshard.sessions import Sessions
from topics.walshard.step_clock import StepClock


class SessionCalls:
    """Of one shard, each a commit of its own: everything prepared is committed before."""

    def __init__(self, sessions: Sessions, holdings: Holdings, commits: GroupCommit, time: StepClock) -> None:
        self._sessions = sessions
        self._holdings = holdings
        self._commits = commits
        self._time = time

    def take(self, call: SessionCall, answer: Answer) -> None:
        """Answers, if the request wants that, or raises TopicsError."""
        sessions, now_ms = self._sessions, self._time.now.mono_ms
        match call:
            case SessionPut():
                self._holdings.claim_session()
                answer.reply = messages.encode_reply(answer.request_id, Done())
                body = SessionBody(call.wid, call.body)
                self._log(body, lambda: sessions.put(call.wid, call.body, now_ms), answer)
            case SessionLook():
                answer.reply = messages.encode_reply(answer.request_id, sessions.look(call.wid))
            case SessionOpen():
                reply = sessions.open(call.wid, answer.frontend, call.stream)
                answer.reply = messages.encode_reply(answer.request_id, reply)
            case SessionClose():
                answer.reply = messages.encode_reply(answer.request_id, Done())
                closed = sessions.closing(call.wid, answer.frontend, call.stream, call.positions)
                if closed is not None:
                    # That it has ended is so whether or not the log can take how far it came.
                    ended = partial(sessions.abandoned, call.wid, answer.frontend, call.stream, now_ms)
                    self._log(closed, lambda: sessions.closed(call.wid, call.positions, now_ms), answer, ended)
            case SessionAbandon():
                sessions.abandoned(call.wid, answer.frontend, call.stream, now_ms)

    def collect(self) -> None:
        """Those that had no stream for too long."""
        for wid in self._sessions.overdue(self._time.now.mono_ms):
            self._log(SessionBody(wid, None), partial(self._sessions.remove, wid), None)

    def _log(
        self,
        body: SessionBody,
        apply: Callable[[], None],
        answer: Answer | None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        entry = frame.encode(FrameType.SESSION, 0, 0, 0, self._time.now.wall_ms, b"", b"", encode_body(body))
        self._commits.commit([], [Operation([entry], lambda _file_no, _offset: apply(), answer=answer, undo=undo)])
