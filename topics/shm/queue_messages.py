"""What frontends and shards say to each other about queues and named cursors (api §9, §10); `messages.py` carries it.

A `/work` stream, and a claim that waits for its window, are known by the frontend that has them and a number of that
frontend's own, never used twice. Both are dealt jobs with a `Dealt` that nobody asked for at that moment.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Claim(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Lease me at most `max` jobs. A nil `lease_ms` is the queue's own."""

    name: str
    node: str
    max: int
    lease_ms: int | None
    stream: int
    """By which the jobs come when the claim has to wait."""


class Ack(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These jobs are done."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int] | None


class Nack(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These jobs are for somebody else, after `delay_ms`."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int] | None
    delay_ms: int


class Extend(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These leases end `lease_ms` from now."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int] | None
    lease_ms: int


class Unclaim(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These leases never reached their consumer: no delivery of it counts."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int]


class WorkOpen(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Keep `max` jobs leased to this stream from now on. Said again to change `max`, and to a restarted shard."""

    name: str
    stream: int
    node: str
    max: int
    lease_ms: int | None


class WorkClose(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The stream is over: what it has is free again, at once."""

    name: str
    stream: int


class Bury(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These dead jobs are in the dead-letter topic now."""

    name: str
    seqs: list[int]


class Exhume(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These dead jobs could not be taken away: try again after `delay_ms`."""

    name: str
    seqs: list[int]
    delay_ms: int


class Remove(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Delete exactly these records, of whatever topic, as far as they are there."""

    name: str
    seqs: list[int]


class CursorPut(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Make a named cursor or change it. A nil `seq` leaves one that exists where it is, and begins a new one at 0."""

    name: str
    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"]
    persist_every: int
    seq: int | None
    tail: bool


class CursorDelete(msgspec.Struct, tag=True, array_like=True, frozen=True):
    name: str
    cursor: str


class CursorLook(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Where is it, or where are all (a nil `cursor`)?"""

    name: str
    cursor: str | None


class CursorAdvance(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A reader has read from `from_seq` to `to_seq`: move the cursor, if it is still there."""

    name: str
    cursor: str
    revision: int
    from_seq: int
    to_seq: int


class CursorPassedOn(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of the answer of a read that CursorMoved has a number for: its connection was given it, or not."""

    name: str
    cursor: str
    revision: int
    read: int
    passed_on: bool


QueueCall = (
    Claim
    | Ack
    | Nack
    | Extend
    | Unclaim
    | WorkOpen
    | WorkClose
    | Bury
    | Exhume
    | Remove
    | CursorPut
    | CursorDelete
    | CursorLook
    | CursorAdvance
    | CursorPassedOn
)


class Dealt(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Leased jobs: ascending seqs, their leases `first_lease_no` and up. `dead` were handed out `dead_deliveries`
    times, which is often enough: the frontend is to bring them to `dead_letter` and then to `Bury` them.
    """

    stream: int
    seqs: list[int]
    first_lease_no: int
    deadline_ms: int
    deliveries: list[int]
    ready: int
    dead: list[int] = []
    dead_deliveries: list[int] = []
    dead_letter: str = ""
    ended: bool = False
    """The queue is gone, and the stream with it."""


class Waiting(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The claim waits for its window: a `Dealt` follows within `wait_ms`."""

    wait_ms: int


class AckReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Of an ack or nack."""

    count: int
    skipped: list[int]
    ready: int
    in_flight: int


class ExtendReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    seqs: list[int]
    skipped: list[int]
    deadline_ms: int


class RemoveReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    count: int


class CursorReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A cursor as it is. `revision` is another one whenever it was moved by anything but a reader."""

    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"]
    persist_every: int
    seq: int
    persisted_seq: int
    revision: int
    created: bool = False


class CursorList(msgspec.Struct, tag=True, array_like=True, frozen=True):
    cursors: list[CursorReply]


class CursorDeleted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class CursorMoved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`moved`: what was read is the reader's, and unless `read` is 0 CursorPassedOn has to follow. Else it is where it
    is now, for another try.
    """

    moved: bool
    seq: int
    revision: int
    read: int = 0


QueueReply = (
    Dealt | Waiting | AckReply | ExtendReply | RemoveReply | CursorReply | CursorList | CursorDeleted | CursorMoved
)
