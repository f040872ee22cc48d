"""A follower that is behind a query: the query read from the leader before, or the follower was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tests.archive.test_following import following, follows, leading, promoted
from tests.contract.asking import ok, state, write
from tests.harness import Service, poll
from tests.spark.test_segment_scan import plan_of, rows_of, schema_of
from topics.client import Client, Retry
from topics.spark import http_read
from topics.spark.batch import RangePartition
from topics.spark.http_read import read_range
from topics.spark.offsets import Range
from topics.spark.options import TopicsSparkError, read_options
from topics.spark.spark_stream import StreamReader

Followed = tuple[Service, Service, Callable[[], None]]


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    """A leader with 20 records, a follower that has 10 of them, and what lets it have the others."""
    place = tmp_path / "archive"
    with leading(place) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", *range(10))
        follows(follower, leader, "orders")
        pid = leader.pid_of("archiver")
        os.kill(pid, signal.SIGSTOP)
        try:
            write(leader.client, "orders", *range(10, 20))
            yield leader, follower, partial(os.kill, pid, signal.SIGCONT)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.spark_since("4.2")
def test_a_stream_waits_for_a_follower_that_is_behind_it(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    leader, follower, go_on = followed
    options = read_options({"url": follower.url, "subscribe": "orders"})
    reader = StreamReader(schema_of(options), options)
    at = {"orders": {"seq": 20, "epoch": state(leader.client, "orders")["epoch"]}}
    assert state(follower.client, "orders")["head_seq"] == 10
    for _ in range(2):
        assert reader.latestOffset(at, ReadAllAvailable()) == at
    assert [line for line in caplog.messages if "waits" in line] == [
        f"topic orders: {follower.url} follows another service and has up to 10; the query waits at 20"
    ]
    write(leader.client, "orders", 20)
    go_on()
    poll("what is new", lambda: reader.latestOffset(at, ReadAllAvailable())["orders"]["seq"] == 21)
    reader.stop()


@pytest.mark.spark_since("4.2")
def test_a_pass_over_what_a_follower_has_ends_where_the_query_stands(followed: Followed) -> None:
    leader, follower, _ = followed
    options = read_options({"url": follower.url, "subscribe": "orders"})
    reader = StreamReader(schema_of(options), options)
    reader.prepareForTriggerAvailableNow()
    at = {"orders": {"seq": 20, "epoch": state(leader.client, "orders")["epoch"]}}
    assert reader.latestOffset(at, ReadAllAvailable()) == at
    reader.stop()


def test_a_task_waits_for_what_its_follower_lacks(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower, go_on = followed
    options = read_options({"url": follower.url, "subscribe": "orders", "tombstones": "rows"})
    part = Range("orders", state(leader.client, "orders")["epoch"], 0, 20)
    with Client(follower.url) as client:
        with monkeypatch.context() as hasty:
            hasty.setattr(http_read, "TASK_RETRY", Retry(total_s=0.0))
            with pytest.raises(TopicsSparkError, match="follows another service, and has records up to 10 of it"):
                rows_of(read_range(client, part, plan_of(options)))
        go_on()
        records, gone = rows_of(read_range(client, part, plan_of(options)))
    assert [row[0] for row in records] == list(range(1, 21))
    assert not gone


@pytest.mark.spark_since("4.2")
def test_a_query_keeps_its_place_when_a_follower_takes_over(tmp_path: Path) -> None:
    """The query was told that each topic was deleted and made again, and read it from its start."""
    place = tmp_path / "archive"
    with leading(place) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", *range(20))
        follows(follower, leader, "orders")
        epoch = state(leader.client, "orders")["epoch"]
        leader.kill_group()
        promoted(follower)
        now = state(follower.client, "orders")
        assert (now["former_epoch"], now["epoch"] == epoch) == (epoch, False)
        gone_to = now["restored_seq"]
        write(follower.client, "orders", *range(3))

        options = read_options({"url": follower.url, "subscribe": "orders", "tombstones": "rows"})
        reader = StreamReader(schema_of(options), options)

        def rows(seq: int) -> tuple[list[int], dict[int, str]]:
            """Return the seqs of the records after `seq`, and the gaps."""
            at = {"orders": {"seq": seq, "epoch": epoch}}
            parts = reader.partitions(at, reader.latestOffset(at, ReadAllAvailable()))
            records, gone = rows_of(batch for part in parts for batch in reader.read(part))
            return [row[0] for row in records], gone

        new = [gone_to + 1, gone_to + 2, gone_to + 3]
        assert rows(12) == ([*range(13, 21), *new], dict.fromkeys(range(21, gone_to + 1), "restored"))
        assert rows(gone_to) == (new, {})
        assert rows(20)[0] == new
        with Client(follower.url) as client:
            planned = Range("orders", epoch, 12, 20)
            records, gone = rows_of(read_range(client, planned, plan_of(options)))
        assert ([row[0] for row in records], gone) == ([*range(13, 21)], {}), "a task that was planned before"

        # What the former leader gave out beyond the gap is of another history.
        at = {"orders": {"seq": gone_to + 1, "epoch": epoch}}
        assert reader.latestOffset(at, ReadAllAvailable()) == {"orders": {"seq": new[-1], "epoch": now["epoch"]}}
        assert [part.range.gap.reason for part in _parts(reader, at) if part.range.gap] == ["recreated"]
        ok(follower.client.delete("/v0/topics/orders"))
        write(follower.client, "orders", "of another topic")
        assert "former_epoch" not in state(follower.client, "orders")
        at = {"orders": {"seq": 12, "epoch": epoch}}
        assert [part.range.gap.reason for part in _parts(reader, at) if part.range.gap] == ["recreated"]
        reader.stop()


def _parts(reader: StreamReader, at: dict[str, Any]) -> list[RangePartition]:
    parts = reader.partitions(at, reader.latestOffset(at, ReadAllAvailable()))
    return [part for part in parts if isinstance(part, RangePartition)]
