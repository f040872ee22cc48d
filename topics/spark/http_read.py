"""What a task does: reads one range of a topic, page by page, and says what of it is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pyarrow as pa

from topics.client import Client, NotFoundError, Page, Record, Retry
from topics.spark.columns import ColumnBuilder
from topics.spark.offsets import LOST_TAIL, Gap, Range, data_loss
from topics.spark.options import ReadOptions, Service

ROWS_PER_BATCH = 8_000
TASK_RETRY = Retry(total_s=120.0, pause_max_s=5.0)
"""A task that fails is run again from its start: waiting for a service that comes back is cheaper."""
PLAN_RETRY = Retry(total_s=5.0)
"""Somebody is sitting in front of it."""

_log = logging.getLogger("topics.spark")


def connect(service: Service, retry: Retry) -> Client:
    return Client(service.url, token=service.token, retry=retry)


def read_range(
    client: Client, one: Range, options: ReadOptions, columns: ColumnBuilder, tags: frozenset[str] | None
) -> Iterator[pa.RecordBatch]:
    """Batches of the range in order. Gaps go the way of `options.tombstones`. Of records whose tag is not in `tags`
    (None: all are wanted) nothing is delivered.
    """
    return delivered(one.topic, batches_and_gaps(client, one, options, columns, tags), options, columns)


def delivered(
    topic: str, items: Iterable[pa.RecordBatch | Gap], options: ReadOptions, columns: ColumnBuilder
) -> Iterator[pa.RecordBatch]:
    """The batches, and what `options.tombstones` makes of the gaps."""
    for item in items:
        if not isinstance(item, Gap):
            yield item
        elif options.tombstones == "fail":
            raise data_loss(topic, item)
        elif options.tombstones == "rows":
            yield columns.gap(topic, item)
        else:
            _say(topic, item)


def batches_and_gaps(
    client: Client, one: Range, options: ReadOptions, columns: ColumnBuilder, tags: frozenset[str] | None
) -> Iterator[pa.RecordBatch | Gap]:
    """As `read_range`, gaps as they are."""
    waiting: list[Record] = []
    for item in _items(client, one, options):
        if isinstance(item, Gap):
            if waiting:
                yield columns.records(one.topic, waiting)
                waiting = []
            yield item
            continue
        waiting += item if tags is None else [record for record in item if record.tag in tags]
        if len(waiting) >= ROWS_PER_BATCH:
            yield columns.records(one.topic, waiting)
            waiting = []
    if waiting:
        yield columns.records(one.topic, waiting)


def _items(client: Client, one: Range, options: ReadOptions) -> Iterator[list[Record] | Gap]:
    if one.gap is not None:
        yield one.gap
    cursor = one.from_seq
    while cursor < one.to_seq:
        try:
            page = client.diff(
                one.topic,
                cursor,
                limit=min(1000, one.to_seq - cursor),
                node=options.node,
                # The filter on tags needs them, and whether they are shown is a matter of columns.
                include_tags=True,
                include_meta=options.include_meta,
            )
        except NotFoundError:
            yield Gap(cursor + 1, one.to_seq, "deleted")
            return
        reason = _break(page, one, cursor)
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
    """Why this instance of the topic has nothing more to give of the range, if so."""
    if page.epoch != one.epoch:
        return "recreated"
    if page.head_seq < one.to_seq and page.next_from_seq <= cursor:
        # A topic of class `memory` that lost its tail: the seqs were there when the range was planned.
        return LOST_TAIL
    return None


def _say(topic: str, gap: Gap) -> None:
    count = "an unknown number of" if gap.last_seq is None else f"{gap.last_seq - gap.first_seq + 1}"
    _log.warning(
        "topic %s: %s records are gone and left out: %s to %s, reason %s",
        topic,
        count,
        gap.first_seq,
        gap.last_seq,
        gap.reason,
    )
