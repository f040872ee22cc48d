"""The types of request bodies. Frontends decode bodies straight into them; the client encodes its calls from them.

A field at its default is not sent. The frontend checks what these types cannot say (`frontend/entry/wire.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

U64_MAX: Final = 2**64 - 1
Count = Annotated[int, msgspec.Meta(ge=0, extra_json_schema={"maximum": U64_MAX})]
"""A u64. msgspec checks the lower bound, `wire.check_counts` the upper one."""
Optional = msgspec.Raw | msgspec.UnsetType
"""JSON that is kept as it was sent; UNSET without any."""

Durability = Literal["ephemeral", "memory", "disk", "fsync", "archived"]
Guarantee = Literal["at_least_once", "exactly_once"]
Consistency = Literal["strictly_at_once", "at_least_once"]
"""The promise of a named cursor: nothing comes twice, or nothing is left out, whatever crashes."""
State = Literal["waiting", "leased", "scheduled", "behind", "dead", "done"]
"""The state of a job. `waiting`: a claim would get it; `leased`: a consumer has it; `scheduled`: it waits for its time;
`behind`: it waits for a job with its `order_key`; `dead`: it moves to or from the dead letters; `done`: acknowledged.
"""

_KEY: Final = msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": 256})
_META: Final = msgspec.Meta(
    description="at most 64 strings by name",
    extra_json_schema={"type": ["object", "null"], "additionalProperties": {"type": "string"}, "maxProperties": 64},
)
_CONFIG: Final = msgspec.Meta(
    description="of the topic, if this write creates it",
    extra_json_schema={"anyOf": [{"$ref": "#/components/schemas/GivenConfig"}, {"type": "null"}]},
)
_PRODUCER_ID: Final = msgspec.Meta(min_length=1, max_length=128)


class NewRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record as a client writes it; `data` is any JSON value, or JSON text as `msgspec.Raw`. `deliver_at` (ms since
    the epoch) or `delay_ms` holds a job back; jobs with one `order_key` are handed out in order, one at a time.
    """

    data: Any
    tag: str | None = None
    node: str | None = None
    meta: dict[str, str] | None = None
    deliver_at: int | None = None
    delay_ms: int | None = None
    order_key: str | None = None


class RecordBody(msgspec.Struct, gc=False, omit_defaults=True):
    """One record of a write."""

    data: Annotated[msgspec.Raw, msgspec.Meta(description="any JSON value, kept byte for byte")]
    tag: str | None = None
    node: str | None = None
    meta: Annotated[Optional, _META] = msgspec.UNSET
    deliver_at: Annotated[Count | None, msgspec.Meta(description="of a job: not before this moment, ms")] = None
    delay_ms: Annotated[Count | None, msgspec.Meta(description="of a job: not before so long after its commit")] = None
    order_key: Annotated[str | None, msgspec.Meta(description="of jobs: one of a key at a time, in order")] = None


class ProducerBody(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A fenced writer (api §2). `epoch` rises with each life of the writer, and shuts out earlier lives. `n` rises by
    one with each write, and may begin anywhere. Together they name the write, like an idempotency key. `begun`: an
    earlier write of the epoch was answered. A service that knows no such write has lost it, and refuses this one.
    """

    id: Annotated[str, _PRODUCER_ID]
    epoch: Count
    n: Count
    begun: bool = False


class AppendBody(msgspec.Struct, gc=False, omit_defaults=True):
    """A write (api §2)."""

    records: Annotated[list[RecordBody], msgspec.Meta(extra_json_schema={"minItems": 1})]
    node: str | None = None
    idempotency_key: Annotated[str, _KEY] | None = None
    create: bool = True
    config: Annotated[Optional, _CONFIG] = msgspec.UNSET
    disable_backpressure: bool = False
    if_head_seq: Count | None = None
    producer: ProducerBody | None = None


class DiffBody(msgspec.Struct, gc=False, omit_defaults=True):
    """`POST /v0/topics/:t/diff` (api §3)."""

    from_seq: Count = 0
    limit: Count = 0
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
    wait_ms: Count = 0
    max_batch_bytes: Count = 0
    from_ts: Count | None = None


class DeleteBody(msgspec.Struct, gc=False, omit_defaults=True):
    """`POST /v0/topics/:t/delete` (api §5). `core/tags.py` says what `match` may be."""

    before_seq: Count | None = None
    match: Any = None


class GivenConfig(msgspec.Struct):
    """The fields a client may send; UNSET where it did not."""

    type: Literal["log", "queue"] | msgspec.UnsetType = msgspec.UNSET
    ttl_ms: int | msgspec.UnsetType = msgspec.UNSET
    cap_records: int | msgspec.UnsetType = msgspec.UNSET
    cap_bytes: int | msgspec.UnsetType = msgspec.UNSET
    discard: Literal["old", "reject"] | msgspec.UnsetType = msgspec.UNSET
    durable: bool | msgspec.UnsetType = msgspec.UNSET
    durability: Durability | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType | None = msgspec.UNSET
    auto_priority: bool | msgspec.UnsetType = msgspec.UNSET
    auto_create: bool | msgspec.UnsetType = msgspec.UNSET
    idempotency_window_ms: int | msgspec.UnsetType = msgspec.UNSET
    dedupe_node: bool | msgspec.UnsetType = msgspec.UNSET
    lease_ms: int | msgspec.UnsetType = msgspec.UNSET
    claim_jitter_ms: int | msgspec.UnsetType = msgspec.UNSET
    max_deliveries: int | msgspec.UnsetType = msgspec.UNSET
    dead_letter: str | msgspec.UnsetType | None = msgspec.UNSET
    leases_durable: bool | msgspec.UnsetType = msgspec.UNSET
    on_ack: Literal["delete", "keep"] | msgspec.UnsetType = msgspec.UNSET


class GivenRouter(msgspec.Struct, frozen=True):
    """A router's fields as a client sends them."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: Any = None
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"


class StageBody(msgspec.Struct, gc=False, omit_defaults=True):
    """`POST /v0/stage/:topic` (api §6)."""

    txn: str
    records: list[RecordBody]
    node: str | None = None


class DropBody(msgspec.Struct, gc=False):
    """`DELETE /v0/stage/:topic` (api §6)."""

    txn: str


class CommitBody(msgspec.Struct, gc=False):
    """`POST /v0/txn/:sink/commit` (api §6)."""

    batch: Count
    stages: list[str]


class StartBody(msgspec.Struct, omit_defaults=True):
    """The start in one topic: behind `from_seq`, at the head, or at a time (api §3.3)."""

    from_seq: Count = 0
    tail: bool = False
    from_ts: Count | None = None


class FollowBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The delivery that a reader asks for."""

    node: str | list[str] | None = None
    limit: Count = 0
    max_batch_bytes: Count = 256 * 1024
    include_meta: bool = True
    include_tags: bool = False
    include_data: bool = True
    consistency: Literal["eventual", "strong"] = "eventual"

    @property
    def strong(self) -> bool:
        return self.consistency == "strong"


class WatchBody(FollowBody, kw_only=True):
    """`POST /v0/watch`."""

    topics: dict[str, StartBody]
    heartbeat_ms: Count = 15_000
    pace_ms: Count = 0


class ClaimBody(msgspec.Struct, gc=False, omit_defaults=True):
    node: str
    max: Count = 1
    lease_ms: Count | None = None


class JobsBody(msgspec.Struct, gc=False, omit_defaults=True):
    """The jobs that a consumer names. With `lease_ids` (one for each) only these leases count."""

    node: str
    seqs: list[Count]
    lease_ids: list[str] | None = None


class NackBody(JobsBody, gc=False):
    delay_ms: Count = 0


class ExtendBody(JobsBody, kw_only=True, gc=False):
    lease_ms: Count


class RedriveBody(msgspec.Struct, gc=False, omit_defaults=True):
    source: str = msgspec.field(name="from")
    max: Count = 100
    from_seq: Count = 0


class PeekBody(msgspec.Struct, gc=False, omit_defaults=True):
    """`POST …/peek`. Without a `state` it shows jobs in any state but `done`."""

    state: State | None = None
    from_seq: Count = 0
    max: Count = 100


class CursorBody(msgspec.Struct, gc=False, omit_defaults=True):
    """`PUT …/cursors/:name`. Fields that are not sent stay as they are; without `from_seq` and `tail` the cursor stays
    where it is. A new one is `at_least_once`, persisted with every read, and begins at 0.
    """

    consistency: Consistency | None = None
    persist_every: Count | None = None
    from_seq: Count | None = None
    tail: bool = False


class ReadBody(msgspec.Struct, gc=False, omit_defaults=True):
    """`POST …/cursors/:name/read`."""

    max_bytes: Count = 0
    limit: Count = 0
    checkpoint: bool = True
    node: str | list[str] | None = None
    include_tags: bool = False
    include_meta: bool = True
