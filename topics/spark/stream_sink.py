"""`df.writeStream.format("topics")`: what tasks have staged becomes visible once for each batch of the query."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from topics.spark.sink import Stager, whole
from topics.spark.spark_errors import TopicsSparkError


class StreamWriter(Stager, DataSourceStreamArrowWriter):
    """Exactly once: the sink is the query (its checkpoint, that is), its batches are Spark's."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 — Spark's name
        staged = whole(messages)
        queries = {message.query for message in staged}
        if not staged:
            return
        query = queries.pop()
        if queries or query is None:
            raise TopicsSparkError("Spark did not say which query its tasks belong to; this cannot be exactly once")
        self.publish(f"{self.options.sink or 'spark'}.{query}", batchId, staged)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self.drop(messages)
