"""`mode=segments` with a cold tier in a bucket: tasks read the objects themselves (docs/bucket.md)."""

from __future__ import annotations

import pytest

from tests.buckets import Proxy
from tests.harness import Service, poll
from tests.spark.conftest import COMPACTED_S
from tests.spark.test_segment_scan import EVENTS, given, manifest, plan_of, rows_of
from topics.client import Client, NewRecord
from topics.spark.http_read import PLAN_RETRY, connect, read_range
from topics.spark.offsets import Range
from topics.spark.options import Directories, OptionError, read_options
from topics.spark.segment_audit import audit_segment
from topics.spark.segment_scan import read_part, sealed_of

RECORDS = 10 * EVENTS + 7


@pytest.mark.long
def test_rows_come_straight_from_the_bucket(
    s3: Proxy, bucket_url: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS), "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}
    tier = {"TOPICS_COLD_URL": bucket_url, "TOPICS_HOT_RETAIN_SEGMENTS": "2"}
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    with Service(shards=1, frontends=1, env=env | tier | s3.env) as service, Client(service.url) as client:
        client.append(topic, [NewRecord({"n": n}, tag="ab"[n % 2]) for n in range(RECORDS)])

        def cold() -> int:
            return sum(segment.tier == "cold" for segment in manifest(client, topic).segments)

        poll("relocation", lambda: cold() == 8, COMPACTED_S)
        client.delete_records(topic, match="a")
        mode = {"mode": "segments", "dataDir": str(service.data_dir), "coldUrl": bucket_url}
        plain = read_options(given(service, topic))
        files = read_options(given(service, topic, **mode))
        reading = connect(plain.service, PLAN_RETRY)
        state = reading.get_topic(topic)
        whole = Range(topic, state.epoch, 0, state.head_seq)
        expected = rows_of(read_range(reading, whole, plan_of(plain)))
        assert len(expected[0]) == RECORDS // 2
        (sealed,), _ = sealed_of(reading, [whole])
        s3.reset()
        assert rows_of(read_part(whole, sealed, plan_of(files))) == expected
        assert s3.requests["GET"] >= 8
        with s3.failing("deny"), pytest.raises(PermissionError, match="some/prefix"):
            rows_of(read_part(whole, sealed, plan_of(files)))
        directories = Directories(str(service.data_dir), bucket_url)
        for segment in manifest(client, topic).segments:
            assert audit_segment(topic, segment, 1, directories).findings == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"coldUrl": "s3://key:secret@b/x"}, "has credentials or options in the URL"),
        ({"coldUrl": "/mnt/cold"}, "must be s3://bucket/prefix"),
        ({"coldUrl": "s3://b/x", "coldDir": "/mnt/cold"}, "only one of coldDir and coldUrl"),
    ],
)
def test_options_that_are_refused(more: dict[str, str], message: str) -> None:
    options = {"url": "http://h", "subscribe": "t", "mode": "segments", "dataDir": "/mnt/data"} | more
    with pytest.raises(OptionError, match=message) as refused:
        read_options(options)
    assert "secret" not in str(refused.value)
