"""What the driver asks the service: which topics there are and where they stand."""

from __future__ import annotations

import re

from topics.client import Client, NotFoundError, TopicState
from topics.spark.offsets import Mark, Offset
from topics.spark.options import Position, Positions, ReadOptions
from topics.spark.spark_errors import OptionError, TopicsSparkError


def states(client: Client, options: ReadOptions) -> dict[str, TopicState]:
    """The topics that are subscribed to and exist, by name."""
    names = options.topics
    if options.pattern is not None:
        wanted = re.compile(options.pattern)
        names = tuple(entry.topic for entry in client.list_topics() if wanted.fullmatch(entry.topic))
    found = {}
    for name in names:
        try:
            found[name] = client.get_topic(name, touch=False)
        except NotFoundError:
            continue  # gone since the list, or never there: whoever needs it says so
    return found


def require(found: dict[str, TopicState], options: ReadOptions) -> None:
    """TopicsSparkError when a topic that was named does not exist, or a pattern matches none."""
    missing = [name for name in options.topics if name not in found]
    if missing:
        raise TopicsSparkError(f"topic {missing[0]!r} does not exist at {options.service.url}")
    if options.pattern is not None and not found:
        raise TopicsSparkError(f"no topic at {options.service.url} matches subscribePattern={options.pattern!r}")


def heads(found: dict[str, TopicState]) -> Offset:
    return {name: Mark(state.head_seq, state.epoch) for name, state in found.items()}


def starts(client: Client, found: dict[str, TopicState], options: ReadOptions, default: Position) -> Offset:
    """Where reading begins in each topic."""
    if options.starting_ts is not None:
        return {name: Mark(before_ts(client, name, options.starting_ts), found[name].epoch) for name in found}
    return resolve("startingOffsets", found, options.starting or Positions(default))


def resolve(option: str, found: dict[str, TopicState], positions: Positions) -> Offset:
    """Positions as seqs. `earliest` is where the live records begin: what was lost before is nobody's gap. OptionError
    for one that names another topic, or a seq that is not there yet.
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
    """The last seq before the first record with `$ts` >= ts; the head when there is none."""
    page = client.diff(topic, from_ts=ts, limit=1)
    return page.records[0].seq - 1 if page.records else page.next_from_seq
