"""The cold tier in a bucket, end to end over HTTP, on a real S3 server behind a proxy that fails on demand."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.buckets import MORE, Fault, Proxy
from tests.e2e.test_compaction import DEADLINE_S, EAGER, compactor, data_files, write
from tests.e2e.test_kill_points import everything_left
from tests.harness import COMMAND, Service, poll
from topics.storage.bucket_store import BucketStore

pytestmark = pytest.mark.long

TOPICS = COMMAND.with_name("topics")
EVENTS = 100
"""Records in a segment (`EAGER`)."""
RECORDS = 1050
TIMEOUT_MS = 400
CAUSES: dict[Fault, tuple[str, ...]] = {
    "deny": ("403",),
    "throttle": ("503",),
    "cut": ("body error",),
    "drop": ("HTTP error",),
    "hang": (f"{TIMEOUT_MS} ms", "error sending request"),  # the reader's time is over, or the request's, as long
}


def made(s3: Proxy, url: str, **settings: str) -> Service:
    env = EAGER | s3.env | {"TOPICS_COLD_URL": url, "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    return Service(shards=1, frontends=2, env=env | settings)


@pytest.fixture
def store(s3: Proxy, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> BucketStore:
    """The bucket as the test itself sees it."""
    for name, value in s3.direct_env.items():
        monkeypatch.setenv(name, value)
    return BucketStore(f"{bucket_url}/topics", 5000)


def fill(service: Service, count: int = RECORDS, first: int = 0, topic: str = "t") -> list[str]:
    values = [f"{n}" for n in range(first, first + count)]
    for at in range(0, count, 50):
        write(service.client, topic, values[at : at + 50], "even" if at % 100 else "odd")
    return values


def data_objects(store: BucketStore) -> list[str]:
    return [name for name in store.list("") if name.endswith(".data")]


def all_cold(service: Service, store: BucketStore, hot: int = 2) -> None:
    poll("relocation", lambda: len(data_objects(store)) == 9, DEADLINE_S)
    poll("the hot copies to go", lambda: len(data_files(service.data_dir)) == hot, DEADLINE_S)


def verified(service: Service, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        check=False,
        args=[str(TOPICS), "verify", str(service.data_dir), "--cold-url", url],
        env=service.environment(),
        capture_output=True,
        text=True,
    )


def assert_clean(service: Service, url: str) -> None:
    found = verified(service, url)
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    assert "was not looked at" not in found.stdout


@pytest.mark.parametrize("object_server", ["s3", "s3s", *MORE], indirect=True)
def test_records_go_into_the_bucket_and_come_back(s3: Proxy, bucket_url: str, store: BucketStore) -> None:
    with made(s3, bucket_url) as service:
        values = fill(service)
        all_cold(service, store)
        assert everything_left(service.client, "t") == values
        service.stop()
        assert_clean(service, bucket_url)
        service.start()
        assert everything_left(service.client, "t") == values
        service.client.post("/v0/topics/t/delete", json={"match": "odd"}).raise_for_status()
        even = [value for value in values if int(value) // 50 % 2]
        assert everything_left(service.client, "t") == even
        service.restart()
        assert everything_left(service.client, "t") == even
        service.stop()
        assert_clean(service, bucket_url)
        assert "test-secret-key" not in service.log_path.read_text()
        service.start()
        service.client.delete("/v0/topics/t").raise_for_status()
        poll("the objects to go", lambda: not store.list(""), DEADLINE_S)


def test_a_segment_of_mostly_deleted_records_is_rewritten_and_goes_back(
    s3: Proxy, bucket_url: str, store: BucketStore
) -> None:
    with made(s3, bucket_url, TOPICS_SEGMENT_REWRITE_DEAD_RATIO="0.4") as service:
        values = fill(service)
        all_cold(service, store)
        before = set(data_objects(store))
        sizes = sum(store.len(name) for name in before)
        service.client.post("/v0/topics/t/delete", json={"match": "odd"}).raise_for_status()
        poll("new versions in the bucket", lambda: not before & set(data_objects(store)), DEADLINE_S)
        poll("all of them", lambda: len(data_objects(store)) == 9, DEADLINE_S)
        assert sum(map(store.len, data_objects(store))) < 0.6 * sizes
        even = [value for value in values if int(value) // 50 % 2]
        assert everything_left(service.client, "t") == even
        service.stop()
        assert_clean(service, bucket_url)


def test_verify_finds_what_was_changed_or_lost_in_the_bucket(s3: Proxy, bucket_url: str, store: BucketStore) -> None:
    with made(s3, bucket_url) as service:
        fill(service)
        all_cold(service, store)
        service.stop()
        first, second, *_ = data_objects(store)
        content = bytearray(store.read_range(first, 0, store.len(first)))
        content[50] ^= 1
        store.put(first, [bytes(content)])
        store.delete(second)
        found = verified(service, bucket_url)
        assert found.returncode == 1
        assert f"DAMAGE segment: {store.place(first)}: offset " in found.stdout
        assert f"DAMAGE segment: {store.place(second)}: offset 0: the file is missing" in found.stdout
        with s3.failing("deny"):
            found = verified(service, bucket_url)
        assert found.returncode == 1
        assert f"DAMAGE unreadable: {store.place(first)}: offset 0: " in found.stdout
        assert "403" in found.stdout


@pytest.mark.parametrize("point", ["relocate.copied", "relocate.marked"])
def test_the_compactor_dies_between_two_steps_of_a_relocation(
    point: str, s3: Proxy, bucket_url: str, store: BucketStore
) -> None:
    with made(s3, bucket_url, TOPICS_TEST_KILL_AT=f"process:{point}") as service:
        values = fill(service)
        all_cold(service, store)
        assert everything_left(service.client, "t") == values
        service.stop()
        assert_clean(service, bucket_url)


def test_a_kill_in_the_midst_of_a_put_leaves_nothing_that_is_needed(
    s3: Proxy, bucket_url: str, store: BucketStore
) -> None:
    """The whole service is killed while a put of its data hangs, after the bucket took the object or before."""
    with made(s3, bucket_url) as service:
        values: list[str] = []
        faults: tuple[tuple[Fault, str], ...] = (("hang", "PUT"), ("hang", "GET"), ("hang", "PUT"))
        for fault, method in faults:
            s3.reset()
            with s3.failing(fault, method):
                values += fill(service, 300, len(values))
                poll("a request that hangs", partial(s3.requests.get, method), DEADLINE_S)
                service.kill_group()
            service.start()
        values += fill(service, 150, len(values))
        assert everything_left(service.client, "t") == values
        poll("relocation", lambda: len(data_objects(store)) == 9, DEADLINE_S)
        poll("the hot copies to go", lambda: len(data_files(service.data_dir)) == 2, DEADLINE_S)
        assert everything_left(service.client, "t") == values
        service.stop()
        assert_clean(service, bucket_url)


def test_orphans_in_the_bucket_go(s3: Proxy, bucket_url: str, store: BucketStore) -> None:
    """Objects of a segment that is hot, or was dropped, go after two snapshots; what is no segment stays."""
    with made(s3, bucket_url) as service:
        values = fill(service)
        all_cold(service, store)
        topic, _, _ = data_objects(store)[0].partition("/")
        needed = store.list("")
        hot = f"{topic}/{data_files(service.data_dir)[0].name}"
        store.put(hot, [b"a copy that was never marked"])
        store.put(f"{topic}/seg-{99_999:020d}.tags", [b"of a segment that never was"])
        store.put("notes/readme", [b"somebody else's"])
        service.restart()
        values += fill(service, 40, len(values))
        poll("the orphans to go", lambda: store.list(topic) == needed, DEADLINE_S)
        assert store.exists("notes/readme")
        assert everything_left(service.client, "t") == values


@pytest.mark.parametrize("fault", ["deny", "throttle", "cut", "drop", "hang"])
def test_a_bucket_that_fails_costs_reads_of_cold_records_only(
    fault: Fault, s3: Proxy, bucket_url: str, store: BucketStore
) -> None:
    # Whatever answers is to be heard, also on a busy machine: else all causes would be that one.
    timeout_ms = TIMEOUT_MS if fault == "hang" else 20_000
    with made(s3, bucket_url, TOPICS_COLD_READ_TIMEOUT_MS=str(timeout_ms)) as service:
        client = service.client
        values = fill(service)
        all_cold(service, store)
        service.restart()  # nothing is cached
        client = service.client
        with s3.failing(fault):
            for _ in range(3):
                refused = client.post("/v0/topics/t/diff", json={"from_seq": 0})
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (503, "storage_unavailable")
                assert "is in the cold tier, which cannot be read now: " in error["message"]
                assert any(cause in error["message"] for cause in CAUSES[fault])
                assert "test-secret-key" not in refused.text
                values += fill(service, 100, len(values))
                page = client.post("/v0/topics/t/diff", json={"from_seq": len(values) - 40}).raise_for_status().json()
                assert [record["data"] for record in page["records"]] == values[-40:]
                fill(service, 50, topic="other")
            assert len(everything_left(client, "other")) == 150
            assert client.get("/v0/ready").status_code == 200
            poll("a failed copy", lambda: compactor(service).failures or fault == "hang", DEADLINE_S)
        poll("the bucket to be read again", lambda: is_read(client), DEADLINE_S)
        assert everything_left(client, "t") == values


def test_another_service_is_refused_and_a_copy_elsewhere_goes_on(
    s3: Proxy, bucket_url: str, store: BucketStore, tmp_path: Path
) -> None:
    with made(s3, bucket_url) as first, made(s3, bucket_url) as second:
        values = fill(first)
        all_cold(first, store)
        owner = BucketStore(bucket_url, 5000)
        first_id, _, place = owner.read_range("owner", 0, owner.len("owner")).decode().partition(" ")
        assert str(first.data_dir) in place
        objects = store.list("")
        fill(second)
        sentence = f"belongs to service {first_id} ("
        poll("the refusal", lambda: sentence in second.log_path.read_text(), DEADLINE_S)
        second_id = (second.data_dir / "meta" / "service-id").read_text()
        assert first_id != second_id
        assert re.search(
            rf"this is service {second_id} \(.*: give each service a prefix of its own in TOPICS_COLD_URL",
            second.log_path.read_text(),
        )
        assert len(everything_left(second.client, "t")) == RECORDS, "it keeps all in its own directory"
        found = checked(second)
        assert found.returncode != 0
        assert sentence in found.stdout
        assert store.list("") == objects
        first.stop()
        assert sentence not in checked(first).stdout
        shutil.copytree(first.data_dir, tmp_path / "moved")
        settings = EAGER | s3.env | {"TOPICS_COLD_URL": bucket_url, "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
        with Service(shards=1, frontends=2, env=settings, data_dir=tmp_path / "moved") as moved:
            assert everything_left(moved.client, "t") == values
            values += fill(moved, 200, len(values))
            poll("more relocation", lambda: len(data_objects(store)) > 9, DEADLINE_S)
            assert everything_left(moved.client, "t") == values
            assert "belongs to service" not in moved.log_path.read_text()


def test_the_service_stops_though_the_bucket_hangs(s3: Proxy, bucket_url: str, store: BucketStore) -> None:
    with made(s3, bucket_url, TOPICS_COLD_READ_TIMEOUT_MS=str(TIMEOUT_MS)) as service:
        values = fill(service)
        all_cold(service, store)
        service.restart()
        with s3.failing("hang"):
            assert service.client.post("/v0/topics/t/diff", json={"from_seq": 0}).status_code == 503
            fill(service, 300, len(values))
            service.stop()
        service.start()
        assert len(everything_left(service.client, "t")) == RECORDS + 300


def test_check_says_what_the_bucket_does_not_let_it_do(s3: Proxy, bucket_url: str) -> None:
    service = made(s3, bucket_url)
    try:
        found = checked(service)
        assert f"cold tier {bucket_url}" in found.stdout
        assert found.returncode == 0, found.stdout
        with s3.failing("deny", "POST"):
            found = checked(service)
        assert found.returncode != 0
        assert "cannot delete: " in found.stdout + found.stderr
        assert "test-secret-key" not in found.stdout + found.stderr
    finally:
        service.close()


def checked(service: Service) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), "check"]
    return subprocess.run(command, check=False, env=service.environment(), capture_output=True, text=True)


def is_read(client: httpx.Client) -> bool:
    return client.post("/v0/topics/t/diff", json={"from_seq": 0}).status_code == 200
