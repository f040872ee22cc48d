"""Followers that serve reads while data are still in the archive, as real services: over a folder, and over a bucket
that is away.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.archive.services import SMALL, cut, patched, read, run
from tests.archive.test_archiver import archiver
from tests.archive.test_following import following, promoted
from tests.buckets import Proxy
from tests.contract.asking import diff, ok, refused, write
from tests.harness import Service, poll

TOPIC = "orders"
RECORDS = 1_000
SEGMENTS_MIN = RECORDS // 60
SLOWLY = ("from topics.archive import borrowing", "borrowing.BATCH_BYTES, borrowing.BATCH_MS = 1, 100")
HARDLY = ("from topics.archive import borrowing", "borrowing.BATCH_BYTES, borrowing.BATCH_MS = 1, 10**9")


@contextmanager
def with_history(url: str, env: dict[str, str]) -> Iterator[Service]:
    """A service whose first base has segments, some of whose records are deleted."""
    with Service(env=SMALL | env) as leader:
        client = leader.client
        for first in range(0, RECORDS, 100):
            records = [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(first, first + 100)]
            ok(client.post(f"/v0/topics/{TOPIC}", json={"records": records}))
        cut(leader)
        ok(client.post(f"/v0/topics/{TOPIC}/delete", json={"match": "odd", "before_seq": 200}))
        leader.stop()
        leader.env |= {"TOPICS_ARCHIVE_URL": url, "TOPICS_ARCHIVE_INTERVAL_MS": "50"}
        leader.start()
        poll("a base", lambda: archiver(leader)["bases"] > 0)
        yield leader


def has_note(service: Service) -> bool:
    return (service.data_dir / "meta" / "borrowed.json").exists()


def shows(follower: Service, expected: dict[int, Any]) -> None:
    poll("the topic", lambda: follower.client.get(f"/v0/topics/{TOPIC}").status_code == 200)
    poll("the same records", lambda: read(follower.client, TOPIC)[0] == expected)


def test_a_follower_serves_reads_at_once_and_takes_over_before_it_has_everything(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    hardly = patched(tmp_path / "hardly", *HARDLY)
    with with_history(place.as_uri(), {}) as leader, Service(env=following(place), command=hardly) as follower:
        expected = read(leader.client, TOPIC)[0]
        shows(follower, expected)
        found = archiver(follower)
        assert found["segments_borrowed"] > SEGMENTS_MIN
        assert found["borrowed_bytes"] > 0
        assert "are still in the archive" in follower.run("status").stdout
        assert "topics_archive_segments_borrowed" in follower.client.get("/v0/metrics").text
        tiers = {row["tier"] for row in ok(follower.client.get(f"/v0/topics/{TOPIC}/segments"))["segments"]}
        assert "archive" in tiers
        listed = run("archive", "list", place)
        assert "was made of it" in listed
        assert f"if it is gone for good, delete {place}/archive/loans/" in listed
        assert "removed 0 generations, 0 bases" in run("archive", "prune", place, "--keep", "0")
        ok(leader.client.post(f"/v0/topics/{TOPIC}/delete", json={"match": "even", "before_seq": 400}))
        expected = read(leader.client, TOPIC)[0]
        shows(follower, expected)
        leader.stop()

        promoted(follower)
        poll("it is ready", follower.is_ready)
        assert read(follower.client, TOPIC)[0] == expected
        expected[write(follower.client, TOPIC, "goes on")["last_seq"]] = "goes on"
        poll("all data to be home", lambda: not has_note(follower), 60)
        assert read(follower.client, TOPIC)[0] == expected
        follower.restart()
        assert read(follower.client, TOPIC)[0] == expected
        follower.stop()
        run("verify", follower.data_dir)
    run("archive", "verify", place)
    assert "was made of it" not in run("archive", "list", place)


@pytest.mark.long
def test_a_follower_that_is_killed_while_data_come_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    slowly = patched(tmp_path / "slowly", *SLOWLY)
    with with_history(place.as_uri(), {}) as leader, Service(env=following(place), command=slowly) as follower:
        expected = read(leader.client, TOPIC)[0]
        shows(follower, expected)
        follower.wait_healed(follower.kill("follower", 0))
        shows(follower, expected)
        expected[write(leader.client, TOPIC, "one")["last_seq"]] = "one"
        follower.kill_group()
        follower.start()
        shows(follower, expected)
        follower.wait_healed(follower.kill("walshard", 0))
        follower.wait_healed(follower.kill("follower", 0))
        poll("all data to be home", lambda: not has_note(follower), 60)
        assert archiver(follower)["segments_borrowed"] == 0
        tiers = {row["tier"] for row in ok(follower.client.get(f"/v0/topics/{TOPIC}/segments"))["segments"]}
        assert tiers == {"hot"}
        leader.stop()
        shutil.rmtree(place / "archive")
        shows(follower, expected)


@pytest.mark.long
def test_a_bucket_that_is_away_costs_a_follower_reads_of_what_is_still_there(
    tmp_path: Path, s3: Proxy, bucket_url: str
) -> None:
    hardly = patched(tmp_path / "hardly", *HARDLY)
    env = following(tmp_path) | s3.env | {"TOPICS_FOLLOW": bucket_url, "TOPICS_COLD_READ_TIMEOUT_MS": "400"}
    with with_history(bucket_url, s3.env) as leader:
        last = write(leader.client, TOPIC, "last")["last_seq"]
        expected = read(leader.client, TOPIC)[0]
        with Service(env=env, command=hardly) as follower:
            poll("the last record", lambda: last in _tail(follower, last))
            leader.stop()
            with s3.failing("deny"):
                assert _tail(follower, last) == {last: "last"}
                answer = follower.client.post(f"/v0/topics/{TOPIC}/diff", json={"from_seq": 300})
                refused(answer, 503, "storage_unavailable")
            shows(follower, expected)


def _tail(follower: Service, seq: int) -> dict[int, Any]:
    answer = follower.client.get(f"/v0/topics/{TOPIC}")
    if answer.status_code != 200 or answer.json()["head_seq"] < seq:
        return {}
    page = diff(follower.client, TOPIC, from_seq=seq - 1)
    return {record["$seq"]: record["data"] for record in page["records"]}
