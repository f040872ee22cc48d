"""Traps for a copy of a running service: deletions made in place, moments between bases, batches over topics,
damage, directories that went back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.archive.services import COMMAND, SMALL, backup, cut, read, restored, run
from tests.cases import case
from tests.contract.asking import ok, put, state, write
from tests.harness import Service, poll
from topics.archive.inspection import figures, prune
from topics.core.location import LOCATION_DELETED
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment import DELETED, ENTRY_LEN, read_columns


def delete(service: Service, topic: str, **what: object) -> None:
    ok(service.client.post(f"/v0/topics/{topic}/delete", json=what))


@pytest.mark.long
def test_deleted_records_stay_deleted_and_those_of_an_earlier_moment_are_back(tmp_path: Path) -> None:
    """Deletions are marked in sealed segments in place: a moment has those before it, and none after it."""
    place = tmp_path / "archive"
    moments: list[tuple[int, dict[int, object]]] = []
    with Service(env=SMALL) as service:
        client = service.client
        for number in range(20):
            tagged = [{"data": f"{number}/{one}", "tag": f"{number}-{one}"} for one in range(10)]
            ok(client.post("/v0/topics/orders", json={"records": tagged}))
            if number % 5 == 4:
                cut(service)
                delete(service, "orders", match=f"{number // 2}-*")
            if number % 5 == 2:
                delete(service, "orders", match=f"{number - 1}-3")
            if number % 5 == 0:
                moments.append((backup(service, place)["taken_ms"], read(client, "orders")[0]))
        delete(service, "orders", before_seq=60)
        moments.append((backup(service, place)["taken_ms"], read(client, "orders")[0]))
        cut(service)
        moments.append((backup(service, place)["taken_ms"], read(client, "orders")[0]))
    run("archive", "verify", place)
    for at, (taken_ms, expected) in enumerate(moments):
        with case(at), restored(place, tmp_path / f"restored-{at}", "--to-ts", taken_ms, env=SMALL) as other:
            assert read(other.client, "orders")[0] == expected
            cut(other)
            assert read(other.client, "orders")[0] == expected
            other.stop()
            run("verify", other.data_dir)
            other.start()
    run("restore", place, "--data-dir", tmp_path / "copied", "--copy")
    assert deleted_frames(tmp_path / "copied") == {DELETED}, (
        "what is deleted says so itself, too: data are shipped once"
    )


def deleted_frames(data_dir: Path) -> set[int]:
    """Return the last bytes of the frames of records that the indexes of segments call deleted."""
    found = set()
    for path in (data_dir / "topics").rglob("*.idx"):
        idx, data = path.read_bytes(), path.with_suffix(".data").read_bytes()
        _, offsets, lengths, flags = read_columns(idx, 0, len(idx) // ENTRY_LEN)
        for offset, length, flag in zip(offsets, lengths, flags, strict=True):
            if flag & LOCATION_DELETED and length:
                found.add(data[offset + length - 1])
    return found


@pytest.mark.long
def test_the_first_moment_with_a_record(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        for number in range(1, 6):
            write(service.client, "orders", *range(10))
            if number == 3:
                cut(service)
            backup(service, place)
    for seq, head_seq in ((1, 10), (10, 10), (11, 20), (35, 40), (50, 50)):
        directory = tmp_path / f"restored-{seq}"
        with case(seq), restored(place, directory, "--to-seq", f"orders={seq}") as other:
            assert max(read(other.client, "orders")[0]) == head_seq
    for wanted, problem in (("orders=51", "has no record 51"), ("other=1", "has no record 1")):
        assert problem in run("restore", place, "--data-dir", tmp_path / "no", "--to-seq", wanted, code=2)
    assert "is before the first moment" in run("restore", place, "--data-dir", tmp_path / "no", "--to-ts", 1, code=2)


@pytest.mark.long
def test_a_batch_over_topics_is_in_a_backup_with_all_of_its_records_or_none(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    topics = [f"out-{number}" for number in range(4)]
    with Service(shards=2, env=SMALL) as service:
        done = threading.Event()
        committed: list[int] = []

        def commit() -> None:
            with httpx.Client(base_url=service.url, timeout=30) as client:
                while not done.is_set():
                    batch = len(committed)
                    stages = [
                        ok(client.post(f"/v0/stage/{topic}", json={"txn": f"b{batch}", "records": [{"data": batch}]}))[
                            "stage"
                        ]
                        for topic in topics
                    ]
                    ok(client.post("/v0/txn/sink/commit", json={"batch": batch, "stages": stages}))
                    committed.append(batch)

        writer = threading.Thread(target=commit)
        writer.start()
        taken = []
        for _ in range(8):
            at = len(committed)
            poll("more batches", partial(_more, committed, at + 3))
            taken.append(backup(service, place)["taken_ms"])
        done.set()
        writer.join()
    for at, taken_ms in enumerate(taken):
        with case(at), restored(place, tmp_path / f"restored-{at}", "--to-ts", taken_ms) as other:
            expected = list(range(ok(other.client.get("/v0/txn/sink"))["last_batch"] + 1))
            # A start publishes what is left of a batch that was decided.
            for topic in topics:
                poll(topic, partial(_has, other, topic, expected))


def _has(service: Service, topic: str, expected: list[int]) -> bool:
    return list(read(service.client, topic)[0].values()) == expected


def _more(committed: list[int], count: int) -> bool:
    return len(committed) > count


@pytest.mark.long
def test_every_damaged_or_missing_object_is_found(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL, shards=1) as service:
        write(service.client, "orders", *[{"data": one} for one in range(100)])
        cut(service)
        backup(service, place)
        write(service.client, "orders", 1)
        backup(service, place)
    objects = sorted(path for path in (place / "archive").rglob("*") if path.is_file())
    assert len(objects) > 6
    for path in objects:
        original = path.read_bytes()
        for what, content in (("missing", None), ("cut", original[:-1]), ("changed", _flipped(original))):
            if content is None and path.parent.name.endswith("bases"):
                continue  # the base before it counts then, or none does
            with case(what, path.name):
                path.unlink() if content is None else path.write_bytes(content)
                problem = run("archive", "verify", place, code=1)
                assert str(path) in problem or f"{path.parent}/: is lost" in problem
                path.write_bytes(original)
    run("archive", "verify", place)
    largest = max((path for path in objects if path.suffix == ".data"), key=lambda path: path.stat().st_size)
    original = largest.read_bytes()
    # Data that stay in the archive are looked at by who reads them, or by --copy, but they must be there.
    for content, more in ((_flipped(original), ("--copy",)), (None, ())):
        largest.unlink() if content is None else largest.write_bytes(content)
        assert str(largest) in run("restore", place, "--data-dir", tmp_path / "new", *more, code=1)
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "new.restoring").exists()


def _flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.long
def test_a_directory_that_went_back_begins_a_new_generation(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        write(service.client, "orders", "a")
        service.stop()
        shutil.copytree(service.data_dir, tmp_path / "copy")
        service.start()
        write(service.client, "orders", "b")
        taken_ms = backup(service, place)["taken_ms"]
        service.stop()
        shutil.rmtree(service.data_dir)
        shutil.copytree(tmp_path / "copy", service.data_dir)
        service.start()
        write(service.client, "orders", "c")
        backup(service, place)
    found = json.loads(run("archive", "list", place, "--json"))["generations"]
    assert [one["number"] for one in found] == [1, 2]
    with restored(place, tmp_path / "newest") as other:
        assert list(read(other.client, "orders")[0].values()) == ["a", "c"]
    with restored(place, tmp_path / "former", "--to-ts", taken_ms) as other:
        assert list(read(other.client, "orders")[0].values()) == ["a", "b"]


@pytest.mark.long
def test_an_archive_has_one_service(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service() as service:
        write(service.client, "orders", 1)
        backup(service, place)
    with Service() as service:
        write(service.client, "orders", 1)
        problem = run("backup", "--data-dir", service.data_dir, "--to", place, code=1)
        assert "give each service a place of its own" in problem
    with restored(place, tmp_path / "restored") as other:
        assert "a place of its own" in run("backup", "--data-dir", other.data_dir, "--to", place, code=1)
        backup(other, tmp_path / "next")
        epoch = state(other.client, "orders")["epoch"]
    with restored(tmp_path / "next", tmp_path / "again") as other:
        assert state(other.client, "orders")["epoch"] != epoch
        assert read(other.client, "orders")[0] == {1: 1}


@pytest.mark.long
def test_pruning_removes_what_only_older_moments_need(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        put(service.client, "orders")
        for number in range(5):
            write(service.client, "orders", *[f"secret-{number}-{one}" for one in range(60)])
            cut(service)
            backup(service, place)
        delete(service, "orders", before_seq=200)
        backup(service, place)
        cut(service)
        backup(service, place)
        expected = read(service.client, "orders")[0]
    run("archive", "prune", place, "--keep", "1h")
    assert any(b"secret-0-" in path.read_bytes() for path in place.rglob("*") if path.is_file())
    removed = json.loads(run("archive", "prune", place, "--keep", "0s", "--json"))
    assert removed["bases"] >= 5
    assert not any(b"secret-0-" in path.read_bytes() for path in place.rglob("*") if path.is_file())
    run("archive", "verify", place)
    with restored(place, tmp_path / "restored") as other:
        assert read(other.client, "orders")[0] == expected


@pytest.mark.long
def test_listing_and_pruning_tell_how_far_they_are(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        for number in range(3):
            write(service.client, "orders", number)
            cut(service)
            backup(service, place)
    archive = Archive(open_archive(OsFileSystem(), str(place)))
    told: list[tuple[int, int]] = []
    bases = sum(len(generation.bases) for generation in figures(archive, lambda *at: told.append(at)))
    assert told == [(at, bases) for at in range(1, bases + 1)]
    told.clear()
    before = _objects(place)
    prune(archive, 2**62, lambda *at: told.append(at))
    gone = before - _objects(place)
    assert gone > 0
    assert told == [(at, gone) for at in range(1, gone + 1)]


@pytest.mark.long
def test_a_backup_that_is_killed_leaves_the_archive_whole(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    seed = int(os.environ.get("TOPICS_SEED", str(random.randrange(2**32))))
    print(f"TOPICS_SEED={seed}")
    chance = random.Random(seed)
    with Service(env=SMALL) as service:
        write(service.client, "orders", *range(100))
        backup(service, place)
        for number in range(12):
            write(service.client, "orders", *[f"{number}-{one}" * 50 for one in range(100)])
            killed = subprocess.Popen([COMMAND, "backup", "--data-dir", service.data_dir, "--to", place])
            poll("the backup", partial(_has_begun, killed, place, _objects(place)))
            time.sleep(chance.random() * 0.02)  # anywhere in what follows
            killed.kill()
            killed.wait()
            run("archive", "verify", place)
        backup(service, place)
        expected = read(service.client, "orders")[0]
    run("archive", "verify", place)
    with restored(place, tmp_path / "restored") as other:
        assert read(other.client, "orders")[0] == expected


@pytest.mark.long
def test_a_restore_that_is_killed_leaves_nothing_in_its_place(tmp_path: Path) -> None:
    place, data_dir = tmp_path / "archive", tmp_path / "restored"
    with Service(env=SMALL) as service:
        for _ in range(30):
            write(service.client, "orders", *["x" * 1000] * 40)
        cut(service)
        backup(service, place)
        expected = read(service.client, "orders")[0]
    making = Path(f"{data_dir}.restoring")
    for files in (1, 10, 30, 60):
        killed = subprocess.Popen([COMMAND, "restore", place, "--data-dir", data_dir])
        poll("the restore", partial(_has_made, killed, making, files))
        killed.kill()
        killed.wait()
        if data_dir.exists():  # it was faster
            shutil.rmtree(data_dir)
    with restored(place, data_dir) as other:
        assert read(other.client, "orders")[0] == expected
    assert not making.exists()


def _has_made(restore: subprocess.Popen[bytes], making: Path, files: int) -> bool:
    try:
        made = sum(path.is_file() for path in making.rglob("*"))
    except FileNotFoundError:  # the directory has its name now
        made = 0
    return restore.poll() is not None or made >= files


def _has_begun(backup: subprocess.Popen[bytes], place: Path, known: int) -> bool:
    return _objects(place) > known or backup.poll() is not None


def _objects(place: Path) -> int:
    return sum(1 for path in place.rglob("*") if path.is_file())
