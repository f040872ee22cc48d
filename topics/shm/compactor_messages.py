"""What the compactor says to shards, and the answers; `messages.py` carries it."""

from __future__ import annotations

import msgspec

from topics.core.segment_list import SegmentInfo


class TopicCheckpoint(msgspec.Struct, array_like=True, frozen=True):
    """One topic's records up to `up_to_seq` are in segments, on the disk; `segments` are those that are new or changed.

    `up_to_seq` is what it was before when a segment was only sealed, rewritten or relocated.
    """

    topic_id: int
    up_to_seq: int
    segments: list[SegmentInfo]


class Checkpoint(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the compactor: log that these are in segments, then let go of their locations."""

    topics: list[TopicCheckpoint]


class Trim(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the compactor: log files numbered below `file_no` hold nothing that two snapshots do not."""

    file_no: int


class MarkAgain(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the compactor: mark these deletions in their segments once more, a sync that should have covered the marks
    may have failed. `runs`: (first_seq, last_seq) of records that the log says are deleted.
    """

    topic_id: int
    runs: list[tuple[int, int]]


CompactorCall = Checkpoint | Trim | MarkAgain


class CheckpointReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Topic ids: `gone` are deleted, `refused` could not be marked. All others of the request are marked."""

    gone: list[int]
    refused: list[int]
