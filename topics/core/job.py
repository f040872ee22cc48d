"""One job of a queue (api §9) and where it stands; `jobs.py` has them all, `leases.py` is who has them. Pure.

               ┌────────────── due ──── DELAYED ◀── nack with a delay ──┐
               ▼                                                        │
    BEHIND ─▶ READY ─┐     RETURNED ◀── expiry, nack, release ──────── LEASED ──▶ HELD ──▶ gone
                     ├──claim──▶ LEASED                                   ▲          │
    fresh ───────────┘     RETURNED ──claim (first of all)────────────────┘          └─▶ as it was, or RETURNED

    BEHIND     scheduled for later (`deliver_at_ms`), or not the first of its `order_key`
    HELD       its end is being committed to the log, or it is on its way to the dead letters

Time is passed in. Leases and delays run on the monotonic clock; what is told to clients and logged is the wall clock of
that moment, which after a restart is all there is. `deliver_at_ms` is a wall time by its nature.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from topics.api.requests import State as State

Holder = tuple[int, int]
"""(frontend, stream) of a `/work` stream; stream 0: the frontend carries the job to the dead letters."""


class Now(NamedTuple):
    """One moment on both clocks."""

    wall_ms: int
    mono_ms: int


class Phase(IntEnum):
    BEHIND = 0
    READY = 1
    RETURNED = 2
    DELAYED = 3
    LEASED = 4
    HELD = 5


class JobView(NamedTuple):
    """One job as it is looked at. `at_ms` (wall): until when it is leased, or from when on it waits no longer; else 0.
    `node` has it, "" is nobody.
    """

    seq: int
    state: State
    at_ms: int
    deliveries: int
    node: str
    order_key: str


class Job:
    """One job that is not fresh. `due_ms` is monotonic: when its lease or delay ends; `deadline_ms` is that instant as
    the wall clock had it, and so is `deliver_at_ms` where a BEHIND job has a `due_ms`: it was written with a delay.
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
        self.phase = Phase.BEHIND
        self.deliver_at_ms = deliver_at_ms
        self.order_key = order_key
        self.node = ""
        self.lease_no = 0
        self.lease_ms = 0
        self.deadline_ms = 0
        self.due_ms = due_ms
        self.deliveries = 0
        self.holder: Holder | None = None
