"""What of queues and named cursors is in the log and in snapshots, beyond the records (api §9, §10). Pure."""

from __future__ import annotations

import msgspec

from topics.core.cursors import CursorBody
from topics.core.seq_set import Run


class LeaseBody(msgspec.Struct, frozen=True):
    """Payload of a LEASE frame: what these jobs are now. An empty `node` is nobody's: back in the queue, from
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
    """Everything of a queue that its records do not say: what a snapshot holds. `attributes` are (seq, deliver_at_ms,
    order_key) of jobs that have any.
    """

    dead_lettered: int = 0
    done: list[Run] = []
    attributes: list[tuple[int, int, str]] = []
    leases: list[LeaseBody] = []


class ConsumerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything of a topic's queue and cursors that its records do not say: what a snapshot holds of them."""

    queue: QueueState | None = None
    cursors: list[CursorBody] = []
