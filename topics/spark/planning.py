"""The questions of the driver to the service: topics, their states and positions."""

from __future__ import annotations

import re

from topics.client import Client, NotFoundError, TopicState
from topics.spark.offsets import Mark, Offset
from topics.spark.options import Position, Positions, ReadOptions
from topics.spark.spark_errors import OptionError, TopicsSparkError


def states(client: Client, options: ReadOptions) -> dict[str, TopicState]:
    """Return the subscribed topics that exist, by name."""
    names = options.topics
    if options.pattern is not None:
        wanted = re.compile(options.pattern)
        names = tuple(entry.topic for entry in client.list_topics() if wanted.fullmatch(entry.topic))
    found = {}
    for name in names:
        try:
            found[name] = client.get_topic(name, touch=False)
        except NotFoundError:
            continue  # deleted since the list, or never there: `require` reports it
    return found


def require(found: dict[str, TopicState], options: ReadOptions) -> None:
    """Raise TopicsSparkError when a named topic does not exist, or a pattern matches none."""
    missing = [name for name in options.topics if name not in found]
    if missing:
        raise TopicsSparkError(f"topic {missing[0]!r} does not exist at {options.service.url}")
    if options.pattern is not None and not found:
        raise TopicsSparkError(f"no topic at {options.service.url} matches subscribePattern={options.pattern!r}")


def heads(found: dict[str, TopicState]) -> Offset:
    return {name: Mark(state.head_seq, state.epoch) for name, state in found.items()}


def starts(client: Client, found: dict[str, TopicState], options: ReadOptions, default: Position) -> Offset:
    """Return the position where reading begins in each topic."""
    if options.starting_ts is not None:
        return {name: Mark(before_ts(client, name, options.starting_ts), found[name].epoch) for name in found}
    return resolve("startingOffsets", found, options.starting or Positions(default))


def resolve(option: str, found: dict[str, TopicState], positions: Positions) -> Offset:
    """Return positions as seqs. `earliest` is where the live records begin: records lost before are not a gap.
    OptionError for a topic that is not read, or a seq that is not assigned yet.
    """
    offset = {}
    strangers = sorted(positions.by_topic.keys() - found.keys())
    if strangers:
        raise OptionError(f"{option} names the topic {strangers[0]!r}, which is not one of those that are read")
    for name, state in found.items():
        position = positions.of(name)
        if position == "earliest":
            position = state.earliest_seq - 1
        elif position == "latest":
            position = state.head_seq
        elif position > state.head_seq:
            raise OptionError(f"{option}: topic {name!r} ends at {state.head_seq}, not {position}")
        offset[name] = Mark(position, state.epoch)
    return offset


def before_ts(client: Client, topic: str, ts: int) -> int:
    """Return the last seq before the first record with `$ts` >= ts; the head when there is none."""
    page = client.diff(topic, from_ts=ts, limit=1)
    return page.records[0].seq - 1 if page.records else page.next_from_seq
