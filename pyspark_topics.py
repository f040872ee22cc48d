"""The module in which Spark finds the data source `topics`: it looks for `DefaultSource` in all modules `pyspark_*`.

Spark does that for every look-up of any source. So this imports nothing until it is asked, and never fails: a machine
without the libraries of `topicsd[spark]` has no such source.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from topics.spark.source import TopicsDataSource
    except ImportError as error:
        raise AttributeError(f"the data source `topics` needs topicsd[spark]: {error}") from error
    return TopicsDataSource
