"""A service takes over from another one, which may still run: `topics restore --take-over`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from tests.archive.follower_rig import FollowerRig
from tests.archive.services import read, restored, run
from tests.archive.shippers import shipper_of
from tests.archive.test_archiver import archiver, shipped, shipping
from tests.archive.test_borrowing import ship
from tests.contract.asking import ok, put, refused, state, write
from tests.contract.socket_client import Socket
from tests.harness import Service, poll
from tests.walshard.rig import Rig, TestClock
from topics.archive.promoting import take_role
from topics.settings import load
from topics.storage import service_id
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import FollowNote, read_note, write_note


def no_leader(url: str, ends: object) -> bytes | None:
    raise OSError("there is no leader")


def test_a_takeover_that_is_ended_between_its_notes_forgets_no_former_epoch(tmp_path: Path) -> None:
    """The next start took the epochs that the one before had just noted for those of the leader."""

    class Ended(OsFileSystem):
        def rename(self, source: str, target: str) -> None:
            if target.endswith(service_id.NAME):
                raise OSError("killed")
            super().rename(source, target)

    data_dir, leader = str(tmp_path), service_id.EpochMasks(7, 5)
    service_id.set_epoch_masks(OsFileSystem(), data_dir, leader, 1)
    write_note(OsFileSystem(), data_dir, FollowNote("file:///a", fence_id="0f" * 8, promoted_id="0f" * 8))
    settings = load({"TOPICS_DATA_DIR": data_dir, "TOPICS_FOLLOW": "file:///a"}, {})
    with pytest.raises(OSError, match="killed"):
        take_role(Ended(), settings, TestClock())
    for _ in range(2):
        assert take_role(OsFileSystem(), settings, TestClock()).follow is None
        found = service_id.epoch_masks(OsFileSystem(), data_dir)
        assert (found.former, found.own in leader) == (leader.own, False)
        assert service_id.known_id(OsFileSystem(), data_dir) == "0f" * 8


@pytest.mark.long
def test_the_former_service_acknowledges_nothing_as_archived_any_more(tmp_path: Path) -> None:
    place = tmp_path / "archive"
    with Service(env=shipping(place)) as former:
        client = former.client
        put(client, "bank", durability="archived")
        poll("a first base", lambda: archiver(former)["bases"] > 0)
        for number in range(20):
            write(client, "bank", number)
        ok(client.put("/v0/topics/bank/cursors/c", json={"consistency": "strictly_at_once", "from_seq": 0}))
        acknowledged = read(client, "bank")[0]
        pid = former.pid_of("archiver")
        os.kill(pid, signal.SIGSTOP)  # so that it cannot know
        with restored(place, tmp_path / "new", "--take-over") as new:
            assert read(new.client, "bank")[0] == acknowledged
            lost = client.post("/v0/topics/bank", json={"records": [{"data": "lost"}]})
            assert refused(lost, 503, "storage_unavailable")["detail"]["cause"] == "archive"
            os.kill(pid, signal.SIGCONT)
            poll("it notices", lambda: archiver(former)["taken_over"])
            for path, body in (("bank", {"records": [{"data": 1}]}), ("other", {"records": [{"data": 1}]})):
                refused(client.post(f"/v0/topics/{path}", json=body), 503, "not_leader")
            refused(client.put("/v0/topics/new", json={}), 503, "not_leader")
            refused(client.get("/v0/txn/nightly"), 503, "not_leader")
            refused(client.post("/v0/topics/bank/cursors/c/read", json={}), 503, "not_leader")
            looked = ok(client.post("/v0/topics/bank/cursors/c/read", json={"checkpoint": False, "limit": 1}))
            assert [record["$seq"] for record in looked["records"]] == [1], "a look moves nothing"
            refused(client.post("/v0/topics/bank/delete", json={"before_seq": 1}), 503, "not_leader")
            with Socket(former) as socket:
                answer = socket.ask("publish", topic="bank", records=[{"data": 1}], request_id=1)
                assert answer["code"] == "not_leader"
            assert len(read(client, "bank")[0]) == 21, "it still reads"
            told = former.run("status")
            assert ("TAKEN OVER" in told.stdout, told.returncode) == (True, 1)
            assert former.status()["state"] == "taken over"
            told = former.run("promote")
            assert ("another service took over from it" in told.stderr, told.returncode) == (True, 1)
            there, here = state(client, "bank"), state(new.client, "bank")
            assert here["epoch"] != there["epoch"] == here["former_epoch"]
            assert here["restored_seq"] == here["head_seq"] > there["head_seq"]
            put(new.client, "new")
            assert "former_epoch" not in state(new.client, "new")
            write(new.client, "orders", "goes on")
        former.restart()
        poll("its next life notices, too", lambda: archiver(former)["taken_over"])
    run("archive", "verify", place)
    problem = run("restore", place, "--data-dir", tmp_path / "again", "--take-over", code=1)
    assert f"({tmp_path / 'new'}) took over from this service already" in problem, "one succeeds"
    assert not (tmp_path / "again").exists()
    (tmp_path / "new").rename(tmp_path / "lost")
    with restored(place, tmp_path / "new", "--take-over") as again:  # the same one may repeat it
        assert read(again.client, "bank")[0] == acknowledged
    with restored(place, tmp_path / "again") as again:
        assert read(again.client, "bank")[0] == acknowledged


def test_a_service_that_was_restored_is_not_told_that_it_was_taken_over_from(tmp_path: Path) -> None:
    """With the settings of the lost one it took no write at all: the archive says that somebody took over, itself."""
    place = tmp_path / "archive"
    with Service(env=shipping(place)) as former:
        write(former.client, "orders", 1)
        shipped(former)
        former.kill_group()
        with restored(place, tmp_path / "new", "--take-over", env=shipping(place)) as new:

            def told() -> list[str]:
                return [line["reason"] for line in new.said() if line["role"] == "archiver" and "reason" in line]

            assert "give each service a place of its own" in poll("a failure", told)[0]
            assert not archiver(new)["taken_over"]
            write(new.client, "orders", 2)
            assert "give each service a place of its own" in new.run("check", "--json").stdout
        former.start()
        poll("the former one notices", lambda: archiver(former)["taken_over"])


def test_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    assert "no archive here" in run("restore", tmp_path, "--data-dir", tmp_path / "new", "--take-over", code=2)
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("whose", ["leader", "follower"])
def test_a_clock_that_is_ahead_hides_no_lag(tmp_path: Path, whose: str) -> None:
    """A leader's moments were newer than any time here: a follower that heard nothing for minutes was up to date. So
    were its own looks, when its clock was put right while it heard nothing.
    """
    place = tmp_path / "archive"
    leader = Rig(str(tmp_path / "leader"))
    if whose == "leader":
        leader.clock.skew_ms = 600_000
    leader.append("t", b"1")
    archive = Archive(open_archive(OsFileSystem(), str(place)))
    ship(leader, archive)
    os.mkdir(data_dir := str(tmp_path / "follower"))
    rig = FollowerRig(data_dir, 1, archive, TestClock(), no_leader)
    try:
        if whose == "follower":
            rig.clock.skew_ms = 600_000
        for _ in range(4):
            rig.advance()
        assert rig.shown
        (place / "archive").rename(tmp_path / "away")
        rig.clock.skew_ms = 0
        rig.advance()
        rig.clock.ms += 60_000
        rig.advance()
        assert rig.shared.control.follow_lag_ms(rig.clock.now_ms()) >= 60_000
    finally:
        rig.close()
        leader.close()


def test_a_leader_that_does_not_reach_its_archive_hides_no_lag(tmp_path: Path) -> None:
    """A follower that its leader tells nothing, as it has no key, was up to date after each look that found nothing:
    also in the second before a record is shipped, and while the leader shipped nothing for hours.
    """
    leader, clock = Rig(str(tmp_path / "leader")), TestClock()
    archive = Archive(open_archive(OsFileSystem(), str(tmp_path / "archive")))
    leader.append("t", b"1")
    shipper = shipper_of(leader, archive, leader_url="http://leader.example:4000")
    shipper.base()
    os.mkdir(data_dir := str(tmp_path / "follower"))
    rig = FollowerRig(data_dir, 1, archive, clock, no_leader)

    def lag_after(seconds: int, ships: bool) -> int:
        """Return the least lag that readers saw, in so many seconds with two looks each."""
        lags = []
        for _ in range(seconds * 2):
            clock.ms += 500
            rig.advance()
            lags.append(rig.shared.control.follow_lag_ms(clock.now_ms()))
            if ships:
                shipper.ship(is_sign=True)
        return min(lags)

    try:
        for _ in range(3):
            rig.advance()
        assert rig.shown
        lag_after(5, ships=True)
        assert 0 < lag_after(5, ships=True) <= 1500, "signs keep it low while nothing is written"
        written_ms = clock.now_ms()
        leader.append("t", b"2")
        for _ in range(10):
            assert clock.now_ms() - lag_after(1, ships=False) <= written_ms, "it is not here"
        shipper.ship()
        assert lag_after(5, ships=True) <= 1500
    finally:
        rig.close()
        leader.close()


@pytest.mark.parametrize("has_folder", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_a_disk_that_is_not_mounted_costs_a_follower_nothing(tmp_path: Path, has_folder: bool, begins: bool) -> None:
    """It took the archive for pruned when it was told to take over, or began where its leader had told more than that
    had, and began to copy it once more: first it removed the copy that it had.
    """
    fs, place = OsFileSystem(), tmp_path / "archive/archive"
    leader = Rig(str(tmp_path / "leader"))
    leader.append("t", b"1", b"2")
    archive = Archive(open_archive(fs, str(tmp_path / "archive")))
    ship(leader, archive)
    data_dir = str(tmp_path / "follower")
    os.mkdir(data_dir)
    rig = FollowerRig(data_dir, 1, archive, TestClock(), no_leader)
    try:
        for _ in range(4):
            rig.advance()
        noted = read_note(fs, data_dir)
        assert noted is not None
        assert noted.piece
        place.rename(tmp_path / "away")
        if has_folder:
            place.mkdir()
        if begins:
            noted = msgspec.structs.replace(noted, told=[0])
            write_note(fs, data_dir, noted)
            rig.archive = Archive(open_archive(fs, str(tmp_path / "archive"), new=False))
            rig.follower_dies()
        else:
            rig.follower.ask_promotion()
        for _ in range(3):
            rig.follower.step()
            assert rig.follower.exit_code is None
        assert read_note(fs, data_dir) == msgspec.structs.replace(noted, fence_id=rig.replica.note.fence_id)
        if has_folder:
            place.rmdir()
        (tmp_path / "away").rename(place)
        rig.follower.ask_promotion()
        rig.follower.step()
        assert rig.replica.note.leads
    finally:
        rig.close()
