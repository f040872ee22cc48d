"""Requests to follow topics, over an event stream (api §7) or a WebSocket (§7.7): checks, and where each starts."""

from __future__ import annotations

from typing import Final, NamedTuple

from topics.api.requests import StartBody
from topics.core.errors import invalid
from topics.core.names import check_topic_name
from topics.frontend.entry import wire
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Slices

BEYOND_ANY_HEAD: Final = (1 << 53) - 1
"""A cursor that JavaScript keeps exactly: ids of frames have it until the topic is read."""
_NO_RECORDS: Final = PageOptions(limit=1, max_batch_bytes=1)


class FollowedTopic(NamedTuple):
    """A topic that is read from `from_seq` on, and its `state` as the answer has it."""

    ref: TopicRef
    from_seq: int
    state: dict[str, int]


def check_starts(starts: dict[str, StartBody], topics_max: int) -> None:
    """Check the names, their number, and the start of each. Raise `400 invalid_request`."""
    if not 1 <= len(starts) <= topics_max:
        raise invalid(f"topics must name 1 to {topics_max} topics, not {len(starts)}", field="topics")
    for name, start in starts.items():
        check_topic_name(name)
        wire.check_counts(start, f"topics.{name}.")
        if (start.from_seq > 0) + start.tail + (start.from_ts is not None) > 1:
            field = f"topics.{name}"
            raise invalid(f"{field}: from_seq, tail and from_ts exclude each other: give one of them", field=field)


def check_durable(ref: TopicRef) -> None:
    """Raise `400` if the topic's records never become durable."""
    if ref.config.durability == "ephemeral":
        raise invalid(
            f"topic {ref.name!r} is ephemeral: nothing of it ever reaches the disk, which is what"
            ' consistency "strong" waits for; watch it with "eventual"',
            field="consistency",
        )


async def follow(
    reader: TopicReader, starts: dict[str, StartBody], strong: bool, lenient: bool = False
) -> dict[str, FollowedTopic]:
    """Find the topics, in slices: each at a moment of its own. Raise `topic_not_found` unless `lenient` leaves it out;
    `400` for one that is never durable.
    """
    find = reader.find if lenient else reader.get
    found, slices = dict[str, FollowedTopic](), Slices()
    for name, start in starts.items():
        if (ref := find(name)) is not None:
            if strong:
                check_durable(ref)
            found[name] = _followed(reader, ref, start)
        await slices.yield_if_over()
    return found


def _followed(reader: TopicReader, ref: TopicRef, start: StartBody) -> FollowedTopic:
    view = ref.view
    from_seq = start.from_seq if start.from_ts is None else reader.seq_before(ref, start.from_ts)
    if start.tail or (reader.is_beyond(view, from_seq) and start.from_ts is None):
        # Beyond any head if the topic was recreated, so that its reader is told, though it may grow meanwhile.
        from_seq = BEYOND_ANY_HEAD if view.recreated and not start.tail else view.head_seq
    # The page at the head has no record, but both ends of the topic at this moment.
    page = reader.read_page(ref, view.head_seq, _NO_RECORDS)
    # A cursor from before the topic was recreated reads it from its first record.
    resolved_seq = from_seq if from_seq != BEYOND_ANY_HEAD else page.earliest_seq - 1
    state = {"from_seq": resolved_seq, "head_seq": page.head_seq, "earliest_seq": page.earliest_seq}
    return FollowedTopic(ref, from_seq, state)
