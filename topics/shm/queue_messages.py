"""Requests to a shard about queues (api §9) and named cursors (api §10), and the answers; `messages.py` carries them.

A frontend knows its `/work` streams, and the claims that wait for their window, by numbers of its own that it never
uses twice. Both get dealt jobs in a `Dealt` that nobody asked for at that moment.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.core.job import JobView, State
from topics.shm.asks import Asks, Done


class Dealt(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Leased jobs: ascending seqs, their leases `first_lease_no` and up.

    `dead` were handed out `dead_deliveries` times, which is often enough: the frontend brings them, with their
    `dead_order_keys` ("" for none), to `dead_letter` and then has the shard `Bury` them.
    """

    stream: int
    seqs: list[int]
    first_lease_no: int
    deadline_ms: int
    deliveries: list[int]
    ready: int
    dead: list[int] = []
    dead_deliveries: list[int] = []
    dead_order_keys: list[str] = []
    dead_letter: str = ""
    ended: bool = False
    """The queue is gone, and the stream with it."""
    refused: bool = False
    """The log cannot say who has jobs, so nobody gets any. A claim must not be told that there are none."""


class Waiting(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The claim waits for its window: a `Dealt` follows within `wait_ms`."""

    wait_ms: int


class AckReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to an ack or nack."""

    count: int
    skipped: list[int]
    ready: int
    in_flight: int


class ExtendReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    seqs: list[int]
    skipped: list[int]
    deadline_ms: int


class Peeked(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All jobs up to `up_to_seq`; `more`: there are records behind it."""

    jobs: list[JobView]
    up_to_seq: int
    more: bool


class Carried(msgspec.Struct, tag=True, array_like=True, frozen=True):
    seqs: list[int]


class RemoveReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    count: int


QueueReply = Dealt | Waiting | AckReply | ExtendReply | Peeked | Carried | RemoveReply


class Claim(msgspec.Struct, Asks[Dealt | Waiting], tag=True, array_like=True, frozen=True):
    """Lease me at most `max` jobs. A nil `lease_ms` means the queue's own."""

    name: str
    node: str
    max: int
    lease_ms: int | None
    stream: int
    """The number under which the jobs come when the claim has to wait."""


class Ack(msgspec.Struct, Asks[AckReply], tag=True, array_like=True, frozen=True):
    """These jobs are done."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int] | None


class Nack(msgspec.Struct, Asks[AckReply], tag=True, array_like=True, frozen=True):
    """Give these jobs to somebody else, after `delay_ms`."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int] | None
    delay_ms: int


class Extend(msgspec.Struct, Asks[ExtendReply], tag=True, array_like=True, frozen=True):
    """These leases end `lease_ms` from now."""

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int] | None
    lease_ms: int


class Unclaim(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """These leases never reached their consumer: they do not count as deliveries. The jobs are ready after
    `delay_ms`.
    """

    name: str
    node: str
    seqs: list[int]
    lease_nos: list[int]
    delay_ms: int = 0


class WorkOpen(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """Keep `max` jobs leased to this stream from now on. It is said again to change `max`, and to a restarted shard."""

    name: str
    stream: int
    node: str
    max: int
    lease_ms: int | None


class WorkClose(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """The stream is over: its jobs are free again, at once."""

    name: str
    stream: int


class Bury(msgspec.Struct, Asks[RemoveReply], tag=True, array_like=True, frozen=True):
    """These dead jobs are in the dead-letter topic now."""

    name: str
    seqs: list[int]


class Exhume(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """These dead jobs could not be taken away: try again after `delay_ms`."""

    name: str
    seqs: list[int]
    delay_ms: int


class Peek(msgspec.Struct, Asks[Peeked], tag=True, array_like=True, frozen=True):
    """Show me at most `max` jobs behind `from_seq`, of this state (nil: of any but "done"). Nothing moves."""

    name: str
    from_seq: int
    state: State | None
    max: int


class Carry(msgspec.Struct, Asks[Carried], tag=True, array_like=True, frozen=True):
    """Which of these records is free to be taken elsewhere? A queue keeps them from its consumers until then: by
    `Remove`, or `Exhume`.
    """

    name: str
    seqs: list[int]


class Remove(msgspec.Struct, Asks[RemoveReply], tag=True, array_like=True, frozen=True):
    """Delete exactly these records of any topic, as far as they are there."""

    name: str
    seqs: list[int]


QueueCall = Claim | Ack | Nack | Extend | Unclaim | WorkOpen | WorkClose | Bury | Exhume | Peek | Carry | Remove


class CursorReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A cursor as it is: the next read begins at `seq`, and ends at `up_to_seq` at the latest. `revision` changes
    whenever anything but a reader moves it.
    """

    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"]
    persist_every: int
    seq: int
    persisted_seq: int
    revision: int
    created: bool = False
    up_to_seq: int | None = None


class CursorList(msgspec.Struct, tag=True, array_like=True, frozen=True):
    cursors: list[CursorReply]


class CursorDeleted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class CursorMoved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`moved`: the records belong to the reader, and if it is `under_way` CursorPassedOn has to follow. The cursor's
    place is for another try, as in CursorReply.
    """

    moved: bool
    seq: int
    up_to_seq: int | None
    revision: int
    under_way: bool = False


CursorAnswer = CursorReply | CursorList | CursorDeleted | CursorMoved


class CursorPut(msgspec.Struct, Asks[CursorReply], tag=True, array_like=True, frozen=True):
    """Make a named cursor or change it. A nil field stays as it is; a new cursor is `at_least_once`, 1,
    beginning at 0.
    """

    name: str
    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"] | None
    persist_every: int | None
    seq: int | None
    tail: bool


class CursorDelete(msgspec.Struct, Asks[CursorDeleted], tag=True, array_like=True, frozen=True):
    name: str
    cursor: str


class CursorLook(msgspec.Struct, Asks[CursorList], tag=True, array_like=True, frozen=True):
    """Where is the cursor, or (a nil `cursor`) where are the first `most` whose names follow `after`? With
    `passed_seq`: where would it be for a reader who has read up to there?
    """

    name: str
    cursor: str | None
    after: str = ""
    most: int = 1000
    passed_seq: int = 0


class CursorAdvance(msgspec.Struct, Asks[CursorMoved], tag=True, array_like=True, frozen=True):
    """A reader has read from `from_seq` to `to_seq`: move the cursor, if it is still there. The frontend has not used
    the number `read` before.
    """

    name: str
    cursor: str
    revision: int
    from_seq: int
    to_seq: int
    read: int


class CursorPassedOn(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """The answer of a read was given to its connection, or not. It follows each CursorAdvance whose answer says so, or
    never came: the shard may have moved the cursor all the same, or be about to.
    """

    name: str
    cursor: str
    revision: int
    read: int
    passed_on: bool


CursorCall = CursorPut | CursorDelete | CursorLook | CursorAdvance | CursorPassedOn
