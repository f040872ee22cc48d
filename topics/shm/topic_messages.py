"""What frontends and shards say to each other about topics and their records (api §1, §5); `messages.py` carries it."""

from __future__ import annotations

from typing import Literal

import msgspec

from topics.core.config import TopicConfig


class PutTopic(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Create a topic or replace its configuration."""

    name: str
    config: TopicConfig
    type_given: bool


class EnsureTopic(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Create a topic with the default configuration; one that is there stays as it is. Answered as PutTopic."""

    name: str


class DeleteTopic(msgspec.Struct, tag=True, array_like=True, frozen=True):
    name: str
    if_empty: bool


class DeleteRecords(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Delete what is below `before_seq` and matches (`core/tags.py`); a nil `op` matches every record.

    Those after `before_seq` and `op` are for the `rest` of another one: it begins at `from_seq` and ends at `last_seq`
    (nil: the head at that moment), in the topic that has this id (0: whichever has the name).
    """

    name: str
    before_seq: int | None
    op: Literal["eq", "glob"] | None
    pattern: bytes
    from_seq: int = 0
    last_seq: int | None = None
    topic_id: int = 0


class Expire(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A reader saw expired records at the front: move the floors now."""

    name: str


TopicCall = PutTopic | EnsureTopic | DeleteTopic | DeleteRecords | Expire


class PutTopicReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    created: bool
    config: TopicConfig


class DeleteTopicReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class DeleteRecordsReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How many were deleted, and what the topic is now. `rest`: what is to be asked next, until all is done: a shard
    takes as much of a delete as fits into one turn.
    """

    deleted: int
    earliest_seq: int
    head_seq: int
    records: int
    live_bytes: int
    rest: DeleteRecords | None = None


TopicReply = PutTopicReply | DeleteTopicReply | DeleteRecordsReply
