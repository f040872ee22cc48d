"""Requests to a shard about topics, and the answers; `messages.py` carries them.

- Frontends: topics and their records (api §1, §5), routers (api §6), watchers and their sessions (api §7), and
  transactions over topics (api §6).
- The compactor: which records are in segments now, and which log files may go.

A frontend watches a topic for all its streams, and is told by a notice. A session is what a client asked for. The shard
that owns its id keeps it. The streams of a session are known by a number that grows from frontend to frontend.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.core.config import TopicConfig
from topics.core.routers import Router, RouterSpec
from topics.core.segment_list import SegmentInfo
from topics.shm.asks import Asks, Done


class PutTopicReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`rest` is the next request, until all is done: a shard takes as much of a change of class as fits into a turn."""

    created: bool
    config: TopicConfig
    rest: PutTopic | None = None


class DeleteTopicReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class DeleteRecordsReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The number of deleted records, and the topic as it is now. `rest` is the next request, until all is done: a shard
    takes as much of a delete as fits into one turn.
    """

    deleted: int
    earliest_seq: int
    head_seq: int
    records: int
    live_bytes: int
    rest: DeleteRecords | None = None


TopicReply = PutTopicReply | DeleteTopicReply | DeleteRecordsReply


class PutTopic(msgspec.Struct, Asks[PutTopicReply], tag=True, array_like=True, frozen=True):
    """Create a topic or replace its configuration. `turns` is for the `rest` of another one: how many it has had."""

    name: str
    config: TopicConfig
    type_given: bool
    turns: int = 0


class EnsureTopic(msgspec.Struct, Asks[PutTopicReply], tag=True, array_like=True, frozen=True):
    """Create a topic with the default configuration; an existing one stays as it is. Answered like PutTopic."""

    name: str


class DeleteTopic(msgspec.Struct, Asks[DeleteTopicReply], tag=True, array_like=True, frozen=True):
    name: str
    if_empty: bool


class DeleteRecords(msgspec.Struct, Asks[DeleteRecordsReply], tag=True, array_like=True, frozen=True):
    """Delete records below `before_seq` that match (`core/tags.py`); a nil `op` matches every record.

    The fields after `op` and its text are for the `rest` of another one: it begins at `from_seq` and ends at `last_seq`
    (nil: the head at that moment), in the topic that has this id (0: whichever has the name).
    """

    name: str
    before_seq: int | None
    op: Literal["eq", "glob"] | None
    pattern: bytes
    from_seq: int = 0
    last_seq: int | None = None
    topic_id: int = 0


class Expire(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """A reader saw expired records at the front: move the floors now."""

    name: str


TopicCall = PutTopic | EnsureTopic | DeleteTopic | DeleteRecords | Expire


class PutRouterReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    created: bool
    router: Router


class DeleteRouterReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class SyncRoutersReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    begun: bool


class CaughtUp(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`done`: asking again now gains nothing. `pending`: there is room for more copies than were made. If it is not
    `done` then, the source could not be read at this moment: ask again in a while.
    """

    done: bool
    pending: bool


RouterReply = PutRouterReply | DeleteRouterReply | SyncRoutersReply | CaughtUp


class PutRouter(msgspec.Struct, Asks[PutRouterReply], tag=True, array_like=True, frozen=True):
    """To shard 0, like the next two: register a router, or change it."""

    name: str
    spec: RouterSpec


class DeleteRouter(msgspec.Struct, Asks[DeleteRouterReply], tag=True, array_like=True, frozen=True):
    name: str


class RemoveRouters(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """Remove these routers, as far as they are still there."""

    router_ids: list[int]


class SyncRouters(msgspec.Struct, Asks[SyncRoutersReply], tag=True, array_like=True, frozen=True):
    """To the shard of a dest: do what the table of routers says now. Has this router (0: any) begun?"""

    dest: str
    router_id: int
    version: int


class CatchUp(msgspec.Struct, Asks[CaughtUp], tag=True, array_like=True, frozen=True):
    """To the shard of a dest: copy everything that its source has now."""

    dest: str


RouterCall = PutRouter | DeleteRouter | RemoveRouters | SyncRouters | CatchUp


class SessionOpenReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The positions of the last SessionClose, None before the first. `exact`: they are all that was sent; else the
    client's Last-Event-ID may know more.
    """

    body: bytes
    positions: dict[str, int] | None
    exact: bool


class Watch(msgspec.Struct, Asks[None], tag=True, array_like=True, frozen=True):
    """Notify me (with my `token`) of every change of this topic; at once if it is not as I have seen it."""

    token: int
    name: str
    seen_topic_id: int
    seen_head_seq: int


class Unwatch(msgspec.Struct, Asks[None], tag=True, array_like=True, frozen=True):
    token: int
    name: str


class Hello(msgspec.Struct, Asks[None], tag=True, array_like=True, frozen=True):
    """A frontend has a new incarnation: the watches and streams of the former one are over."""

    incarnation: int


class SessionPut(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """Keep a watch session; only frontends look into its `body`."""

    wid: str
    body: bytes


class SessionLook(msgspec.Struct, Asks[SessionOpenReply], tag=True, array_like=True, frozen=True):
    """How would a SessionOpen be answered now? Nothing begins or ends by asking."""

    wid: str


class SessionOpen(msgspec.Struct, Asks[SessionOpenReply], tag=True, array_like=True, frozen=True):
    """A stream of this session begins; `stream` identifies it (unique per frontend incarnation)."""

    wid: str
    stream: int


class SessionClose(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """The stream ended in order. `positions` are how far it has sent each topic, without topics that have ended; None:
    neither it nor a stream before it has sent anything.
    """

    wid: str
    stream: int
    positions: dict[str, int] | None


class SessionAbandon(msgspec.Struct, Asks[None], tag=True, array_like=True, frozen=True):
    """Nobody waits for the answer to that SessionOpen any more: no stream has begun."""

    wid: str
    stream: int


SessionCall = SessionPut | SessionLook | SessionOpen | SessionClose | SessionAbandon


WatchCall = Watch | Unwatch | Hello | SessionCall


class TxnReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A sink after the call: `batch` is its latest, `pending` the stages of it that are still to be published."""

    outcome: Literal["begun", "pending", "committed", "none"]
    batch: int
    pending: list[tuple[str, str]]


class TxnPendingReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """(sink, batch, stages) of each batch."""

    batches: list[tuple[str, int, list[tuple[str, str]]]]


SinkReply = TxnReply | TxnPendingReply


class TxnBegin(msgspec.Struct, Asks[TxnReply], tag=True, array_like=True, frozen=True):
    """Decide a batch of a sink: from now on its stages, (id, topic) each, will be published."""

    sink: str
    batch: int
    stages: list[tuple[str, str]]


class StagePublish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Append a stage of a decided batch, once; answered as an append."""

    name: str
    stage: str
    sink: str
    batch: int


class TxnEnd(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """Every stage of the batch is published."""

    sink: str
    batch: int


class StagesOver(msgspec.Struct, Asks[None], tag=True, array_like=True, frozen=True):
    """The batch is over: the topic may forget the pins by which it publishes each stage once."""

    name: str
    sink: str
    batch: int


class TxnLook(msgspec.Struct, Asks[TxnReply], tag=True, array_like=True, frozen=True):
    """Which batch has this sink committed?"""

    sink: str


class TxnForget(msgspec.Struct, Asks[TxnReply], tag=True, array_like=True, frozen=True):
    """Nobody will use the sink any more."""

    sink: str


class TxnPending(msgspec.Struct, Asks[TxnPendingReply], tag=True, array_like=True, frozen=True):
    """Which batches are decided and not over?"""


SinkCall = TxnBegin | TxnEnd | TxnLook | TxnForget | TxnPending


"""To the shard that owns the sink."""


TxnCall = SinkCall | StagePublish | StagesOver


class CheckpointReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Topic ids: `gone` are deleted, `refused` could not be marked. All others of the request are marked."""

    gone: list[int]
    refused: list[int]


class TopicCheckpoint(msgspec.Struct, array_like=True, frozen=True):
    """One topic's records up to `up_to_seq` are in segments, on the disk; `segments` are those that are new or changed.

    `up_to_seq` stays as it was when a segment was only sealed, rewritten or relocated.
    """

    topic_id: int
    up_to_seq: int
    segments: list[SegmentInfo]


class Checkpoint(msgspec.Struct, Asks[CheckpointReply], tag=True, array_like=True, frozen=True):
    """From the compactor: log that these records are in segments, then let go of their locations."""

    topics: list[TopicCheckpoint]


class Trim(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """From the compactor: log files numbered below `file_no` hold nothing that two snapshots do not have."""

    file_no: int


class MarkAgain(msgspec.Struct, Asks[Done], tag=True, array_like=True, frozen=True):
    """From the compactor: mark these deletions in their segments once more, because a sync that should have covered the
    marks may have failed. `runs` are (first_seq, last_seq) of records that the log says are deleted.
    """

    topic_id: int
    runs: list[tuple[int, int]]


CompactorCall = Checkpoint | Trim | MarkAgain
