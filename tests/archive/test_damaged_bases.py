"""Damage in the newest base of an archive: an older base and the pieces behind it give the very same moment."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.archive.archiving import HARMS, harmed
from tests.archive.services import COMMAND, run
from tests.archive.shippers import shipper_of
from tests.archive.test_borrowing import FS, ship
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive import shipping
from topics.archive.inspection import check, prune
from topics.archive.restoring import NotThereError, Restore, WantedMoment, last_whole_ms, plan
from topics.core.clock import iso
from topics.shm.topic_messages import DeleteRecords
from topics.storage.archive_objects import Archive, ArchiveDamagedError, FileRef, base_name, open_archive, piece_name
from topics.storage.borrowed import read_borrowed
from topics.storage.filesystem import OsFileSystem


class Based:
    """A service with sealed segments, and its archive with three bases. Before each base it got ten records, and lost
    one that an older base has.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = root / "archive"
        self.archive = Archive(open_archive(FS, str(self.place)))
        (root / "data").mkdir()
        self.at_first: dict[int, bytes] = {}
        for life in range(3):
            rig = Rig(str(root / "data"), segment_max_events="4")
            rig.clock.ms += life * 100_000
            rig.append("t", *(b"%d" % number for number in range(10 * life, 10 * life + 10)), tag=b"t%d" % life)
            Compaction(rig).cut()
            rig.delete(DeleteRecords("t", 3 * life + 1, None, b""))
            self.expected = dict(Compaction(rig).read("t"))
            self.at_first = self.at_first or self.expected
            ship(rig, self.archive)
        self.clock = rig.clock
        self.first, self.second, self.last = self.archive.bases(1)

    def damage(self, name: str, harm: str = "changed") -> Path:
        path = Path(self.archive.store.place(name))
        path.write_bytes(harmed(path.read_bytes(), harm))
        return path

    def own_index(self, number: int) -> str:
        """Return the name of an index that this base has and no older one."""
        older = {ref.name for base in self.archive.bases(1) if base < number for ref in self._files(base)}
        return next(ref.name for ref in self._files(number) if ref.path.endswith(".idx") and ref.name not in older)

    def _files(self, number: int) -> list[FileRef]:
        return list(self.archive.base(1, number)[0].files)

    def restored(self, *options: object) -> tuple[dict[int, bytes], str]:
        """Restore with the command; return (records, what it said on stderr)."""
        data_dir = self.root / "restored"
        command = [COMMAND, "restore", self.place, "--data-dir", data_dir, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        rig = Rig(str(data_dir))
        try:
            return dict(Compaction(rig).read("t")), done.stderr
        finally:
            rig.close()


class BadSectors(OsFileSystem):
    """A disk that cannot read some files, and is all right otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: set[str] = set()
        self.bad_once: set[str] = set()

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        if (path := os.readlink(f"/proc/self/fd/{fd}")) in self.bad:
            self.bad -= {path} & self.bad_once
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, length, offset)


@pytest.fixture
def based(tmp_path: Path) -> Based:
    return Based(tmp_path)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("option", ["--copy", "--take-over", ""])
def test_an_older_base_gives_the_moment_of_a_damaged_newest_one(based: Based, harm: str, option: str) -> None:
    """The restore was refused, though everything was there."""
    whole = Path(based.archive.store.place(base_name(1, based.last))).read_bytes()
    damaged = based.damage(base_name(1, based.last), harm)
    found, told = based.restored(*([option] if option else []))
    assert found == based.expected
    assert str(damaged) in told
    assert f"base={based.second}" in told, "it says which one was used"
    borrowed = read_borrowed(FS, str(based.root / "restored"))
    assert (borrowed is None) == (option == "--copy")
    if borrowed is not None:
        assert list(based.archive.loans(1)) == [based.second]
        prune(based.archive, based.clock.ms + 1)
        assert based.archive.bases(1) == [based.second, based.last]
    assert str(damaged) in run("archive", "verify", based.place, code=1)
    if borrowed is not None:
        damaged.write_bytes(whole)
        assert prune(based.archive, based.clock.ms + 1).loans == [borrowed.loan]
        assert all(based.archive.file(ref) for ref in borrowed.files)


@pytest.mark.parametrize("kind", [".idx", "base"])
def test_so_it_does_if_all_newer_ones_are_damaged(based: Based, kind: str) -> None:
    numbers = based.second, based.last
    name_of = based.own_index if kind == ".idx" else lambda number: base_name(1, number)
    damaged = [str(based.damage(name)) for name in map(name_of, numbers)]
    found, told = based.restored("--copy")
    assert found == based.expected
    assert any(path in told for path in damaged)
    assert f"base={based.first}" in told


def test_a_time_or_a_record_behind_a_damaged_base_is_reached_from_the_one_before(based: Based) -> None:
    wanted = [WantedMoment(ts_ms=based.archive.piece(1, number)[0].taken_ms) for number in (based.first, based.second)]
    wanted += [WantedMoment(topic="t", seq=seq) for seq in (10, 11, 20, 21, 30)]
    whole = [plan(based.archive, one).moment.number for one in wanted]
    based.damage(base_name(1, based.second))
    found = [plan(based.archive, one) for one in wanted]
    assert [one.moment.number for one in found] == whole
    assert {one.base.number for one in found if one.damage is not None} == {based.first}
    based.damage(base_name(1, based.last))
    assert [plan(based.archive, one).moment.number for one in wanted] == whole


def test_a_moment_that_no_older_base_reaches_is_refused(based: Based) -> None:
    damaged, data_dir = based.damage(base_name(1, based.last)), based.root / "restored"
    Path(based.archive.store.place(piece_name(1, based.last - 1))).rename(based.root / "away")
    first_ms = based.archive.piece(1, based.first)[0].taken_ms
    for option in ("--copy", "--take-over", f"--to-ts={based.clock.ms}", "--to-seq=t=30"):
        problem = run("restore", based.place, "--data-dir", data_dir, option, code=1)
        assert f"{damaged}: checksum does not match; no older base" in problem, option
        assert "put it back from a copy" in problem
        instead = " instead of --take-over, once the former service is stopped" if option == "--take-over" else ""
        way_out = f"; or restore an earlier moment, with --to-ts {iso(first_ms)}{instead}\n"
        assert problem.endswith(way_out) == ("--to-seq" not in option), option
    assert not based.archive.has_piece(1, based.last + 1), "the former service is not shut out"
    assert plan(based.archive, WantedMoment(ts_ms=first_ms)).base.number == based.first
    assert based.restored(f"--to-ts={iso(first_ms)}")[0] == based.at_first


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_last_moment_before_a_damaged_piece_is_named_and_restored(tmp_path: Path, at: int) -> None:
    """Nothing named it, and `--to-ts` met the damaged piece where it looked for the moment."""
    rig, archive = Rig(str(tmp_path / "data")), Archive(open_archive(FS, str(tmp_path / "archive")))
    rig.append("t", b"0")
    shipper = shipper_of(rig, archive)
    shipper.base()
    [base] = archive.bases(1)
    for number in range(1, 4):
        rig.clock.ms += 1000
        rig.append("t", b"%d" % number)
        shipper.ship()
    taken = [archive.piece(1, base + number)[0].taken_ms for number in range(4)]
    name = piece_name(1, base + at)
    path = Path(archive.store.place(name))
    path.write_bytes(harmed(path.read_bytes(), "changed"))
    rig.shard.close()
    rig.close()
    way_out = f"; or restore an earlier moment, with --to-ts {iso(taken[at - 1])}"
    place, data_dir = tmp_path / "archive", tmp_path / "restored"
    for options in ([], [f"--to-ts={taken[-1]}"], [f"--to-ts={taken[at]}"], [f"--to-ts={taken[at] - 1}"]):
        problem = run("restore", place, "--data-dir", data_dir, *options, code=1)
        assert f"{path}: checksum does not match" in problem
        assert way_out in problem
    for number in range(at):
        found = plan(archive, WantedMoment(ts_ms=taken[number]))
        assert found.moment.number == base + number
    run("restore", place, "--data-dir", data_dir, f"--to-ts={iso(taken[at - 1])}")
    restored = Rig(str(data_dir))
    assert dict(Compaction(restored).read("t")) == {number + 1: b"%d" % number for number in range(at)}
    restored.close()


def test_a_part_of_a_moment_is_no_moment_before_its_damaged_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces of a long moment have its time: the one before was restored instead, without a word."""
    monkeypatch.setattr(shipping, "PIECE_BYTES", 1)
    rig, archive = Rig(str(tmp_path / "data")), Archive(open_archive(FS, str(tmp_path / "archive")))
    rig.append("t", b"0")
    shipper = shipper_of(rig, archive)
    shipper.base()
    [base] = archive.bases(1)
    rig.clock.ms += 1000
    for number in range(1, 6):
        rig.append("t", b"%d" % number)
    shipper.ship()
    last = archive.last_piece(1, base)
    pieces = [archive.piece(1, number)[0] for number in range(base + 1, last + 1)]
    assert [piece.is_moment for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len({piece.taken_ms for piece in pieces}) == 1 < len(pieces)
    (path := Path(archive.store.place(piece_name(1, last)))).write_bytes(b"cut")
    wanted = WantedMoment(ts_ms=pieces[0].taken_ms)
    with pytest.raises(ArchiveDamagedError, match=str(path)):
        plan(archive, wanted)
    first_ms = archive.piece(1, base)[0].taken_ms
    assert last_whole_ms(archive, None) == last_whole_ms(archive, pieces[0].taken_ms) == first_ms
    assert last_whole_ms(archive, first_ms - 1) is None
    rig.shard.close()
    rig.close()


def test_a_damaged_only_base_of_a_generation_is_no_reason_for_the_moment_before(based: Based) -> None:
    based.damage(base_name(1, based.first))
    damaged = based.damage(base_name(1, based.second))
    based.damage(base_name(1, based.last))
    with pytest.raises(ArchiveDamagedError, match=f"{base_name(1, based.last)}: .*; no older base"):
        plan(based.archive, WantedMoment())
    with pytest.raises(ArchiveDamagedError, match=str(damaged)):
        plan(based.archive, WantedMoment(ts_ms=based.archive.piece(1, based.second)[0].taken_ms))


def test_what_a_restore_had_made_from_a_damaged_base_is_gone(based: Based) -> None:
    """The next one begins from nothing: no file and no loan of the base before is left."""
    based.damage(based.own_index(based.last))
    found, told = based.restored()
    assert found == based.expected
    assert f"base={based.second}" in told
    assert list(based.archive.loans(1)) == [based.second]
    assert not (based.root / "restored.restoring").exists()


@pytest.mark.parametrize("kind", [".idx", "base"])
def test_an_object_in_a_bad_place_of_the_disk_is_a_damaged_one(based: Based, kind: str) -> None:
    """Each command that met it said that the store does not answer: try again. An older base was whole."""
    disk = BadSectors()
    archive = Archive(open_archive(disk, str(based.place)))
    name = based.own_index(based.last) if kind == ".idx" else base_name(1, based.last)
    disk.bad.add(path := archive.store.place(name))
    if kind == ".idx":
        with pytest.raises(ArchiveDamagedError, match="its disk cannot read it"):
            Restore(archive, plan(archive, WantedMoment()), FS, str(based.root / "other"), lambda *_: None).run(
                based.clock
            )
    found = plan(archive, WantedMoment())
    assert found.base.number == based.second
    assert f"{path}: its disk cannot read it" in str(found.damage)
    assert [path in problem for problem in check(archive, lambda *_: None)] == [True]


def test_verify_notices_a_piece_that_is_missing_before_others(tmp_path: Path) -> None:
    """It took the piece before it for the last one, as a restore does, and said that all is whole."""
    rig, archive = Rig(str(tmp_path / "data")), Archive(open_archive(FS, str(tmp_path / "archive")))
    rig.append("t", b"0")
    shipper = shipper_of(rig, archive)
    shipper.base()
    for number in range(3):
        rig.append("t", b"%d" % number)
        shipper.ship()
    [base] = archive.bases(1)
    (path := Path(archive.store.place(piece_name(1, base + 1)))).unlink()
    assert archive.last_piece(1, base) == base
    assert f"{path}: is missing" in check(archive, lambda *_: None)
    rig.shard.close()
    rig.close()


@pytest.mark.parametrize("starts_again", [False, True])
def test_behind_a_base_in_a_bad_place_of_the_disk_another_one_is_made(based: Based, starts_again: bool) -> None:
    """There was none: the disk's error counted as one of the whole archive, into which nothing was shipped any more
    after a start.
    """
    disk, rig = BadSectors(), Rig(str(based.root / "data"), segment_max_events="4")
    archive = Archive(open_archive(disk, str(based.place)))
    shipper = shipper_of(rig, archive)
    assert shipper.is_based
    based.place.rename(away := based.root / "away")
    with pytest.raises(OSError, match="is missing"):
        shipper.look_at_base()
    assert shipper.is_based, "a store that is away is not damaged"
    assert not shipper.lacks_base
    away.rename(based.place)
    disk.bad.add(archive.store.place(base_name(1, based.last)))
    if starts_again:
        shipper = shipper_of(rig, archive)
    else:
        shipper.look_at_base()
    assert shipper.lacks_base
    shipper.base()
    assert not shipper.lacks_base
    newest = archive.bases(1)[-1]
    assert newest > based.last
    assert plan(archive, WantedMoment()).base.number == newest
    rig.shard.close()
    rig.close()


def test_a_time_before_a_base_that_is_damaged_with_its_piece_is_found(based: Based) -> None:
    """The restore was refused: nothing told the time of that base."""
    archive, taken_ms = based.archive, based.archive.base(1, based.second)[0].taken_ms
    for name in (base_name(1, based.last), piece_name(1, based.last)):
        based.damage(name)
    assert plan(archive, WantedMoment(ts_ms=taken_ms)).base.number == based.second
    with pytest.raises(NotThereError, match="is before the first moment"):
        plan(archive, WantedMoment(ts_ms=1))
    with pytest.raises(ArchiveDamagedError, match=piece_name(1, based.last)):
        plan(archive, WantedMoment(ts_ms=based.clock.ms))
    for name in (base_name(1, based.first), piece_name(1, based.first)):
        based.damage(name)
    assert plan(archive, WantedMoment(ts_ms=taken_ms)).base.number == based.second
    with pytest.raises(ArchiveDamagedError, match=piece_name(1, based.first)):
        plan(archive, WantedMoment(ts_ms=1))


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_a_backup_makes_a_base_behind_any_damaged_pieces(tmp_path: Path, in_a_row: int) -> None:
    """It was refused if it looked for the begin of its logs just there."""
    (tmp_path / "data").mkdir()
    rig = Rig(str(tmp_path / "data"))
    shipper = shipper_of(rig, Archive(open_archive(FS, str(tmp_path / "archive"))))
    shipper.base()
    for number in range(8):
        rig.append("t", b"%d" % number)
        last = shipper.ship().piece
    rig.append("t", b"behind")
    Compaction(rig).cut()
    rig.append("t", b"last")
    for number in range(2, last - in_a_row + 1):
        shutil.copytree(tmp_path / "archive", tmp_path / f"archive-{number}")
        archive = Archive(open_archive(FS, str(tmp_path / f"archive-{number}")))
        for damaged in range(number, number + in_a_row):
            path = Path(archive.store.place(piece_name(1, damaged)))
            path.write_bytes(harmed(path.read_bytes(), "cut"))
        made = shipper_of(rig, archive).base().piece
        found = plan(archive, WantedMoment())
        assert found.base.number == found.moment.number == made
        assert all(archive.piece(1, number) for number in found.pieces)
    rig.shard.close()
    rig.close()


def test_a_base_that_a_disk_fails_to_read_once_leaves_no_files_behind(based: Based) -> None:
    """It was pruned without its list of files, which stayed as long as their generation."""
    disk = BadSectors()
    archive = Archive(open_archive(disk, str(based.place)))
    for number in (based.first, based.second):
        disk.bad.add(archive.store.place(base_name(1, number)))
    disk.bad_once = set(disk.bad)
    pruned = prune(archive, based.clock.ms + 1)
    assert (pruned.bases, pruned.damaged, disk.bad) == (2, [], set())
    assert archive.bases(1) == [based.last]
    assert set(archive.store.list("g00000001.files/")) == {ref.name for ref in archive.base(1, based.last)[0].files}
    assert pruned.files


def test_files_in_a_bad_place_of_the_disk_are_put_beside(tmp_path: Path) -> None:
    """No base could be made any more, since each try met what one before, that was killed, had put there."""
    disk, rig = BadSectors(), Rig(str(tmp_path), segment_max_events="4")
    archive = Archive(open_archive(disk, str(tmp_path / "archive")))
    rig.append("t", *(b"%d" % number for number in range(10)), tag=b"t")
    Compaction(rig).cut()
    rig.append("t", b"behind the snapshot")
    shipper = shipper_of(rig, archive)
    shipper.begin_base().copy()
    disk.bad |= (bad := {archive.store.place(name) for name in archive.store.list("g00000001.files/")})
    assert bad
    shipper.base()
    found = plan(archive, WantedMoment())
    assert all(archive.file(ref) for ref in found.base.files)
    rig.shard.close()
    rig.close()
