"""Filters of a query, used to read less (PySpark 4.1 and newer)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from topics.spark.batch import BatchReader, Wanted


class PushdownBatchReader(BatchReader):
    """A batch reader that takes filters. Spark refuses it unless `spark.sql.python.filterPushdown.enabled` is on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 — Spark's name
        """Narrow the range by these filters; return them all, for Spark to apply as well."""
        for one in filters:
            self.wanted = _narrowed(self.wanted, one)
        return filters


def _narrowed(wanted: Wanted, one: Filter) -> Wanted:
    """Return `wanted`, narrowed by one filter if its column allows that."""
    column = getattr(one, "attribute", ())
    value = getattr(one, "value", None)
    if column == ("topic",) or column == ("tag",):
        names: frozenset[str] | None = None
        if isinstance(one, EqualTo) and isinstance(value, str):
            names = frozenset({value})
        elif isinstance(one, In) and all(isinstance(name, str) for name in one.value):
            names = frozenset(one.value)
        if names is not None:
            if column == ("tag",):
                return wanted._replace(tags=names if wanted.tags is None else names & wanted.tags)
            return wanted._replace(topics=names if wanted.topics is None else names & wanted.topics)
    elif column == ("seq",) and isinstance(value, int):
        least, most = _bounds(one, value)
        if least is not None:
            wanted = wanted._replace(seq_from=max(wanted.seq_from, least))
        if most is not None:
            wanted = wanted._replace(seq_to=most if wanted.seq_to is None else min(wanted.seq_to, most))
    elif column == ("timestamp",) and isinstance(value, datetime.datetime):
        least, most = _bounds(one, _micros(value))
        if least is not None:
            wanted = wanted._replace(time_from_us=max(least, wanted.time_from_us or least))
        if most is not None:
            wanted = wanted._replace(time_to_us=min(most, wanted.time_to_us or most))
    return wanted


def _bounds(one: Filter, value: int) -> tuple[int | None, int | None]:
    """Return (least, most) of the values that pass the filter; None for no bound."""
    match one:
        case EqualTo():
            return value, value
        case GreaterThan():
            return value + 1, None
        case GreaterThanOrEqual():
            return value, None
        case LessThan():
            return None, value - 1
        case LessThanOrEqual():
            return None, value
        case _:
            return None, None


def _micros(time: datetime.datetime) -> int:
    since = time.astimezone(datetime.UTC) - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return since // datetime.timedelta(microseconds=1)
