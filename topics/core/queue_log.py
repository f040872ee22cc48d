"""The frames of queues and named cursors and their fold into a topic. Pure.

Bodies (msgpack; `seq` of the frame is not used):

    LEASE            topic_id     {"node": str, "deadline_ms": u64, "lease_ms": u64, "seqs": [u64], …}
                                                                                 see LeaseFrameBody
    JOB_ATTRIBUTES   topic_id     [[seq, deliver_at_ms, order_key], …]           first frame of the write it belongs to
    ACK              topic_id     {"runs": [[first_seq, last_seq], …], "keep": bool, "dead_lettered": u64, …}
                                                                                 see AckFrameBody
    CURSOR           topic_id     {"name": str, "consistency": str | nil, "persist_every": u64, "seq": u64,
                                   "missing": [[after_seq, to_seq], …]}

A frame has the state after it, and an ACK that deletes has a revision: a run of frames that comes twice changes
nothing. No frame needs a record, which may be marked, rewritten or deleted when the log is read (`core/fold.py`).
"""

from __future__ import annotations

import msgspec

from topics.core.cursors import CursorFrameBody
from topics.core.floors import Deletion, Floors
from topics.core.job import ConsumerState, LeaseFrameBody
from topics.core.seq_set import Run, runs_of, seqs_of
from topics.core.topic import Topic

JobRow = tuple[int, int, str]
"""(seq, deliver_at_ms, order_key)"""


class AckFrameBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Jobs that are over. If `keep`, their records stay. Else these are deleted: `records` and `size_bytes` fewer live.

    `revision`, `earliest_seq` and `evict_…` are as in `Floors`. `dead_lettered` is the number of all jobs that went to
    the dead letters so far, 0 for no change. Unlike a DELETE, the body does not count what is left: an ack is one of
    many writes in a group and does not know the others.
    """

    runs: list[Run]
    keep: bool = False
    dead_lettered: int = 0
    revision: int = 0
    records: int = 0
    size_bytes: int = 0
    earliest_seq: int = 1
    evict_floor: int = 1
    evict_reason: int = 0
    evict_run_seq: int = 1

    @staticmethod
    def removing(topic: Topic, deletion: Deletion, revision: int, dead_lettered: int) -> AckFrameBody:
        """Return the body to log for this deletion."""
        floors = topic.floors_without(deletion)
        taken = deletion.records, deletion.size_bytes, deletion.earliest_seq
        evicted = floors.evict_floor, floors.evict_reason, floors.evict_run_seq
        return AckFrameBody(runs_of(deletion.seqs), False, dead_lettered, revision, *taken, *evicted)

    def seqs(self) -> list[int]:
        return list(seqs_of(self.runs))

    def floors_of(self, topic: Topic) -> Floors:
        """Return the floors of a topic after this ack; the topic has everything before it."""
        evicted: AckFrameBody | Floors = self if self.evict_floor > topic.evict_floor else topic.floors()
        return Floors(
            self.revision,
            max(topic.earliest_seq, self.earliest_seq),
            evicted.evict_floor,
            evicted.evict_reason,
            evicted.evict_run_seq,
            # The durable log alone knows fewer records of an `ephemeral` topic than this ack may take.
            max(0, topic.records - self.records),
            max(0, topic.live_bytes - self.size_bytes),
        )


_decode_lease = msgspec.msgpack.Decoder(LeaseFrameBody).decode
_decode_rows = msgspec.msgpack.Decoder(list[JobRow]).decode
decode_ack = msgspec.msgpack.Decoder(AckFrameBody).decode
_decode_cursor = msgspec.msgpack.Decoder(CursorFrameBody).decode


def consumer_state(topic: Topic) -> ConsumerState:
    return ConsumerState(None if topic.queue is None else topic.queue.state(), topic.cursors.bodies())


def restore_consumers(topic: Topic, state: ConsumerState) -> None:
    """Restore the state that `consumer_state` returned, before the rest of the log."""
    if state.queue is not None and topic.queue is not None:
        topic.queue.restore(state.queue)
    for body in state.cursors:
        topic.cursors.logged(body)


def fold_lease(topic: Topic, data: bytes) -> None:
    """Apply a LEASE frame; `Leases.start` forgets those of its jobs that are deleted."""
    if topic.queue is not None:
        topic.queue.logged(_decode_lease(data))


def fold_job_attributes(topic: Topic, data: bytes) -> None:
    if topic.queue is not None:
        for seq, deliver_at_ms, order_key in _decode_rows(data):
            topic.queue.add(seq, deliver_at_ms, order_key)


def fold_cursor(topic: Topic, data: bytes) -> None:
    topic.cursors.logged(_decode_cursor(data))
