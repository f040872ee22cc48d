"""Damage in the newest base of an archive: an older base and the pieces behind it give the very same moment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.archive.archiving import HARMS, harmed
from tests.archive.services import COMMAND, run
from tests.archive.test_borrowing import FS, ship
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive.inspection import prune
from topics.archive.restoring import WantedMoment, plan
from topics.shm.topic_messages import DeleteRecords
from topics.storage.archive_objects import Archive, ArchiveDamagedError, FileRef, base_name, open_archive, piece_name
from topics.storage.borrowed import read_borrowed


class Based:
    """A service with sealed segments, and its archive with three bases. Before each base it got ten records, and lost
    one that an older base has.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = root / "archive"
        self.archive = Archive(open_archive(FS, str(self.place)))
        (root / "data").mkdir()
        for life in range(3):
            rig = Rig(str(root / "data"), segment_max_events="4")
            rig.clock.ms += life * 100_000
            rig.append("t", *(b"%d" % number for number in range(10 * life, 10 * life + 10)), tag=b"t%d" % life)
            Compaction(rig).cut()
            rig.delete(DeleteRecords("t", 3 * life + 1, None, b""))
            self.expected = dict(Compaction(rig).read("t"))
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
    for option in ("--copy", "--take-over", f"--to-ts={based.clock.ms}", "--to-seq=t=30"):
        problem = run("restore", based.place, "--data-dir", data_dir, option, code=1)
        assert f"{damaged}: checksum does not match; no older base" in problem, option
        assert "put it back from a copy" in problem
    assert not based.archive.has_piece(1, based.last + 1), "the former service is not shut out"
    first_ms = based.archive.piece(1, based.first)[0].taken_ms
    assert plan(based.archive, WantedMoment(ts_ms=first_ms)).base.number == based.first


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
