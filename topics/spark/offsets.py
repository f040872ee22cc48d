"""A query's position in each topic, and the ranges of its next batch. Pure: callers pass in the state of topics.

An offset is JSON in a query's checkpoint:

    {"orders": {"seq": 1200, "epoch": "019a3f…"}, …}      by topic name, sorted

`seq` is the last record that was read (0: none), `epoch` the instance of the topic that it was read from. An empty
epoch stands for a topic that did not exist when the query looked: its next instance is read from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from topics.spark.options import DataLossError, TombstoneMode

PARTITIONS_WANTED = 8
LEAST_RECORDS = 50_000
MOST_RECORDS = 400_000
"""Bounds of a partition's size unless an option gives it."""
NO_EPOCH = ""
LOST_TAIL = "lost_tail"


class Mark(NamedTuple):
    """A position in one instance of a topic."""

    seq: int
    epoch: str


Offset = dict[str, Mark]
"""Marks by topic name."""


class Gap(NamedTuple):
    """Records that cannot be read any more; `last_seq` is None if their number is unknown, `detail` tells of damage."""

    first_seq: int
    last_seq: int | None
    reason: str
    detail: str = ""


class Range(NamedTuple):
    """Records from_seq + 1..to_seq of one instance of a topic; `gap`, if any, comes before them."""

    topic: str
    epoch: str
    from_seq: int
    to_seq: int
    gap: Gap | None = None


def to_json(offset: Offset) -> dict[str, Any]:
    """Return an offset as JSON. Equal offsets give the same text, which Spark compares."""
    return {topic: {"seq": mark.seq, "epoch": mark.epoch} for topic, mark in sorted(offset.items())}


def from_json(content: Mapping[str, Any]) -> Offset:
    return {topic: Mark(int(mark["seq"]), str(mark["epoch"])) for topic, mark in content.items()}


def advance(start: Offset, heads: Offset, max_records: int | None) -> Offset:
    """Return the end of the batch after `start`: at the heads, or after `max_records` in all, shared out by lag.

    Deleted topics keep their seq, without an epoch; new topics and new instances are read from their start. When a head
    went back (the topic lost its tail, and its seqs are assigned again), the query goes back with it.
    """
    end = {topic: Mark(mark.seq, NO_EPOCH) for topic, mark in start.items() if topic not in heads}
    lags = {}
    for topic, head in heads.items():
        from_seq = _from_seq(start.get(topic), head)
        end[topic] = Mark(from_seq, head.epoch)
        lags[topic] = max(0, head.seq - from_seq)
    for topic, share in _deal(lags, max_records, sum(mark.seq for mark in start.values())).items():
        end[topic] = Mark(end[topic].seq + share, end[topic].epoch)
    return end


def _from_seq(start: Mark | None, head: Mark) -> int:
    """Return the position in the instance of `head` where reading goes on."""
    return min(start.seq, head.seq) if start is not None and start.epoch == head.epoch else 0


def _deal(lags: Mapping[str, int], max_records: int | None, turn: int) -> dict[str, int]:
    """Return the number of records to read from each topic: at least one of each that has any. If `max_records` is too
    few for that, `turn` decides which topics come first. It grows with the records read, so no topic waits for ever.
    """
    total = sum(lags.values())
    if max_records is None or total <= max_records:
        return dict(lags)
    waiting = sorted(topic for topic, lag in lags.items() if lag)
    if max_records <= len(waiting):
        first = turn % len(waiting)
        return dict.fromkeys((waiting[first:] + waiting[:first])[:max_records], 1)
    spare, spare_lag = max_records - len(waiting), total - len(waiting)
    shares = {topic: 1 + (lags[topic] - 1) * spare // spare_lag for topic in waiting}
    left = max_records - sum(shares.values())
    for topic in sorted(waiting, key=lambda topic: shares[topic] - lags[topic])[:left]:
        shares[topic] += 1
    return shares


def ranges(start: Offset, end: Offset) -> list[Range]:
    """Return the ranges between two offsets. A break in a topic's history is a gap before its records."""
    found = []
    for topic, mark in sorted(end.items()):
        before = start.get(topic)
        gap = None
        if before is not None and before.epoch not in (mark.epoch, NO_EPOCH):
            gap = Gap(before.seq + 1, None, "deleted" if mark.epoch == NO_EPOCH else "recreated")
        elif before is not None and before.epoch == mark.epoch != NO_EPOCH and mark.seq < before.seq:
            gap = Gap(mark.seq + 1, before.seq, LOST_TAIL)
        from_seq = _from_seq(before, mark)
        to_seq = from_seq if mark.epoch == NO_EPOCH else mark.seq
        if gap is not None or to_seq > from_seq:
            found.append(Range(topic, mark.epoch, from_seq, to_seq, gap))
    return found


def check_history(whole: Iterable[Range], tombstones: TombstoneMode) -> None:
    """Raise DataLossError for a gap that is known before anything is read, if gaps fail the query."""
    if tombstones == "fail":
        for one in whole:
            if one.gap is not None:
                raise data_loss(one.topic, one.gap)


def data_loss(topic: str, gap: Gap) -> DataLossError:
    way_out = "set tombstones=rows to get gaps as rows, or failOnDataLoss=false to leave them out"
    if gap.reason in ("deleted", "recreated"):
        what = "was deleted" if gap.reason == "deleted" else "was deleted and made again"
        return DataLossError(f"topic {topic!r} {what} while the query stood at record {gap.first_seq - 1}; {way_out}")
    why = f"{gap.reason}: {gap.detail}" if gap.detail else gap.reason
    which = f"records {gap.first_seq} to {gap.last_seq} are gone (reason: {why})"
    return DataLossError(f"topic {topic!r}: {which}; {way_out}")


def split(whole: Iterable[Range], max_records: int | None, min_partitions: int) -> list[Range]:
    """Cut ranges into parts of about equal length, in order: at most `max_records` each, and at least `min_partitions`
    if there are as many records. Without `max_records` there are enough parts for some cores, and each is large enough
    that the cost of a task (about 0.1 s in Spark and its Python worker) does not matter.
    """
    whole = list(whole)
    total = sum(one.to_seq - one.from_seq for one in whole)
    if max_records is None:
        max_records = min(max(total // PARTITIONS_WANTED, LEAST_RECORDS), MOST_RECORDS)
    size = max(1, min(max_records, total // min_partitions))
    parts = []
    for one in whole:
        length = one.to_seq - one.from_seq
        count = -(-length // size)
        if count <= 1:
            parts.append(one)
            continue
        borders = [one.from_seq + length * number // count for number in range(count + 1)]
        first, *rest = pairwise(borders)
        parts.append(Range(one.topic, one.epoch, *first, one.gap))
        parts += [Range(one.topic, one.epoch, *ends) for ends in rest]
    return parts
