"""A follower serves reads while data of sealed segments are still in the archive: whatever is deleted, pruned, killed
or taken over meanwhile. The model of archives (`archiving.py`), step by step.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from tests.archive import leading
from tests.archive.archiving import Archiving, compare, small_world
from tests.archive.follower_rig import FollowerRig
from tests.cases import case
from tests.executors import Hanging, Inline
from tests.storage.faults import Crash, Fault
from topics.archive import borrowing, follow_main, replica, shipping
from topics.archive.base_files import BaseFiles
from topics.archive.directory_copy import DirectoryCopy
from topics.shm.control import Role
from topics.storage.borrowed import read_borrowed
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.follow_note import FollowNote, read_note, write_note
from topics.storage.pins import Pin, PinFiles, new_pin_id, pins_dir


@pytest.fixture
def service() -> Iterator[Archiving]:
    """A service with sealed segments in the archive's base."""
    yield from with_segments()


def with_segments() -> Iterator[Archiving]:
    """A service with sealed segments in the archive's base."""
    with small_world():
        found = Archiving.__new__(Archiving)
        Archiving.begin(found, backlog=1 << 30, answers=False)
        for name in ("a", "d"):
            found.append(name, 8, "disk", 0)
            found.append(name, 8, "disk", 1)
        found.delete("a", 0.2, 1)
        found.cut()
        found.delete("d", 0.2)
        for _ in range(3):
            found.ship(0)
        yield found
        found.teardown()


def follower(service: Archiving) -> FollowerRig:
    """A follower that shows a moment."""
    for _ in range(4):
        service.follow([])
        rig = service.follower
        assert rig is not None
        if rig.shown:
            return rig
    raise AssertionError("a follower shows nothing")


def missing(rig: FollowerRig) -> set[str]:
    return set(rig.replica.homecoming.missing)


def local_data(rig: FollowerRig) -> set[str]:
    root = Path(rig.settings.data_dir)
    return {str(path.relative_to(root)) for path in root.glob("topics/*/*.data")}


def borrows(rig: FollowerRig) -> bool:
    return read_borrowed(OsFileSystem(), rig.settings.data_dir) is not None


def until_home(service: Archiving) -> None:
    for _ in range(60):
        service.follow([])
        rig = service.follower
        assert rig is not None
        if not borrows(rig):
            return
    raise AssertionError("a follower does not get all data")


def ship_bases(service: Archiving, count: int) -> None:
    """Ship until there are so many more bases."""
    wanted = len(service.archive.bases(1)) + count
    for _ in range(20 * count):
        service.append("b", 1, "disk")
        service.ship(0)
        if len(service.archive.bases(1)) >= wanted:
            return
    raise AssertionError("no base")


def test_reads_are_served_before_the_data_are_here(service: Archiving) -> None:
    rig = follower(service)
    borrowed = missing(rig)
    assert len(borrowed) > 2
    assert not borrowed & local_data(rig)
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    left = []
    while missing(rig):
        service.follow([])  # which compares what it shows
        left.append((cell.get("segments_borrowed"), cell.get("borrowed_bytes")))
    assert left == sorted(left, reverse=True)
    assert left[-1] == (0, 0)
    assert borrowed <= local_data(rig)
    until_home(service)
    assert service.archive.loans(1) == {}
    for name in list(service.bucket.objects):
        if ".files/" in name and name.endswith(".data"):
            kept = service.bucket.objects.pop(name)
            service.follow([])
            service.bucket.objects[name] = kept
    rig.restart_service()
    assert follower(service).replica.homecoming.missing == {}


def test_a_loan_keeps_what_a_follower_has_not_fetched(service: Archiving) -> None:
    rig = follower(service)
    assert missing(rig)
    service.partition(True, 0)
    service.delete("a", 1.0)
    service.cut()
    ship_bases(service, 2)
    service.prune(1, [])
    lent = [ref.name for ref in rig.replica.homecoming.missing.values()]
    assert set(lent) <= service.bucket.objects.keys()
    assert len(service.archive.bases(1)) == 3
    service.partition(False, 0)
    rig.restart_service()
    until_home(service)
    service.prune(1, [])
    assert len(service.archive.bases(1)) == 1
    assert not set(lent) <= service.bucket.objects.keys(), "what was deleted goes"
    service.moments = {at: found for at, found in service.moments.items() if at[1] >= service.archive.bases(1)[0]}


def test_another_base_comes_while_data_are_missing(service: Archiving) -> None:
    """Its segments are fetched with it, deletions in those that are missing go into their indexes."""
    rig = follower(service)
    before = missing(rig)
    for nth in range(3):
        service.delete("a", 0.1, nth)
        service.append("a", 7, "disk", nth)
        service.cut()
        ship_bases(service, 1)
        service.follow([])
        service.follow([])
    assert rig.replica.note.base > 1
    assert not missing(rig) - before, "what is new comes with the base"
    until_home(service)
    service.take_over([])


def test_what_is_deleted_while_data_come_stays_deleted(service: Archiving) -> None:
    """The shard marks indexes alone then; one that takes over has the marks in the data, too (`topics verify`)."""
    follower(service)
    for tag in (0, 1, None, 0):
        service.delete("a", 0.5, tag)
        service.delete("d", 0.3, tag)
        service.append("a", 1, "disk")
        service.ship(0)
        service.follow([])
        service.follow([])
    until_home(service)
    service.delete("d", 0.5)
    service.ship(0)
    service.follow([])
    service.take_over([])


def test_one_that_borrows_takes_over(service: Archiving) -> None:
    """It leads as a restored service does: its compactor fetches the rest, and ends the loan."""
    rig = follower(service)
    service.follow([])
    service.follow([])
    assert missing(rig)
    service.take_over([])
    leader = service.leader
    assert read_borrowed(OsFileSystem(), leader.data_dir) is not None
    compare(leader.rig, leader.live)
    service.delete("a", 0.5, 1)
    compare(leader.rig, leader.live)
    service.brings_home()
    assert service.archive.loans(1) == {}


def test_a_promotion_keeps_what_has_come(service: Archiving) -> None:
    rig = follower(service)
    while len(missing(rig)) > 1:
        service.follow([])
    last = missing(rig)
    service.take_over([])
    leader = service.leader
    note = read_borrowed(OsFileSystem(), leader.data_dir)
    assert note is not None
    leader.compaction.compactor.upkeep()
    cell = leader.rig.shared.control.cell(Role.COMPACTOR, 0)
    assert cell.get("segments_borrowed") <= len(last), "the compactor fetches nothing twice"


def test_what_has_come_may_go_to_the_cold_tier_of_one_that_takes_over(service: Archiving) -> None:
    """It has the same name there as in the archive that it was borrowed from."""
    service.world.is_cold = True
    rig = follower(service)
    while len(missing(rig)) > 1:
        service.follow([])
    service.take_over([])
    for _ in range(4):
        service.world.clock.ms += 100_000_000
        service.leader.cut()
    service.brings_home()
    assert service.archive.loans(1) == {}


def test_an_archive_that_lends_nothing_is_copied(service: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower needs to read alone, until it takes over."""

    def denied(_name: str, _content: bytes) -> NoReturn:
        raise OSError(errno.EACCES, "denied", "sim://bucket")

    rig = service.followers[0] = service.follower_in(f"{service.directory}/follower")
    monkeypatch.setattr(rig.archive.store, "create", denied)
    rig = follower(service)
    assert not missing(rig)
    assert not borrows(rig)
    assert service.archive.loans(1) == {}
    rig.restart_service()
    service.follow([])


def test_an_object_that_is_gone_keeps_its_segment_borrowed_and_no_other(service: Archiving) -> None:
    rig = follower(service)
    path, ref = list(rig.replica.homecoming.missing.items())[-1]
    content = service.bucket.objects.pop(ref.name)
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    for _ in range(60):
        service.world.clock.ms += borrowing.RETRY_MS
        rig.advance()
    assert missing(rig) == {path}
    assert cell.get("failures") > 0
    service.bucket.objects[ref.name] = content
    service.world.clock.ms += borrowing.RETRY_MS
    until_home(service)


def slow(service: Archiving) -> FollowerRig:
    """A follower that shows a moment, and has to wait for the data that it fetches."""
    rig = follower(service)
    rig.helper = helper = Hanging()
    helper.hangs = True
    rig.follower_dies()
    rig.advance()
    assert missing(rig)
    return rig


def test_one_that_may_only_read_copies_everything_also_after_a_failure(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of a loan that was perhaps created is there then, and the loan cannot be removed."""
    errors = [OSError(errno.EIO, "failed", "sim://bucket")]

    def create(_name: str, _content: bytes) -> NoReturn:
        raise errors.pop() if errors else OSError(errno.EACCES, "denied", "sim://bucket")

    def delete(_name: str) -> NoReturn:
        raise OSError(errno.EACCES, "denied", "sim://bucket")

    rig = service.followers[0] = service.follower_in(f"{service.directory}/follower")
    monkeypatch.setattr(rig.archive.store, "create", create)
    monkeypatch.setattr(rig.archive.store, "delete", delete)
    for _ in range(4):
        service.world.clock.ms += 10_000
        rig.advance()
    assert rig.shown
    assert not errors
    assert not borrows(rig)


def test_what_is_shown_as_deleted_stays_so_while_a_base_from_before_is_laid_out(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_main, "LOOK_MS", 1 << 40)
    rig = slow(service)
    service.delete("a", 0.4, 0)
    service.cut()
    ship_bases(service, 1)
    service.delete("a", 1.0, 1)
    service.ship(0)
    rig.advance()
    base = rig.replica.note.base
    shown = rig.shown
    assert shown == max(service.moments)
    compare(rig, service.history[shown])
    rig.follower_dies()
    rig.follower.step()  # lays the base out; no shard has loaded it yet
    assert rig.replica.note.base > base
    compare(rig, service.history[shown])


def test_a_segment_that_is_dropped_before_it_has_come_is_not_fetched_after_a_restart(service: Archiving) -> None:
    rig = slow(service)
    before = missing(rig)
    service.delete("a", 1.0)
    service.cut()
    ship_bases(service, 1)
    for _ in range(4):
        service.world.clock.ms += follow_main.LOOK_MS
        rig.advance()
    assert missing(rig) < before
    rig.helper = Inline()
    rig.follower_dies()
    until_home(service)


def test_files_that_a_program_has_pinned_stay_until_it_is_done(service: Archiving) -> None:
    clock, rig = service.world.clock, follower(service)
    clock.skew_ms = 1 << 40  # pins hold by the time since the machine's start, which is not that since 1970
    until_home(service)
    before = local_data(rig)
    pins = PinFiles(OsFileSystem(), pins_dir(rig.shared.ram_dir), 0)
    pins.put(new_pin_id(), Pin("a", 1, [(1, 0)], clock.monotonic_ms() + 600_000))
    service.delete("a", 1.0)
    service.cut()
    ship_bases(service, 1)
    looks(service, 4)
    assert before <= local_data(rig)
    clock.ms += 600_000
    looks(service, 4)
    assert not before <= local_data(rig)


def looks(service: Archiving, times: int) -> None:
    for _ in range(times):
        service.world.clock.ms += follow_main.LOOK_MS
        service.follow([])


def test_a_full_disk_is_no_reason_to_fetch_again_and_again(service: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_copy: DirectoryCopy, path: str, _content: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space left", path)

    rig = follower(service)
    monkeypatch.setattr(DirectoryCopy, "replace", full)
    read_range, fetched = rig.archive.store.read_range, []

    def read(name: str, offset: int, length: int) -> bytes:
        if name.endswith(".data"):
            fetched.append(service.world.clock.ms)
        return read_range(name, offset, length)

    monkeypatch.setattr(rig.archive.store, "read_range", read)
    before = missing(rig)
    for _ in range(120):
        service.world.clock.ms += 500
        rig.follower.step()
    times = sorted(set(fetched))
    assert len(times) > 3
    assert all(after - at >= borrowing.RETRY_MS for at, after in itertools.pairwise(times[1:]))
    assert missing(rig) == before
    monkeypatch.undo()


def test_a_leader_that_lives_is_not_taken_over_from_while_data_are_laid_out(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives a sign each second. To lay out a batch takes longer than a leader may be silent."""
    rig = service.followers[0] = service.follower_in(f"{service.directory}/follower", takeover_after_ms="5000")
    rig = slow(service)
    replace, laid_out = DirectoryCopy.replace, []

    def slowly(copy: DirectoryCopy, path: str, content: bytes) -> None:
        for _ in range(8 if path.endswith(".data") else 0):
            service.append("b", 1, "disk")
            service.ship(0)
        replace(copy, path, content)
        laid_out.append(path)

    monkeypatch.setattr(DirectoryCopy, "replace", slowly)
    while missing(rig):
        service.append("b", 1, "disk")
        service.ship(0)
        rig.follower.step()  # takes what is new, and begins to fetch
        helper = rig.helper
        assert isinstance(helper, Hanging)
        helper.go_on()
        helper.hangs = True
        rig.follower.step()  # nothing is new, until it lays out what has come
        assert rig.follower.exit_code is None, "it took over"
    assert laid_out
    monkeypatch.undo()


def test_a_base_whose_note_cannot_be_written_is_laid_out_again(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = follower(service)
    base, failures = rig.replica.note.base, [OSError(errno.ENOSPC, "no space left", "following.json")]

    def write(fs: FileSystem, data_dir: str, note: FollowNote) -> None:
        if note.base > base and failures:
            raise failures.pop()
        write_note(fs, data_dir, note)

    monkeypatch.setattr(replica, "write_note", write)
    service.delete("a", 0.5)
    service.cut()
    ship_bases(service, 1)
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    loads = cell.get("bases")
    for _ in range(3):
        service.world.clock.ms += follow_main.LOOK_MS
        rig.advance()
    assert not failures
    assert rig.replica.note.base > base
    assert cell.get("bases") > loads


def test_nothing_is_closed_in_the_archive_with_an_id_that_is_not_noted(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that died then could not go on: nobody would have the id, and nobody else could lead."""
    rig = follower(service)
    failures, closed = [OSError(errno.ENOSPC, "no space left", "following.json")], []

    def write(fs: FileSystem, data_dir: str, note: FollowNote) -> None:
        if note.fence_id and failures:
            raise failures.pop()
        write_note(fs, data_dir, note)

    def create(name: str, content: bytes) -> bool:
        noted = read_note(OsFileSystem(), rig.settings.data_dir)
        assert noted is not None
        assert noted.fence_id
        closed.append(name)
        return put(name, content)

    put = rig.archive.store.create
    monkeypatch.setattr(replica, "write_note", write)
    monkeypatch.setattr(rig.archive.store, "create", create)
    rig.follower.ask_promotion()
    for _ in range(2):
        service.world.clock.ms += 1000
        rig.follower.step()
    assert not failures
    assert closed


@pytest.mark.parametrize("nth", range(1, 40, 3))
def test_the_loan_of_a_copy_that_was_killed_ends_with_the_next_one(service: Archiving, nth: int) -> None:
    """At any request of the first copy, and of the next one."""
    for _ in range(2):
        service.follow([], nth=nth)
    rig = follower(service)
    note = read_borrowed(OsFileSystem(), rig.settings.data_dir)
    assert note is not None
    assert list(service.archive.loans(1).values()) == [note.loan]
    until_home(service)
    assert service.archive.loans(1) == {}


def test_the_loan_of_a_follower_that_arrives_late_keeps_nothing(service: Archiving) -> None:
    """The follower has taken another one by then."""
    for _ in range(3):
        service.follow(["late"])
    rig = follower(service)
    note = read_borrowed(OsFileSystem(), rig.settings.data_dir)
    assert note is not None
    for late in service.bucket.late:
        late.requests = 0
    assert service.bucket.exists(note.loan)
    assert any(name.startswith("loans/") for name in service.bucket.came_late)
    assert list(service.archive.loans(1).values()) == [note.loan]
    until_home(service)
    assert service.archive.loans(1) == {}
    ship_bases(service, 1)
    service.prune(1, [])
    assert len(service.archive.bases(1)) == 1


@pytest.mark.long
@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH])
def test_a_follower_that_is_killed_at_any_call_while_data_come_goes_on(service: Archiving, error: int) -> None:
    rig = follower(service)
    service.delete("a", 0.5, 0)
    service.append("a", 1, "disk")
    service.ship(0)
    rig.close()
    service.followers[0] = None
    kept, objects = rig.settings.data_dir, dict(service.bucket.objects)
    expected = service.moments[max(service.moments)]
    for nth in itertools.count(1):
        data_dir = f"{kept}-{nth}"
        shutil.copytree(kept, data_dir)
        service.bucket.objects.clear()
        service.bucket.objects |= objects
        again = service.followers[0] = service.follower_in(data_dir)
        faulty = again.process_fs
        faulty.arm(Fault(nth, error))
        with case(nth):
            for _ in range(60):
                service.world.clock.ms += 1000
                try:
                    again.advance()
                except Crash:
                    again.follower_dies()
                if again.shown:
                    compare(again, service.history[again.shown])
                if not borrows(again):
                    break
            assert not borrows(again)
            assert service.archive.loans(1) == {}
            compare(again, expected)
        again.close()
        service.followers[0] = None
        shutil.rmtree(data_dir)
        if not faulty.struck:
            break
    assert nth > 10


@pytest.mark.parametrize("is_known", [True, False])
def test_data_of_which_a_later_base_has_another_object_are_fetched(
    service: Archiving, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A base that was given up leaves data without the deletions that come. Each base behind it had another object of
    them then, and a follower that had not fetched them yet never did: it had lost them when its loan ended.
    """
    load = leading.SmallLogs.load
    monkeypatch.setattr(
        leading.SmallLogs, "load", lambda *of: msgspec.structs.replace(load(*of), segment_rewrite_dead_ratio=0.95)
    )
    service.leader.restart()
    service.append("b", 8, "disk", 1)
    service.cut()
    shipper = service.leader.shipper()
    shipper.begin()
    shipper.begin_base().copy()
    service.delete("b", 0.1, 1)
    service.cut()
    ship_bases(service, 1)
    former = data_of_newest_base(service)
    rig = slow(service)
    lent = missing(rig)
    service.delete("b", 0.1, 1)
    service.cut()
    if not is_known:
        make: Any = BaseFiles
        monkeypatch.setattr(shipping, "BaseFiles", lambda *of: make(*of[:-2], {}, of[-1]))
    ship_bases(service, 1)
    later = data_of_newest_base(service)
    others = {path for path in lent & later.keys() if later[path] != former[path]}
    assert bool(others) != is_known
    for _ in range(3):
        service.follow([])
    assert rig.replica.note.base == service.archive.bases(1)[-1]
    assert isinstance(rig.helper, Hanging)
    rig.helper.go_on()
    until_home(service)
    assert later.keys() <= local_data(rig)


def data_of_newest_base(service: Archiving) -> dict[str, str]:
    """Return the names of objects by paths."""
    base, _ = service.archive.base(1, service.archive.bases(1)[-1])
    return {ref.path: ref.name for ref in base.files if ref.path.endswith(".data")}
