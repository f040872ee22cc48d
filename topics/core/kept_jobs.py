"""Room in a queue that refuses what does not fit (`discard: "reject"`) and keeps acknowledged jobs (`on_ack`). Pure.

They stay until cap or ttl takes them: before a write is refused they give way. They are done, so nobody loses anything:
it is a deletion, without a tombstone.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import islice
from typing import Final

from topics.core.live_scan import living
from topics.core.seq_set import seqs_of
from topics.core.topic import Topic

_LOOK: Final = 1024
_STEP: Final = 100
"""One part in so many of a cap is given up beyond what is missing, so that not every write has to ask for room."""


def giving_way(topic: Topic, records: int, size_bytes: int, dying: Set[int]) -> list[int]:
    """The oldest acknowledged jobs (seqs, ascending) that have to go so that so many records and bytes fit; none when
    they fit anyway, or would not if all of them went. `dying` are on their way out already.
    """
    config, queue = topic.config, topic.queue
    if config.discard != "reject" or queue is None or not queue.done.count:
        return []
    over_records = topic.records + records - config.cap_records if config.cap_records else 0
    over_bytes = topic.live_bytes + size_bytes - config.cap_bytes if config.cap_bytes else 0
    if over_records <= 0 and over_bytes <= 0:
        return []
    most_records = over_records + config.cap_records // _STEP
    most_bytes = over_bytes + config.cap_bytes // _STEP
    found: list[int] = []
    found_bytes = 0
    done = seqs_of(queue.done.runs())
    while some := list(islice(done, _LOOK)):
        for seq, offset_len in living(topic.index, some, topic.earliest_seq, topic.head_seq):
            if seq in dying:
                continue
            if len(found) >= most_records and found_bytes >= most_bytes:
                return found
            found.append(seq)
            found_bytes += offset_len >> 32
    return found if len(found) >= over_records and found_bytes >= over_bytes else []
