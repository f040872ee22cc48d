"""The types of answers. The client decodes answers into them. The OpenAPI document is made from them, and its tests
check every answer against them. Frontends write answers as JSON text, without these types.

- Clients ignore fields that they do not know (api §0.2), so an answer may have more.
- A field with the default None is absent where it does not apply, and never `null`.
- A field whose value is one of a few words is decoded as any text: a later service may have more words.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec

from topics.api.requests import Consistency, Durability, GivenRouter, State

Seq = Annotated[int, msgspec.Meta(ge=0)]
Ms = Annotated[int, msgspec.Meta(ge=0)]


def one_of(words: Any) -> msgspec.Meta:
    """Return metadata that makes the OpenAPI document list these words."""
    return msgspec.Meta(extra_json_schema={"enum": sorted(get_args(words))})


Config = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"$ref": "#/components/schemas/EchoedConfig"})]
"""The whole configuration of a topic."""


class Performance(msgspec.Struct, frozen=True, kw_only=True):
    """The times and costs of an answer (api §0.7); a member that does not apply is absent."""

    server_total_ms: float
    wal_append_ms: float = 0.0
    fsync_ms: float = 0.0
    records_scanned: int = 0
    throttle_wait_ms: float = 0.0
    cold_segments_read: int = 0
    copies_pending: bool = False
    """True if the shard of a router's dest did not answer: records of its source may be missing."""
    archived_seq: Seq | None = None
    """The last seq of the topic that was in the archive when the read began; None without an archive."""
    lag_ms: int | None = None
    """The greatest age in ms that the state of a follower may have; None for a service that leads."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """The members of all answers."""

    performance: Performance


class TopicAnswer(Timed, frozen=True, kw_only=True):
    """An answer about one topic."""

    topic: str


# -- errors and probes


class Problem(msgspec.Struct, frozen=True):
    """An error: clients branch on `code`, people read `message`, programs compute with `detail`."""

    code: str
    message: str
    detail: dict[str, Any] | None = None


class Error(msgspec.Struct, frozen=True):
    """The body of every answer that is no success (api §0.6)."""

    error: Problem


class Health(Timed, frozen=True, kw_only=True):
    """The process that was asked is alive."""

    status: Literal["ok"]
    version: str
    uptime_ms: Ms


class Ready(Timed, frozen=True, kw_only=True):
    """All topics can be read."""

    status: Literal["ready"]
    wal_replay_complete: bool
    topics: int
    pressure: float
    recovering_shards: list[int] | None = None
    hanging_shards: list[int] | None = None
    read_only_shards: list[int] | None = None


class KeyRights(Timed, frozen=True, kw_only=True):
    """The rights of a key. `keys` is false if the service has none: nobody is limited. No prefixes: all names."""

    keys: bool
    scopes: list[str]
    prefixes: list[str]


# -- topics


class PutTopicAnswer(TopicAnswer, frozen=True, kw_only=True):
    """A topic was created or configured."""

    created: bool
    config: Config


class QueueCounts(msgspec.Struct, frozen=True):
    """Numbers of a queue's jobs: those that a claim would get now, that are leased, that went to the dead letters so
    far, and that wait for their time. A job that waits for another one with its `order_key` counts in none of them.
    """

    ready: int
    in_flight: int
    dead_lettered: int
    scheduled: int = 0


class TopicState(TopicAnswer, frozen=True, kw_only=True):
    """A topic as it is. `epoch` names this instance: a topic that is deleted and made again has another one. Records up
    to `archived_seq` are in the archive; None without an archive. Cursors up to `restored_seq` that were kept with
    `former_epoch` hold: it is the same topic, from before the service was restored or took over.
    """

    type: Annotated[str, one_of(Literal["log", "queue"])]
    head_seq: Seq
    earliest_seq: Seq
    next_seq: Seq
    count: int
    bytes: int
    durable_seq: Seq
    epoch: str
    config: Config
    effective_priority: int
    last_write_ts: Ms | None
    last_read_ts: Ms | None
    archived_seq: Seq | None = None
    former_epoch: str | None = None
    restored_seq: Seq | None = None
    queue: QueueCounts | None = None


class CursorState(msgspec.Struct, frozen=True, kw_only=True):
    """A named cursor: `cursor_seq` was read last, `persisted_seq` is its position after a crash."""

    cursor: str
    consistency: Annotated[str, one_of(Consistency)]
    persist_every: int
    cursor_seq: Seq
    persisted_seq: Seq


class TopicEntry(msgspec.Struct, frozen=True):
    """A topic in a list."""

    topic: str
    head_seq: Seq
    earliest_seq: Seq
    count: int
    bytes: int
    durable: bool
    effective_priority: int
    type: Annotated[str, one_of(Literal["log", "queue"])]
    last_write_ts: Ms | None
    queue: QueueCounts | None = None
    rate: float | None = None
    lag: int | None = None
    cursors: list[CursorState] | None = None


class TopicList(Timed, frozen=True, kw_only=True):
    """A page, ordered by name; `next_cursor` only when there are more."""

    topics: list[TopicEntry]
    next_cursor: str | None = None
    matched: int | None = None


class DeleteTopicAnswer(TopicAnswer, frozen=True, kw_only=True):
    """`deleted` is false when there was none."""

    deleted: bool
    routers_removed: list[str]


# -- records


class AppendAnswer(TopicAnswer, frozen=True, kw_only=True):
    """A write of records first_seq..last_seq, as durable as `durability` says; `seqs` unless `return_seqs=false`.
    `deduped`: an earlier attempt had committed it.
    """

    first_seq: Seq
    last_seq: Seq
    head_seq: Seq
    count: int
    created: bool
    deduped: bool
    durability: Annotated[str, one_of(Durability)]
    seqs: list[Seq] | None = None


class Record(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A record as it is delivered; absent members are left out. `$ts` is in ms since the epoch."""

    seq: Seq = msgspec.field(name="$seq")
    ts: Ms = msgspec.field(name="$ts")
    raw: msgspec.Raw = msgspec.field(name="data", default_factory=lambda: msgspec.Raw(b"null"))
    """JSON of `data`, byte for byte; `null` if none was asked for. It shares the page's memory: keep `bytes(raw)`."""
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: dict[str, Any] | None = None
    """Strings, as writers give them. Only `_topics_router`, added by an exactly_once router, is an object (api §6)."""

    @property
    def data(self) -> Any:
        """`raw`, decoded at each call."""
        return msgspec.json.decode(self.raw)


class TombstoneAnswer(msgspec.Struct, frozen=True):
    """Records gap_from..gap_to, which were lost without anybody asking for it (api §3.3)."""

    gap_from: Seq
    gap_to: Seq
    reason: str
    missed_estimate: int
    earliest_seq: Seq
    head_seq: Seq

    @property
    def next_from_seq(self) -> int:
        """The cursor to go on with behind the gap. A topic that was `recreated` is read from its first record."""
        return self.earliest_seq - 1 if self.reason == "recreated" else self.gap_to


class DiffAnswer(TopicAnswer, frozen=True, kw_only=True):
    """The records that follow a cursor."""

    records: list[Record]
    next_from_seq: Seq
    head_seq: Seq
    earliest_seq: Seq
    durable_seq: Seq
    epoch: str
    caught_up: bool
    tombstone: TombstoneAnswer | None
    lag: int


class DeleteRecordsAnswer(TopicAnswer, frozen=True, kw_only=True):
    """The topic after a deletion of records (api §5)."""

    deleted: int
    earliest_seq: Seq
    head_seq: Seq
    count: int
    bytes: int


# -- routers


class RouterEntry(GivenRouter, frozen=True, kw_only=True):
    """A router in a list; `forwarded_total` counts the copies it has made. `lag`: seqs of its source that it had not
    looked at when the request came, absent while there is no source.
    """

    router: str
    forwarded_total: int
    filter: str | list[str] | None
    lag: int | None = None


class PutRouterAnswer(GivenRouter, frozen=True, kw_only=True):
    """A router was made or changed."""

    router: str
    created: bool
    filter: str | list[str] | None
    performance: Performance


class RouterState(RouterEntry, frozen=True, kw_only=True):
    """A router as it is."""

    performance: Performance


class RouterList(Timed, frozen=True, kw_only=True):
    """A page, ordered by name; `next_cursor` only when there are more."""

    routers: list[RouterEntry]
    next_cursor: str | None = None


class DeleteRouterAnswer(Timed, frozen=True, kw_only=True):
    """`deleted` is false when there was none."""

    router: str
    deleted: bool


# -- live


class WatchedTopic(msgspec.Struct, frozen=True):
    """The start of a watch in one topic."""

    from_seq: Seq
    head_seq: Seq
    earliest_seq: Seq


class WatchAnswer(Timed, frozen=True, kw_only=True):
    """A watch session; its stream is at `stream_url`."""

    wid: str
    stream_url: str
    session_ttl_ms: int
    topics: dict[str, WatchedTopic]


# -- transactions


class StageAnswer(TopicAnswer, frozen=True, kw_only=True):
    """Records that are kept back; `stage` names them in the commit."""

    txn: str
    stage: str
    count: int
    bytes: int
    expires_in_ms: Ms


class DropStagesAnswer(TopicAnswer, frozen=True, kw_only=True):
    """Stages of a transaction were dropped."""

    txn: str
    dropped: int


class CommitAnswer(Timed, frozen=True, kw_only=True):
    """A batch of a sink. It is a `duplicate` if it, or a later one (`last_batch`), had been committed before."""

    sink: str
    batch: int
    last_batch: int
    duplicate: bool
    count: int


class SinkAnswer(Timed, frozen=True, kw_only=True):
    """A sink; `last_batch` is null when it never committed."""

    sink: str
    last_batch: int | None


class ForgetSinkAnswer(Timed, frozen=True, kw_only=True):
    """A sink was forgotten, if there was one."""

    sink: str
    deleted: bool


# -- queues


class JobAnswer(Record, frozen=True, gc=False, kw_only=True):
    """A job, leased to its consumer until `deadline` (ms since the epoch). `deliveries` counts this one as well."""

    lease_id: str
    deadline: Ms
    deliveries: int


class ClaimAnswer(TopicAnswer, frozen=True, kw_only=True):
    """Claimed jobs, ascending by seq; `ready` are left."""

    claimed: list[JobAnswer]
    count: int
    ready: int


class SettledAnswer(TopicAnswer, frozen=True, kw_only=True):
    """The common part of ack, nack and extend: `skipped` were not leased to this node, or not by these leases."""

    skipped: list[Seq]


class AckAnswer(SettledAnswer, frozen=True, kw_only=True):
    """The numbers of jobs that were acknowledged, and of those ready and leased now."""

    acked: int
    ready: int
    in_flight: int


class NackAnswer(SettledAnswer, frozen=True, kw_only=True):
    """The numbers of jobs that were given back, and of those ready and leased now."""

    nacked: int
    ready: int
    in_flight: int


class ExtendAnswer(SettledAnswer, frozen=True, kw_only=True):
    """The number of leases that were extended, and their deadlines by seq."""

    extended: int
    deadlines: dict[str, Ms]


class RedriveAnswer(TopicAnswer, frozen=True, kw_only=True):
    """The number of dead letters that are jobs again; `next_from_seq` only if it stopped before the end."""

    source: str = msgspec.field(name="from")
    redriven: int
    next_from_seq: Seq | None = None


class PeekedJob(Record, frozen=True, gc=False, kw_only=True):
    """A job and its state: `node` has it until `deadline`; it waits until `deliver_at`, or for others with its
    `order_key`. `deliveries` counts how often it was handed out. Times are in ms since the epoch.
    """

    state: Annotated[str, one_of(State)]
    deliveries: int
    leased_to: str | None = msgspec.field(name="node", default=None)
    deadline: Ms | None = None
    deliver_at: Ms | None = None
    order_key: str | None = None


class PeekAnswer(TopicAnswer, frozen=True, kw_only=True):
    """Jobs, ascending by seq; `next_from_seq` only where there may be more, behind that."""

    jobs: list[PeekedJob]
    count: int
    next_from_seq: Seq | None = None


# -- named cursors


class CursorAnswer(CursorState, frozen=True, kw_only=True):
    """One cursor of a topic."""

    topic: str
    performance: Performance


class PutCursorAnswer(CursorAnswer, frozen=True, kw_only=True):
    """A cursor was made (`created`) or changed."""

    created: bool


class CursorListAnswer(TopicAnswer, frozen=True, kw_only=True):
    """A page, ordered by name; `next_cursor` only when there are more."""

    cursors: list[CursorState]
    next_cursor: str | None = None


class DeleteCursorAnswer(TopicAnswer, frozen=True, kw_only=True):
    """`deleted` is false when there was none."""

    cursor: str
    deleted: bool


class ReadCursorAnswer(DiffAnswer, frozen=True, kw_only=True):
    """A page of a diff; the cursor stands at `cursor_seq` now. `checkpoint: false` leaves it where it was."""

    cursor: str
    cursor_seq: Seq
