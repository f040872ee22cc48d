"""Damage that no older base makes up for is refused, and what a follower has is kept meanwhile."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.archive.archiving import Archiving, harmed, small_world
from tests.archive.shippers import shipper_of
from tests.archive.test_borrowing import FS
from tests.archive.test_borrowing_followers import follower, missing, with_segments
from tests.archive.test_borrowing_followers import ship_bases as ship_more
from tests.archive.test_damaged_bases import Based
from tests.archive.test_simulation import begun, follow_and_go_back, followed, ship_bases, stay_behind_a_hole
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.cli import restore
from topics.frontend.txn.coordinator import Stages
from topics.shm.control import EXIT_AGAIN, Role
from topics.storage import layout
from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    LogPart,
    base_name,
    encode,
    open_archive,
    piece_name,
)
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note
from topics.storage.frame import lay_out
from topics.storage.logfile import WalPosition


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_world():
        yield


@pytest.fixture
def based(tmp_path: Path) -> Based:
    return Based(tmp_path)


@pytest.fixture
def service() -> Iterator[Archiving]:
    yield from begun(0)


@pytest.fixture
def lent() -> Iterator[Archiving]:
    yield from with_segments()


@pytest.mark.parametrize("what", ["base", "piece"])
def test_a_record_is_not_looked_for_in_later_moments_alone(based: Based, what: str) -> None:
    """Without a word the restore gave a later moment, in which the record was deleted."""
    if what == "base":
        based.damage(base_name(1, based.first))
        seq = 1
    else:
        based.damage(piece_name(1, based.second))
        seq = 15
    with pytest.raises(ArchiveDamagedError, match="checksum"):
        plan(based.archive, WantedMoment(topic="t", seq=seq))


def test_a_damaged_file_that_all_bases_have_is_read_once(
    based: Based, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A restore fetched everything again for each base."""
    of = [{ref.name for ref in based.archive.base(1, number)[0].files} for number in based.archive.bases(1)]
    based.damage(next(name for name in sorted(set.intersection(*of)) if name.endswith(".data")))
    runs: list[int] = []
    run_one = Restore.run
    monkeypatch.setattr(Restore, "run", lambda self, clock: (runs.append(1), run_one(self, clock))[1])
    parser = argparse.ArgumentParser()
    restore.fill(parser)
    options = parser.parse_args([str(based.place), "--data-dir", str(based.root / "restored"), "--copy"])
    assert options.command(options) == 1
    assert "checksum differs; no older base" in capsys.readouterr().err
    assert len(runs) == 1


def test_a_follower_that_may_not_end_its_loan_takes_new_bases(lent: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never looked for a base again, nor for a generation."""

    def denied(_name: str) -> NoReturn:
        raise OSError(errno.EACCES, "denied", "sim://bucket")

    rig = follower(lent)
    monkeypatch.setattr(rig.archive.store, "delete", denied)
    while missing(rig):
        lent.follow([])
    ship_more(lent, 2)
    for _ in range(10):
        lent.world.clock.ms += 20_000
        lent.follow([])
    assert rig.replica.note.base == lent.archive.bases(1)[-1]


@pytest.mark.parametrize("case", ["generation", "promotion"])
def test_a_follower_keeps_what_it_has_if_nothing_newer_can_be_copied(service: Archiving, case: str) -> None:
    if case == "generation":
        follow_and_go_back(service)
        service.append("a", 1, "disk")
        for _ in range(3):
            service.ship(0)
    else:
        stay_behind_a_hole(service, bases=2)
    rig = service.follower
    assert rig is not None
    shown = rig.shown
    generation = service.archive.generations()[-1]
    name = base_name(generation, service.archive.bases(generation)[-1])
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "cut")
    if case == "promotion":
        rig.follower.ask_promotion()
    for _ in range(6):
        service.world.clock.ms += 20_000
        rig.advance()
    assert rig.shown == shown
    service.bucket.objects[name] = whole


def test_a_follower_behind_a_hole_begins_anew_with_any_whole_base_there(service: Archiving) -> None:
    rig = stay_behind_a_hole(service, bases=3)
    name = base_name(1, service.archive.bases(1)[-1])
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "cut")
    for _ in range(6):
        service.world.clock.ms += 20_000
        service.follow([])
    assert rig.shown == max(service.moments)
    service.bucket.objects[name] = whole


def test_a_follower_starts_again_with_a_base_that_a_damaged_piece_is_behind(service: Archiving) -> None:
    """It had copied the base, and the other processes of its service were never told to begin with that."""
    ship_bases(service)
    for _ in range(6):
        service.ship(0)  # until no base is due
    last = service.archive.bases(1)[-1]
    for _ in range(2):
        service.append("d", 1, "disk")
        service.ship(0)
    assert service.archive.bases(1)[-1] == last
    name = piece_name(1, last + 1)
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "changed")
    rig = service.follower_in(os.path.join(service.directory, "follower"))
    rig.follower.step()
    assert rig.follower.exit_code == EXIT_AGAIN
    rig.restart_service()
    for _ in range(3):
        rig.advance()
    assert rig.shown == (1, last)
    rig.close()
    service.bucket.objects[name] = whole


@pytest.mark.parametrize("promotes", [False, True])
def test_a_follower_begins_anew_with_a_base_behind_a_damaged_piece(service: Archiving, promotes: bool) -> None:
    """It tried the piece for ever, looked for no base, and could not take over."""
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    rig = service.follower
    assert rig is not None
    shown = rig.shown
    assert shown is not None
    last = service.archive.bases(1)[-1]
    for _ in range(2):
        service.append("d", 1, "disk")
        service.ship(0)
    name = piece_name(1, shown[1] + 1)
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "changed")
    for _ in range(4):
        service.follow([])
    assert rig.shown == shown, "no base is behind it"
    service.cut()
    while service.archive.bases(1)[-1] < shown[1] + 4:
        service.append("d", 1, "disk")
        service.ship(0)
    service.cut()
    while service.archive.base(1, service.archive.bases(1)[-1])[0].first_piece <= shown[1] + 1:
        service.append("d", 1, "disk")
        service.ship(0)
    assert service.archive.bases(1)[-1] > last
    if promotes:
        service.take_over([])
        assert service.former is not None
    else:
        for _ in range(8):
            service.world.clock.ms += 20_000
            service.follow([])
        assert rig.shown == max(service.moments)
    service.bucket.objects[name] = whole


def test_a_follower_reads_no_files_of_a_base_that_needs_a_damaged_piece(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each try, every ten seconds, it read all indexes of the base before it met the piece."""
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    rig = service.follower
    assert rig is not None
    shown = rig.shown
    assert shown is not None
    name, last = piece_name(1, shown[1] + 1), service.archive.bases(1)[-1]
    while service.archive.bases(1)[-1] == last:
        service.append("d", 1, "disk")
        service.ship(0)
    base, _ = service.archive.base(1, service.archive.bases(1)[-1])
    assert base.first_piece <= shown[1] < base.number
    assert base.files
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "changed")
    read: list[str] = []
    read_one = Archive.file
    monkeypatch.setattr(Archive, "file", lambda self, ref: (read.append(ref.name), read_one(self, ref))[1])
    with capture_logs() as logs:
        for _ in range(6):
            service.world.clock.ms += 20_000
            service.follow([])
    assert (rig.shown, read) == (shown, [])
    assert [line for line in logs if "the newest base cannot be taken" in line["event"]]
    service.bucket.objects[name] = whole
    for _ in range(3):
        service.follow([])
    assert rig.shown == max(service.moments)


@pytest.mark.parametrize("kind", ["index", "piece"])
def test_a_follower_keeps_what_it_has_if_no_newer_base_can_be_copied(service: Archiving, kind: str) -> None:
    """It gave up everything, and then the copy failed: the objects of bases alone were looked at before."""
    if kind == "index":
        stay_behind_a_hole(service, bases=3)
        bases = [service.archive.base(1, number)[0] for number in service.archive.bases(1)[1:]]
        names = {ref.name for base in bases for ref in base.files if ref.path.endswith(".idx")}
    else:
        follow_and_go_back(service)
        for _ in range(4):
            service.append("a", 1, "disk")
            service.ship(0)
        [number] = service.archive.bases(2)
        assert service.archive.last_piece(2, number) > number
        names = {piece_name(2, number)}
    rig = service.follower
    assert rig is not None
    first = rig.shown
    whole = {name: service.bucket.objects[name] for name in names}
    service.bucket.objects.update({name: harmed(whole[name], "changed") for name in names})
    for _ in range(6):
        service.world.clock.ms += 20_000
        service.follow([])
    assert rig.shown == first
    service.bucket.objects.update(whole)
    for _ in range(6):
        service.world.clock.ms += 20_000
        service.follow([])
    assert rig.shown == max(service.moments)


def test_a_follower_begins_with_an_older_base_if_an_index_is_damaged(service: Archiving) -> None:
    ship_bases(service)
    *older, last = service.archive.bases(1)
    names = {ref.name for number in older for ref in service.archive.base(1, number)[0].files}
    files = service.archive.base(1, last)[0].files
    name = next(ref.name for ref in files if ref.path.endswith(".idx") and ref.name not in names)
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "changed")
    for _ in range(6):
        service.world.clock.ms += 20_000
        service.follow([])
    assert service.follower is not None
    assert service.follower.shown == max(service.moments)
    service.bucket.objects[name] = whole


def test_the_moment_of_a_base_has_no_file_from_before_it(tmp_path: Path) -> None:
    """A stage went just before a base, without a change of the logs: the base was named by an old piece."""
    data_dir = str(tmp_path / "data")
    os.mkdir(data_dir)
    rig = Rig(data_dir)
    rig.append("t", b"1")
    archive = Archive(open_archive(FS, str(tmp_path / "archive")))
    shipper = shipper_of(rig, archive)
    shipper.base()
    Stages(data_dir, 3_600_000, lambda: 1 << 40).make("t", "txn", lay_out([(b"", b"", b'"staged"', b"")]))
    for number in range(2, 5):
        rig.append("t", b"%d" % number)
        shipper.ship()
    Compaction(rig).cut()
    shipper.ship()
    for path in Path(layout.stages_dir(data_dir)).iterdir():
        path.unlink()
    shipper.base()
    rig.shard.close()
    rig.close()
    base, _ = archive.base(1, archive.bases(1)[-1])
    piece, _ = archive.piece(1, base.number)
    assert all(file.piece >= base.first_piece for file in piece.txn)


def archiver_begins_beside_damage(service: Archiving) -> tuple[int, dict[str, bytes]]:
    """An archiver starts beside a damaged newest base, and makes another one, by which a piece becomes a moment. Return
    (its number, the whole base before it by its name).
    """
    name = base_name(1, service.archive.bases(1)[-1])
    whole = {name: service.bucket.objects[name]}
    service.bucket.objects[name] = harmed(whole[name], "cut")
    service.archiver_dies(0)
    service.append("a", 2, "archived")
    while base_name(1, service.archive.bases(1)[-1]) == name:
        service.ship(0)
    number = service.archive.bases(1)[-1]
    assert not service.archive.piece(1, number)[0].is_moment
    assert service.archive.last_piece(1, number) == number
    return number, whole


def promoted(service: Archiving) -> int:
    """Promote the follower; return the piece of the moment from which it leads."""
    rig = service.follower
    assert rig is not None
    rig.follower.ask_promotion()
    for _ in range(4):
        rig.follower.step()
        assert rig.follower.exit_code is None or rig.leads, "nothing is copied again"
        if rig.leads:
            break
    note = read_note(OsFileSystem(), rig.settings.data_dir)
    assert note is not None
    assert note.leads
    return note.piece


def test_a_promotion_beside_a_damaged_base_leads_from_what_was_acknowledged(service: Archiving) -> None:
    """It led from the moment before, without two records that counted as archived."""
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    number, whole = archiver_begins_beside_damage(service)
    acknowledged = service.leader.archived()
    assert promoted(service) == number
    assert acknowledged["a"].items() <= service.history[1, number]["a"].items()
    service.bucket.objects.update(whole)


def test_a_follower_shows_and_keeps_the_moment_of_a_base_that_is_damaged_by_now(service: Archiving) -> None:
    ship_bases(service)
    number, whole = archiver_begins_beside_damage(service)
    name = base_name(1, number)
    whole[name] = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole[name], "cut")
    for _ in range(5):
        service.follow([])
    assert service.follower is not None
    assert service.follower.shown == (1, number)
    assert promoted(service) == number
    service.bucket.objects.update(whole)


@pytest.mark.parametrize("behind", ["nothing", "part", "hole"])
def test_a_promotion_counts_a_base_that_came_after_its_piece(service: Archiving, behind: str) -> None:
    """The follower had passed the piece by: it was no moment yet."""
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    number, whole = archiver_begins_beside_damage(service)
    name = base_name(1, number)
    base = service.bucket.objects.pop(name)
    service.follow([])
    assert service.follower is not None
    assert service.follower.replica.laid_piece == number > service.follower.replica.note.piece
    service.bucket.objects[name] = base
    if behind != "nothing":
        piece, _ = service.archive.piece(1, number)
        first, *others = piece.ends
        file_no, offset = first.position.file_no, first.position.offset + 8 * (behind == "hole")
        ends = [replace(first, position=WalPosition(file_no, offset + 8), last_bytes=bytes(8)), *others]
        next_ = replace(piece, number=number + 1, parts=[LogPart(0, file_no, offset, 8)], ends=ends, txn=[])
        service.bucket.objects[piece_name(1, number + 1)] = encode(next_, [bytes(8)])
        service.follower.replica.step()
        assert service.follower.replica.has_hole == (behind == "hole")
    assert promoted(service) == number
    service.bucket.objects.update(whole)


def test_a_follower_says_once_that_the_newest_base_is_damaged(service: Archiving) -> None:
    """Every ten seconds it said that the archive cannot be followed, and it took every moment."""
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    assert service.follower is not None
    last = service.archive.bases(1)[-1]
    with capture_logs() as logs:
        while service.archive.bases(1)[-1] == last:
            service.append("d", 1, "disk")
            service.ship(0)
        name = base_name(1, service.archive.bases(1)[-1])
        whole = service.bucket.objects[name]
        service.bucket.objects[name] = harmed(whole, "cut")
        for _ in range(4):
            service.append("d", 1, "disk")
            service.world.clock.ms += 20_000
            service.leader.step(0)
            service.follow([])
    told = [line["event"] for line in logs if name in line.get("reason", "")]
    assert [line for line in told if "base cannot be taken" in line] == told
    assert len(told) == 1
    service.bucket.objects[name] = whole


@pytest.mark.parametrize("wanted", ["by nobody", "by command", "by itself"])
def test_a_follower_that_cannot_take_over_says_so(service: Archiving, wanted: str) -> None:
    """Nothing but its log told it, and no takeover by itself tried: each look at the damage counted as a sign."""
    rig = followed(service, takeover_after_ms="5000" if wanted == "by itself" else "0")
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    service.append("a", 1, "archived")
    service.ship(0)
    name = piece_name(1, service.archive.last_piece(1, 0))
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "cut")
    with capture_logs() as logs:
        if wanted == "by command":
            rig.follower.ask_promotion()
        for _ in range(3):
            rig.clock.ms += 4000
            rig.follower.step()
            if wanted == "by itself":
                assert not [line for line in logs if "cannot take over" in line["event"]], "the leader lives"
                service.append("a", 1, "disk")
                service.ship(0)
        assert cell.get("takeover_blocked") == 1
        rig.clock.ms += 5000
        rig.follower.step()  # sees the last piece
        rig.clock.ms += 5000
        for _ in range(3):
            rig.follower.step()
    told = [line for line in logs if "cannot take over" in line["event"]]
    assert [name in line["reason"] for line in told] == [True] * (wanted != "by nobody")
    assert bool(rig.replica.note.fence_id) == (wanted == "by command"), "the leader may come back"
    service.bucket.objects[name] = whole
    rig.follower.step()
    assert cell.get("takeover_blocked") == 0
    assert rig.leads == (wanted != "by nobody")


def test_a_leader_that_comes_back_leads_on_though_its_follower_was_blocked(service: Archiving) -> None:
    rig = followed(service, takeover_after_ms="5000")
    service.append("a", 1, "archived")
    service.ship(0)
    name = piece_name(1, service.archive.last_piece(1, 0))
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "cut")
    for _ in range(3):
        rig.clock.ms += 6000
        rig.follower.step()
    service.append("a", 1, "archived")
    service.ship(0)
    service.bucket.objects[name] = whole
    for _ in range(2):
        rig.clock.ms += 3000
        rig.follower.step()
        assert not rig.replica.note.fence_id
    rig.clock.ms += 3000
    rig.follower.step()
    assert rig.leads
