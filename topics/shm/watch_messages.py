"""What frontends and shards say to each other about who watches what (api §7); `messages.py` carries it.

A frontend watches a topic for all its streams, and is told by a notice. A session is what a client asked for, kept by
the shard that owns its id; its streams are known by a number that grows from frontend to frontend.
"""

from __future__ import annotations

import msgspec


class Watch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Notify me (with my `token`) of every change of this topic; at once if it is not what I have seen."""

    token: int
    name: str
    seen_topic_id: int
    seen_head_seq: int


class Unwatch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    token: int
    name: str


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A frontend's new incarnation: what the former one watched and streamed is over."""

    incarnation: int


class SessionPut(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Keep a watch session; `body` is the frontends' own affair."""

    wid: str
    body: bytes


class SessionLook(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a SessionOpen would be answered now; nothing begins or ends by asking."""

    wid: str


class SessionOpen(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A stream of this session begins; `stream` identifies it (unique per frontend incarnation)."""

    wid: str
    stream: int


class SessionClose(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The stream ended in order; these are the positions it has sent up to, without topics that have ended. None: it
    has sent nothing, nor has one before it.
    """

    wid: str
    stream: int
    positions: dict[str, int] | None


class SessionAbandon(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nobody waits for the answer to that SessionOpen any more: no stream has begun."""

    wid: str
    stream: int


SessionCall = SessionPut | SessionLook | SessionOpen | SessionClose | SessionAbandon

WatchCall = Watch | Unwatch | Hello | SessionCall


class SessionOpenReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`positions` as SessionClose said them, None before the first. `exact`: they are all that was sent; else the
    client's Last-Event-ID may know more.
    """

    body: bytes
    positions: dict[str, int] | None
    exact: bool
