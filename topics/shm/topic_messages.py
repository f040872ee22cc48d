"""Requests to a shard about topics, and the answers; `messages.py` encodes them.

Frontends ask about topics and their records (api §1, §5), routers (api §6), watches and sessions (api §7), and
transactions over topics (api §6). The compactor says which records are in segments and which log files may go.

A frontend watches a topic once for all its streams; notices tell it of changes. A watch session is kept by the shard
that owns its id. Its streams have numbers that grow from one frontend incarnation to the next.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from topics.core.config import TopicConfig
from topics.core.routers import Router, RouterSpec
from topics.core.segment_list import SegmentInfo
from topics.shm.asks import Asks, Deleted, Done, Message, OfTopic

SESSION_TTL_MS: Final = 300_000
"""The time for which a watch session without a stream is kept."""


class PutTopicReply(Message, frozen=True):
    """The topic now. Send a `rest` as the next request, until there is none: some changes take several turns."""

    created: bool
    config: TopicConfig
    rest: PutTopic | None = None


class DeleteRecordsReply(Message, frozen=True):
    """The number of deleted records, and the topic as it is now. `rest`: the next request, until all is done."""

    deleted: int
    earliest_seq: int
    head_seq: int
    records: int
    live_bytes: int
    rest: DeleteRecords | None = None


class PutTopic(OfTopic, Asks[PutTopicReply], frozen=True):
    """Create a topic or replace its configuration. `turns` is set in a `rest`: the turns the change has had; `is_set`,
    too: the topic has had the configuration, and may have another by now.
    """

    config: TopicConfig
    type_given: bool
    turns: int = 0
    is_set: bool = False


class EnsureTopic(OfTopic, Asks[PutTopicReply], frozen=True):
    """Create a topic with the default configuration; an existing one stays as it is."""


class DeleteTopic(OfTopic, Asks[Deleted], frozen=True):
    if_empty: bool


class DeleteRecords(OfTopic, Asks[DeleteRecordsReply], frozen=True):
    """Delete records below `before_seq` that match (`core/tags.py`); a nil `op` matches every record.

    The last three fields are set in a `rest`: it goes on at `from_seq`, up to `last_seq` (nil: the head), in the topic
    with this id (0: any of that name).
    """

    before_seq: int | None
    op: Literal["eq", "glob"] | None
    pattern: bytes
    from_seq: int = 0
    last_seq: int | None = None
    topic_id: int = 0


class Expire(OfTopic, Asks[Done], frozen=True):
    """Move the floors now: a reader saw expired records at the front."""


class PutRouterReply(Message, frozen=True):
    created: bool
    router: Router


class SyncRoutersReply(Message, frozen=True):
    begun: bool


class CaughtUp(Message, frozen=True):
    """`done`: asking again does not help. Without `done` ask again: at once, or in a while if copies are `pending`
    because the source cannot be read at the moment.
    """

    done: bool
    pending: bool


class PutRouter(Message, Asks[PutRouterReply], frozen=True):
    """To shard 0, like DeleteRouter and RemoveRouters: register a router, or change it."""

    name: str
    spec: RouterSpec


class DeleteRouter(Message, Asks[Deleted], frozen=True):
    name: str


class RemoveRouters(Message, Asks[Done], frozen=True):
    """Remove those of these routers that still exist."""

    router_ids: list[int]


class SyncRouters(OfTopic, Asks[SyncRoutersReply], frozen=True):
    """Apply the table of routers to this dest. The answer says whether this router (0: any) has begun."""

    router_id: int
    version: int


class CatchUp(OfTopic, Asks[CaughtUp], frozen=True):
    """Copy everything into this dest that its source has now."""


class SessionOpenReply(Message, frozen=True):
    """The positions of the last SessionClose, None before. If not `exact`, a Last-Event-ID may be further."""

    body: bytes
    positions: dict[str, int] | None
    exact: bool


class Watch(Message, Asks[None], frozen=True):
    """Notify me (with my `token`) of every change of this topic; at once if it has changed since I saw it."""

    token: int
    name: str
    seen_topic_id: int
    seen_head_seq: int


class Unwatch(Message, Asks[None], frozen=True):
    token: int
    name: str


class Hello(Message, Asks[None], frozen=True):
    """A frontend has a new incarnation: end the watches and streams of the former one."""

    incarnation: int


class SessionPut(Message, Asks[Done], frozen=True):
    """Keep a watch session; only frontends look into its `body`."""

    wid: str
    body: bytes


class SessionGet(Message, Asks[SessionOpenReply], frozen=True):
    """Answer as a SessionOpen would be answered now, without opening a stream."""

    wid: str


class _OfStream(Message, frozen=True):
    """Base of requests about a stream of a session; `stream` identifies it (unique in a frontend incarnation)."""

    wid: str
    stream: int


class SessionOpen(_OfStream, Asks[SessionOpenReply], frozen=True):
    """Open a stream of this session."""


class SessionClose(_OfStream, Asks[Done], frozen=True):
    """The stream ended in order. `positions`: last seqs sent by topic, no deleted ones; None: none was ever sent."""

    positions: dict[str, int] | None


class SessionAbandon(_OfStream, Asks[None], frozen=True):
    """Nobody waits for the answer to that SessionOpen any more: no stream was opened."""


class TxnReply(Message, frozen=True):
    """A sink after the call. `batch` is its latest batch, `pending` the stages of it that are not published yet."""

    outcome: Literal["begun", "pending", "committed", "none"]
    batch: int
    pending: list[tuple[str, str]]


class TxnPendingReply(Message, frozen=True):
    """(sink, batch, stages) of each batch."""

    batches: list[tuple[str, int, list[tuple[str, str]]]]


class TxnBegin(Message, Asks[TxnReply], frozen=True):
    """Decide a batch of a sink: its stages, (id, topic) each, will be published whatever happens."""

    sink: str
    batch: int
    stages: list[tuple[str, str]]


class StagePublish(OfTopic, frozen=True):
    """Append a stage of a decided batch, once; answered as an append."""

    stage: str
    sink: str
    batch: int


class TxnEnd(Message, Asks[Done], frozen=True):
    """Every stage of the batch is published."""

    sink: str
    batch: int


class StagesOver(OfTopic, Asks[None], frozen=True):
    """The batch is over: the topic may forget the stage keys that made it publish each stage only once."""

    sink: str
    batch: int


class TxnGet(Message, Asks[TxnReply], frozen=True):
    """Return the batch that this sink has committed last."""

    sink: str


class TxnForget(Message, Asks[TxnReply], frozen=True):
    """Forget the sink: nobody will use it any more."""

    sink: str


class TxnPending(Message, Asks[TxnPendingReply], frozen=True):
    """Return the batches that are decided and not over."""


SinkCall = TxnBegin | TxnEnd | TxnGet | TxnForget | TxnPending
"""To the shard that owns the sink."""


class CheckpointReply(Message, frozen=True):
    """Topic ids: `deleted` topics do not exist any more, `refused` could not be marked. All other topics are marked."""

    deleted: list[int]
    refused: list[int]


class TopicCheckpoint(msgspec.Struct, array_like=True, frozen=True):
    """One topic's records up to `up_to_seq` are in segments and synced. `segments`: those that are new or changed.

    `up_to_seq` is the former one when a segment was only sealed, rewritten or relocated.
    """

    topic_id: int
    up_to_seq: int
    segments: list[SegmentInfo]


class Checkpoint(Message, Asks[CheckpointReply], frozen=True):
    """From the compactor: log that these records are in segments, then drop their locations."""

    topics: list[TopicCheckpoint]


class Trim(Message, Asks[Done], frozen=True):
    """From the compactor: both kept snapshots have everything that is in log files below `file_no`."""

    file_no: int


class MarkAgain(Message, Asks[Done], frozen=True):
    """From the compactor: mark these runs of deleted records in their segments again, as a sync may have failed."""

    topic_id: int
    runs: list[tuple[int, int]]
