"""Topics in Spark: the data source, sink and jobs of docs/spark.md. Install as `topicsd[spark]`.

This module imports nothing heavy: Spark's workers import the package to find one class of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL: Final = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    # The default of 15 s is too short for a Python process on a busy machine.
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:MaxMetaspaceSize=256m",
}
"""Settings of a session that stays below 4 GiB, pushes filters down, and reports a wrong option in one line."""


def register(spark: SparkSession) -> None:
    """Make the format `topics` known to a session. Spark finds it by itself where the package is installed."""
    from topics.spark.source import TopicsDataSource

    spark.dataSource.register(TopicsDataSource)
