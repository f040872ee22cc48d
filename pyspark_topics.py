"""Where Spark finds the data source `topics`: it imports every module called `pyspark_*` and looks for `DefaultSource`.

It does so for any look-up of any source, so nothing is imported before it is asked for, and nothing here raises: a
machine without the libraries of `topics[spark]` has no such source.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from topics.spark.source import TopicsDataSource
    except ImportError as error:
        raise AttributeError(f"the data source `topics` needs topics[spark]: {error}") from error
    return TopicsDataSource
