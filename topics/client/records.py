"""What the service gives and takes, as types. `data` stays JSON text: what was sent comes back (api §0.2)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec


class Record(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One record as it was committed; `ts` in ms since the epoch. Encoded it has the keys it came with."""

    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    raw: msgspec.Raw = msgspec.field(name="data")
    """The JSON text of `data`, byte for byte. `bytes(record.raw)` for keeping: it shares its page's memory."""
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: dict[str, Any] | None = None
    """Strings, as writers give them; only what an exactly_once router adds is an object (`_topics_router`, api §6)."""

    @property
    def data(self) -> Any:
        """`raw`, decoded at each call."""
        return msgspec.json.decode(self.raw)


class Tombstone(msgspec.Struct, frozen=True):
    """Records gap_from..gap_to are lost to a reader who did not ask for it (api §3.3)."""

    gap_from: int
    gap_to: int
    reason: str
    earliest_seq: int
    head_seq: int
    missed_estimate: int = 0


class TopicGone(msgspec.Struct, frozen=True):
    """A topic that was followed was deleted; nothing more comes of it. While the service was away its end was seen by
    nobody: then `head_seq` is how far it was followed.
    """

    head_seq: int


Item: TypeAlias = Record | Tombstone
Tombstones = Literal["raise", "yield"]
"""What a reader wants of gaps: GapError (they are never passed over by default), or a Tombstone among the records."""


class Page(msgspec.Struct, frozen=True):
    """The answer of one diff. `epoch` names the instance of the topic: another one after it was made anew."""

    topic: str
    records: list[Record]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    durable_seq: int = 0
    tombstone: Tombstone | None = None
    epoch: str = ""


class NewRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record to write; `data` is any JSON value, or JSON text as `msgspec.Raw`.

    Of a job of a queue: `deliver_at` (ms since the epoch) or `delay_ms` says from when on it may be handed out; of
    those of one `order_key` one at a time is, in their order.
    """

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, str] | None = None
    deliver_at: int | None = None
    delay_ms: int | None = None
    order_key: str | None = None


class Producer(msgspec.Struct, frozen=True):
    """Who writes, and which of its writes this is (api §2): that identifies it, as a key would. `epoch` rises with each
    life of the writer and shuts out those before; `n` rises by one with each write, and may begin anywhere.
    """

    id: str
    epoch: int
    n: int


class Appended(msgspec.Struct, frozen=True):
    """A committed write: records first_seq..last_seq. `deduped`: an earlier attempt had committed them."""

    topic: str
    first_seq: int
    last_seq: int
    head_seq: int
    count: int
    created: bool
    deduped: bool
    durability: str = ""


class QueueCounts(msgspec.Struct, frozen=True):
    """Jobs of a queue: to be claimed now, leased, and moved to the dead letters so far (api §1)."""

    ready: int
    in_flight: int
    dead_lettered: int


class TopicState(msgspec.Struct, frozen=True):
    """A topic as it is now (api §1)."""

    topic: str
    type: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    config: dict[str, Any]
    durable_seq: int = 0
    epoch: str = ""
    last_write_ts: int | None = None
    last_read_ts: int | None = None
    queue: QueueCounts | None = None


class TopicEntry(msgspec.Struct, frozen=True):
    """A topic in a list."""

    topic: str
    head_seq: int
    earliest_seq: int
    count: int
    bytes: int
    durable: bool


class TopicPage(msgspec.Struct, frozen=True):
    """One page of the list of topics."""

    topics: list[TopicEntry]
    next_cursor: str | None = None


class Configured(msgspec.Struct, frozen=True):
    """The whole configuration after a PUT."""

    topic: str
    created: bool
    config: dict[str, Any]


class TopicDeleted(msgspec.Struct, frozen=True):
    """`deleted` is False when there was none."""

    topic: str
    deleted: bool


class RecordsDeleted(msgspec.Struct, frozen=True):
    """How many records a deletion took, and what is left (api §5)."""

    topic: str
    deleted: int
    earliest_seq: int
    head_seq: int
    count: int
    bytes: int


class Staged(msgspec.Struct, frozen=True):
    """Records that are kept back; `stage` names them in the commit."""

    topic: str
    txn: str
    stage: str
    count: int
    bytes: int
    expires_in_ms: int


class Committed(msgspec.Struct, frozen=True):
    """`duplicate`: the sink had committed this batch, or a later one (`last_batch`), before; nothing was appended."""

    sink: str
    batch: int
    last_batch: int
    duplicate: bool
    count: int


class StagesDropped(msgspec.Struct, frozen=True):
    """How many stages of a transaction in a topic are gone."""

    topic: str
    txn: str
    dropped: int


class SinkState(msgspec.Struct, frozen=True):
    """`last_batch` is None for a sink that never committed."""

    sink: str
    last_batch: int | None


class SinkForgotten(msgspec.Struct, frozen=True):
    """`deleted` is False when there was none."""

    sink: str
    deleted: bool
