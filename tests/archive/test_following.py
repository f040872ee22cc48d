"""Services that follow another one, and take over from it: `run --follow`, `topics-supervisor promote`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.archive.services import SMALL, cut, patched, read, run
from tests.archive.test_archiver import archiver, shipping
from tests.contract.asking import diff, ok, put, refused, state, write
from tests.contract.socket_client import Socket
from tests.harness import OWN_URL, Service, poll
from topics.client import Client, Record
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note

ABOUT = ("archive", "followed archive", "data format")
"""Beginnings of what a check says."""
SOON = ("from topics.archive import archiver, follow_main", "archiver.BASE_PIECES = 4", "follow_main.LOOK_MS = 100")


def following(place: Path, **more: object) -> dict[str, str]:
    env = SMALL | {"TOPICS_FOLLOW": place.as_uri(), "TOPICS_ARCHIVE_INTERVAL_MS": "50"}
    return env | {f"TOPICS_{name}": str(value) for name, value in more.items()}


@contextmanager
def leading(place: Path, **more: Any) -> Iterator[Service]:
    """A service with an archive, once that can be followed."""
    with Service(env=shipping(place, **more)) as leader:
        poll("a first base", lambda: archiver(leader)["bases"] > 0)
        yield leader


def promoted(follower: Service) -> dict[str, Any]:
    done = follower.run("promote", "--json", "--timeout-ms", "45000")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def follows(follower: Service, leader: Service, *names: str) -> None:
    """Wait until the follower has what the leader has now, and compare all that readers see."""
    for name in names:
        head_seq = state(leader.client, name)["head_seq"]
        _wait_for(follower, name, head_seq)
        poll(f"{name} to be the same", partial(_is_same, follower, leader, name))
        there, here = state(leader.client, name), state(follower.client, name)
        for member in ("head_seq", "earliest_seq", "count", "bytes", "epoch", "config"):
            assert here[member] == there[member], (name, member)


def _is_same(follower: Service, leader: Service, name: str) -> bool:
    return read(follower.client, name) == read(leader.client, name)


def _wait_for(service: Service, name: str, seq: int) -> None:
    poll(f"{name} at {seq}", lambda: _head(service, name) >= seq)


def _head(service: Service, name: str) -> int:
    answer = service.client.get(f"/v0/topics/{name}")
    return int(answer.json()["head_seq"]) if answer.status_code == 200 else -1


def _cursor(client: httpx.Client) -> Any:
    return client.get("/v0/topics/before/cursors/c").json() | {"performance": None}


def _names(service: Service) -> set[str]:
    return {topic["topic"] for topic in ok(service.client.get("/v0/topics"))["topics"]}


def test_a_follower_shows_what_its_leader_has(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with leading(place, ADVERTISE_URL="http://leader.example:4400") as leader:
        there = leader.client
        write(there, "before", *range(100), tag="t")
        with Service(env=following(place)) as follower:
            here = follower.client
            follows(follower, leader, "before")

            write(there, "before", *range(100, 160))
            ok(there.post("/v0/topics/before/delete", json={"before_seq": 31}))
            put(there, "capped", cap_records=10)
            write(there, "capped", *range(30))
            put(there, "gone")
            follows(follower, leader, "before", "capped")
            poll("the topic", lambda: "gone" in _names(follower))
            ok(there.delete("/v0/topics/gone"))
            put(there, "capped", cap_records=5)
            write(there, "capped", "last")
            follows(follower, leader, "capped")
            poll("the topic to be gone", lambda: "gone" not in _names(follower))

            put(there, "jobs", type="queue")
            write(there, "jobs", *range(5))
            claimed = ok(there.post("/v0/topics/jobs/claim", json={"node": "w", "max": 2}))["claimed"]
            ok(there.post("/v0/topics/jobs/ack", json={"node": "w", "seqs": [claimed[0]["$seq"]]}))
            follows(follower, leader, "jobs")
            poll("the queue's end", lambda: state(here, "jobs")["count"] == 4)
            ok(there.put("/v0/topics/before/cursors/c", json={"seq": 120}))
            poll("the cursor", lambda: _cursor(here) == _cursor(there))

            ok(there.put("/v0/routers/r", json={"source": "before", "dest": "copies"}))
            write(there, "before", "copied")
            poll("the copy", lambda: _head(leader, "copies") > 0)
            follows(follower, leader, "copies", "before")
            assert [found["router"] for found in ok(here.get("/v0/routers"))["routers"]] == ["r"]
            cut(leader)
            write(there, "before", "behind the snapshot")
            follows(follower, leader, "before")
            assert diff(here, "before")["performance"]["lag_ms"] < 60_000

            status = follower.status()
            assert status["state"] == "running"
            assert status["archiver"]["follows"]
            assert "follows it" in follower.run("status").stdout
            metrics = follower.client.get("/v0/metrics").text
            assert "topics_archive_lag_seconds" in metrics
            assert "topics_compactor_lag_seconds" not in metrics, "nobody is behind: there is no compactor"


def test_a_follower_hears_from_its_leader_what_the_archive_lacks(tmp_path: Path) -> None:
    """A follower that takes over keeps that. The archive alone is what counts as durable."""
    place = tmp_path / "archive"
    with leading(place, ADVERTISE_URL=OWN_URL) as leader, Service(env=following(place)) as follower:
        there, here = leader.client, follower.client
        put(there, "bank", durability="archived")
        write(there, "bank", 1)
        follows(follower, leader, "bank")
        poll("the leader tells", lambda: "the leader tells" in follower.log_tail())
        poll("it is in the archive", lambda: state(here, "bank")["archived_seq"] == 1)
        pid = leader.pid_of("archiver")
        os.kill(pid, signal.SIGSTOP)
        write(there, "orders", *range(100))
        refused(there.post("/v0/topics/bank", json={"records": [{"data": 2}]}), 503, "storage_unavailable")
        put(there, "capped", cap_records=10)
        write(there, "capped", *range(30))
        follows(follower, leader, "orders", "bank", "capped")
        assert state(here, "bank")["archived_seq"] == 1
        for pid_killed in (follower.kill("walshard", 0), follower.kill("walshard", 1)):
            follower.wait_healed(pid_killed)
        write(there, "orders", "more")
        follows(follower, leader, "orders", "bank", "capped")
        assert state(here, "bank")["archived_seq"] == 1

        expected = read(there, "orders")[0]
        promoted(follower)
        records, tombstones = read(here, "orders")
        assert (records, [found["reason"] for found in tombstones]) == (expected, ["restored"])
        write(here, "orders", "goes on")
        os.kill(pid, signal.SIGCONT)
        poll("the former leader notices", lambda: archiver(leader)["taken_over"])
        follower.stop()
        run("verify", follower.data_dir)
        follower.start()
        assert read(follower.client, "orders")[0].items() > expected.items()


@pytest.mark.long
def has_all(follower: Service, place: Path) -> bool:
    """Return whether the note of a follower names the last piece of the archive."""
    fs = OsFileSystem()
    note = read_note(fs, str(follower.data_dir))
    return note is not None and note.piece == Archive(open_archive(fs, str(place))).last_piece(
        note.generation, note.piece
    )


def test_a_follower_that_died_ahead_of_the_archive_goes_back_to_it(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with leading(place, ADVERTISE_URL=OWN_URL) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", 1)
        follows(follower, leader, "orders")
        poll("the leader tells", lambda: "the leader tells" in follower.log_tail())
        os.kill(pid := leader.pid_of("archiver"), signal.SIGSTOP)
        # A piece that the follower passes later would have it note what it was told by then, and go on from there.
        poll("it has all of the archive", lambda: has_all(follower, place))
        write(leader.client, "orders", *range(100))
        follows(follower, leader, "orders")
        frontend = follower.pid_of("frontend")
        follower.kill("follower", 0)
        follower.wait_healed(frontend)  # the next one has all processes start again
        follows(follower, leader, "orders")
        killed = leader.kill("frontend", 0)
        poll("another frontend", lambda: leader.pid_of("frontend") != killed)  # a connection to that one is reset
        write(leader.client, "orders", *range(100))
        follows(follower, leader, "orders")
        os.kill(pid, signal.SIGCONT)
        head_seq = state(leader.client, "orders")["head_seq"]
        poll("the archive has it", lambda: state(follower.client, "orders")["archived_seq"] == head_seq)


def test_a_leader_tells_only_who_may_read_everything(tmp_path: Path) -> None:
    place, keys = tmp_path / "archive", tmp_path / "keys"
    keys.write_text("all\nreader:read\nprefixed:read+admin:or\n")
    secured = {"TOPICS_API_KEYS_FILE": str(keys), "TOPICS_ADVERTISE_URL": OWN_URL}
    with Service(env=shipping(place) | secured) as leader:
        leader.client.headers["Authorization"] = "Bearer all"
        poll("a first base", lambda: archiver(leader)["bases"] > 0)
        write(leader.client, "orders", 1)
        ends: dict[str, list[Any]] = {"ends": []}
        for key in ("reader", "prefixed"):
            answer = httpx.post(f"{leader.url}/v0/archive/tail", json=ends, headers={"Authorization": f"Bearer {key}"})
            refused(answer, 403, "forbidden")
        assert leader.client.post("/v0/archive/tail", json=ends).status_code == 200
        other = {"shard": 0, "log_id": 1, "position": {"file_no": 1, "offset": 0}, "last_bytes": ""}
        refused(leader.client.post("/v0/archive/tail", json={"ends": [other]}), 409, "head_mismatch")
        refused(leader.client.post("/v0/archive/tail", json={"ends": [{"shard": 0}]}), 400, "invalid_request")
        with Service(env=following(place)) as follower:
            follows(follower, leader, "orders")
            poll("it says so", lambda: "tells nothing now" in follower.log_tail())
            assert "set TOPICS_FOLLOW_KEY to a key of the leader with read and admin" in follower.log_tail()
            assert "unauthorized" in follower.log_tail()
            refused(follower.client.post("/v0/archive/tail", json=ends), 503, "not_leader")
        with Service(env=following(place, FOLLOW_KEY="all")) as follower:
            poll("the leader tells", lambda: "the leader tells" in follower.log_tail())
            os.kill(pid := leader.pid_of("archiver"), signal.SIGSTOP)
            write(leader.client, "orders", 2)
            follows(follower, leader, "orders")
            os.kill(pid, signal.SIGCONT)
            assert '"follow_key":"masked"' in follower.log_path.read_text()


def test_a_follower_changes_nothing(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    url = "http://leader.example:4400"
    with leading(place, ADVERTISE_URL=url) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", 1)
        follows(follower, leader, "orders")
        here = follower.client
        assert ok(here.get("/v0/key"))["keys"] is False
        one = {"records": [{"data": 1}]}
        for answer in (
            here.post("/v0/topics/orders", json=one),
            here.put("/v0/topics/new", json={}),
            here.delete("/v0/topics/orders"),
            here.post("/v0/topics/orders/delete", json={"before_seq": 2}),
            here.put("/v0/topics/orders/cursors/c", json={"seq": 1}),
            here.post("/v0/topics/orders/claim", json={"node": "w"}),
            here.put("/v0/routers/r", json={"source": "orders", "dest": "copies"}),
            here.get("/v0/txn/nightly"),  # a reader's question, whose answer may be older here than the records
            here.post("/v0/txn/nightly/commit", json={"batch": 1, "stages": []}),
        ):
            refusal = refused(answer, 503, "not_leader")
            assert refusal["detail"] == {"leader": url}
            assert refusal["message"].endswith(f"send this to {url}")
        with Socket(follower) as socket:
            assert socket.ask("publish", topic="orders", records=[{"data": 1}], request_id=1)["code"] == "not_leader"
        assert follower.run("promote", "--timeout-ms", "0").returncode == 1
        done = leader.run("promote")
        assert (done.returncode, "it leads" in done.stderr) == (5, True)


def test_a_promotion_that_waits_is_shown_and_withdrawn(tmp_path: Path) -> None:
    """Only a restart ended it, and `status` did not show that it waits."""
    place, away = tmp_path / "archive", tmp_path / "away"
    with leading(place, ADVERTISE_URL=OWN_URL) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", 1)
        follows(follower, leader, "orders")
        (place / "archive").rename(away)
        done = follower.run("promote", "--timeout-ms", "1000")
        assert (done.returncode, "`promote --cancel` ends that" in done.stderr) == (1, True)
        found = archiver(follower)["promotion"]
        assert found["age_ms"] > 0
        assert not found["begun"]
        done = follower.run("promote", "--cancel", "--json")
        assert (done.returncode, json.loads(done.stdout)["pid"]) == (0, follower.pid), done.stderr
        assert archiver(follower)["promotion"] is None
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(follower.run, "promote")
            poll("it waits", lambda: archiver(follower)["promotion"])
            assert follower.run("promote", "--cancel").returncode == 0
            done = waiting.result()
        assert (done.returncode, "somebody has withdrawn it" in done.stderr) == (1, True), "it ends at once"
        away.rename(place / "archive")
        write(leader.client, "orders", 2)
        follows(follower, leader, "orders")
        done = follower.run("promote", "--cancel")
        assert (done.returncode, "no promotion waits" in done.stderr) == (1, True)
        assert promoted(follower)["topics"] == 1
        done = follower.run("promote", "--cancel")
        assert (done.returncode, "it leads" in done.stderr) == (5, True)


def test_a_follower_sends_no_cursor_back(tmp_path: Path) -> None:
    """It has no records of `ephemeral` topics, and may be behind what a reader has read at the leader. It answered both
    cursors with its own head, behind which the reader got records again.
    """
    place = tmp_path / "archive"
    with leading(place, ADVERTISE_URL=OWN_URL) as leader, Service(env=following(place)) as follower:
        there, here = leader.client, follower.client
        put(there, "fleeting", durability="ephemeral")
        write(there, "fleeting", *range(100))
        write(there, "orders", 1)
        follows(follower, leader, "orders")
        poll("the topic", lambda: "fleeting" in _names(follower))
        refusal = refused(here.post("/v0/topics/fleeting/diff", json={"from_seq": 100}), 503, "not_leader")
        assert refusal["detail"]["leader"] == leader.url
        refused(here.post("/v0/watch", json={"topics": {"fleeting": {"from_seq": 100}}}), 503, "not_leader")
        with Socket(follower) as socket:
            assert socket.ask("subscribe", topic="fleeting", from_seq=100)["code"] == "not_leader"
        with Client([follower.url, leader.url], reads="any") as client:
            assert [record.data for record in client.read("fleeting", 90)] == list(range(90, 100))
        with Client([follower.url, leader.url], reads="any") as client, closing(client.follow({"fleeting": 98})) as new:
            assert [one.seq for _, one in islice(new, 2) if isinstance(one, Record)] == [99, 100]

        os.kill(pid := follower.pid_of("follower"), signal.SIGSTOP)
        last_seq = write(there, "orders", 2, 3)["last_seq"]
        page = diff(here, "orders", from_seq=last_seq)
        found = [page[member] for member in ("records", "next_from_seq", "head_seq", "caught_up", "lag")]
        assert found == [[], last_seq, 1, True, 0]
        with Socket(follower) as socket:
            socket.ask("subscribe", topic="orders", from_seq=last_seq)
            os.kill(pid, signal.SIGCONT)
            write(there, "orders", 4)
            assert socket.records(1)[0]["data"] == 4


def test_watchers_of_a_follower_hear_of_what_is_new(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with leading(place) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", 1)
        follows(follower, leader, "orders")
        with Socket(follower) as socket:
            socket.ask("subscribe", topic="orders", from_seq=1)
            write(leader.client, "orders", 2)
            assert socket.records(1)[0]["data"] == 2
        found = write(leader.client, "orders", 3)["last_seq"]
        page = diff(follower.client, "orders", from_seq=found - 1, wait_ms=20_000)
        assert [record["data"] for record in page["records"]] == [3]


@pytest.mark.long
def test_whatever_dies_the_follower_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with leading(place) as leader, Service(env=following(place)) as follower:
        for turn, (role, index) in enumerate(
            [("follower", 0), ("walshard", 0), ("walshard", 1), ("frontend", 0), ("follower", 0)]
        ):
            write(leader.client, "a", *range(turn, turn + 60))
            write(leader.client, "b", *range(turn, turn + 60))
            pid = follower.kill(role, index)
            write(leader.client, f"new-{turn}", 1)
            follower.wait_healed(pid)
            follows(follower, leader, "a", "b", f"new-{turn}")
        follower.kill_group()
        write(leader.client, "a", "while it was away")
        follower.start()
        follows(follower, leader, "a", "b")
        leader.restart()
        write(leader.client, "a", "after a restart")
        follows(follower, leader, "a", "b")


@pytest.mark.long
def test_followers_load_the_bases_of_their_leader(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    command = patched(tmp_path / "patched", *SOON)
    with Service(env=shipping(place), command=command) as leader:
        poll("a first base", lambda: archiver(leader)["bases"] > 0)
        with Service(env=following(place), command=command) as follower:
            for turn in range(12):
                write(leader.client, "a", *range(turn, turn + 50))
                write(leader.client, "b", *range(turn, turn + 50))
                ok(leader.client.post("/v0/topics/a/delete", json={"before_seq": turn * 40}))
                cut(leader)
                follows(follower, leader, "a", "b")
            poll("a snapshot of the leader", lambda: archiver(follower)["bases"] > 2)
            poll("files that are gone", lambda: len(list(follower.data_dir.glob("topics/*/seg-*.data"))) < 24)
            follows(follower, leader, "a", "b")
            follower.restart()
            follows(follower, leader, "a", "b")


@pytest.mark.long
def test_a_hole_in_the_archive_has_everything_copied_again(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    command = patched(tmp_path / "patched", *SOON)
    with leading(place, ARCHIVE_BACKLOG_BYTES=0, WAL_FILE_BYTES=1 << 20) as leader:
        write(leader.client, "a", *range(10))
        with Service(env=following(place), command=command) as follower:
            follows(follower, leader, "a")
            os.kill(pid := leader.pid_of("archiver"), signal.SIGSTOP)
            files = list((leader.data_dir / "wal").rglob("*.log"))
            while all(file.exists() for file in files):
                write(leader.client, "a", *("x" * 10000 for _ in range(100)))
                cut(leader)
            os.kill(pid, signal.SIGCONT)
            poll("the hole", lambda: archiver(leader)["holes"] > 0)
            follows(follower, leader, "a")
            assert "everything is copied again" in follower.log_path.read_text()


@pytest.mark.long
def test_a_follower_takes_over(tmp_path: Path) -> None:
    """All that was acknowledged as archived is there; the rest is a gap that readers are told of."""
    place = tmp_path / "archive"
    own = following(place, ADVERTISE_URL=OWN_URL)
    with leading(place) as leader, Service(env=own) as follower:
        put(leader.client, "bank", durability="archived")
        for number in range(20):
            write(leader.client, "bank", number)
        epoch = state(leader.client, "bank")["epoch"]
        pid = leader.pid_of("archiver")
        os.kill(pid, signal.SIGSTOP)  # so that it cannot know
        lost = write(leader.client, "orders", "of class disk")
        assert promoted(follower)["took_ms"] > 0
        here = follower.client
        records, tombstones = read(here, "bank")
        assert list(records.values()) == list(range(20))
        assert [found["reason"] for found in tombstones] == ["restored"]
        assert state(here, "bank")["epoch"] != epoch
        assert _head(follower, "orders") == -1
        assert lost["last_seq"] == 1
        write(here, "bank", "goes on")
        refused(leader.client.post("/v0/topics/bank", json={"records": [{"data": 1}]}), 503, "storage_unavailable")
        os.kill(pid, signal.SIGCONT)
        poll("the former leader notices", lambda: archiver(leader)["taken_over"])

        def names_the_leader() -> bool:
            answer = leader.client.post("/v0/topics/orders", json={"records": [{"data": 1}]})
            refusal = refused(answer, 503, "not_leader")
            return refusal["detail"] == {"leader": follower.url} and follower.url in refusal["message"]

        poll("the new leader's address, which its first piece has", names_the_leader)
        assert any(f"use the other one, {follower.url};" in line.get("reason", "") for line in leader.said())
        assert f"use the other one, {follower.url};" in leader.run("check", "--json").stdout
        leader.stop()  # it is to follow now
        with Service(env=following(place)) as former:
            poll("what the new leader wrote", lambda: "goes on" in read(former.client, "bank")[0].values())
            follows(former, follower, "bank")
            follower.restart()  # with the same settings it goes on to lead
            write(follower.client, "bank", "and on")
            follows(former, follower, "bank")
            assert promoted(former)["topics"] == 1
            write(former.client, "bank", "once more")
            leader.start()
        follower.stop()
        run("verify", follower.data_dir)
        follower.start()
    run("archive", "verify", place)


@pytest.mark.long
def test_a_leader_that_dies_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with leading(place, ADVERTISE_URL="http://127.0.0.1:1") as leader:
        put(leader.client, "bank", durability="archived")
        with Service(env=following(place, TAKEOVER_AFTER_MS=15_000)) as follower:
            for number in range(10):
                write(leader.client, "bank", number)
            acknowledged = read(leader.client, "bank")[0]
            leader.kill_group()
            poll("the follower to lead", lambda: not archiver(follower)["follows"], 60)
            poll("it is ready", follower.is_ready)
            assert read(follower.client, "bank")[0] == acknowledged
            write(follower.client, "bank", "goes on")
            leader.start()
            poll("the former leader notices", lambda: archiver(leader)["taken_over"])


def test_the_check_says_whose_the_archive_is(tmp_path: Path) -> None:
    place, empty = tmp_path / "archive", tmp_path / "empty"

    def problems(service: Service, **env: str) -> str:
        done = service.run("check", "--json", env=env)
        assert done.stdout, done.stderr
        told = [problem or "fine" for subject, problem in json.loads(done.stdout) if subject.startswith(ABOUT)]
        return "; ".join(dict.fromkeys(told))

    with leading(place) as leader, Service(env=following(place)) as follower:
        poll("a copy", lambda: "the service is copied" in follower.log_tail())
        assert problems(leader) == problems(follower) == "fine"
        assert "set TOPICS_WAL_SHARDS=2" in problems(follower, TOPICS_WAL_SHARDS="3")
        assert "is a copy of the service in" in problems(follower, TOPICS_FOLLOW=empty.as_uri())
        del follower.env["TOPICS_FOLLOW"]
        assert "start it with --follow" in problems(follower), "a start is refused, and nothing was found wrong"
        follower.env["TOPICS_FOLLOW"] = place.as_uri()
        with Service() as other:
            assert "give --follow an empty directory" in problems(other, TOPICS_FOLLOW=place.as_uri())
            assert "give each service a place of its own" in problems(other, TOPICS_ARCHIVE_URL=place.as_uri())
            new = str(tmp_path / "new")
            assert "has no base yet" in problems(other, TOPICS_DATA_DIR=new, TOPICS_FOLLOW=empty.as_uri())
        promoted(follower)
        assert "took over from this service" in problems(leader)
        assert problems(follower) == "fine"
        place.rename(tmp_path / "away")
        assert f"it cannot be told whose it is: {place}/archive/: is empty, and this" in problems(leader)
        (tmp_path / "away").rename(place)


def test_a_copy_is_not_backed_up_as_its_leader(tmp_path: Path) -> None:
    """Its logs have the leader's id. One that had stopped began a generation in the leader's archive, and closed the
    one of the leader; one that ran was told to try again, for ever.
    """
    place = tmp_path / "archive"
    with leading(place) as leader, Service(env=following(place)) as follower:
        write(leader.client, "orders", 1)
        follows(follower, leader, "orders")
        assert "is a copy of" in run("backup", "--data-dir", follower.data_dir, "--to", tmp_path / "own", code=1)
        follower.stop()
        write(leader.client, "orders", 2)
        poll("it is shipped", lambda: state(leader.client, "orders").get("archived_seq") == 2)
        assert "is a copy of" in run("backup", "--data-dir", follower.data_dir, "--to", place, code=1)
        assert Archive(open_archive(OsFileSystem(), str(place))).generations() == [1]


def test_a_directory_is_either_led_or_followed(tmp_path: Path) -> None:
    place, other = tmp_path / "archive", tmp_path / "other"
    with leading(place), Service(env=following(place)) as follower:
        follower.stop()
        answer = follower.run("run", env={"TOPICS_FOLLOW": other.as_uri()})
        assert (answer.returncode, "empty the directory to follow" in answer.stderr) == (1, True), answer.stderr
        del follower.env["TOPICS_FOLLOW"]
        answer = follower.run("run")
        assert (answer.returncode, "start it with --follow" in answer.stderr) == (1, True), answer.stderr
        follower.env["TOPICS_FOLLOW"] = place.as_uri()
        follower.start()
    with Service() as own:
        own.stop()
        answer = own.run("run", env={"TOPICS_FOLLOW": place.as_uri()})
        assert (answer.returncode, "has a service of its own" in answer.stderr) == (1, True), answer.stderr
        own.start()
