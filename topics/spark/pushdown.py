"""Filters of a query, used to read less (PySpark 4.1 and newer)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from topics.spark.batch import FAR, BatchReader, Wanted


class PushdownBatchReader(BatchReader):
    """A batch reader that takes filters. Spark refuses it unless `spark.sql.python.filterPushdown.enabled` is on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 — Spark's name
        """Narrow the range by these filters; return them all, for Spark to apply as well."""
        for one in filters:
            self.wanted = _narrowed(self.wanted, one)
        return filters


def _narrowed(wanted: Wanted, one: Filter) -> Wanted:
    """Return `wanted`, narrowed by one filter if its column allows that."""
    column, value = getattr(one, "attribute", ()), getattr(one, "value", None)
    if column in (("topic",), ("tag",)):
        names: frozenset[str] | None = None
        if isinstance(one, EqualTo) and isinstance(value, str):
            names = frozenset({value})
        elif isinstance(one, In) and all(isinstance(name, str) for name in one.value):
            names = frozenset(one.value)
        if names is not None and column == ("tag",):
            return wanted._replace(tags=names if wanted.tags is None else names & wanted.tags)
        if names is not None:
            return wanted._replace(topics=names if wanted.topics is None else names & wanted.topics)
    elif column == ("seq",) and isinstance(value, int):
        least, most = _bounds(one, value)
        return wanted._replace(seq_from=max(wanted.seq_from, least), seq_to=min(wanted.seq_to, most))
    elif column == ("timestamp",) and isinstance(value, datetime.datetime):
        least, most = _bounds(one, _micros(value))
        return wanted._replace(time_from_us=max(wanted.time_from_us, least), time_to_us=min(wanted.time_to_us, most))
    return wanted


def _bounds(one: Filter, value: int) -> tuple[int, int]:
    match one:
        case EqualTo():
            return value, value
        case GreaterThan():
            return value + 1, FAR
        case GreaterThanOrEqual():
            return value, FAR
        case LessThan():
            return -FAR, value - 1
        case LessThanOrEqual():
            return -FAR, value
        case _:
            return -FAR, FAR


def _micros(time: datetime.datetime) -> int:
    since = time.astimezone(datetime.UTC) - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return since // datetime.timedelta(microseconds=1)
