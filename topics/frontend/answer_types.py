"""What answers look like, as types: for the OpenAPI document, whose tests hold every answer against them.

Answers are not made from these. Clients ignore fields that they do not know (api §0.2), so more may be there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from topics.core.config import TopicConfig
from topics.core.routers import RouterSpec

Seq = Annotated[int, msgspec.Meta(ge=0)]
Ms = Annotated[int, msgspec.Meta(ge=0)]


class Performance(msgspec.Struct, kw_only=True):
    """How long it took (api §0.7); what does not apply is absent."""

    server_total_ms: float
    wal_append_ms: float = 0.0
    fsync_ms: float = 0.0
    records_scanned: int = 0
    throttle_wait_ms: float = 0.0
    cold_segments_read: int = 0
    copies_pending: bool = False
    """The shard of a router's dest did not answer: what its source has may not be there yet."""


class EchoedConfig(TopicConfig, frozen=True):
    """The whole configuration of a topic."""

    durable: bool = False


class PutTopicAnswer(msgspec.Struct):
    """A topic was created or configured."""

    topic: str
    created: bool
    config: EchoedConfig
    performance: Performance


class TopicState(msgspec.Struct):
    """A topic as it is."""

    topic: str
    type: Literal["log", "queue"]
    head_seq: Seq
    earliest_seq: Seq
    next_seq: Seq
    count: int
    bytes: int
    durable_seq: Seq
    epoch: str
    config: EchoedConfig
    effective_priority: int
    last_write_ts: Ms | None
    last_read_ts: Ms | None
    performance: Performance
    queue: QueueCounts | msgspec.UnsetType = msgspec.UNSET


class QueueCounts(msgspec.Struct):
    """Of a queue: what a claim would get now, what is leased, what went to the dead letters."""

    ready: int
    in_flight: int
    dead_lettered: int


class TopicEntry(msgspec.Struct):
    """A topic in a list."""

    topic: str
    head_seq: Seq
    earliest_seq: Seq
    count: int
    bytes: int
    durable: bool
    effective_priority: int


class TopicList(msgspec.Struct):
    """A page, ordered by name; `next_cursor` only when there are more."""

    topics: list[TopicEntry]
    performance: Performance
    next_cursor: str | msgspec.UnsetType = msgspec.UNSET


class DeleteTopicAnswer(msgspec.Struct):
    """`deleted` is false when there was none."""

    topic: str
    deleted: bool
    routers_removed: list[str]
    performance: Performance


class PutRouterAnswer(RouterSpec, frozen=True, kw_only=True):
    """A router was made or changed."""

    router: str
    created: bool
    performance: Performance


class RouterEntry(RouterSpec, frozen=True, kw_only=True):
    """A router in a list; `forwarded_total` counts the copies it has made."""

    router: str
    forwarded_total: int


class RouterState(RouterEntry, frozen=True, kw_only=True):
    """A router as it is."""

    performance: Performance


class RouterList(msgspec.Struct):
    """A page, ordered by name; `next_cursor` only when there are more."""

    routers: list[RouterEntry]
    performance: Performance
    next_cursor: str | msgspec.UnsetType = msgspec.UNSET


class DeleteRouterAnswer(msgspec.Struct):
    """`deleted` is false when there was none."""

    router: str
    deleted: bool
    performance: Performance


class DeleteRecordsAnswer(msgspec.Struct):
    """The topic after a deletion of records."""

    topic: str
    deleted: int
    earliest_seq: Seq
    head_seq: Seq
    count: int
    bytes: int
    performance: Performance


class AppendAnswer(msgspec.Struct):
    """A write that is as durable as `durability` says; `seqs` unless `return_seqs=false`."""

    topic: str
    first_seq: Seq
    last_seq: Seq
    head_seq: Seq
    count: int
    created: bool
    deduped: bool
    durability: Literal["ephemeral", "memory", "disk", "fsync"]
    performance: Performance
    seqs: list[Seq] | msgspec.UnsetType = msgspec.UNSET


class Record(msgspec.Struct):
    """A record as it is delivered; what is absent is left out."""

    seq: Seq = msgspec.field(name="$seq")
    ts: Ms = msgspec.field(name="$ts")
    data: Any
    node: str | msgspec.UnsetType = msgspec.field(name="$node", default=msgspec.UNSET)
    tag: str | msgspec.UnsetType = msgspec.field(name="$tag", default=msgspec.UNSET)
    meta: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class TombstoneAnswer(msgspec.Struct):
    """What is gone and was not asked to go (api §3.3)."""

    gap_from: Seq
    gap_to: Seq
    reason: str
    missed_estimate: int
    earliest_seq: Seq
    head_seq: Seq


class DiffAnswer(msgspec.Struct):
    """What follows a cursor."""

    topic: str
    records: list[Record]
    next_from_seq: Seq
    head_seq: Seq
    earliest_seq: Seq
    durable_seq: Seq
    epoch: str
    caught_up: bool
    tombstone: TombstoneAnswer | None
    lag: int
    performance: Performance


class WatchedTopic(msgspec.Struct):
    """Where a watch starts in a topic."""

    from_seq: Seq
    head_seq: Seq
    earliest_seq: Seq


class WatchAnswer(msgspec.Struct):
    """A watch session; its stream is at `stream_url`."""

    wid: str
    stream_url: str
    session_ttl_ms: int
    topics: dict[str, WatchedTopic]
    performance: Performance


class Health(msgspec.Struct):
    """The process that was asked answers."""

    status: Literal["ok"]
    version: str
    uptime_ms: Ms
    performance: Performance


class Ready(msgspec.Struct):
    """All topics can be read."""

    status: Literal["ready"]
    wal_replay_complete: bool
    topics: int
    pressure: float
    performance: Performance
    recovering_shards: list[int] | msgspec.UnsetType = msgspec.UNSET
    read_only_shards: list[int] | msgspec.UnsetType = msgspec.UNSET


class Problem(msgspec.Struct):
    """Clients branch on `code`, people read `message`, programs compute with `detail`."""

    code: str
    message: str
    detail: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Error(msgspec.Struct):
    """Every answer that is no success (api §0.6)."""

    error: Problem


class StageAnswer(msgspec.Struct):
    """Records are kept back; `stage` names them in the commit."""

    topic: str
    txn: str
    stage: str
    count: int
    bytes: int
    expires_in_ms: Ms
    performance: Performance


class DropStagesAnswer(msgspec.Struct):
    """Stages of a transaction were dropped."""

    topic: str
    txn: str
    dropped: int
    performance: Performance


class CommitAnswer(msgspec.Struct):
    """A batch of a sink; `duplicate`: it, or a later one (`last_batch`), had been committed before."""

    sink: str
    batch: int
    last_batch: int
    duplicate: bool
    count: int
    performance: Performance


class SinkAnswer(msgspec.Struct):
    """A sink; `last_batch` is null when it never committed."""

    sink: str
    last_batch: int | None
    performance: Performance


class ForgetSinkAnswer(msgspec.Struct):
    """A sink was forgotten, if there was one."""

    sink: str
    deleted: bool
    performance: Performance


class ManifestSegment(msgspec.Struct):
    """A sealed segment: records first_seq..last_seq, of first_ts..last_ts. `data_path` is below the cold directory when
    `tier` is "cold", `idx_path` always below the data directory. `idx_xxh3`: XXH3-64 over offset, len and ts of all
    entries of the index; null where it cannot be read. Frames carry checksums of their own.
    """

    first_seq: Seq
    last_seq: Seq
    records: int
    first_ts: Ms
    last_ts: Ms
    data_bytes: int
    version: int
    tier: Literal["hot", "cold"]
    data_path: str
    idx_path: str
    idx_xxh3: str | None


class PinMade(msgspec.Struct):
    """The files of the listed segments stay for so long."""

    id: str
    ttl_ms: Ms


class Manifest(msgspec.Struct):
    """Sealed segments of a topic. Records from `http_from_seq` on are in no sealed segment; those below `earliest_seq`
    do not count, wherever they still are. `next_from_seq`: ask again from there for more; null: these are all.
    """

    topic: str
    epoch: str
    head_seq: Seq
    earliest_seq: Seq
    evict_floor: Seq
    dedupe_node: bool
    http_from_seq: Seq
    segments: list[ManifestSegment]
    next_from_seq: Seq | None
    pin: PinMade | None
    performance: Performance


class PinRenewed(msgspec.Struct):
    """`held` is false for a pin that is over, or never was: its files may be gone."""

    topic: str
    pin: str
    held: bool
    performance: Performance


class PinEnded(msgspec.Struct):
    """`ended` is false for a pin that was over, or never was."""

    topic: str
    pin: str
    ended: bool
    performance: Performance
