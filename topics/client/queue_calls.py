"""The calls of a queue (api §9) as values, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from topics.client.calls import Call, topic_path
from topics.client.records import Record


class ClaimedJob(Record, frozen=True, gc=False, kw_only=True):
    """A record that is leased: until `deadline` (ms since the epoch) nobody else gets it. `deliveries` counts this one
    as well.
    """

    lease_id: str
    deadline: int
    deliveries: int


class Held(Protocol):
    """What a job is settled by: its seq and, as the fence, the lease it was claimed under."""

    @property
    def seq(self) -> int: ...

    @property
    def lease_id(self) -> str: ...


class Claimed(msgspec.Struct, frozen=True):
    """`claimed` ascends by seq; `ready` are those that are left to claim."""

    topic: str
    claimed: list[ClaimedJob]
    ready: int


class Settled(msgspec.Struct, frozen=True):
    """Of ack, nack and extend: `skipped` are seqs whose lease is not, or no longer, the caller's."""

    topic: str
    skipped: list[int]


class Redriven(msgspec.Struct, frozen=True):
    """How many dead letters are jobs again. `next_from_seq`: it stopped there, before the end."""

    topic: str
    redriven: int
    next_from_seq: int | None = None


class PeekedJob(Record, frozen=True, gc=False, kw_only=True):
    """A job as it is looked at. `state`: `waiting`, `leased` (to `leased_to`, until `deadline`), `scheduled` (for
    `deliver_at`), `behind` others with its `order_key`, `dead` (on its way to the dead letters), `done`. Times in ms
    since the epoch. `deliveries` is how often it was handed out.
    """

    state: str
    deliveries: int
    leased_to: str | None = msgspec.field(name="node", default=None)
    deadline: int | None = None
    deliver_at: int | None = None
    order_key: str | None = None


class Peeked(msgspec.Struct, frozen=True):
    """`jobs` ascend by seq. `next_from_seq`: there may be more, behind that."""

    topic: str
    jobs: list[PeekedJob]
    next_from_seq: int | None = None


_encode = msgspec.json.Encoder().encode
_claimed = msgspec.json.Decoder(Claimed).decode
_settled = msgspec.json.Decoder(Settled).decode
_peeked = msgspec.json.Decoder(Peeked).decode
_redriven = msgspec.json.Decoder(Redriven).decode
decode_job = msgspec.json.Decoder(ClaimedJob).decode


def claim(topic: str, node: str, *, max_jobs: int = 1, lease_ms: int | None = None) -> Call[Claimed]:
    """Up to `max_jobs`, at once: none when none is ready. An answer that is lost leaves its jobs leased."""
    body: dict[str, Any] = {"node": node, "max": max_jobs}
    if lease_ms is not None:
        body["lease_ms"] = lease_ms
    return Call("POST", f"{topic_path(topic)}/claim", _claimed, _encode(body), repeatable=False)


def ack(topic: str, node: str, jobs: Sequence[Held], *, repeatable: bool = False) -> Call[Settled]:
    """The jobs are done. A repeat finds those skipped that the first attempt took."""
    return _settle(topic, "ack", node, jobs, {}, repeatable)


def nack(topic: str, node: str, jobs: Sequence[Held], *, delay_ms: int = 0, repeatable: bool = False) -> Call[Settled]:
    """The jobs are given back, to be delivered again after `delay_ms`."""
    return _settle(topic, "nack", node, jobs, {"delay_ms": delay_ms}, repeatable)


def extend(topic: str, node: str, jobs: Sequence[Held], *, lease_ms: int) -> Call[Settled]:
    """The leases last until now + `lease_ms`."""
    return _settle(topic, "extend", node, jobs, {"lease_ms": lease_ms}, True)


def peek(topic: str, *, state: str | None = None, max_jobs: int = 100, from_seq: int = 0) -> Call[Peeked]:
    """Jobs behind `from_seq` in this state, None for any but `done`; touches no lease."""
    body: dict[str, Any] = {"max": max_jobs, "from_seq": from_seq}
    if state is not None:
        body["state"] = state
    return Call("POST", f"{topic_path(topic)}/peek", _peeked, _encode(body))


def redrive(topic: str, dead_letter: str, *, max_jobs: int = 1000, from_seq: int = 0) -> Call[Redriven]:
    """Moves dead letters behind `from_seq` back into the queue."""
    body = {"from": dead_letter, "max": max_jobs, "from_seq": from_seq}
    return Call("POST", f"{topic_path(topic)}/redrive", _redriven, _encode(body), repeatable=False)


def _settle(
    topic: str, verb: str, node: str, jobs: Sequence[Held], more: dict[str, int], repeatable: bool
) -> Call[Settled]:
    body = {"node": node, "seqs": [job.seq for job in jobs], "lease_ids": [job.lease_id for job in jobs]} | more
    return Call("POST", f"{topic_path(topic)}/{verb}", _settled, _encode(body), repeatable=repeatable)
