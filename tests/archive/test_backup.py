"""Backups of real services, running and stopped, and what a restored service has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from tests.archive.archiving import HARMS, harmed
from tests.archive.services import COMMAND, SMALL, backup, cut, read, restored, run
from tests.buckets import Fault, Proxy
from tests.cases import case
from tests.contract.asking import ok, put, state, write
from tests.harness import Service, poll
from topics import __version__
from topics.archive.backing_up import backup as make_backup
from topics.archive.ownership import following_problem
from topics.archive.shipping import NoMomentError, Shipped, Shipper
from topics.cli.read import timestamp_ms
from topics.core.clock import SystemClock
from topics.shm.control import VERSION, ControlPage
from topics.shm.shm_names import identity, shm_name
from topics.storage.archive_objects import Archive, loan_name, open_archive
from topics.storage.borrowed import BorrowedNote, write_borrowed
from topics.storage.filesystem import OsFileSystem
from topics.storage.lock import DataDirLock

OTHER_USER = 65534


@pytest.mark.long
def test_a_running_service_is_backed_up_and_restored(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        client = service.client
        for number in range(20):
            write(client, "orders", *[f"{number}/{one}" for one in range(10)])
        cut(service)
        write(client, "orders", "behind the snapshot")
        write(client, "new", "only in the log")
        before = state(client, "orders")
        first = backup(service, place)
        assert first["objects"] > 3
        again = backup(service, place)
        assert again["objects"] < first["objects"], "segments are copied once"
        expected = read(client, "orders")[0]
        assert len(expected) == 201
    with restored(place, tmp_path / "restored", env=SMALL) as other:
        client = other.client
        records, tombstones = read(client, "orders")
        assert records == expected
        now = state(client, "orders")
        assert now["epoch"] != before["epoch"]
        [tombstone] = tombstones
        assert (tombstone["gap_from"], tombstone["gap_to"], tombstone["reason"]) == (202, now["head_seq"], "restored")
        assert now["head_seq"] > 201
        assert write(client, "orders", "goes on")["last_seq"] == now["head_seq"] + 1
        assert read(client, "new")[0] == {1: "only in the log"}
        other.restart()
        assert read(other.client, "orders")[0] == expected | {now["head_seq"] + 1: "goes on"}


def test_a_stopped_service_is_backed_up_and_restored(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL, shards=1) as service:
        write(service.client, "orders", *range(100))
        cut(service)
        write(service.client, "orders", *range(5))
        expected = read(service.client, "orders")[0]
        service.stop()
        backup(service, place)
        assert json.loads(run("archive", "verify", place, "--json")) == {"problems": []}
    problem = following_problem(Archive(open_archive(OsFileSystem(), str(place))), 2)
    assert problem == "the service there has 1 shard: set TOPICS_WAL_SHARDS=1"
    with restored(place, tmp_path / "restored", env=SMALL, shards=3) as other:  # another count of shards
        assert read(other.client, "orders")[0] == expected
        cut(other)
        # The seqs of the gap `restored` are no records.
        assert other.status()["compactor"]["checkpointed_records"] <= len(expected)


def test_a_service_of_another_release_is_not_backed_up(tmp_path: Path) -> None:
    with Service(shards=1) as service:
        header = ControlPage.attach(shm_name(identity(str(service.data_dir)), "control")).header
        header.set("version", VERSION + 1)
        problem = run("backup", "--data-dir", service.data_dir, "--to", tmp_path / "archive", code=1)
        header.set("version", VERSION)
    versions = f"its shared memory has version {VERSION + 1}, topics {__version__} knows {VERSION}"
    assert problem == (
        f"topics backup: the service is of another release ({versions}): use its commands, or restart it\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")
def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    """A full disk was said to need write access, and another TOPICS_DATA_DIR, which a restore does not use."""
    place, full = tmp_path / "archive", tmp_path / "full"
    full.mkdir()
    with Service(shards=1) as service:
        write(service.client, "orders", *("x" * 1000 for _ in range(100)))
        backup(service, place)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)], check=True)
        try:
            (full / "filler").write_bytes(bytes(40_000))
            problem = run("backup", "--data-dir", service.data_dir, "--to", full / "archive", code=1)
            assert "No space left on device; free some space there, or choose another place" in problem
            shutil.rmtree(full / "archive")
            problem = run("restore", place, "--data-dir", full / "restored", code=1)
            assert "No space left on device; free some space there, or choose another place" in problem
            with suppress(OSError):
                (full / "filler").write_bytes(bytes(100_000))
            problem = run("restore", place, "--data-dir", full / "restored", code=1)
            found = f"topics restore: {full}/restored.restoring: No space left on device; free some space there"
            assert problem == f"{found}, or choose another place\n"
            assert [path.name for path in full.iterdir()] == ["filler"]
            subprocess.run(["mount", "-o", "remount,ro", str(full)], check=True)
            problem = run("restore", place, "--data-dir", full / "restored", code=1)
            assert problem.endswith("file system; mount its file system writable, or choose another place\n")
        finally:
            subprocess.run(["umount", str(full)], check=True)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_list_of_an_archive_that_has_no_room(tmp_path: Path, damaged: bool) -> None:
    """An output longer than one buffer was taken for a failure of the archive, exit code 1."""
    place = tmp_path / "archive"
    with Service(env=SMALL, shards=1) as service:
        write(service.client, "orders", 1)
        backup(service, place)
    verb = "verify" if damaged else "list"
    if damaged:
        for path in place.rglob("*"):
            if path.is_file():
                path.write_bytes(b"x")
    for arguments in ([verb, place], [verb, place, "--json"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [COMMAND, "archive", *map(str, arguments)], check=False, stdout=full, stderr=subprocess.PIPE
            )
        assert done.returncode == 2
        assert done.stderr.endswith(b"topics archive: cannot write to stdout: No space left on device\n")


def test_no_archive_in_the_data_directory_and_none_around_it(tmp_path: Path) -> None:
    data, link = tmp_path / "data", tmp_path / "link"
    data.mkdir()
    link.symlink_to(data)
    inside = f"its files would be in {data}/copies/archive, inside the data directory {data}; name a place apart"
    for arguments, problem in (
        (["backup", "--data-dir", str(data), "--to", f"{link}/copies"], inside),
        (["backup", "--data-dir", str(link), "--to", f"{data}/../data/copies"], inside),
        (["restore", str(tmp_path), "--data-dir", f"{tmp_path}/archive/new"], f"has the data directory {tmp_path}"),
    ):
        refused = subprocess.run([COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert problem in refused.stderr
    assert list(data.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_the_service_can_read_what_a_backup_by_root_made(tmp_path: Path) -> None:
    """`meta/service-id` was root's: its archiver, and a backup by its user, failed from then on."""
    with Service(shards=1) as service:
        write(service.client, "orders", 1)
        service.stop()
        for path in (service.data_dir, *service.data_dir.rglob("*")):
            os.chown(path, OTHER_USER, OTHER_USER)
        backup(service, tmp_path / "archive")
        note = (service.data_dir / "meta" / "service-id").stat()
        assert (note.st_uid, note.st_gid) == (OTHER_USER, OTHER_USER)


def test_a_warning_of_a_restore_is_not_in_its_json(tmp_path: Path) -> None:
    """The loan of a restore before, into the same directory, cannot be ended any more: that line came on stdout."""
    place, making = tmp_path / "archive", tmp_path / "restored.restoring"
    with Service(shards=1) as service:
        write(service.client, "orders", 1)
        backup(service, place)
    making.mkdir()
    write_borrowed(OsFileSystem(), str(making), BorrowedNote("/dev/null/gone", loan_name(1, 1), []))
    done = json.loads(run("restore", place, "--data-dir", tmp_path / "restored", "--json"))
    assert done["topics"] == 1


def test_a_place_without_an_archive_is_not_pruned(tmp_path: Path) -> None:
    """A misspelled place was reported as pruned, every night."""
    assert "there is no archive here" in run("archive", "prune", tmp_path / "typo", "--keep", "7d", code=2)


def test_a_service_in_a_container_is_not_backed_up_from_outside(tmp_path: Path) -> None:
    """It was said to start or to stop, each time. Its lock is seen outside, and its shared memory is not."""
    lock = DataDirLock.acquire(str(tmp_path))
    try:
        with pytest.raises(NoMomentError, match="is in a container"):
            make_backup(OsFileSystem(), str(tmp_path), f"{tmp_path}/to", None, SystemClock(), 0, lambda *_: None)
    finally:
        lock.release()


def test_a_killed_service_is_backed_up_and_restored(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        write(service.client, "orders", *range(100))
        service.kill_group()
        backup(service, place)
        service.start()
    with restored(place, tmp_path / "restored") as other:
        assert list(read(other.client, "orders")[0].values()) == list(range(100))


@pytest.mark.long
def test_every_kind_of_state_comes_back(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=SMALL) as service:
        client = service.client
        put(client, "mails", type="queue", dead_letter="dead")
        write(client, "mails", "a", "b", "c")
        assert len(ok(client.post("/v0/topics/mails/claim", json={"node": "n", "max": 1}))["claimed"]) == 1
        ok(client.post("/v0/topics/mails/ack", json={"node": "n", "seqs": [1]}))
        write(client, "source", "zero")
        ok(client.put("/v0/topics/source/cursors/reader", json={"consistency": "at_least_once"}))
        ok(client.post("/v0/topics/source/cursors/reader/read", json={"limit": 1}))
        poll("the read to be passed on", lambda: persisted_seq(client) == 1)
        ok(client.put("/v0/routers/copies", json={"source": "source", "dest": "dest"}))
        write(client, "source", "one", "two")
        assert list(read(client, "dest")[0].values())[-2:] == ["one", "two"]
        copies = read(client, "dest")[0]
        write(client, "keyed", "x", idempotency_key="once")
        put(client, "memory", durability="ephemeral")
        write(client, "memory", "in RAM")
        backup(service, place)
    with restored(place, tmp_path / "restored") as other:
        client = other.client
        assert sorted(read(client, "mails")[0].values()) == ["b", "c"]
        assert read(client, "dest")[0] == copies
        write(client, "source", "three")
        assert list(read(client, "dest")[0].values()) == [*copies.values(), "three"]
        assert persisted_seq(client) == 1
        assert write(client, "keyed", "x", idempotency_key="once")["last_seq"] == 1
        records, [tombstone] = read(client, "memory")
        assert (records, tombstone["reason"]) == ({}, "restart")


def persisted_seq(client: httpx.Client) -> int:
    return int(ok(client.get("/v0/topics/source/cursors/reader"))["persisted_seq"])


def test_a_restore_needs_an_empty_directory(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service() as service:
        write(service.client, "orders", 1)
        backup(service, place)
        assert "is not empty" in run("restore", place, "--data-dir", service.data_dir, code=1)
        # Else its service is shut out, and nothing is there in its place.
        (tmp_path / "file").touch()
        held = DataDirLock.acquire(str(tmp_path / "held.restoring"))
        for directory, problem in (
            (service.data_dir, "is not empty"),
            ("/proc", "a file system of its own"),
            (tmp_path / "file" / "new", "Not a directory"),
            (tmp_path / "held", "is made by another restore"),
        ):
            assert problem in run("restore", place, "--data-dir", directory, "--take-over", code=1)
        held.release()
        (place / "archive" / "g00000001.bases").rename(tmp_path / "bases")
        assert "first base" in run("restore", place, "--data-dir", tmp_path / "new", "--take-over", code=2)
        assert not (tmp_path / "new.restoring").exists()
        (tmp_path / "bases").rename(place / "archive" / "g00000001.bases")
        backup(service, place)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with restored(place, tmp_path / "link") as other:
        assert read(other.client, "orders")[0] == {1: 1}


def test_a_place_without_an_archive(tmp_path: Path) -> None:
    assert "no archive here" in run("restore", tmp_path, "--data-dir", tmp_path / "new", code=2)
    assert not (tmp_path / "new").exists()
    for command in ("list", "verify"):  # the one said so with exit code 0, the other one that it is damaged
        assert "no archive here" in run("archive", command, tmp_path, code=2)
        assert "no archive here" in run("archive", command, tmp_path, "--json", code=2)


def test_an_archive_whose_generations_are_lost_is_no_empty_place(tmp_path: Path) -> None:
    """`topics restore` said that there is no archive, and a backup that two services use it."""
    place = tmp_path / "archive"
    with Service(data_dir=tmp_path / "data", shards=1) as service:
        write(service.client, "orders", 1)
        backup(service, place)
        (place / "archive/generations").rename(tmp_path / "generations")
        lost = f"{place}/archive/generations/: is lost; put it back from a copy, or use another place"
        assert lost in run("backup", "--data-dir", tmp_path / "data", "--to", place, code=1)
    for command in (["restore"], ["archive", "list"], ["archive", "verify"], ["archive", "prune", "--keep", "0"]):
        into = ["--data-dir", tmp_path / "new"] if command == ["restore"] else []
        assert lost in run(*command, place, *into, code=1)
    assert not (tmp_path / "new").exists()
    env = {"TOPICS_DATA_DIR": str(tmp_path / "copy"), "TOPICS_FOLLOW": place.as_uri(), "TOPICS_WAL_SHARDS": "1"}
    with Service(data_dir=tmp_path / "copy", env=env, shards=1).unstarted() as follower:
        assert lost in follower.run("check", "--json").stdout


def test_a_backup_that_begins_an_archive_says_so(tmp_path: Path) -> None:
    """Into a folder whose disk was not mounted root began another archive, without a word."""
    to = ["--to", str(tmp_path / "archive"), "--json"]
    arguments = [str(COMMAND), "backup", "--data-dir", str(tmp_path / "data"), *to]
    with Service(data_dir=tmp_path / "data", shards=1) as service:
        write(service.client, "orders", 1)
        told = [subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True) for _ in range(2)]
    assert "mount its disk" in told[0].stderr
    assert str(tmp_path / "archive") in told[0].stderr
    assert json.loads(told[0].stdout)["piece"]
    assert told[1].stderr == ""


def three_backups(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Return the place of an archive of three backups, and the files of its bases in their order."""
    place = tmp_path / "archive"
    with Service(shards=1) as service:
        for number in range(3):
            write(service.client, "orders", number)
            backup(service, place)
    return place, sorted((place / "archive" / "g00000001.bases").iterdir())


def test_one_damaged_base_hides_nothing_else(tmp_path: Path) -> None:
    """`topics archive list` named it and nothing else, and so did `prune`, without a way out."""
    place, bases = three_backups(tmp_path)
    bases[1].write_bytes(bases[1].read_bytes()[:-1])
    listed = subprocess.run([COMMAND, "archive", "list", place, "--json"], capture_output=True, check=False)
    shown = json.loads(listed.stdout)["generations"]
    assert [base["number"] for base in shown[0]["bases"]] == [int(bases[0].name), int(bases[2].name)]
    problem = run("archive", "list", place, code=1)
    assert f"{bases[1]}: " in problem
    assert "put it back from a copy" in problem
    run("archive", "prune", place, "--keep", "0")
    assert sorted((place / "archive" / "g00000001.bases").iterdir()) == bases[2:]
    run("archive", "verify", place)


def test_all_that_is_damaged_is_told_beside_what_is_there(tmp_path: Path) -> None:
    """`list` named one base of those, and `prune` said nothing of what it had removed."""
    place, (first, second, last) = three_backups(tmp_path)
    end = max((place / "archive" / "g00000001.pieces").iterdir())
    for path in (first, second, end):
        path.write_bytes(path.read_bytes()[:-1])
    listed = subprocess.run([COMMAND, "archive", "list", place], capture_output=True, text=True, check=False)
    assert listed.returncode == 1
    lines = listed.stderr.splitlines()
    assert all(str(path) in line for path, line in zip((first, second, end), lines, strict=True)), lines
    assert " to a damaged piece (" in listed.stdout
    assert f"base {int(last.name)} " in listed.stdout
    prune = [str(COMMAND), "archive", "prune", str(place), "--keep", "0"]
    pruned = subprocess.run(prune, capture_output=True, text=True, check=False)
    assert pruned.returncode == 1
    assert "removed 0 generations, 0 bases" in pruned.stdout, "no base before or behind these gives a moment"
    assert str(end) in pruned.stderr


@pytest.mark.parametrize("harm", [*HARMS, "gone"])
@pytest.mark.parametrize("kind", ["pieces", "bases"])
def test_a_pruning_leaves_the_last_moment_that_can_be_restored(tmp_path: Path, kind: str, harm: str) -> None:
    """The newest base counted as the last moment, though its piece was damaged: nothing could be restored any more."""
    place, bases = three_backups(tmp_path)
    end = max((place / "archive" / f"g00000001.{kind}").iterdir())
    whole = end.read_bytes()
    end.unlink()
    if harm != "gone":
        end.write_bytes(harmed(whole, harm))
    told = run("archive", "prune", place, "--keep", "0", code=int((kind, harm) != ("bases", "gone")))
    assert not bases[0].exists()
    assert bases[1].exists()
    assert f"{end}: " in told or (kind, harm) == ("bases", "gone")
    second_ms = Archive(open_archive(OsFileSystem(), str(place))).base(1, int(bases[1].name))[0].taken_ms
    to = [] if kind == "bases" else ["--to-ts", str(second_ms)]
    with restored(place, tmp_path / "restored", "--copy", *to, shards=1) as other:
        assert read(other.client, "orders")[0] == {1: 0, 2: 1} | ({3: 2} if kind == "bases" else {})
    end.write_bytes(whole)
    run("archive", "prune", place, "--keep", "0")
    assert sorted(path.name for path in bases[2].parent.iterdir()) == [bases[2].name], "it holds back nothing for good"
    run("archive", "verify", place)


def test_a_backup_that_needs_a_damaged_piece_says_so(tmp_path: Path) -> None:
    """It ended well, and no restore could give what it had backed up."""
    place, data = tmp_path / "archive", tmp_path / "data"
    with Service(shards=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "86400000"}) as service:
        for number in range(3):
            write(service.client, "orders", number)
            backup(service, place)
        (place / "archive" / "g00000001.pieces" / f"{2:012d}").write_bytes(b"")
        write(service.client, "orders", 3)
        problem = run("backup", "--data-dir", service.data_dir, "--to", place, code=1)
    assert "g00000001.pieces/000000000002: has only 0 bytes: no restore of this backup; put it back" in problem
    assert "000000000002: has only 0 bytes" in run("restore", place, "--data-dir", data, code=1)


def test_a_stopped_service_replaces_a_damaged_newest_base(tmp_path: Path) -> None:
    """Each of its backups said that two of them use the archive."""
    place = tmp_path / "archive"
    with Service(shards=1) as service:
        write(service.client, "orders", 1)
        service.stop()
        backup(service, place)
        (base,) = (place / "archive" / "g00000001.bases").iterdir()
        base.write_bytes(base.read_bytes()[:-1])
        backup(service, place)
    with restored(place, tmp_path / "restored") as other:
        assert read(other.client, "orders")[0] == {1: 1}


def test_a_backup_that_waits_for_its_moment_says_once_that_the_archive_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said so ten times a second."""
    tries = iter([NoMomentError("not now"), NoMomentError("not now")])
    base = Shipper.base

    def late_base(shipper: Shipper) -> Shipped:
        for refusal in tries:
            raise refusal
        return base(shipper)

    monkeypatch.setattr(Shipper, "base", late_base)
    with Service(shards=1) as service:
        write(service.client, "orders", 1)
        service.stop()
        with capture_logs() as logs:
            make_backup(
                OsFileSystem(), str(service.data_dir), f"{tmp_path}/to", None, SystemClock(), 60_000, lambda *_: None
            )
    assert [line["place"] for line in logs if "a new archive" in line["event"]] == [f"{tmp_path}/to"]


def test_a_time_before_all_moments_is_refused_with_the_first_one(tmp_path: Path) -> None:
    """It was said in ms alone."""
    place = tmp_path / "archive"
    with Service(shards=1) as service:
        moments = []
        for number in range(2):
            write(service.client, "orders", number)
            moments.append(backup(service, place)["taken_ms"])
    wanted = "2001-09-09T01:46:40Z"
    problem = run("restore", place, "--data-dir", tmp_path / "new", "--to-ts", wanted, code=2)
    assert "2001-09-09T01:46:40.000Z is before the first moment" in problem
    assert timestamp_ms(problem.split()[-1]) == moments[0]


@pytest.mark.long
def test_segments_in_the_cold_tier_are_copied_too(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    env = SMALL | {"TOPICS_COLD_DIR": str(tmp_path / "cold"), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    with Service(env=env) as service:
        for _ in range(20):
            write(service.client, "orders", *range(20))
        poll("cold segments", lambda: len(list((tmp_path / "cold").rglob("*.data"))) > 4)
        cut(service)
        expected = read(service.client, "orders")[0]
        missing = run("backup", "--data-dir", service.data_dir, "--to", place, code=1)
        assert "name it (--cold-dir, --cold-url)" in missing
        wrong = run("backup", "--data-dir", service.data_dir, "--to", place, "--cold-dir", tmp_path / "wrong", code=1)
        assert f"{tmp_path}/wrong/topics/" in wrong, "it told to write less"
        assert "the newest snapshot lists it" in wrong
        backup(service, place, "--cold-dir", tmp_path / "cold")
    (tmp_path / "cold").rename(tmp_path / "lost")
    with restored(place, tmp_path / "restored") as other:
        assert read(other.client, "orders")[0] == expected


@pytest.mark.long
def test_an_archive_in_a_bucket(tmp_path: Path, s3: Proxy, bucket_url: str) -> None:
    with Service(env=SMALL) as service:
        write(service.client, "orders", *range(100))
        cut(service)
        backup(service, bucket_url, env=s3.env)
        faults: tuple[Fault, ...] = ("deny", "throttle", "drop", "lost_answer", "refuse_early")
        for fault in faults:
            with case(fault):
                write(service.client, "orders", fault)
                with s3.failing(fault):
                    run("backup", "--data-dir", service.data_dir, "--to", bucket_url, code=None, env=s3.env)
                backup(service, bucket_url, env=s3.env)
        expected = read(service.client, "orders")[0]
    run("archive", "verify", bucket_url, env=s3.env)
    with restored(bucket_url, tmp_path / "restored", env=s3.env) as other:
        assert read(other.client, "orders")[0] == expected
