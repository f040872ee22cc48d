"""A restored service that reads data in the archive until it has them: nothing is lost, nothing deleted comes back,
whatever is deleted, dies or is away meanwhile. Real shards, the real compactor and restore, an archive in a folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from tests.archive.shippers import shipper_of
from tests.harness import poll
from tests.storage.faults import FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive import directory_copy
from topics.archive.inspection import Pruned, check, prune
from topics.archive.restoring import Restore, Restored, WantedMoment, plan
from topics.core.segment_list import COLD
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage import kill_points, layout
from topics.storage.archive_objects import Archive, ArchiveDamagedError, loan_name, open_archive
from topics.storage.borrowed import open_cold, read_borrowed
from topics.storage.filesystem import OsFileSystem
from topics.storage.kill_points import KillPoint
from topics.storage.segment_check import DamageFinding
from topics.storage.segment_store import LocalStore
from topics.storage.verify import verify

EVENTS = 8
"""Records in a segment."""
SEGMENTS = 4
RETRY_MS = 160_000
"""The longest pause after a failure of the archive."""
FS = OsFileSystem()


def ship(rig: Rig, archive: Archive) -> None:
    """Back up a service, which ends then."""
    shipper_of(rig, archive).base()
    rig.shard.close()
    rig.close()


@pytest.fixture(autouse=True, scope="module")
def small_gaps() -> Iterator[None]:
    """The gap behind a restored topic is short: each of its seqs takes an entry, and the tests' reader takes it up."""
    with patch.object(directory_copy, "LOST_SEQS_MAX", 200):
        yield


class Borrowing:
    """A service restored from the archive of another one, which had SEGMENTS segments and an active one, and had
    deleted records before and behind its snapshot. Each third record has the tag "third", the others "odd" or "even".
    """

    def __init__(self, root: Path, *, cold: bool = False) -> None:
        self.root, self.place = root, root / "archive"
        self.data_dir = str(root / "restored")
        self.live: dict[int, tuple[int, str]] = {}
        """Number and tag of each live record, by seq."""
        self.written = 0
        self.cold_dir = root / "cold" if cold else None
        self._ship()
        self.restored = self.restore()
        self.rig = self._rig(self.data_dir, **({"cold_dir": str(self.cold_dir)} if cold else {}))
        self.compaction = Compaction(self.rig)

    def _rig(self, data_dir: str, **more: str) -> Rig:
        os.makedirs(data_dir, exist_ok=True)
        more |= {"segment_max_events": str(EVENTS), "hot_retain_segments": "1"}
        return Rig(data_dir, FaultyFileSystem(), 1, **more)

    def _ship(self) -> None:
        self.rig = self._rig(str(self.root / "origin"))
        compaction = Compaction(self.rig)
        self.write(EVENTS * SEGMENTS + 3)
        self.delete("third")
        compaction.cut()
        self.delete_before(EVENTS // 2)
        self.write(2)
        ship(self.rig, self.archive)

    @property
    def archive(self) -> Archive:
        return Archive(open_archive(FS, str(self.place)))

    def restore(self, data_dir: str | None = None, lender: str | None = "") -> Restored:
        found = plan(self.archive, WantedMoment())
        lender = str(self.place) if lender == "" else lender
        return Restore(self.archive, found, FS, data_dir or self.data_dir, lambda *_: None, lender).run(self.rig.clock)

    # -- clients

    def write(self, count: int) -> None:
        for _ in range(count):
            self.written += 1
            tag = "odd" if self.written % 2 else "even"
            tag = tag if self.written % 3 else "third"
            seq = self.rig.append("t", b"%d" % self.written, tag=tag.encode()).first_seq
            self.live[seq] = self.written, tag

    def delete(self, tag: str) -> None:
        self.rig.call(DeleteRecords("t", None, "eq", tag.encode()))
        self.live = {seq: record for seq, record in self.live.items() if record[1] != tag}

    def delete_before(self, seq: int) -> None:
        self.rig.call(DeleteRecords("t", seq, None, b""))
        self.live = {one: record for one, record in self.live.items() if one >= seq}

    # -- what happens

    def go_on(self) -> None:
        """Upkeep and a cut, later than any pause."""
        self.rig.clock.ms += RETRY_MS
        with suppress(OSError):  # the process logs it and goes on
            self.compaction.upkeep()
        self.compaction.cut()

    def die(self) -> None:
        """All processes are killed; the service starts again."""
        self.rig.restart_service()
        self.compaction.begin_again()

    def all_home(self) -> None:
        def is_home() -> bool:
            self.go_on()
            return read_borrowed(FS, self.data_dir) is None

        poll("all data to be home", is_home, 20.0)

    # -- what must hold

    def borrowed(self) -> list[int]:
        """First seqs of the segments whose data are still in the archive."""
        note = read_borrowed(FS, self.data_dir)
        if note is None:
            return []
        topic = f"{self.rig.hosted('t').topic.id:016x}"
        infos = self.compaction.segments("t")
        versions = {(info.first_seq, info.version) for info in infos if info.flags & COLD}
        return sorted(
            first
            for first, version in versions
            if f"{topic}/seg-{first:020d}{f'.{version}' if version else ''}.data" in note.names()
        )

    def check(self) -> None:
        found = {seq: int(data) for seq, data in self.compaction.read("t")}
        assert found == {seq: number for seq, (number, _) in self.live.items()}

    def close(self) -> None:
        kill_points.arm(None, lambda: None)
        self.rig.shard.close()
        self.rig.close()
        cold = None if self.cold_dir is None else str(self.cold_dir)
        assert verify(self.data_dir, lambda *_: None, cold).damage == []


@pytest.fixture
def borrowing(tmp_path: Path) -> Iterator[Borrowing]:
    made = Borrowing(tmp_path)
    yield made
    made.close()


def local_data(data_dir: str) -> list[str]:
    return sorted(path.name for path in Path(data_dir, "topics").rglob("*.data"))


def test_a_restore_fetches_no_data_of_sealed_segments(borrowing: Borrowing, tmp_path: Path) -> None:
    done = borrowing.restored
    assert done.borrowed_segments == SEGMENTS
    assert done.borrowed_bytes > 0
    assert len(local_data(borrowing.data_dir)) == 1, "the active segment, which is appended to"
    assert len(list(Path(borrowing.data_dir, "topics").rglob("*.tags"))) == SEGMENTS
    whole = borrowing.restore(str(tmp_path / "whole"), None)
    assert (whole.borrowed_segments, whole.borrowed_bytes) == (0, 0)
    assert whole.size_bytes == done.size_bytes + done.borrowed_bytes
    assert len(local_data(str(tmp_path / "whole"))) == SEGMENTS + 1
    assert read_borrowed(FS, str(tmp_path / "whole")) is None


def test_records_are_read_in_the_archive_until_they_are_home(borrowing: Borrowing) -> None:
    borrowing.check()
    assert len(borrowing.borrowed()) == SEGMENTS
    borrowing.write(EVENTS)
    borrowing.check()
    borrowing.all_home()
    borrowing.check()
    assert borrowing.borrowed() == []
    shutil.rmtree(borrowing.place)
    borrowing.check()
    borrowing.die()
    borrowing.check()


def test_the_compactor_tells_how_much_is_left(borrowing: Borrowing) -> None:
    cell = borrowing.compaction.life.cell
    left: list[tuple[int, int]] = []
    while read_borrowed(FS, borrowing.data_dir) is not None:
        borrowing.rig.clock.ms += 1000
        borrowing.compaction.compactor.upkeep()
        left.append((cell.get("segments_borrowed"), cell.get("borrowed_bytes")))
        if not left[-1][0]:
            borrowing.compaction.cut()
    assert left[0] == (SEGMENTS, borrowing.restored.borrowed_bytes)
    assert left[-1] == (0, 0)
    assert len(set(left)) > 2, "one after the other comes home"
    assert left == sorted(left, reverse=True)


def test_what_is_deleted_while_it_is_borrowed_stays_deleted(borrowing: Borrowing) -> None:
    borrowing.delete("odd")
    borrowing.check()
    borrowing.die()
    borrowing.check()
    borrowing.delete_before(EVENTS + 3)
    borrowing.compaction.cut()
    borrowing.check()
    borrowing.all_home()
    borrowing.check()


@pytest.mark.parametrize("point", ["rewrite.fetched", "rewrite.copied", "rewrite.synced", "rewrite.marked"])
def test_what_is_deleted_while_it_comes_home_stays_deleted(borrowing: Borrowing, point: KillPoint) -> None:
    def delete() -> None:
        kill_points.arm(None, lambda: None)
        borrowing.delete("odd")
        borrowing.write(1)

    kill_points.arm(point, delete)
    borrowing.all_home()
    borrowing.check()
    borrowing.die()
    borrowing.check()


class Killed(BaseException):
    """The process is gone."""


def killed() -> None:
    kill_points.arm(None, lambda: None)
    raise Killed


@pytest.mark.parametrize("point", ["rewrite.fetched", "rewrite.copied", "rewrite.synced", "rewrite.marked"])
def test_a_kill_while_data_come_home_loses_nothing(borrowing: Borrowing, point: KillPoint) -> None:
    for _ in range(SEGMENTS):
        kill_points.arm(point, killed)
        with pytest.raises(Killed):
            borrowing.all_home()
        borrowing.die()
        borrowing.check()
        if not borrowing.borrowed():
            break
    borrowing.all_home()
    borrowing.check()


def test_an_archive_that_is_away_is_waited_for(borrowing: Borrowing) -> None:
    away = borrowing.place.rename(borrowing.root / "away")
    for _ in range(3):
        borrowing.go_on()
    assert len(borrowing.borrowed()) == SEGMENTS
    borrowing.write(EVENTS)
    borrowing.delete("even")
    borrowing.compaction.cut()
    cold = open_cold(FS, borrowing.data_dir, None)
    assert cold is not None
    note = read_borrowed(FS, borrowing.data_dir)
    assert note is not None
    for name, own in note.names().items():
        with pytest.raises(FileNotFoundError) as error:
            cold.read_range(name, 0, 1)
        assert str(borrowing.place / "archive" / own) in str(error.value), "the error names the object"
    away.rename(borrowing.place)
    borrowing.check()
    borrowing.all_home()
    borrowing.check()


def test_an_object_that_is_gone_keeps_its_segment_borrowed_and_no_other(borrowing: Borrowing) -> None:
    note = read_borrowed(FS, borrowing.data_dir)
    assert note is not None
    gone = next(ref for ref in note.files if ref.path.endswith(".data"))
    (borrowing.place / "archive" / gone.name).rename(borrowing.root / "kept")
    for _ in range(SEGMENTS + 3):
        borrowing.go_on()
    assert len(borrowing.borrowed()) == 1
    found = verify_offline(borrowing)
    assert [finding.path for finding in found] == [str(borrowing.place / "archive" / gone.name)]
    (borrowing.root / "kept").rename(borrowing.place / "archive" / gone.name)
    borrowing.all_home()
    borrowing.check()


def verify_offline(borrowing: Borrowing) -> list[DamageFinding]:
    copy = borrowing.root / "copy"
    shutil.copytree(borrowing.data_dir, copy)
    return list(verify(str(copy), lambda *_: None).damage)


def ship_more(borrowing: Borrowing, before_seq: int = 1) -> int:
    """Have one more base in the archive, without records before `before_seq`; return a time after it."""
    rig = Rig(str(borrowing.root / "origin"), FaultyFileSystem(), segment_max_events=str(EVENTS))
    rig.call(DeleteRecords("t", before_seq, None, b""))
    rig.append("t", *[b'"later"'] * (3 * EVENTS))
    Compaction(rig).cut()
    rig.clock.ms += 100_000
    ship(rig, borrowing.archive)
    return rig.clock.ms + 1


def test_a_loan_keeps_the_archive_from_being_pruned(borrowing: Borrowing) -> None:
    base = plan(borrowing.archive, WantedMoment()).base.number
    [(lent, loan)] = borrowing.archive.loans(1).items()
    assert lent == base
    before_ms = ship_more(borrowing)
    assert len(borrowing.archive.bases(1)) == 2
    kept = prune(borrowing.archive, before_ms)
    assert (kept.bases, kept.files, kept.loans) == (0, 0, [loan])
    assert borrowing.archive.removals(1) == [], "nothing waits"
    assert check(borrowing.archive, lambda *_: None) == []
    borrowing.check()
    borrowing.all_home()
    assert borrowing.archive.loans(1) == {}
    removed = prune(borrowing.archive, before_ms)
    assert (removed.bases, removed.loans) == (1, [])
    assert check(borrowing.archive, lambda *_: None) == []
    borrowing.check()


def test_what_a_loan_does_not_need_goes_beside_it(borrowing: Borrowing) -> None:
    """The plan of a pruning leaves out what is lent. A removal that named that would wait, with all that is older."""
    borrowing.all_home()
    ship_more(borrowing, 2 * EVENTS)
    lent = str(borrowing.root / "lent")
    borrowing.restore(lent)
    before_ms = ship_more(borrowing, 3 * EVENTS)
    archive = borrowing.archive
    _, second, third = archive.bases(1)
    [(base, loan)] = archive.loans(1).items()
    assert base == second
    removed = prune(archive, before_ms)
    assert (removed.bases, removed.loans) == (1, [loan])
    assert removed.pieces > 0
    assert removed.files > 0
    assert archive.bases(1) == [second, third]
    assert archive.removals(1) == [], "nothing waits"
    assert prune(archive, before_ms) == Pruned(loans=[loan])
    note = read_borrowed(FS, lent)
    assert note is not None
    assert {ref.name for ref in note.files} <= set(archive.store.list("g00000001.files/"))
    assert check(archive, lambda *_: None) == []
    assert verify(lent, lambda *_: None).damage == []
    archive.end_loan(loan)
    ended = prune(archive, before_ms)
    assert (ended.bases, ended.loans) == (1, [])
    assert ended.files > 0


@pytest.mark.parametrize("arrives", ["soon", "after it was ended"])
def test_a_loan_that_arrives_late_keeps_nothing(
    borrowing: Borrowing, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    """The restore was refused, as nobody could know that. Its loan kept the archive from being pruned for good."""
    borrowing.all_home()
    late: list[tuple[str, bytes]] = []
    create, exists = LocalStore.create, LocalStore.exists

    def give_up(store: LocalStore, name: str, content: bytes) -> bool:
        if late:
            return create(store, name, content)
        late.append((name, content))
        raise TimeoutError(errno.ETIMEDOUT, "timed out", name)

    def look(store: LocalStore, name: str) -> bool:
        is_there = exists(store, name)
        if arrives == "soon" and late and name == late[0][0]:
            assert create(store, *late[0])  # just behind the look
        return is_there

    monkeypatch.setattr(LocalStore, "create", give_up)
    monkeypatch.setattr(LocalStore, "exists", look)
    target = str(borrowing.root / "other")
    with pytest.raises(TimeoutError, match="restore with --copy"):
        borrowing.restore(target)
    monkeypatch.undo()
    assert not os.path.exists(f"{target}.restoring")
    archive = borrowing.archive
    if arrives != "soon":
        assert archive.store.create(*late[0])
    assert archive.store.exists(late[0][0])
    assert archive.loans(1) == {}
    removed = prune(archive, ship_more(borrowing))
    assert (removed.bases, removed.loans) == (1, [])
    borrowing.restore(target)
    assert len(archive.loans(1)) == 1, "the next loan counts"


def test_a_pruning_that_meets_a_new_loan_waits_for_its_end(borrowing: Borrowing) -> None:
    """The base is gone by then, but the restore has seen it, and needs everything else."""
    borrowing.all_home()
    archive, before_ms = borrowing.archive, ship_more(borrowing)
    older, _ = archive.bases(1)
    loan = loan_name(1, older)

    def lend(done: int, _total: int) -> None:
        if done == 1:
            archive.store.create(loan, b"somebody")

    rest = [*archive.store.list("g00000001.pieces/"), *archive.store.list("g00000001.files/")]
    met = prune(archive, before_ms, lend)
    assert (met.bases, met.pieces, met.files, met.loans) == (1, 0, 0, [loan])
    again = prune(archive, before_ms)
    assert (again.bases, again.pieces, again.files, again.loans) == (0, 0, 0, [loan])
    assert [*archive.store.list("g00000001.pieces/"), *archive.store.list("g00000001.files/")] == rest
    archive.store.delete(loan)
    ended = prune(archive, before_ms)
    assert ended.pieces > 0
    assert ended.loans == []
    assert archive.removals(1) == []
    assert check(archive, lambda *_: None) == []


def test_a_base_that_is_pruned_before_the_loan_is_missed_by_the_restore(tmp_path: Path) -> None:
    borrowing = Borrowing(tmp_path)
    borrowing.all_home()
    found = plan(borrowing.archive, WantedMoment())
    borrowing.archive.store.delete(f"g00000001.bases/{found.base.number:012d}")
    target = str(tmp_path / "late")
    with pytest.raises(ArchiveDamagedError, match=r"bases/.* is missing"):
        Restore(borrowing.archive, found, FS, target, lambda *_: None, str(borrowing.place)).run(borrowing.rig.clock)
    assert borrowing.archive.loans(1) == {}
    assert not os.path.exists(target)
    borrowing.close()


def test_an_incomplete_archive_is_refused_before_anything_is_fetched(borrowing: Borrowing) -> None:
    note = read_borrowed(FS, borrowing.data_dir)
    assert note is not None
    gone = next(ref for ref in note.files if ref.path.endswith(".data"))
    content = borrowing.archive.store.read_range(gone.name, 0, gone.size_bytes)
    borrowing.archive.store.delete(gone.name)
    with pytest.raises(ArchiveDamagedError, match=f"{gone.name}: is missing"):
        borrowing.restore(str(borrowing.root / "other"))
    assert list(borrowing.archive.loans(1).values()) == [note.loan], "the loan of the refused restore is ended"
    borrowing.archive.store.put(gone.name, [content])


KILLED_RESTORE = """
import os, sys
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.core.clock import SystemClock
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
place, data_dir = sys.argv[1:]
archive = Archive(open_archive(OsFileSystem(), place))
found = plan(archive, WantedMoment())
Restore(archive, found, OsFileSystem(), data_dir, lambda *_: os._exit(9), place).run(SystemClock())
"""


def test_the_loan_of_a_restore_that_was_killed_ends_with_the_next_one(borrowing: Borrowing) -> None:
    target = str(borrowing.root / "other")
    done = subprocess.run([sys.executable, "-c", KILLED_RESTORE, str(borrowing.place), target], check=False)
    assert done.returncode == 9
    assert len(borrowing.archive.store.list("loans/")) == 2
    borrowing.restore(target)
    note = read_borrowed(FS, target)
    assert note is not None
    own = read_borrowed(FS, borrowing.data_dir)
    assert own is not None
    assert borrowing.archive.store.list("loans/") == sorted([note.loan, own.loan])


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_restore_that_is_told_to_end_ends_its_loan(borrowing: Borrowing, told: signal.Signals) -> None:
    """`timeout`, systemd and containers tell it so, or a terminal that is gone: the archive was not pruned any more."""
    target, loans = borrowing.root / "other", borrowing.archive.store.list("loans/")
    idx = next(ref for ref in plan(borrowing.archive, WantedMoment()).base.files if ref.path.endswith(".idx"))
    held = borrowing.place / "archive" / idx.name
    content = held.read_bytes()
    held.unlink()
    os.mkfifo(held)
    command = [sys.executable, "-c", "import sys; from topics.cli.main import main; sys.exit(main())"]
    with subprocess.Popen([*command, "restore", str(borrowing.place), "--data-dir", str(target)]) as restoring:
        poll("its loan", lambda: len(borrowing.archive.store.list("loans/")) > len(loans))
        restoring.send_signal(told)

        def has_ended() -> bool:
            with (
                suppress(OSError),
                open(os.open(held, os.O_WRONLY | os.O_NONBLOCK), "wb") as file,
            ):  # else nobody reads it
                file.write(content)  # without damage: that would end the restore, too
            return restoring.poll() is not None

        poll("its end", has_ended)
    held.unlink()
    held.write_bytes(content)
    assert restoring.returncode == 128 + told
    assert borrowing.archive.store.list("loans/") == loans
    assert not target.exists()


def test_the_loan_of_a_restore_that_loses_the_archive_ends_with_the_next_one(borrowing: Borrowing) -> None:
    """It stayed for ever: the note that names it was removed."""
    target, away = str(borrowing.root / "other"), borrowing.root / "away"

    def loses(_done: int, _total: int) -> None:
        if borrowing.place.exists():
            borrowing.place.rename(away)

    found = plan(borrowing.archive, WantedMoment())
    with pytest.raises((ArchiveDamagedError, OSError)):
        Restore(borrowing.archive, found, FS, target, loses, str(borrowing.place)).run(borrowing.rig.clock)
    away.rename(borrowing.place)
    assert len(borrowing.archive.store.list("loans/")) == 2
    borrowing.restore(target)
    note, own = read_borrowed(FS, target), read_borrowed(FS, borrowing.data_dir)
    assert note is not None
    assert own is not None
    assert borrowing.archive.store.list("loans/") == sorted([note.loan, own.loan])
    assert not os.path.exists(f"{target}.restoring")


def test_of_two_restores_into_one_directory_one_is_refused(borrowing: Borrowing) -> None:
    """The second one removed what the first had made, and ended its loan: that ended well, with segments missing."""
    target, refused = str(borrowing.root / "other"), []

    def begins_too(_done: int, _total: int) -> None:
        with pytest.raises(OSError, match="is made by another restore"):
            borrowing.restore(target)
        refused.append(target)

    found = plan(borrowing.archive, WantedMoment())
    Restore(borrowing.archive, found, FS, target, begins_too, str(borrowing.place)).run(borrowing.rig.clock)
    assert refused
    note = read_borrowed(FS, target)
    assert note is not None
    assert note.loan in borrowing.archive.store.list("loans/")
    assert verify(target, lambda _done, _total: None).damage == []


def test_a_loan_that_the_next_restore_cannot_end_either_is_named(borrowing: Borrowing) -> None:
    """Its note is gone with that restore, and nothing on the disk names it any more."""
    target = str(borrowing.root / "other")
    found = plan(borrowing.archive, WantedMoment())
    with (
        patch.object(LocalStore, "delete", side_effect=OSError("refused")),
        patch.object(Restore, "_fetch_segments", side_effect=OSError("refused")),
        pytest.raises(OSError, match="refused"),
    ):
        Restore(borrowing.archive, found, FS, target, lambda *_: None, str(borrowing.place)).run(borrowing.rig.clock)
    note = read_borrowed(FS, f"{target}.restoring")
    assert note is not None
    with patch.object(LocalStore, "delete", side_effect=OSError("refused")), capture_logs() as logged:
        borrowing.restore(target)
    [warning] = [line for line in logged if line["log_level"] == "warning"]
    assert warning["loan"] == borrowing.archive.store.place(note.loan)


@pytest.mark.parametrize("what", ["", "archive/generations"])
def test_a_loan_does_not_count_as_ended_while_the_archive_is_away(
    borrowing: Borrowing, tmp_path: Path, what: str
) -> None:
    """The disk of its folder is not mounted, say."""

    def has_all() -> bool:
        borrowing.rig.clock.ms += RETRY_MS
        borrowing.compaction.upkeep()
        return borrowing.borrowed() == []

    poll("all data to be here", has_all, 20.0)
    away = (borrowing.place / what).rename(tmp_path / "away")
    for _ in range(4):
        borrowing.go_on()
    assert read_borrowed(FS, borrowing.data_dir) is not None
    away.rename(borrowing.place / what)
    borrowing.all_home()
    assert borrowing.archive.loans(1) == {}


def test_an_archive_that_cannot_be_written_is_copied_only(borrowing: Borrowing, tmp_path: Path) -> None:
    (borrowing.place / "archive" / "loans").rename(tmp_path / "loans")
    (borrowing.place / "archive" / "loans").write_text("in the way")
    with pytest.raises(OSError, match="--copy"):
        borrowing.restore(str(tmp_path / "other"))
    assert not os.path.exists(tmp_path / "other")
    left = sorted(os.listdir(tmp_path / "other.restoring"))
    assert left == [layout.LOCK_NAME, layout.META_NAME], "the note of a loan that may arrive"
    borrowing.restore(str(tmp_path / "other"), None)
    assert not os.path.exists(tmp_path / "other.restoring")
    (borrowing.place / "archive" / "loans").unlink()
    (tmp_path / "loans").rename(borrowing.place / "archive" / "loans")


def test_a_topic_deleted_while_it_is_borrowed_leaves_nothing(borrowing: Borrowing) -> None:
    borrowing.rig.call(DeleteTopic("t", False))
    borrowing.all_home()
    assert local_data(borrowing.data_dir) == []
    assert borrowing.archive.loans(1) == {}


def test_what_is_home_goes_to_the_service_s_own_cold_tier(tmp_path: Path) -> None:
    borrowing = Borrowing(tmp_path, cold=True)
    borrowing.check()
    borrowing.all_home()
    borrowing.check()
    shutil.rmtree(borrowing.place)

    def is_cold() -> bool:
        borrowing.go_on()
        return len(local_data(borrowing.data_dir)) <= 2

    poll("relocation", is_cold, 20.0)
    borrowing.check()
    borrowing.die()
    borrowing.check()
    borrowing.close()


class Restoring(RuleBasedStateMachine):
    """Anything may happen while data come home."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="topics-borrow-", dir="/dev/shm"))
        self.one = Borrowing(self.root)
        self.away: Path | None = None

    @rule(count=st.integers(1, EVENTS))
    def write(self, count: int) -> None:
        self.one.write(count)

    @rule(tag=st.sampled_from(["odd", "even", "third"]))
    def delete(self, tag: str) -> None:
        self.one.delete(tag)

    @rule(share=st.floats(0, 1))
    def delete_before(self, share: float) -> None:
        self.one.delete_before(1 + int(share * max(self.one.live, default=0)))

    @rule(steps=st.integers(1, 4))
    def upkeep(self, steps: int) -> None:
        for _ in range(steps):
            self.one.rig.clock.ms += 1000
            with suppress(OSError):
                self.one.compaction.compactor.upkeep()

    @rule()
    def later(self) -> None:
        self.one.rig.clock.ms += RETRY_MS

    @rule()
    def cut(self) -> None:
        self.one.compaction.cut()

    @rule(point=st.sampled_from(["rewrite.fetched", "rewrite.copied", "rewrite.synced", "rewrite.marked"]))
    def die_while_data_come_home(self, point: KillPoint) -> None:
        kill_points.arm(point, killed)
        with suppress(Killed):
            self.one.go_on()
        kill_points.arm(None, lambda: None)
        self.one.die()

    @rule(shard=st.booleans())
    def crash(self, shard: bool) -> None:
        if shard:
            self.one.rig.boot()
        else:
            self.one.compaction.begin_again()

    @rule()
    def restart(self) -> None:
        self.one.die()

    @precondition(lambda self: self.away is None)
    @rule()
    def archive_is_away(self) -> None:
        self.away = self.one.place.rename(self.root / "away")

    @precondition(lambda self: self.away is not None)
    @rule()
    def archive_is_back(self) -> None:
        assert self.away is not None
        self.away.rename(self.one.place)
        self.away = None

    @invariant()
    def every_record_is_there_and_no_other(self) -> None:
        if hasattr(self, "one") and (self.away is None or not self.one.borrowed()):
            self.one.check()

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        try:
            if self.away is not None:
                self.archive_is_back()
            self.one.all_home()
            self.one.check()
            assert self.one.archive.loans(1) == {}
            shutil.rmtree(self.one.place)
            self.one.die()
            self.one.check()
            self.one.close()
        finally:
            shutil.rmtree(self.root, ignore_errors=True)


Restoring.TestCase.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRestoring = Restoring.TestCase
