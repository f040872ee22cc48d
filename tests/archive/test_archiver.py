"""A service that ships what it commits: what is in the archive when the machine is lost, the bucket is away, or any
process is killed.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.archive.services import SMALL, cut, patched, read, restored, run
from tests.buckets import Proxy
from tests.contract.asking import put, state, write
from tests.harness import Service, poll

SHARDS_WAIT_FOR_THE_ARCHIVER = """
import os, time
from topics.archive.archiver import Archiver
from topics.walshard import main as shards
run, step = shards.run, Archiver.step
def run_later(*arguments, **options):
    while not os.path.exists({tried!r}):
        time.sleep(0.01)
    return run(*arguments, **options)
def note_step(self):
    pause_ms = step(self)
    open({tried!r}, "w").close()
    return pause_ms
shards.run, Archiver.step = run_later, note_step
"""


def shipping(place: Path, **more: object) -> dict[str, str]:
    env = SMALL | {"TOPICS_ARCHIVE_URL": place.as_uri(), "TOPICS_ARCHIVE_INTERVAL_MS": "50"}
    return env | {f"TOPICS_{name}": str(value) for name, value in more.items()}


def archiver(service: Service) -> dict[str, Any]:
    """Return its part of the status. A service that starts again has none for a moment."""
    found: dict[str, Any] = poll("an archiver", lambda: service.status()["archiver"])
    return found


def shipped(service: Service) -> None:
    """Wait until everything that is committed is in the archive."""
    poll("the archive has everything", lambda: archiver(service)["lag_ms"] == 0)


def test_a_machine_that_is_lost_is_restored(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=shipping(place)) as service:
        client = service.client
        write(client, "orders", *range(100))
        cut(service)
        write(client, "orders", "behind the snapshot")
        head_seq = state(client, "orders")["head_seq"]
        poll("archived_seq", lambda: state(client, "orders")["archived_seq"] == head_seq)
        expected = read(client, "orders")[0]
        service.kill_group()
    with restored(place.as_uri(), tmp_path / "restored") as other:
        assert read(other.client, "orders")[0] == expected
        assert "archived_seq" not in state(other.client, "orders")


def test_the_first_start_of_a_service_tells_of_no_failure(tmp_path: Path) -> None:
    """The archiver began before the shards had logs, and its first line said that the archive cannot be written."""
    command = patched(tmp_path / "patched", SHARDS_WAIT_FOR_THE_ARCHIVER.format(tried=str(tmp_path / "tried")))
    with Service(env=shipping(tmp_path / "archive"), command=command) as service:
        poll("a first base", lambda: archiver(service)["bases"] == 1)
        assert archiver(service)["failures"] == 0
        assert (tmp_path / "tried").exists()
        assert "cannot be written now" not in service.log_tail()


def test_a_clean_stop_ships_what_was_written_last(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    # A busy machine may need more than the two seconds.
    command = patched(
        tmp_path / "patched", "from topics.archive import main as archiving", "archiving.LAST_SHIP_S = 60.0"
    )
    env = shipping(place, ARCHIVE_INTERVAL_MS=3_600_000, SHUTDOWN_GRACE_MS=60_000)
    with Service(env=env, command=command) as service:
        poll("a first base", lambda: archiver(service)["bases"] == 1)
        write(service.client, "orders", *range(100))
        service.stop()
    with restored(place, tmp_path / "restored") as other:
        assert list(read(other.client, "orders")[0].values()) == list(range(100))


def test_a_base_that_takes_long_has_nobody_wait_for_the_interval(tmp_path: Path) -> None:
    """The archiver ships once there is enough for a piece, as it does at other times."""
    place = tmp_path / "archive"
    command = patched(
        tmp_path / "patched",
        "from topics.archive import archiver, base_files",
        "archiver.PIECE_BYTES, archiver.BASE_PIECES = 1000, 1",
        "copy, copied = base_files.BaseFiles.copy, []",
        "def stuck(files):",
        "    copied.append(files)",
        "    return copy(files) if len(copied) == 1 else files._is_over.wait()",
        "base_files.BaseFiles.copy = stuck",
    )
    with Service(env=shipping(place, ARCHIVE_INTERVAL_MS=3_600_000), command=command) as service:
        poll("a first base", lambda: archiver(service)["bases"] == 1)
        for number in range(3):
            write(service.client, "orders", "x" * 2000)
            poll("it is shipped", lambda: state(service.client, "orders").get("archived_seq") == number + 1)


@pytest.mark.long
def test_an_archiver_ends_whenever_it_is_told_to(tmp_path: Path) -> None:
    """It stood still for ever, and kept its directory locked, if it was told between two waits."""
    command = patched(
        tmp_path / "patched", "from topics.archive import main as archiving", "archiving.HEARTBEAT_MS = 0"
    )
    for nth in range(6):
        place = tmp_path / str(nth)
        with Service(env=shipping(place), command=command) as service:
            poll("a first base", lambda: archiver(service)["bases"] == 1)
            service.kill_supervisor()


@pytest.mark.long
def test_a_killed_archiver_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=shipping(place)) as service:
        for number in range(12):
            write(service.client, "orders", *range(30))
            [process] = [found for found in service.status()["processes"] if found["role"] == "archiver"]
            if process["pid"]:
                os.kill(process["pid"], signal.SIGKILL)
            write(service.client, "orders", f"after kill {number}")
        shipped(service)
        expected = read(service.client, "orders")[0]
        service.kill_group()
    run("archive", "verify", place)
    with restored(place, tmp_path / "restored") as other:
        assert read(other.client, "orders")[0] == expected


@pytest.mark.long
def test_logs_stay_while_the_bucket_is_away(tmp_path: Path, s3: Proxy, bucket_url: str) -> None:
    env = shipping(tmp_path) | s3.env | {"TOPICS_ARCHIVE_URL": bucket_url, "TOPICS_WAL_FILE_BYTES": str(1 << 20)}
    with Service(env=env, shards=1) as service:
        write(service.client, "orders", "first")
        shipped(service)
        files = sorted((service.data_dir / "wal").rglob("*.log"))
        with s3.failing("deny"):
            poll("a failure", lambda: archiver(service)["failures"] > 0 or not write(service.client, "orders", "x"))
            for _ in range(4):
                write(service.client, "orders", "x" * 700_000)
                cut(service)
            assert files[0].exists(), "the archive lacks its bytes"
            assert archiver(service)["lag_ms"] > 0
        shipped(service)
        assert archiver(service)["holes"] == 0

        def is_removed() -> bool:
            write(service.client, "orders", "so that there is a cut")
            cut(service)
            return not files[0].exists()

        poll("the file is removed once it was shipped", is_removed)
        shipped(service)
        expected = read(service.client, "orders")[0]
        service.kill_group()
    run("archive", "verify", bucket_url, env=s3.env)
    with restored(bucket_url, tmp_path / "restored", env=s3.env) as other:
        assert read(other.client, "orders")[0] == expected


@pytest.mark.long
def test_more_than_the_backlog_is_a_hole_behind_which_the_archive_begins_anew(
    tmp_path: Path, s3: Proxy, bucket_url: str
) -> None:
    env = shipping(tmp_path, WAL_FILE_BYTES=1 << 20, ARCHIVE_BACKLOG_BYTES=2 << 20) | s3.env
    with Service(env=env | {"TOPICS_ARCHIVE_URL": bucket_url}, shards=1) as service:
        write(service.client, "orders", "first")
        shipped(service)
        files = sorted((service.data_dir / "wal").rglob("*.log"))
        with s3.failing("deny"):
            for _ in itertools.count():
                write(service.client, "orders", "x" * 700_000)
                cut(service)
                if not files[0].exists():
                    break
        shipped(service)
        assert archiver(service)["holes"] == 1
        write(service.client, "orders", "last")
        shipped(service)
        expected = read(service.client, "orders")[0]
        service.kill_group()
    run("archive", "verify", bucket_url, env=s3.env)
    with restored(bucket_url, tmp_path / "restored", env=s3.env) as other:
        assert read(other.client, "orders")[0] == expected
    with restored(bucket_url, tmp_path / "earlier", "--to-seq", "orders=1", env=s3.env) as other:
        assert read(other.client, "orders")[0] == {1: "first"}, "moments before the hole are kept"


def test_an_archive_whose_disk_goes_away_is_not_begun_again_in_its_place(tmp_path: Path) -> None:
    """Pieces went to the disk below then, and records counted as archived that were in no archive."""
    place = tmp_path / "archive"
    with Service(env=shipping(place, ARCHIVE_WAIT_MS=1000)) as service:
        put(service.client, "bank", durability="archived")
        write(service.client, "bank", 1)
        (place / "archive").rename(tmp_path / "away")
        answer = service.client.post("/v0/topics/bank", json={"records": [{"data": 2}]})
        assert answer.status_code == 503, answer.text
        assert not (place / "archive").exists()
        (tmp_path / "away").rename(place / "archive")
        poll("it is shipped", lambda: state(service.client, "bank")["archived_seq"] == 2)
    run("archive", "verify", place)


def test_an_archive_whose_disk_is_not_mounted_at_a_start_is_not_begun_again(tmp_path: Path) -> None:
    """The archiver began another one in the empty place, where records counted as archived."""
    place = tmp_path / "archive"
    with Service(env=shipping(place, ARCHIVE_WAIT_MS=1000)) as service:
        put(service.client, "bank", durability="archived")
        write(service.client, "bank", 1)
        service.stop()
        (place / "archive").rename(tmp_path / "away")
        service.start()
        answer = service.client.post("/v0/topics/bank", json={"records": [{"data": 2}]})
        assert answer.status_code == 503, answer.text
        assert not (place / "archive").exists()
        poll("a failure", lambda: archiver(service)["failures"] > 0)
        (tmp_path / "away").rename(place / "archive")
        poll("it is shipped", lambda: state(service.client, "bank")["archived_seq"] == 2)
    run("archive", "verify", place)
    assert run("archive", "list", place).count("generation") == 1
