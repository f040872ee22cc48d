"""One job of a queue (api §9), where it stands, and what the log says of it; `jobs.py` has all jobs. Pure.

               ┌────────────── due ──── DELAYED ◀── nack with a delay ──┐
               ▼                                                        │
    BEHIND ─▶ READY ─┐     RETURNED ◀── expiry, nack, release ──────── LEASED ──▶ HELD ──▶ gone
                     ├──claim──▶ LEASED                                   ▲          │
    fresh ───────────┘     RETURNED ──claim (first of all)────────────────┘          └─▶ as it was, or RETURNED

    BEHIND     scheduled for later (`deliver_at_ms`), or not the first of its `order_key`
    HELD       its end is being committed to the log, or it is on its way to the dead letters

Time is passed in. Leases and delays run on the monotonic clock. Clients are told, and the log has, the wall clock of
that moment; after a restart nothing else is left. `deliver_at_ms` is a wall time by its nature.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from topics.api.requests import State as State
from topics.core.cursors import CursorFrameBody
from topics.core.seq_set import Run

Holder = tuple[int, int]
"""(frontend, stream) of a `/work` stream. Stream 0: the frontend carries the job to the dead letters."""


class Now(NamedTuple):
    """One moment on both clocks."""

    wall_ms: int
    mono_ms: int


class JobPhase(IntEnum):
    BEHIND = 0
    READY = 1
    RETURNED = 2
    DELAYED = 3
    LEASED = 4
    HELD = 5


class JobView(NamedTuple):
    """One job as a peek shows it. `at_ms` (wall) is the end of its lease or of its waiting, else 0. `node` has it, ""
    is nobody.
    """

    seq: int
    state: State
    at_ms: int
    deliveries: int
    node: str
    order_key: str


class TrackedJob:
    """One job that is not fresh. `due_ms` (monotonic) is when its lease or delay ends, `deadline_ms` the same instant
    on the wall clock. A BEHIND job has a `due_ms` if it was written with a delay; then `deliver_at_ms` is that instant.
    """

    __slots__ = (
        "deadline_ms",
        "deliver_at_ms",
        "deliveries",
        "due_ms",
        "holder",
        "lease_ms",
        "lease_no",
        "node",
        "order_key",
        "phase",
    )

    def __init__(self, deliver_at_ms: int = 0, order_key: str = "", due_ms: int = 0) -> None:
        self.phase = JobPhase.BEHIND
        self.deliver_at_ms = deliver_at_ms
        self.order_key = order_key
        self.node = ""
        self.lease_no = 0
        self.lease_ms = 0
        self.deadline_ms = 0
        self.due_ms = due_ms
        self.deliveries = 0
        self.holder: Holder | None = None


class LeaseBody(msgspec.Struct, frozen=True):
    """Payload of a LEASE frame: how these jobs stand now. An empty `node` is nobody: they are back in the queue from
    `deadline_ms` on. `stream` 0 is none.
    """

    node: str
    deadline_ms: int
    lease_ms: int
    seqs: list[int]
    lease_nos: list[int]
    deliveries: list[int]
    frontend: int = 0
    stream: int = 0


class QueueState(msgspec.Struct, frozen=True):
    """The state of a queue in a snapshot: everything that its records do not say. `attributes` are (seq, deliver_at_ms,
    order_key) of jobs that have any.
    """

    dead_lettered: int = 0
    done: list[Run] = []
    attributes: list[tuple[int, int, str]] = []
    leases: list[LeaseBody] = []


class ConsumerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a topic's queue and cursors in a snapshot: everything that its records do not say."""

    queue: QueueState | None = None
    cursors: list[CursorFrameBody] = []


T = TypeVar("T")


def deal(items: Sequence[T], wanted: Sequence[int]) -> list[list[T]]:
    """Deals items round-robin: each taker gets one in turn until it has as many as it wanted or nothing is left."""
    hands: list[list[T]] = [[] for _ in wanted]
    hungry = [at for at, most in enumerate(wanted) if most]
    dealt = 0
    while hungry and dealt < len(items):
        for at in hungry[: len(items) - dealt]:
            hands[at].append(items[dealt])
            dealt += 1
        hungry = [at for at in hungry if len(hands[at]) < wanted[at]]
    return hands
