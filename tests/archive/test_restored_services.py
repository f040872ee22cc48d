"""Services that were restored and read data in the archive until they are home: over a folder, and over a bucket that
fails.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.archive.services import SMALL, backup, cut, read, run
from tests.buckets import Proxy
from tests.contract.asking import ok, write
from tests.e2e.test_kill_points import came_up
from tests.harness import Service, poll

TOPIC = "orders"
RECORDS = 1_000
BORROWED_MIN = RECORDS // 60


def shipped(place: object, env: dict[str, str]) -> dict[int, Any]:
    """Back up a service some of whose records are deleted; return the others."""
    with Service(env=SMALL, shards=1) as service:
        client = service.client
        for first in range(0, RECORDS, 100):
            records = [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(first, first + 100)]
            ok(client.post(f"/v0/topics/{TOPIC}", json={"records": records}))
        cut(service)
        ok(client.post(f"/v0/topics/{TOPIC}/delete", json={"match": "odd", "before_seq": 200}))
        backup(service, place, env=env)
        return read(client, TOPIC)[0]


def restore(place: object, data_dir: Path, env: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("restore", place, "--data-dir", data_dir, "--json", env=env))
    return found


def all_home(service: Service) -> None:
    poll("all data to be home", lambda: not (service.data_dir / "meta" / "borrowed.json").exists(), 60)


def test_a_service_goes_on_while_its_data_come_home(tmp_path: Path) -> None:
    place, data_dir = tmp_path / "archive", tmp_path / "restored"
    expected = shipped(place, {})
    done = restore(place, data_dir, {})
    assert done["borrowed_segments"] > BORROWED_MIN
    run("verify", data_dir)
    pruned = run("archive", "prune", place, "--keep", "0")
    assert "removed 0 generations, 0 bases" in pruned
    assert "was made of it" in run("archive", "list", place)
    with Service(env=SMALL, shards=1, data_dir=data_dir) as service:
        assert read(service.client, TOPIC)[0] == expected
        ok(service.client.post(f"/v0/topics/{TOPIC}/delete", json={"match": "even", "before_seq": 400}))
        expected = {seq: data for seq, data in expected.items() if seq >= 400 or data % 2}
        assert read(service.client, TOPIC)[0] == expected
        all_home(service)
        assert service.status()["compactor"]["segments_borrowed"] == 0
        shutil.rmtree(place)
        assert read(service.client, TOPIC)[0] == expected
        write(service.client, TOPIC, "goes on")
        service.restart()
        records = read(service.client, TOPIC)[0]
        assert records.pop(max(records)) == "goes on"
        assert records == expected
    run("verify", data_dir)


@pytest.mark.long
@pytest.mark.parametrize("point", ["rewrite.fetched", "rewrite.copied", "rewrite.synced", "rewrite.marked"])
def test_a_service_that_is_killed_while_its_data_come_home(tmp_path: Path, point: str) -> None:
    place, data_dir = tmp_path / "archive", tmp_path / "restored"
    expected = shipped(place, {})
    assert restore(place, data_dir, {})["borrowed_segments"] > BORROWED_MIN
    env = SMALL | {"TOPICS_TEST_KILL_AT": f"service:{point}"}
    with Service(env=env, shards=1, data_dir=data_dir).unstarted() as service:
        came_up(service)  # or was killed before it was ready
        service.was_killed()
        run("verify", data_dir)
        del service.env["TOPICS_TEST_KILL_AT"]
        for _ in range(3):
            service.start()
            assert read(service.client, TOPIC)[0] == expected
            service.kill_group()
            run("verify", data_dir)
        service.start()
        all_home(service)
        shutil.rmtree(place)
        assert read(service.client, TOPIC)[0] == expected
        service.stop()
        run("verify", data_dir)


@pytest.mark.long
def test_a_bucket_that_is_away_costs_reads_of_what_is_still_there(tmp_path: Path, s3: Proxy, bucket_url: str) -> None:
    expected = shipped(bucket_url, s3.env)
    data_dir = tmp_path / "restored"
    assert restore(bucket_url, data_dir, s3.env)["borrowed_segments"] > BORROWED_MIN
    env = SMALL | s3.env | {"TOPICS_COLD_READ_TIMEOUT_MS": "400"}
    with Service(env=env, shards=1, data_dir=data_dir).unstarted() as service:
        with s3.failing("deny"):
            service.start()
            client = service.client
            head_seq = write(client, TOPIC, "new")["last_seq"]
            assert ok(client.post(f"/v0/topics/{TOPIC}/diff", json={"from_seq": head_seq - 1}))["records"]
            refused = client.post(f"/v0/topics/{TOPIC}/diff", json={"from_seq": 300})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
            assert "403" in refused.text, "the error says why"
            poll("a count", lambda: service.status()["compactor"]["segments_borrowed"] > BORROWED_MIN)
            assert service.status()["compactor"]["borrowed_bytes"] > 0
            assert "are still in the archive" in service.run("status").stdout
            tiers = {row["tier"] for row in ok(client.get(f"/v0/topics/{TOPIC}/segments"))["segments"]}
            assert "archive" in tiers
            assert "cold" not in tiers
            ok(client.post(f"/v0/topics/{TOPIC}/delete", json={"match": "even", "before_seq": 400}))
            cut(service)
        expected = {seq: data for seq, data in expected.items() if seq >= 400 or data % 2} | {head_seq: "new"}
        assert read(client, TOPIC)[0] == expected
        service.restart()  # so that nothing waits after failures
        all_home(service)
        with s3.failing("drop"):
            assert read(service.client, TOPIC)[0] == expected
            tiers = {row["tier"] for row in ok(service.client.get(f"/v0/topics/{TOPIC}/segments"))["segments"]}
            assert tiers == {"hot"}
        service.stop()
    run("verify", data_dir, env=s3.env)
    assert "loans" not in run("archive", "list", bucket_url, env=s3.env)


@pytest.mark.long
def test_a_service_that_borrows_is_backed_up(tmp_path: Path, s3: Proxy, bucket_url: str) -> None:
    """The second archive has everything, whatever is home by then, and needs the first one no more."""
    expected = shipped(bucket_url, s3.env)
    data_dir, second = tmp_path / "restored", tmp_path / "second"
    restore(bucket_url, data_dir, s3.env)
    with Service(env=SMALL | s3.env, shards=1, data_dir=data_dir) as service:
        poll("a backup", lambda: run("backup", "--data-dir", data_dir, "--to", second, code=None, env=s3.env) == "")
        assert read(service.client, TOPIC)[0] == expected
    run("archive", "verify", second)
    run("restore", second, "--data-dir", tmp_path / "third", "--copy")
    shutil.rmtree(second)
    run("verify", tmp_path / "third")
    with Service(env=SMALL, shards=1, data_dir=tmp_path / "third") as service:
        assert read(service.client, TOPIC)[0] == expected
