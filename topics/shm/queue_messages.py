"""Requests to a shard about queues (api §9) and named cursors (api §10), and the answers; `messages.py` encodes them.

A frontend numbers its `/work` streams and the claims that wait for their window; it never uses a number twice. The
shard sends jobs for such a stream or claim in a `Dealt` by itself.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.core.job import JobView, State
from topics.shm.asks import Asks, Deleted, Done, Message, OfTopic


class Dealt(Message, frozen=True):
    """Leased jobs: ascending seqs, their leases numbered from `first_lease_no` on.

    `dead` jobs have had all their deliveries (`dead_deliveries`). The frontend moves them, with their `dead_order_keys`
    ("" for none), to the topic `dead_letter`, and then sends `Bury`. All jobs belong to the queue `topic_id`.
    """

    stream: int
    seqs: list[int]
    first_lease_no: int
    deadline_ms: int
    deliveries: list[int]
    ready: int
    dead: list[int] = msgspec.field(default_factory=list)
    dead_deliveries: list[int] = msgspec.field(default_factory=list)
    dead_order_keys: list[str] = msgspec.field(default_factory=list)
    dead_letter: str = ""
    ended: bool = False
    """True if the queue was deleted, and its streams with it."""
    refused: bool = False
    """True if the shard cannot log leases, so nobody gets jobs. A claim must not answer that there are no jobs."""
    topic_id: int = 0


class Waiting(Message, frozen=True):
    """The claim waits for its window: a `Dealt` follows within `wait_ms`."""

    wait_ms: int


class AckReply(Message, frozen=True):
    """The answer to an ack or nack."""

    count: int
    skipped: list[int]
    ready: int
    in_flight: int


class ExtendReply(Message, frozen=True):
    seqs: list[int]
    skipped: list[int]
    deadline_ms: int


class Peeked(Message, frozen=True):
    """The matching jobs up to `up_to_seq`; `more`: there are records behind it."""

    jobs: list[JobView]
    up_to_seq: int
    more: bool


class Reserved(Message, frozen=True):
    seqs: list[int]


class RemoveReply(Message, frozen=True):
    count: int


class Claim(OfTopic, Asks[Dealt | Waiting], frozen=True):
    """Lease at most `max` jobs to this node. A nil `lease_ms` means the queue's own."""

    node: str
    max: int
    lease_ms: int | None
    stream: int
    """The `stream` of the later `Dealt` if the claim has to wait."""


class OfLeased(OfTopic, frozen=True):
    """Base of requests about jobs that are leased to `node`. With `lease_nos` only exactly these leases count."""

    node: str
    seqs: list[int]
    lease_nos: list[int] | None


class Ack(OfLeased, Asks[AckReply], frozen=True):
    """These jobs are done."""


class Nack(OfLeased, Asks[AckReply], frozen=True):
    """Make these jobs ready again after `delay_ms`."""

    delay_ms: int


class Extend(OfLeased, Asks[ExtendReply], frozen=True):
    """Extend these leases: they end `lease_ms` from now."""

    lease_ms: int


class Unclaim(OfLeased, Asks[Done], frozen=True):
    """Take back leases that never reached their consumer and so are no deliveries. Jobs are ready after `delay_ms`."""

    delay_ms: int = 0


class WorkOpen(OfTopic, Asks[Done], frozen=True):
    """Keep `max` jobs leased to this stream. It is sent again to change `max`, and to a restarted shard."""

    stream: int
    node: str
    max: int
    lease_ms: int | None


class WorkClose(OfTopic, Asks[Done], frozen=True):
    """The stream has ended: its jobs are ready again at once."""

    stream: int


class _OfRecords(OfTopic, frozen=True):
    """Base of requests about records of a topic. A `topic_id` other than 0 must be that topic's."""

    seqs: list[int]
    topic_id: int = 0


class Bury(_OfRecords, Asks[RemoveReply], frozen=True):
    """Remove these dead jobs: they are in the dead-letter topic now."""


class Release(_OfRecords, Asks[Done], frozen=True):
    """Release dead or reserved jobs that could not be moved: they may be dealt again after `delay_ms`."""

    delay_ms: int = 0


class Peek(OfTopic, Asks[Peeked], frozen=True):
    """Return at most `max` jobs behind `from_seq`, of this state (nil: of any but "done"). Changes nothing."""

    from_seq: int
    state: State | None
    max: int


class Reserve(_OfRecords, Asks[Reserved], frozen=True):
    """Reserve the free ones among these records: the queue does not deal them then."""


class Remove(_OfRecords, Asks[RemoveReply], frozen=True):
    """Delete exactly these records of a topic of any type, as far as they exist."""


class CursorReply(Message, frozen=True):
    """A cursor: the next read is (`seq`, `up_to_seq`] at most. `revision` changes unless a reader moves it."""

    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"]
    persist_every: int
    seq: int
    persisted_seq: int
    revision: int
    created: bool = False
    up_to_seq: int | None = None


class CursorList(Message, frozen=True):
    cursors: list[CursorReply]


class CursorMoved(Message, frozen=True):
    """`moved`: the records are the reader's; else try again with the rest. `under_way`: CursorPassedOn must follow."""

    moved: bool
    seq: int
    up_to_seq: int | None
    revision: int
    under_way: bool = False


class _OfCursor(OfTopic, frozen=True):
    """Base of requests about one named cursor."""

    cursor: str


class CursorPut(_OfCursor, Asks[CursorReply], frozen=True):
    """Create a named cursor or change it. A nil field stays as it is; a new cursor is `at_least_once`, 1, from 0."""

    consistency: Literal["strictly_at_once", "at_least_once"] | None
    persist_every: int | None
    seq: int | None
    tail: bool


class CursorDelete(_OfCursor, Asks[Deleted], frozen=True):
    """Delete the cursor, if it exists."""


class CursorGet(OfTopic, Asks[CursorList], frozen=True):
    """Return the cursor, or (nil) the first `most` after the name `after`, for a reader that has read `passed_seq`."""

    cursor: str | None
    after: str = ""
    most: int = 1000
    passed_seq: int = 0


class CursorAdvance(_OfCursor, Asks[CursorMoved], frozen=True):
    """Move the cursor from `from_seq` to `to_seq` for a reader. The frontend uses no number `read` twice."""

    revision: int
    from_seq: int
    to_seq: int
    read: int


class CursorPassedOn(_OfCursor, Asks[Done], frozen=True):
    """Say whether the answer of a read was passed to its connection. The frontend sends it after a CursorAdvance whose
    answer asks for it, or never came: then the shard may have moved the cursor, or may do so soon.
    """

    revision: int
    read: int
    passed_on: bool
