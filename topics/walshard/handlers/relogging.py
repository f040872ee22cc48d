"""Relogging: before an `ephemeral` topic becomes durable, the shard logs its live records again, in turns.

A turn reads the next live records from the RAM log and writes their frames, unchanged, to the durable log:

    EVICT_WATERMARK   the current floors; their count and bytes leave out the records that follow
    APPEND            the records; seqs missing between them were deleted or lost in RAM
    JOB_ATTRIBUTES    of the jobs among them
    HEAD_WATERMARK    the ceiling as it was

After a turn the topic's records are durable up to some seq and in RAM behind it. A topic that was durable before it
became `ephemeral` looks the same, so no other code has to know of turns. If the shard dies between two turns, the topic
is still `ephemeral`, with more durable records. The last turn also writes the unexpired keys, an exact HEAD_WATERMARK
and CONFIG_UPDATE.

The leases that are held when a queue gets `leases_durable` are logged in turns, too, but behind the CONFIG_UPDATE.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Final, NamedTuple

import msgspec

from topics.core.control_bodies import encode_body
from topics.core.floors import Floors
from topics.core.idempotency import WriteOutcome
from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_GONE, LOCATION_IN_RAM_LOG, LOW_WORD, flags_of
from topics.shm.topic_messages import PutTopicReply
from topics.storage import layout
from topics.storage.frame import FLAG_MORE, Bytes, FrameType
from topics.storage.logfile import map_file
from topics.storage.topic_frames import check_header, control_frame, floor_frame, head_frame, idempotency_frame
from topics.walshard.commit.draft import Draft, control_write
from topics.walshard.hosted.hosted import Hosted

TURN_BYTES: Final = 1 << 20
"""Bytes of records with which a turn ends."""
TURN_SEQS: Final = 8192
"""Seqs that a turn looks at, at most."""
TURNS_OF_ONE_SIZE: Final = 256
"""After each so many turns the turns grow, so that they overtake writers that go on meanwhile."""

LEASES_PER_TURN: Final = 1000
"""Held leases that a turn logs: some 5 ms, 40 if each is a claim of its own."""


class RelogTurn(NamedTuple):
    """One turn: its frames for the durable log, and the entries to change once they are logged. The caller adds the
    CONFIG_UPDATE to the last turn.
    """

    hosted: Hosted
    buffers: list[Bytes]
    floors: Floors
    first_seq: int
    entries: array[int]
    rows: list[int]
    """Rows of `entries` that are logged again. `place` adds the log file and the offset of the write to them."""
    is_last: bool

    def place(self, file_no: int, offset: int) -> None:
        """Take over the new locations of the records, once the log has the turn at this place."""
        topic, entries = self.hosted.topic, self.entries
        for row in self.rows:
            entries[row * ENTRY_WORDS + 2] += offset
            entries[row * ENTRY_WORDS + 3] += file_no
        if entries:
            self.hosted.ring.replace_entries(self.first_seq, entries)
            self.hosted.ram_from_seq = self.first_seq + len(entries) // ENTRY_WORDS
        topic.revision, topic.logged_floor = self.floors.revision, self.floors.evict_floor


def plan_turn(hosted: Hosted, directory: str, turns: int, now_ms: int) -> RelogTurn:
    """Return the next turn after `turns` turns. Nothing may be pending. Raise OSError if the RAM log is unreadable."""
    topic = hosted.topic
    factor = 1 + turns // TURNS_OF_ONE_SIZE
    first_seq = max(topic.earliest_seq, hosted.ram_from_seq)
    last_seq = min(topic.head_seq, first_seq + factor * TURN_SEQS - 1)
    entries = hosted.ring.entries(first_seq, last_seq) if first_seq <= last_seq else array("Q")
    records, rows = _records(hosted, directory, first_seq, entries, factor * TURN_BYTES)
    is_last = first_seq + len(entries) // ENTRY_WORDS > topic.head_seq
    size_bytes = sum(map(len, records))
    floors = topic.floors()
    before = msgspec.structs.replace(
        floors, records=floors.records - len(records), live_bytes=floors.live_bytes - size_bytes
    )
    floor = floor_frame(topic, before, now_ms, FLAG_MORE)
    offset_lens, file_words = entries[2::ENTRY_WORDS], entries[3::ENTRY_WORDS]
    offset = len(floor)
    for row, record in zip(rows, records, strict=True):
        offset_lens[row] = len(record) << 32 | offset
        file_words[row] &= ~(LOCATION_IN_RAM_LOG << FLAGS_SHIFT | LOW_WORD)
        offset += len(record)
    entries[2::ENTRY_WORDS], entries[3::ENTRY_WORDS] = offset_lens, file_words
    buffers: list[Bytes] = [floor, *records, *_attributes(hosted, [first_seq + row for row in rows], now_ms)]
    if is_last:
        buffers += _keys(hosted, now_ms)
        buffers.append(head_frame(topic, topic.head_seq, now_ms, exact=True, flags=FLAG_MORE))
    else:
        buffers.append(head_frame(topic, topic.ceilings.seq, now_ms, exact=False))
    return RelogTurn(hosted, buffers, floors, first_seq, entries, rows, is_last)


def lease_turn(hosted: Hosted, now_ms: int, reply: PutTopicReply | None = None) -> Draft | None:
    """Return the next turn of held leases; None if there is no other. Nothing may be pending."""
    topic, queue = hosted.topic, hosted.topic.queue
    while queue is not None and queue.unlogged:
        if seqs := queue.take_unlogged(LEASES_PER_TURN):
            bodies = [(FrameType.LEASE, encode_body(body)) for body in queue.bodies(seqs)]
            write = control_write(topic, now_ms, bodies, None, partial(queue.unlogged.extend, seqs), sync=True)
            return Draft([write], touched=[hosted], reply=reply)
    return None


def _records(
    hosted: Hosted, directory: str, first_seq: int, entries: array[int], bytes_max: int
) -> tuple[list[Bytes], list[int]]:
    """Return (frames, rows) of the live records among the entries, up to `bytes_max`. Cut off the entries behind."""
    maps: dict[int, memoryview] = {}
    records: list[Bytes] = []
    rows: list[int] = []
    size_bytes = 0
    offset_lens, file_words = entries[2::ENTRY_WORDS], entries[3::ENTRY_WORDS]
    for row, flags in enumerate(flags_of(entries)):
        if flags & LOCATION_GONE:
            continue
        if size_bytes >= bytes_max:
            del entries[row * ENTRY_WORDS :]
            break
        file_no, offset = file_words[row] & LOW_WORD, offset_lens[row] & LOW_WORD
        content = maps.get(file_no)
        if content is None:
            content = maps[file_no] = memoryview(map_file(layout.log_path(directory, file_no)))
        record = content[offset : offset + (offset_lens[row] >> 32)]
        check_header(record, 0, hosted.topic, first_seq + row, file_no, offset)
        records.append(record)
        rows.append(row)
        size_bytes += len(record)
    return records, rows


def _attributes(hosted: Hosted, seqs: list[int], ts: int) -> list[bytes]:
    """Return the attributes of jobs, which only the RAM log has."""
    queue = hosted.topic.queue
    rows = [] if queue is None else queue.attributes_of(seqs)
    if not rows:
        return []
    return [control_frame(FrameType.JOB_ATTRIBUTES, hosted.topic.id, ts, encode_body(rows), flags=FLAG_MORE)]


def _keys(hosted: Hosted, now_ms: int) -> list[bytes]:
    """Return the unexpired keys, which only the RAM log has."""
    topic = hosted.topic
    return [
        idempotency_frame(topic, bytes(key), WriteOutcome(seq, count, ts))
        for key, seq, count, ts in topic.idempotency.unexpired(now_ms, topic.config.idempotency_window_ms)
    ]
