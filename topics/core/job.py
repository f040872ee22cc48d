"""One job of a queue (api §9): its phase, and its form in the log and in snapshots. `jobs.py` manages all jobs. Pure.

               ┌────────────── due ──── DELAYED ◀── nack with a delay ──┐
               ▼                                                        │
    BEHIND ─▶ READY ─┐     RETURNED ◀── expiry, nack, release ──────── LEASED ──▶ HELD ──▶ deleted, or done
                     ├──claim──▶ LEASED                                   ▲          │
    fresh ───────────┘     RETURNED ──claim (first of all)────────────────┘          └─▶ LEASED again, or RETURNED

    BEHIND     not the first of its `order_key`
    SCHEDULED  between BEHIND and READY, of a job that has a time (`deliver_at_ms`)
    HELD       its end is being committed to the log, or a frontend is carrying it to the dead letters

The caller passes in the time. Leases and delays run on the monotonic clock. Clients and the log get the same instant on
the wall clock, and after a restart only that is known. `deliver_at_ms` is a wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    SCHEDULED = 6


class JobView(NamedTuple):
    """One job as a peek shows it. `at_ms` (wall) ends its lease or delay, 0 for none; `node` has it, "" for none."""

    seq: int
    state: State
    at_ms: int
    deliveries: int
    node: str
    order_key: str


@dataclass(slots=True, eq=False)
class TrackedJob:
    """One job that is not fresh. `due_ms` (monotonic) is when its lease or delay ends, `deadline_ms` the same instant
    on the wall clock. A job that was written with a delay has a `due_ms`, too; then `deliver_at_ms` is that instant.
    """

    deliver_at_ms: int = 0
    order_key: str = ""
    due_ms: int = 0
    phase: JobPhase = JobPhase.BEHIND
    node: str = ""
    lease_no: int = 0
    lease_ms: int = 0
    deadline_ms: int = 0
    deliveries: int = 0
    holder: Holder | None = None


class LeaseFrameBody(msgspec.Struct, frozen=True):
    """Payload of a LEASE frame: the leases of these jobs after it. An empty `node` is nobody: the jobs are back in the
    queue from `deadline_ms` on. `stream` 0 is none.
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
    """A queue in a snapshot, beyond its records. `attributes`: (seq, deliver_at_ms, order_key) of jobs with any."""

    dead_lettered: int = 0
    done: list[Run] = []
    attributes: list[tuple[int, int, str]] = []
    leases: list[LeaseFrameBody] = []


class ConsumerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a topic's queue and cursors in a snapshot: everything that its records do not say."""

    queue: QueueState | None = None
    cursors: list[CursorFrameBody] = []


T = TypeVar("T")


def deal(items: Sequence[T], wanted: Sequence[int]) -> list[list[T]]:
    """Deal items round-robin: each taker gets one in turn until it has as many as it wanted or nothing is left."""
    hands: list[list[T]] = [[] for _ in wanted]
    hungry = [at for at, most in enumerate(wanted) if most]
    dealt = 0
    while hungry and dealt < len(items):
        for at in hungry[: len(items) - dealt]:
            hands[at].append(items[dealt])
            dealt += 1
        hungry = [at for at in hungry if len(hands[at]) < wanted[at]]
    return hands
