"""Reading over HTTP. The driver asks for topics, states and positions; tasks read pages and gaps of their ranges."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa

from topics.client import Client, NotFoundError, Page, Record, Retry, TopicState
from topics.spark.columns import ColumnBuilder
from topics.spark.offsets import LOST_TAIL, Gap, Mark, Offset, Range, data_loss
from topics.spark.options import OptionError, Position, Positions, ReadOptions, Service, TopicsSparkError

ROWS_PER_BATCH = 8_000
PAGES_PER_BATCH = ROWS_PER_BATCH // 1000  # of long records they have fewer, and `calls.DIFF_MAX_BYTES`
TASK_RETRY = Retry(total_s=120.0, pause_max_s=5.0)
"""Tasks wait long for the service: Spark would run a failed task again from its start."""
PLAN_RETRY = Retry(total_s=5.0)
"""The driver waits briefly, since a person waits for the plan."""
BEHIND_PAUSE_S = 0.25
"""The time until a follower that is behind is asked again."""

log = logging.getLogger("topics.spark")


class ReadPlan(NamedTuple):
    """A query's options and columns, and the tags that a filter leaves (None: all records)."""

    options: ReadOptions
    columns: ColumnBuilder
    tags: frozenset[str] | None


def connect(service: Service, retry: Retry) -> Client:
    return Client(service.url, token=service.token, retry=retry)


def states(client: Client, options: ReadOptions) -> dict[str, TopicState]:
    """Return the subscribed topics that exist, by name. OptionError for a `url` that leads to something else."""
    found: dict[str, TopicState] = {}
    try:
        names = options.topics
        if options.pattern is not None:
            wanted = re.compile(options.pattern)
            names = tuple(entry.topic for entry in client.list_topics() if wanted.fullmatch(entry.topic))
        for name in names:
            state = state_of(client, name)
            if state is not None:  # else deleted since the list, or never there: `require` reports it
                found[name] = state
    except NotFoundError as error:
        raise OptionError(f"option url={options.service.url!r}: {error}; give the address without a path") from None
    return found


def state_of(client: Client, topic: str) -> TopicState | None:
    """Return the topic, None if it does not exist. NotFoundError if the address has no topics at all."""
    try:
        return client.get_topic(topic, touch=False)
    except NotFoundError as error:
        if error.code != "topic_not_found":
            raise
        return None


def carried(start: Offset, found: Mapping[str, TopicState]) -> Offset:
    """Return the offset with the present epochs of topics that go on in a service that was restored or took over."""
    goes_on = {name for name, mark in start.items() if name in found and _is_of_former(mark, found[name])}
    return {name: Mark(mark.seq, found[name].epoch) if name in goes_on else mark for name, mark in start.items()}


def _is_of_former(mark: Mark, state: TopicState) -> bool:
    return mark.epoch == state.former_epoch and mark.seq <= (state.restored_seq or 0)


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
    if options.starting_ts is not None:
        return {name: Mark(before_ts(client, name, options.starting_ts), found[name].epoch) for name in found}
    return resolve("startingOffsets", found, options.starting or Positions(default))


def resolve(option: str, found: dict[str, TopicState], positions: Positions) -> Offset:
    """Return positions as seqs. Raise OptionError for a topic that is not read, or a seq beyond the head."""
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


def follows(client: Client, topic: str, head_seq: int) -> bool:
    """Return True if the service follows another one: what it lacks of the topic may still come."""
    try:
        return client.diff(topic, head_seq, limit=1).performance.lag_ms is not None  # no record is read for it
    except NotFoundError:
        return False


def before_ts(client: Client, topic: str, ts: int) -> int:
    """Return the seq before the first record with `$ts` >= ts, or before a loss in front of it; else the head."""
    page = client.diff(topic, from_ts=ts, limit=1)
    if page.tombstone is not None:
        return page.tombstone.gap_from - 1
    return page.records[0].seq - 1 if page.records else page.next_from_seq


def read_range(client: Client, one: Range, plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a range in order. `options.tombstones` says what becomes of gaps."""
    return delivered(one.topic, batches_and_gaps(client, one, plan), plan)


def delivered(topic: str, items: Iterable[pa.RecordBatch | Gap], plan: ReadPlan) -> Iterator[pa.RecordBatch]:
    """Yield the batches, and for each gap what `options.tombstones` wants: an error, a row, or a line of log."""
    for item in items:
        if not isinstance(item, Gap):
            yield item
        elif plan.options.tombstones == "fail":
            raise data_loss(topic, item)
        elif plan.options.tombstones == "rows":
            yield plan.columns.gap(topic, item)
        else:
            count = "an unknown number of" if item.last_seq is None else f"{item.last_seq - item.first_seq + 1}"
            which = f"{item.first_seq} to {item.last_seq}, reason {item.reason}"
            log.warning("topic %s: %s records are lost and left out: %s", topic, count, which)


def batches_and_gaps(client: Client, one: Range, plan: ReadPlan) -> Iterator[pa.RecordBatch | Gap]:
    waiting: list[Record] = []
    pages = 0
    for item in _pages_and_gaps(client, one, plan.options):
        if not isinstance(item, Gap):
            waiting += item if plan.tags is None else [record for record in item if record.tag in plan.tags]
            pages += 1
        if waiting and (isinstance(item, Gap) or pages >= PAGES_PER_BATCH):
            yield plan.columns.batch_of(one.topic, waiting)
            waiting, pages = [], 0
        if isinstance(item, Gap):
            yield item
    if waiting:
        yield plan.columns.batch_of(one.topic, waiting)


def _pages_and_gaps(client: Client, one: Range, options: ReadOptions) -> Iterator[list[Record] | Gap]:
    if one.gap is not None:
        yield one.gap
    cursor, until_s = one.from_seq, 0.0
    while cursor < one.to_seq:
        try:
            page = client.diff(
                one.topic,
                cursor,
                limit=min(1000, one.to_seq - cursor),
                node=options.node,
                include_tags=True,  # for the filter on tags; ColumnBuilder decides whether they are shown
                include_meta=options.include_meta,
            )
            if page.epoch != one.epoch:
                state = client.get_topic(one.topic, touch=False)
                if _is_of_former(Mark(one.to_seq, one.epoch), state):
                    one = one._replace(epoch=state.epoch)
        except NotFoundError:
            yield Gap(cursor + 1, one.to_seq, "deleted")
            return
        reason = _break(page, one, cursor)
        if reason == LOST_TAIL and page.performance.lag_ms is not None:
            until_s = until_s or time.monotonic() + TASK_RETRY.total_s
            if time.monotonic() > until_s:
                raise TopicsSparkError(
                    f"topic {one.topic!r}: {options.service.url} follows another service, and has records up to "
                    f"{page.head_seq} of it, not up to {one.to_seq}; run the query again, or read from the leader"
                )
            time.sleep(BEHIND_PAUSE_S)
            continue
        until_s = 0.0
        if reason is not None:
            yield Gap(cursor + 1, one.to_seq, reason)
            return
        lost = page.tombstone
        if lost is not None and lost.gap_from <= one.to_seq:
            yield Gap(lost.gap_from, min(lost.gap_to, one.to_seq), lost.reason)
        records = page.records
        if records and records[-1].seq > one.to_seq:
            records = [record for record in records if record.seq <= one.to_seq]
        if records:
            yield records
        cursor = page.next_from_seq


def _break(page: Page, one: Range, cursor: int) -> str | None:
    """Return why the rest of the range is not in this instance of the topic; None if it is."""
    if page.epoch != one.epoch:
        return "recreated"
    if page.head_seq < one.to_seq and page.next_from_seq <= cursor:
        # These seqs existed when the range was planned: a topic of class `memory` has lost its tail.
        return LOST_TAIL
    return None
