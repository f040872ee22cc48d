"""What the log says of queues and named cursors, and how it is applied to a topic. Pure.

Bodies (msgpack; `seq` of the frame is not used):

    LEASE            topic_id     {"node": str, "deadline_ms": u64, "lease_ms": u64, "seqs": [u64], …}    LeaseBody
    JOB_ATTRIBUTES   topic_id     [[seq, deliver_at_ms, order_key], …]           first frame of the write it belongs to
    ACK              topic_id     {"runs": [[first_seq, last_seq], …], "keep": bool, "dead_lettered": u64, …}    AckBody
    CURSOR           topic_id     {"name": str, "consistency": str | nil, "persist_every": u64, "seq": u64,
                                   "missing": [[after_seq, to_seq], …]}

Each says how things are afterwards, and an ACK that deletes has a revision: a run of frames that comes twice changes
nothing. No frame asks for a record, which may be marked, rewritten or gone when the log is read (`core/fold.py`).
"""

from __future__ import annotations

import msgspec

from topics.core.cursors import CursorFrameBody
from topics.core.floors import Deletion, Floors
from topics.core.job import ConsumerState, LeaseBody
from topics.core.seq_set import Run, runs_of, seqs_of
from topics.core.topic import Topic

JobRow = tuple[int, int, str]
"""(seq, deliver_at_ms, order_key)"""


class AckBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Jobs that are over. `keep`: their records stay. Else they are deleted: so many `records` and `size_bytes` of the
    log, and the live ones begin at `earliest_seq` then.

    `revision`, `earliest_seq` and `evict_…` are as in `Floors`. `dead_lettered` counts the jobs that went to the dead
    letters so far; 0: as before. Unlike a DELETE, the body does not say what is left: an ack is one of many writes in a
    group and does not know the others.
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
    def removing(topic: Topic, deletion: Deletion, revision: int, dead_lettered: int) -> AckBody:
        """Returns the body to log for this deletion."""
        floors = topic.floors_without(deletion)
        return AckBody(
            runs_of(deletion.seqs),
            False,
            dead_lettered,
            revision,
            deletion.records,
            deletion.size_bytes,
            deletion.earliest_seq,
            floors.evict_floor,
            floors.evict_reason,
            floors.evict_run_seq,
        )

    def seqs(self) -> list[int]:
        return list(seqs_of(self.runs))

    def floors_of(self, topic: Topic) -> Floors:
        """Returns the floors of a topic after this ack, if everything before it is known."""
        floors = topic.floors()
        if self.evict_floor > topic.evict_floor:
            floors = msgspec.structs.replace(
                floors,
                evict_floor=self.evict_floor,
                evict_reason=self.evict_reason,
                evict_run_seq=self.evict_run_seq,
            )
        return msgspec.structs.replace(
            floors,
            revision=self.revision,
            earliest_seq=max(topic.earliest_seq, self.earliest_seq),
            # Of an `ephemeral` topic the durable log alone knows fewer than are gone now.
            records=max(0, topic.records - self.records),
            live_bytes=max(0, topic.live_bytes - self.size_bytes),
        )


_decode_lease = msgspec.msgpack.Decoder(LeaseBody).decode
_decode_rows = msgspec.msgpack.Decoder(list[JobRow]).decode
decode_ack = msgspec.msgpack.Decoder(AckBody).decode
_decode_cursor = msgspec.msgpack.Decoder(CursorFrameBody).decode


def consumer_state(topic: Topic) -> ConsumerState:
    return ConsumerState(None if topic.queue is None else topic.queue.state(), topic.cursors.bodies())


def restore_consumers(topic: Topic, state: ConsumerState) -> None:
    """Restores the state that `consumer_state` returned; the log goes on behind it."""
    if state.queue is not None and topic.queue is not None:
        topic.queue.restore(state.queue)
    for body in state.cursors:
        topic.cursors.logged(body)


def fold_lease(topic: Topic, data: bytes) -> None:
    """A body that names jobs which are gone means nothing (`Leases.start`)."""
    if topic.queue is not None:
        topic.queue.logged(_decode_lease(data))


def fold_job_attributes(topic: Topic, data: bytes) -> None:
    if topic.queue is not None:
        for seq, deliver_at_ms, order_key in _decode_rows(data):
            topic.queue.add(seq, deliver_at_ms, order_key)


def fold_cursor(topic: Topic, data: bytes) -> None:
    topic.cursors.logged(_decode_cursor(data))
