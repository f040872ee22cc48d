"""What the log says of queues and named cursors, and how it is applied to a topic. Pure; part of the fold.

Bodies (msgpack; `seq` of the frame is not used):

    LEASE            topic_id     {"node": str, "deadline_ms": u64, "lease_ms": u64, "seqs": [u64], …}    LeaseBody
    JOB_ATTRIBUTES   topic_id     [[seq, deliver_at_ms, order_key], …]           first frame of the write it belongs to
    ACK              topic_id     {"runs": [[first_seq, last_seq], …], "keep": bool, "dead_lettered": u64}
    CURSOR           topic_id     {"name": str, "consistency": str | nil, "persist_every": u64, "seq": u64}

Each says what is, not what changes: a run of frames that comes twice changes nothing.
"""

from __future__ import annotations

import msgspec

from topics.core.cursors import CursorBody
from topics.core.queue_state import LeaseBody, QueueState
from topics.core.seq_set import Run, seqs_of
from topics.core.topic import Topic

JobRow = tuple[int, int, str]
"""(seq, deliver_at_ms, order_key)"""


class AckBody(msgspec.Struct, frozen=True):
    """Jobs that are over. `keep`: their records stay; else they are deleted. `dead_lettered`: how many jobs went to the
    dead letters up to now, 0: as before.
    """

    runs: list[Run]
    keep: bool = False
    dead_lettered: int = 0


class ConsumerState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything of a topic's queue and cursors that its records do not say: what a snapshot holds of them."""

    queue: QueueState | None = None
    cursors: list[CursorBody] = []


_decode_lease = msgspec.msgpack.Decoder(LeaseBody).decode
_decode_rows = msgspec.msgpack.Decoder(list[JobRow]).decode
_decode_ack = msgspec.msgpack.Decoder(AckBody).decode
_decode_cursor = msgspec.msgpack.Decoder(CursorBody).decode


def consumer_state(topic: Topic) -> ConsumerState:
    return ConsumerState(None if topic.queue is None else topic.queue.state(), topic.cursors.bodies())


def restore_consumers(topic: Topic, state: ConsumerState) -> None:
    """The inverse; the log goes on behind it."""
    if state.queue is not None and topic.queue is not None:
        topic.queue.restore(state.queue)
    for body in state.cursors:
        topic.cursors.logged(body)


def fold_lease(topic: Topic, data: bytes) -> None:
    if topic.queue is not None:
        topic.queue.logged(_decode_lease(data))


def fold_job_attributes(topic: Topic, data: bytes) -> None:
    if topic.queue is not None:
        for seq, deliver_at_ms, order_key in _decode_rows(data):
            topic.queue.add(seq, deliver_at_ms, order_key)


def fold_ack(topic: Topic, data: bytes) -> None:
    body = _decode_ack(data)
    if topic.queue is not None:
        topic.queue.dead_lettered = max(topic.queue.dead_lettered, body.dead_lettered)
    if body.keep:
        if topic.queue is not None:
            topic.queue.finish(body.runs)
        return
    seqs = [seq for seq in seqs_of(body.runs) if topic.earliest_seq <= seq <= topic.head_seq]
    if seqs:
        topic.deleted(topic.plan_removal(seqs, set(seqs)))


def fold_cursor(topic: Topic, data: bytes) -> None:
    topic.cursors.logged(_decode_cursor(data))
