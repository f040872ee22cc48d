"""Archives against a model (`archiving.py`): schedules that Hypothesis draws, and those that found something."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.archive.archiving import HARMS, SHARDS, STEPS, Archiving, compare, harmed, small_world
from tests.archive.follower_rig import FollowerRig
from tests.archive.leading import KilledError, Leader, Small, copied, shown
from tests.archive.simulated import FIRST_OBJECT, SimulatedBucket
from tests.cases import case
from tests.storage.faults import Crash, Fault
from topics.archive import archiver, follow_main, ownership, shipping
from topics.archive.inspection import check, figures, prune
from topics.archive.ownership import TakenOverError, close_archive, take_over
from topics.archive.restoring import NotThereError, WantedMoment, plan
from topics.core.config import TopicConfig
from topics.shm.control import Role
from topics.shm.topic_messages import PutTopic
from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    Piece,
    Removal,
    base_name,
    decode,
    encode,
    generation_name,
    loan_name,
    piece_name,
    removal_name,
)
from topics.storage.borrowed import read_borrowed
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note, write_note
from topics.storage.verify import verify
from topics.walshard import follower_shard
from topics.walshard import shard as shard_module

EXAMPLES = 10
"""A sample; `make archive-sim` runs any number (`schedules.py`)."""


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_world():
        yield


TestArchiving = pytest.mark.long(Archiving.TestCase)
TestArchiving.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)


def test_a_seed_draws_the_same_schedules_again() -> None:
    made: list[list[tuple[str, bytes]]] = []

    class Noted(Archiving):
        def teardown(self) -> None:
            own = self.directory.encode()
            made[-1] += [(name, content.replace(own, b"")) for name, content in self.bucket.objects.items()]
            super().teardown()

    for _ in range(2):
        made.append([])
        few = settings(max_examples=3, stateful_step_count=STEPS, deadline=None, database=None)
        run_state_machine_as_test(seed(2)(Noted), settings=few)
    assert made[0] == made[1]
    assert len(made[0]) > 50


def test_behind_a_hole_there_is_no_moment_until_the_next_base(service: Archiving) -> None:
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.leader.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    assert len(service.moments) == 1
    service.archived_is_in_the_last_moment()
    service.archiver_dies(0)
    service.ship(0)
    assert len(service.moments) == 1, "nor does the next archiver take them for moments"
    service.leader.helpers.go_on()
    service.ship(0)
    assert len(service.moments) == 2
    service.archived_is_in_the_last_moment()


def test_a_moment_behind_a_hole_is_none_without_its_base(service: Archiving) -> None:
    """An archiver that died between the piece and its base took the hole for closed."""
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.long_outage("a", 3)
    shipper = service.leader.shipper()
    shipper.begin()
    files = shipper.begin_base()
    files.copy()
    service.leader.bucket.troubles = ["lost_answer"]
    with pytest.raises(OSError, match="lost_answer"):
        shipper.end_base(files)
    assert len(service.moments) == 1
    service.restore(1.0)
    shipper.begin()
    assert not shipper.is_based
    service.archiver_dies(0)
    for _ in range(3):
        service.ship(0)
    assert len(service.moments) > 1


def test_a_follower_takes_over_at_the_last_moment_before_a_hole(service: Archiving) -> None:
    """It copied everything again for ever: the leader was lost before the base behind the hole was whole."""
    followed(service)
    service.leader.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    service.take_over([])
    assert service.former is not None


def test_a_takeover_goes_on_when_everything_has_to_be_copied_again(service: Archiving) -> None:
    """It forgot that the fence was its own, and nobody could take over any more."""
    followed(service)
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    assert len(service.moments) > 2
    assert service.follower is not None
    service.follower.follower.ask_promotion()  # once: a command is given once
    for _ in range(8):
        service.follow([])
        if service.former is not None:
            break
    assert service.former is not None


def test_logs_that_go_just_before_a_base_leave_a_hole(service: Archiving) -> None:
    service.append("a", 3, "disk")
    shipper = service.leader.shipper()
    shipper.begin()
    shipper.base()
    assert shipper.is_based
    for _ in range(3):
        service.append_much("a")
        service.cut()
    files = shipper.begin_base()
    service.append("a", 1, "disk")
    shipper.ship()
    assert not shipper.is_based, "nobody could restore that from the base before"
    files.copy()
    shipper.end_base(files)
    assert shipper.is_based


def test_an_archiver_goes_on_behind_a_piece_that_ends_with_a_log_file(service: Archiving) -> None:
    """It stood still for ever: behind the end of a file there is no frame."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(6):
        service.append_much("a")
    service.leader.bucket.troubles = ["lost_answer"]
    service.ship(0)
    assert _last_piece(service) not in service.moments
    for _ in range(4):  # the rest, and a base
        service.ship(0)
    assert _last_piece(service) in service.moments


def _last_piece(service: Archiving) -> tuple[int, int]:
    generation = service.archive.generations()[-1]
    return generation, service.archive.last_piece(generation, 1)


def test_a_directory_that_went_back_begins_a_generation(service: Archiving) -> None:
    service.append("a", 3, "disk")
    service.copy_directory()
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.put_copy_in_its_place()
    service.append("b", 1, "disk")
    service.ship(0)
    service.ship(0)
    assert [generation for generation, _ in sorted(service.moments)] == [1, 2]


@pytest.fixture
def service() -> Iterator[Archiving]:
    """A service without a backlog. At the end its first and last moments are restored."""
    yield from begun(0)


@pytest.fixture
def keeping() -> Iterator[Archiving]:
    """A service that keeps its logs until they are in the archive."""
    yield from begun(1 << 30)


def begun(backlog: int) -> Iterator[Archiving]:
    """A service with such a backlog. At the end its first and last moments are restored."""
    found = Archiving.__new__(Archiving)
    Archiving.begin(found, backlog=backlog, answers=False)
    yield found
    found.teardown()


def test_nothing_counts_as_archived_after_somebody_took_over(service: Archiving) -> None:
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    take_over(service.archive, service.archive.generations()[-1], service.leader.rig.clock, "another machine")
    moments, words = len(service.moments), service.leader.shipped
    for which in (0, 1, 0):
        service.append("a", 1, "disk")
        service.ship(which)
        service.archiver_dies(which)
        service.ship(which)
    assert (len(service.moments), service.leader.shipped) == (moments, words)
    assert service.leader.rig.shared.control.is_taken_over
    take_over(service.archive, service.archive.generations()[-1], service.leader.rig.clock, "a third one")


def test_what_was_deleted_leaves_the_archive_with_the_history_that_is_kept(service: Archiving) -> None:
    service.world.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    service.append("a", 3, "disk")
    secret = b'"a secret"'
    service.leader.live["a"][service.leader.rig.append("a", secret).first_seq] = secret
    for _ in range(3):
        service.ship(0)
    service.cut()
    service.delete("a", 1.0)
    service.cut()
    assert any(secret in body for body in service.bucket.objects.values())
    for _ in range(9):  # days, with a record each
        service.leader.rig.clock.ms += archiver.BASE_MS
        service.append("b", 1, "disk")
        service.cut()
        for _ in range(3):
            service.ship(0)
    assert not any(secret in body for body in service.bucket.objects.values())
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


@pytest.mark.parametrize("dies", [False, True])
def test_a_clock_that_was_put_forward_prunes_nothing(service: Archiving, dies: bool) -> None:
    """A machine that came up in another year, before its clock was set right, removed all but the last moment."""
    service.world.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    clock, page = service.leader.rig.clock, service.leader.rig.shared.control
    for _ in range(2):
        service.append("a", 3, "disk")
        for _ in range(3):
            service.ship(0)
        clock.ms += archiver.BASE_MS
    for shard in service.leader.rig.shards:
        shard.sweep()
    bases = service.archive.bases(1)
    assert len(bases) > 1
    clock.skew_ms = 365 * archiver.BASE_MS
    if dies:
        service.archiver_dies(0)
    for _ in range(3):
        service.ship(0)
    assert service.archive.bases(1)[: len(bases)] == bases
    assert page.cell(Role.ARCHIVER, 0).get("failures") == 0
    clock.skew_ms = 0


def test_a_clock_that_was_far_ahead_keeps_no_base_back(service: Archiving) -> None:
    """The newest base bore the later time, so none was made for its age until real time got there."""
    clock = service.leader.rig.clock
    clock.skew_ms = 365 * archiver.BASE_MS
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    clock.skew_ms = 0
    [first] = service.archive.bases(1)
    for days in range(1, 4):
        clock.ms += archiver.BASE_MS
        service.append("a", 1, "disk")
        for _ in range(3):
            service.ship(0)
        assert len(service.archive.bases(1)) == 1 + days, "one a day"
    assert service.archive.bases(1)[0] == first


def test_an_archive_whose_disk_is_full_is_pruned(service: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was pruned behind a moment that was shipped, of which there was none any more."""
    service.world.keep_ms = archiver.BASE_MS
    service.archiver_dies(0)
    for _ in range(2):
        service.append("a", 3, "disk")
        service.cut()
        for _ in range(3):
            service.ship(0)
        service.leader.rig.clock.ms += archiver.BASE_MS
    bases = service.archive.bases(1)
    assert len(bases) > 1

    def full(name: str, content: bytes) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with monkeypatch.context() as patched:
        patched.setattr(service.leader.bucket, "create", full)
        service.append("a", 1, "disk")
        for _ in range(3):
            service.ship(0)
    assert service.archive.bases(1)[0] > bases[0]
    assert not service.archive.has_piece(1, 1)
    assert service.archive.removals(1) == []
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def test_a_full_disk_at_the_begin_of_a_generation_has_the_archive_pruned(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who had begun had it pruned, and nobody could begin without room."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    service.copy_directory()
    service.append("a", 3, "disk")
    for _ in range(6):
        service.append("b", 1, "disk")
        service.ship(0)
    bases = service.archive.bases(1)
    assert len(bases) > 1
    service.world.keep_ms = archiver.BASE_MS
    service.put_copy_in_its_place()
    service.leader.rig.clock.ms += 3 * archiver.BASE_MS

    def full(name: str, content: bytes) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with monkeypatch.context() as patched:
        patched.setattr(service.leader.bucket, "create", full)
        service.ship(0)
    assert service.archive.generations() == [1]
    assert service.archive.bases(1) == bases[-1:]
    service.ship(0)
    assert service.archive.generations() == [1, 2]
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def test_one_damaged_base_holds_back_nothing_but_itself(service: Archiving) -> None:
    """Nothing of the archive was pruned any more, and nobody was told what to do. A base that cannot be read goes with
    the history before a later one.
    """
    ship_bases(service)
    first, second, *_, last = service.archive.bases(1)
    second_ms, whole = service.archive.base(1, second)[0].taken_ms, dict(service.bucket.objects)
    damaged = damage(service, base_name(1, second))
    pruned = prune(service.archive, second_ms + 1)
    assert [f"{damaged}: checksum does not match; put it back" in line for line in pruned.damaged] == [True]
    assert service.archive.bases(1)[0] == first, "nothing that can be read takes its place"
    assert [base.number for base in figures(service.archive)[0].bases] == [
        no for no in service.archive.bases(1) if no != second
    ]
    assert damaged in figures(service.archive)[0].damaged[0]
    prune(service.archive, service.world.clock.ms + 1)
    assert service.archive.bases(1) == [last]
    expected = SimulatedBucket()
    expected.objects = whole
    prune(Archive(expected), service.world.clock.ms + 1)
    left = service.bucket.objects.keys() - expected.objects.keys()
    assert all(name.startswith("g00000001.files/") for name in left), "only what no other base names"
    assert len(left) < 10
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def test_a_damaged_first_base_goes_with_its_pieces(service: Archiving) -> None:
    ship_bases(service)
    _, second, *_, last = service.archive.bases(1)
    prune(service.archive, service.archive.base(1, second)[0].taken_ms + 1)
    damage(service, base_name(1, second))
    prune(service.archive, service.world.clock.ms + 1)
    first_piece = service.archive.base(1, last)[0].first_piece
    pieces = [name for name in service.bucket.objects if name.startswith("g00000001.pieces/")]
    assert min(pieces) == piece_name(1, first_piece)
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def test_a_generation_whose_end_is_damaged_holds_back_no_other_one(service: Archiving) -> None:
    ship_bases(service)
    follow_and_go_back(service)
    for _ in range(8):
        service.append("b", 1, "disk")
        service.ship(0)
    first, *_, last = service.archive.bases(2)
    for loan in service.archive.loans(1).values():
        service.archive.end_loan(loan)
    end = piece_name(1, service.archive.last_piece(1, 1))
    end_whole = service.bucket.objects[end]
    damage(service, end)
    listed = figures(service.archive)
    assert [bool(found.bases) for found in listed] == [True, True], "the list was empty but for the error"
    assert [found.last_ms is None for found in listed] == [True, False]
    pruned = prune(service.archive, service.world.clock.ms + 1)
    assert [f"{end}: checksum does not match; put it back" in line for line in pruned.damaged] == [True]
    assert service.archive.bases(2) == [last] != [first]
    assert service.archive.bases(1), "nobody knows when it ended"
    service.bucket.objects[end] = end_whole
    prune(service.archive, service.world.clock.ms + 1)
    assert service.archive.generations() == [2]
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


@pytest.mark.parametrize("harm", [*HARMS, "gone"])
def test_a_running_archiver_prunes_nothing_in_favour_of_a_base_without_its_pieces(
    service: Archiving, harm: str
) -> None:
    """The newest base counted as the last moment, also when a piece that it needs was damaged. All before it went."""
    service.world.keep_ms = 1
    service.archiver_dies(0)
    ship_bases(service)
    *older, former, last = service.archive.bases(1)
    name = piece_name(1, last)
    whole = service.bucket.objects.pop(name)
    if harm != "gone":
        service.bucket.objects[name] = harmed(whole, harm)
    service.world.clock.ms += archiver.PRUNE_MS
    with capture_logs() as logs:
        service.ship(0)
    assert service.archive.bases(1) == [former, last]
    assert older
    assert [name in line["reason"] for line in logs if "the archive is damaged" in line["event"]] == [True]
    with pytest.raises(ArchiveDamagedError):
        plan(service.archive, WantedMoment(ts_ms=service.archive.base(1, last)[0].taken_ms))
    behind = plan(service.archive, WantedMoment(ts_ms=service.archive.base(1, last)[0].taken_ms - 1))
    assert behind.base.number == former
    assert all(service.archive.piece(1, number) for number in behind.pieces)
    service.bucket.objects[name] = whole
    service.world.clock.ms += archiver.PRUNE_MS
    service.ship(0)
    assert service.archive.bases(1)[0] == last
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


@pytest.mark.parametrize("tells", [False, True])
def test_a_restart_ends_a_promotion_that_has_not_reached_the_archive(service: Archiving, tells: bool) -> None:
    """The follower had noted it without the archive, and took over from a healthy leader when that was back."""
    rig = followed(service)
    service.leader.answers = tells
    service.append("a", 1, "disk")
    rig.advance()
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    bucket.is_away = True
    rig.follower.ask_promotion()
    for _ in range(3):
        rig.follower.step()
    bucket.is_away = False
    rig.follower_dies()
    for _ in range(4):
        rig.advance()
    assert not rig.leads
    assert not rig.replica.note.fence_id


def test_an_archive_that_is_away_is_told_once_though_the_leader_goes_on_telling(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer of the leader made the follower forget that it had said so: its log had a line a second."""
    monkeypatch.setattr(follow_main, "LOOK_MS", 60_000)
    service.leader.answers = True
    rig = followed(service)
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    for _ in range(2):
        with capture_logs() as logs:
            for bucket.is_away in [False] * 4 + [True] * 8:
                service.append("a", 1, "disk")
                rig.clock.ms += 2000
                rig.advance()
        told = [line["event"] for line in logs if "sim://bucket" in line.get("reason", "")]
        assert len(told) == 1, told


def test_a_promotion_can_be_withdrawn_while_the_archive_is_away(service: Archiving) -> None:
    """Only a restart ended one that waited for the archive, and nothing showed that it waited."""
    rig = followed(service)
    service.append("a", 1, "disk")
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    for outcome in ("withdrawn", "not withdrawn"):
        bucket.is_away = True
        rig.follower.ask_promotion()
        asked_ms = rig.clock.ms
        for _ in range(3):
            rig.clock.ms += 1000
            rig.follower.step()
        assert not rig.replica.note.fence_id
        assert [cell.get(word) for word in ("promotion_ms", "promotion_begun")] == [asked_ms, 0]
        if outcome == "withdrawn":
            rig.follower.withdraw_promotion()
        bucket.is_away = False
        for _ in range(4):
            rig.advance()
        assert rig.leads == (outcome == "not withdrawn")
        if outcome == "withdrawn":
            assert [cell.get(word) for word in ("promotion_ms", "promotion_begun")] == [0, 0]
            assert rig.shown == max(service.moments), "it goes on to follow"


@pytest.mark.parametrize("nth", range(1, 15))
def test_a_promotion_is_withdrawn_or_goes_on_but_never_half(service: Archiving, nth: int) -> None:
    """A command may withdraw it between any two requests. Once the follower has noted it, a restart does not end it."""
    rig = followed(service)
    service.append("a", 1, "disk")
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    cell, left = rig.shared.control.cell(Role.ARCHIVER, 0), []

    def withdraw() -> None:
        rig.follower.withdraw_promotion()
        left.append(cell.get("promotion_ms"))

    rig.follower.ask_promotion()
    bucket.before(nth, withdraw)
    rig.follower.step()
    note = read_note(OsFileSystem(), rig.settings.data_dir)
    assert note is not None
    is_closed = bool(service.archive.piece(1, service.archive.last_piece(1, 0))[0].taken_over_by)
    is_withdrawn = nth <= 3  # before the last look whether the archive is there
    assert left == [0 if is_withdrawn else rig.clock.ms]
    assert cell.get("promotion_begun") == (not is_withdrawn)
    assert (bool(note.fence_id), is_closed, note.leads) == (not is_withdrawn,) * 3


@pytest.mark.parametrize("waits", ["in a request", "between two steps"])
def test_a_leader_that_is_well_is_not_taken_over_from_once_a_promotion_is_withdrawn(
    service: Archiving, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """While a promotion waits, the leader is not asked. That counted as its silence."""
    service.leader.answers = True
    rig = followed(service, takeover_after_ms="5000")
    follower, bucket = rig.follower, rig.archive.store
    assert isinstance(bucket, SimulatedBucket)

    def withdraw() -> None:
        rig.clock.ms += 10_000
        follower.withdraw_promotion()

    follower.ask_promotion()
    with capture_logs() as logs:
        bucket.is_away = True
        for _ in range(3):
            rig.clock.ms += 4000
            follower.step()
        bucket.is_away = False
        if waits == "in a request":
            require_archive = rig.replica.require_archive
            monkeypatch.setattr(rig.replica, "require_archive", lambda: (withdraw(), require_archive()))
            follower.step()
            monkeypatch.undo()
        else:
            withdraw()
        service.leader.answers = False  # for a moment
        follower.step()
    assert rig.shared.control.cell(Role.ARCHIVER, 0).get("promotion_ms") == 0
    assert (follower.exit_code, rig.replica.note.fence_id) == (None, "")
    assert not [line for line in logs if "has given no sign" in line["event"]]
    rig.clock.ms += 5000
    follower.step()
    assert rig.leads, "the leader is silent"


def test_a_takeover_of_its_own_accord_heeds_a_withdrawal(service: Archiving) -> None:
    """Somebody withdrew a promotion while the follower looked whether it could take over from a silent leader. "It goes
    on to follow", said the command, and it took over.
    """
    rig = followed(service, takeover_after_ms="5000")
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)

    def ask_and_withdraw() -> None:
        rig.follower.ask_promotion()
        rig.follower.withdraw_promotion()

    rig.clock.ms += 5000
    bucket.before(3, ask_and_withdraw)
    rig.follower.step()
    assert not rig.leads
    assert not rig.replica.note.fence_id
    rig.clock.ms += 5000
    rig.follower.withdraw_promotion()
    rig.follower.step()
    assert rig.leads, "there was none to withdraw"


NOT_NOTED = Fault(1, errno.ENOSPC, always=True, calls=frozenset({"pwritev"}))
PERHAPS_NOTED = Fault(1, errno.EIO, always=True, calls=frozenset({"fsync_dir"}))


@pytest.mark.parametrize(("fault", "is_there"), [(NOT_NOTED, False), (PERHAPS_NOTED, True)])
def test_a_takeover_begins_once_it_is_noted(service: Archiving, fault: Fault, is_there: bool) -> None:
    """With a full disk nothing was noted, nobody could withdraw it, and the follower took over later from a leader that
    was well by then. A note that could not be synced is there.
    """
    rig = followed(service, takeover_after_ms="5000")
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    rig.process_fs.arm(fault)
    with capture_logs() as logs:
        for _ in range(2):
            rig.clock.ms += 5000
            rig.follower.step()
    assert [cell.get("promotion_begun"), cell.get("promotion_ms") > 0] == [is_there, is_there]
    assert ["takes over" in line["event"] for line in logs].count(True) == is_there
    service.append("a", 1, "disk")
    service.ship(0)
    rig.follower.ask_promotion()
    rig.follower.step()
    rig.follower.withdraw_promotion()
    rig.process_fs.arm(None)
    rig.follower.step()
    assert rig.leads == is_there
    assert (cell.get("promotion_ms") > 0) == is_there
    rig.clock.ms += 5000
    rig.follower.step()
    assert rig.leads, "the leader is silent"


def test_a_promotion_that_had_begun_is_shown_after_a_restart(service: Archiving) -> None:
    rig = followed(service)
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    rig.follower.ask_promotion()
    bucket.before(FIRST_OBJECT, partial(setattr, bucket, "is_away", True))
    rig.follower.step()
    rig.follower_dies()
    cell = rig.shared.control.cell(Role.ARCHIVER, 0)
    assert cell.get("promotion_ms") == 0
    rig.follower.step()
    rig.follower.withdraw_promotion()
    assert cell.get("promotion_ms") == rig.clock.ms
    assert cell.get("promotion_begun") == 1
    bucket.is_away = False
    rig.follower.step()
    assert rig.leads


def test_a_generation_stays_until_a_later_one_can_be_restored(service: Archiving) -> None:
    """It went though nothing of the later one could be restored."""
    ship_bases(service)
    service.copy_directory()
    service.append("a", 3, "disk")
    service.ship(0)
    service.put_copy_in_its_place()
    for _ in range(3):
        service.append("b", 1, "disk")
        service.ship(0)
    [only] = service.archive.bases(2)
    name = piece_name(2, only)
    whole = service.bucket.objects.pop(name)
    last = service.archive.bases(1)[-1]
    for _ in range(2):
        assert [name in line for line in prune(service.archive, service.world.clock.ms + 1).damaged] == [True]
        assert (service.archive.generations(), service.archive.bases(1)) == ([1, 2], [last])
    assert plan(service.archive, WantedMoment(ts_ms=service.archive.base(1, last)[0].taken_ms)).base.number == last
    service.bucket.objects[name] = whole
    assert prune(service.archive, service.world.clock.ms + 1).damaged == []
    assert service.archive.generations() == [2]
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def test_a_killed_pruning_goes_on_only_in_favour_of_what_is_whole_still(service: Archiving) -> None:
    """The next one removed what was listed, though a piece that the other base needs was damaged by then."""
    now_ms = ship_bases(service)
    bases = service.archive.bases(1)
    removed = [base_name(1, number) for number in bases[:-1]]
    first_piece = service.archive.base(1, bases[-1])[0].first_piece
    removed += [piece_name(1, number) for number in service.archive.pieces(1) if number < first_piece]
    service.bucket.create(removal_name(1, 1), encode(Removal(1, removed)))
    name = piece_name(1, bases[-1])
    whole = service.bucket.objects.pop(name)
    prune(service.archive, 0)
    assert service.archive.bases(1) == bases
    prune(service.archive, now_ms)
    assert service.archive.bases(1) == bases[-2:]
    service.bucket.objects[name] = whole
    prune(service.archive, 0)
    assert service.archive.bases(1) == bases[-1:]
    assert service.archive.removals(1) == []
    prune(service.archive, now_ms)
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def test_behind_a_damaged_newest_base_another_one_is_made(service: Archiving) -> None:
    """The service shipped nothing any more, for good."""
    ship_bases(service)
    prune(service.archive, service.world.clock.ms + 1)
    [last] = service.archive.bases(1)
    assert not service.archive.has_piece(1, 1)
    damaged = damage(service, base_name(1, last))
    service.archiver_dies(0)
    service.append("a", 3, "disk")
    with capture_logs() as logs:
        for _ in range(3):
            service.ship(0)
    assert damaged in next(line["reason"] for line in logs if "cannot be read" in line["event"])
    assert service.archive.bases(1)[-1] > last
    del service.bucket.objects[damaged]
    service.moments = {
        at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects and at[1] > last
    }


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_running_archiver_replaces_a_damaged_newest_base(
    service: Archiving, keeps_all: bool, is_missing: bool
) -> None:
    """It did so only when it started again, or with the next base. Nothing waits for the base: each moment is one."""
    service.world.keep_ms = 0 if keeps_all else 7 * archiver.BASE_MS
    service.archiver_dies(0)
    ship_bases(service)
    for _ in range(6):
        service.ship(0)  # syncs write, too, and then a base may be due
    last = service.archive.bases(1)[-1]
    name, end = base_name(1, last), service.archive.last_piece(1, last)
    whole = service.bucket.objects.pop(name) if is_missing else service.bucket.objects[damage(service, name)]
    service.world.clock.ms += archiver.PRUNE_MS
    with capture_logs() as logs:
        for _ in range(4):
            service.ship(0)
    newest = service.archive.bases(1)[-1]
    assert newest == end + 1, "one, though nothing was written"
    assert service.archive.piece(1, newest)[0].is_moment
    assert [name in line["reason"] for line in logs if "another one is made at once" in line["event"]] == [True]
    assert plan(service.archive, WantedMoment()).base.number == newest
    service.bucket.objects[name] = whole if is_missing else whole[:-1] + bytes([whole[-1] ^ 1])


@pytest.mark.parametrize("starts_again", [False, True])
@pytest.mark.parametrize("needed_by", ["the base", "a moment behind it"])
def test_a_running_archiver_makes_a_base_behind_a_damaged_piece(
    service: Archiving, needed_by: str, starts_again: bool
) -> None:
    """It looked at its newest base alone. For up to a day no last moment could be restored, and nobody knew."""
    service.world.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    ship_bases(service)
    service.append("a", 3, "disk")
    for _ in range(6):
        service.ship(0)
    last = service.archive.bases(1)[-1]
    number = service.archive.base(1, last)[0].first_piece if needed_by == "the base" else last + 1
    service.append("a", 3, "disk")
    service.ship(0)
    assert service.archive.bases(1)[-1] == last
    whole = service.bucket.objects[damage(service, piece_name(1, number))]
    if starts_again:
        service.archiver_dies(0)
    service.world.clock.ms += archiver.PRUNE_MS
    with capture_logs() as logs:
        for _ in range(4):
            service.ship(0)
        assert service.archive.bases(1)[-1] == last, "another one of this snapshot would need the piece, too"
        service.cut()
        service.world.clock.ms += archiver.BASE_RETRY_MS
        for _ in range(4):
            service.ship(0)
    told = [line["reason"] for line in logs if "once a snapshot is behind it" in line["event"]]
    assert [piece_name(1, number) in reason for reason in told] == [True]
    found = plan(service.archive, WantedMoment())
    assert found.base.number > last
    assert all(service.archive.piece(1, no) for no in found.pieces)
    service.bucket.objects[piece_name(1, number)] = whole[:-1] + bytes([whole[-1] ^ 1])


def test_an_idle_archiver_makes_a_base_behind_a_damaged_piece_at_once(service: Archiving) -> None:
    service.world.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    ship_bases(service)
    for _ in range(6):
        service.ship(0)
    last = service.archive.bases(1)[-1]
    service.append("a", 3, "disk")
    service.ship(0)
    service.cut()
    service.ship(0)  # the marks of the cut
    number = service.archive.last_piece(1, last)
    assert number == last + 2
    whole = service.bucket.objects[damage(service, piece_name(1, last + 1))]
    service.world.clock.ms += archiver.PRUNE_MS
    for _ in range(4):
        service.ship(0)
    found = plan(service.archive, WantedMoment())
    assert found.base.number > number
    assert found.base.first_piece > last + 1
    service.bucket.objects[piece_name(1, last + 1)] = whole[:-1] + bytes([whole[-1] ^ 1])


@pytest.mark.parametrize("harm", HARMS)
def test_a_follower_begins_with_an_older_base_if_the_newest_one_is_damaged(service: Archiving, harm: str) -> None:
    """It could not begin, though an older base and the pieces behind it were there. When the next base comes, it takes
    that.
    """
    ship_bases(service)
    _, older, last = service.archive.bases(1)[-3:]
    name = base_name(1, last)
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, harm)
    for _ in range(3):
        service.follow([])
    rig = service.follower
    assert rig is not None
    assert (rig.shown, rig.replica.note.base) == (max(service.moments), older)
    note = read_borrowed(OsFileSystem(), rig.settings.data_dir)
    assert list(service.archive.loans(1)) == ([older] if note is not None else [])
    while service.archive.bases(1)[-1] == last:
        service.append("d", 1, "disk")
        service.ship(0)
    for _ in range(6):
        service.follow([])
    assert rig.replica.note.base > last
    service.bucket.objects[name] = whole


def followed(service: Archiving, takeover_after_ms: str = "0") -> FollowerRig:
    """Ship some records; return a follower that has them."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    if takeover_after_ms != "0":
        directory = f"{service.directory}/follower"
        service.followers[0] = service.follower_in(directory, takeover_after_ms=takeover_after_ms)
    for _ in range(4):
        service.follow([])
    assert service.follower is not None
    return service.follower


def stay_behind_a_hole(service: Archiving, bases: int) -> FollowerRig:
    """Return a follower that has the moment in front of a hole. The archive has so many bases by then."""
    followed(service)
    assert service.follower is not None
    service.long_outage("a", 3)
    while len(service.archive.bases(1)) < bases:
        service.append("a", 1, "disk")
        service.ship(0)
    return service.follower


def test_a_follower_keeps_what_it_has_if_the_base_behind_a_hole_is_damaged(service: Archiving) -> None:
    """It gave up everything, and served nothing until there was another base."""
    rig = stay_behind_a_hole(service, bases=2)
    first = rig.shown
    assert first is not None
    name = base_name(1, service.archive.bases(1)[-1])
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = harmed(whole, "cut")
    for _ in range(6):
        service.follow([])
    assert rig.shown == first
    with pytest.raises(ArchiveDamagedError, match=f"{name}: .*; no older base"):
        plan(service.archive, WantedMoment())
    service.bucket.objects[name] = whole
    for _ in range(6):
        service.follow([])
    assert rig.shown == max(service.moments)


def test_a_follower_behind_a_hole_remembers_which_indexes_are_damaged(service: Archiving) -> None:
    """It read all files of all bases again at each look. What is put back it takes at the next one."""
    rig = stay_behind_a_hole(service, bases=4)
    first, bucket = rig.shown, rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    base = service.archive.base(1, service.archive.bases(1)[-1])[0]
    *_, name = [ref.name for ref in base.files if ref.path.endswith(".idx")]
    whole = service.bucket.objects[name]
    damage(service, name)
    read: list[str] = []
    read_range = bucket.read_range

    def noted(name: str, offset: int, length: int) -> bytes:
        read.append(name)
        return read_range(name, offset, length)

    with patch.object(bucket, "read_range", noted):
        for looks in range(4):
            read.clear()
            for _ in range(2):  # as often as it looks for a base
                service.follow([])
            files = [other for other in read if other.endswith(".idx")]
            assert (len(set(files)) > 1) if not looks else set(files) == {name}, looks
    assert rig.shown == first
    service.bucket.objects[name] = whole
    for _ in range(6):
        service.follow([])
    assert rig.shown == max(service.moments)


def test_the_first_step_of_a_follower_looks_once(service: Archiving) -> None:
    """It looked twice: once before it asked the leader, and once behind that."""
    rig = followed(service)
    rig.restart_service()
    with patch.object(rig.replica, "step", wraps=rig.replica.step) as looks:
        service.follow([])
        assert looks.call_count == 1
        service.append("a", 1, "disk")
        service.ship(0)
        service.follow([])
    assert rig.shown == max(service.moments)


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_damaged_oldest_base_keeps_its_pieces(service: Archiving, is_lent: bool) -> None:
    """They were pruned: once the base was put back from a copy, nothing could be restored from it."""
    ship_bases(service)
    first = service.archive.bases(1)[0]
    before_ms = service.archive.base(1, first)[0].taken_ms
    if is_lent:
        service.bucket.create(loan_name(1, first), b"a restored service")
        before_ms = service.world.clock.ms + 1
    before, whole = set(service.bucket.objects), service.bucket.objects[base_name(1, first)]
    damaged = damage(service, base_name(1, first))
    assert damaged in prune(service.archive, before_ms).damaged[0]
    assert set(service.bucket.objects) == before
    service.bucket.objects[damaged] = whole
    assert check(service.archive, lambda _done, _total: None) == []
    for loan in service.archive.loans(1).values():
        service.archive.end_loan(loan)


def test_a_backup_of_a_directory_at_rest_replaces_a_damaged_newest_base(service: Archiving) -> None:
    """Each backup said that two of them use one archive, until something was written."""
    service.append("a", 3, "disk")
    for _ in range(2):
        shipper = service.leader.shipper()
        shipper.begin()
        shipper.base()
    [last] = service.archive.bases(1)
    damage(service, base_name(1, last))
    for _ in range(2):
        shipper = service.leader.shipper()
        shipper.begin()
        assert shipper.base().piece == last + 1
    assert service.archive.bases(1) == [last, last + 1]
    del service.bucket.objects[base_name(1, last)]
    service.moments = {(1, last + 1): service.moments[1, last + 1]}


def test_a_pruning_that_meets_damage_says_so_and_what_it_removed(service: Archiving) -> None:
    """It was logged as an archive that cannot be written, and what went was not."""
    service.world.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    ship_bases(service)
    last = service.archive.bases(1)[-1]
    damaged = damage(service, base_name(1, last))
    service.world.clock.ms += archiver.PRUNE_MS
    with capture_logs() as logs:
        for _ in range(4):
            service.ship(0)
    told = {line["event"]: line.get("reason", "") for line in logs}
    assert damaged in next(reason for event, reason in told.items() if "the archive is damaged" in event)
    assert "pruned the archive" in told
    assert not any("cannot be written" in event for event in told)
    del service.bucket.objects[damaged]  # the base before it gives its moments, too


def test_a_pruning_that_cannot_begin_is_tried_again_at_once(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put off for an hour."""
    ship_bases(service)
    first = service.archive.bases(1)[0]
    service.world.keep_ms = archiver.BASE_MS
    service.world.clock.ms += 2 * archiver.BASE_MS
    service.archiver_dies(0)

    def away(_shipper: shipping.Shipper) -> None:
        raise OSError(errno.EIO, "is away")

    with monkeypatch.context() as patched:
        patched.setattr(shipping.Shipper, "require_end", away)
        for _ in range(3):
            service.ship(0)
    assert service.archive.bases(1)[0] == first
    for _ in range(2):
        service.ship(0)
    assert first not in service.archive.bases(1)
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


@pytest.mark.parametrize("kind", ["generation", "removal"])
def test_what_is_damaged_holds_back_no_other_generation(service: Archiving, kind: str) -> None:
    """Nothing was listed or pruned, and nobody was told of a way out."""
    ship_bases(service)
    follow_and_go_back(service)
    for _ in range(8):
        service.append("b", 1, "disk")
        service.ship(0)
    for loan in service.archive.loans(1).values():
        service.archive.end_loan(loan)
    if kind == "removal":
        service.bucket.create(removal_name(1, 1), encode(Removal(1, [])))
    damaged = damage(service, generation_name(2) if kind == "generation" else removal_name(1, 1))
    before = {number: service.archive.bases(number) for number in (1, 2)}
    assert [(bool(found.bases), len(found.damaged)) for found in figures(service.archive)] == (
        [(True, 0), (False, 1)] if kind == "generation" else [(True, 0), (True, 0)]
    )
    pruned = prune(service.archive, service.world.clock.ms + 1)
    way_out = "put it back from a copy" if kind == "generation" else "remove it"
    assert [f"{damaged}: checksum does not match; {way_out}" in line for line in pruned.damaged] == [True]
    if kind == "generation":
        assert service.archive.bases(1) == before[1][-1:], "the last moment that can be restored stays"
        assert service.archive.bases(2) == before[2]
        damage(service, damaged)  # it is whole again
    else:
        assert service.archive.bases(1) == before[1]
        assert service.archive.bases(2) == before[2][-1:]
        del service.bucket.objects[damaged]
    assert prune(service.archive, service.world.clock.ms + 1).damaged == []
    assert service.archive.generations() == [2]
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def damage(service: Archiving, name: str) -> str:
    """Change the last byte of an object."""
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = whole[:-1] + bytes([whole[-1] ^ 1])
    return name


def test_a_clock_that_was_put_back_hides_no_lag(service: Archiving) -> None:
    """The newest moment bore a later time, so the archive counted as up to date, and no alert told that it was away."""
    clock, page = service.leader.rig.clock, service.leader.rig.shared.control
    clock.skew_ms = archiver.BASE_MS
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    clock.skew_ms = 0
    service.partition(away=True)
    service.append("a", 1, "disk")
    service.ship(0)
    clock.ms += 60_000
    service.ship(0)
    assert page.archive_lag_ms(clock.now_ms()) >= 60_000
    service.partition(away=False)


def taken_over(service: Archiving, *, shipped: int) -> Leader:
    """Take over from a leader that was told to keep little and has shipped so often; return it. The heir has bases."""
    service.append("a", 3, "disk")
    service.world.keep_ms = archiver.BASE_MS
    service.archiver_dies(0)
    for _ in range(shipped):
        service.ship(0)
    service.world.keep_ms = 0
    for _ in range(4):
        service.follow([])
    former = service.leader
    service.take_over([])
    for _ in range(2):
        service.leader.rig.clock.ms += 2 * archiver.BASE_MS
        service.append("a", 3, "disk")
        for _ in range(3):
            service.ship(0)
    return former


def test_a_former_leader_that_was_stopped_prunes_nothing_of_its_heirs(service: Archiving) -> None:
    """It pruned with the history that it was told to keep before it met the piece by which the heir had taken over."""
    former = taken_over(service, shipped=3)
    there = set(service.bucket.objects)
    former.append("b", 1, "disk")
    for _ in range(2):
        former.step(0)
    assert set(service.bucket.objects) == there
    assert former.rig.shared.control.is_taken_over


def test_a_former_leader_without_news_prunes_nothing_of_its_heirs(service: Archiving) -> None:
    """It had nothing to ship, so it did not meet the piece by which the heir had taken over, and pruned each hour."""
    former = taken_over(service, shipped=6)
    there = set(service.bucket.objects)
    for _ in range(3):  # it may end a base of its own first
        former.step(0)
    assert not there - set(service.bucket.objects)
    assert former.rig.shared.control.is_taken_over


def test_a_former_leader_says_where_its_heir_is(service: Archiving) -> None:
    """The archive has the address, and its clients were told to look for it in a log."""
    former = taken_over(service, shipped=3)
    with capture_logs() as logs:
        for _ in range(3):
            former.step(0)
    [told] = [line["reason"] for line in logs if "took over from this service" in line.get("reason", "")]
    assert f"use the other one, {service.leader.url};" in told
    service.leader.step(0)
    closing = service.archive.last_piece(2, 0)
    name = piece_name(2, closing)
    whole = service.bucket.objects[name]
    service.bucket.objects[name] = whole[:-1]
    assert "use the other one;" in str(ownership.taken_over(service.archive, "somebody")), "damage hides nothing else"
    service.bucket.objects[name] = whole


def test_a_stop_waits_for_no_base_that_cannot_be_made_now(service: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archiver took its steps one after the other, without a pause, until its time to stop was over."""
    service.append("a", 12, "disk")
    service.cut()
    data = sorted(Path(service.leader.data_dir).rglob("*.data"))[0]
    data.rename(away := data.with_suffix(".away"))
    for _ in range(3):
        service.ship(0)
    found, steps = service.leader.archivers[0], list[int]()
    taken = found.step

    def step() -> int | None:
        steps.append(len(steps))
        assert len(steps) < 10, "it stops"
        return taken()

    monkeypatch.setattr(found, "step", step)
    stop = threading.Event()
    stop.set()
    found.work(stop)
    assert len(steps) == 1
    away.rename(data)
    service.leader.rig.clock.ms += archiver.BASE_RETRY_MS
    found.work(stop)
    assert service.archive.bases(1), "it is waited for where it can be made"


@pytest.mark.parametrize("is_based", [False, True])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_segment_that_cannot_be_read_is_told_and_keeps_no_moment_back(
    service: Archiving, is_missing: bool, is_based: bool
) -> None:
    """The base was tried again at once, without a word and without an end: each time all that could be read was."""
    for _ in range(3 if is_based else 0):
        service.ship(0)
    bases = service.archive.bases(1) if is_based else []
    assert bool(bases) == is_based
    service.append("a", 12, "disk")
    service.cut()
    data = sorted(Path(service.leader.data_dir).rglob("*.data"))[0]
    data.rename(away := data.with_suffix(".away"))
    if not is_missing:
        data.mkdir()  # as with a bad sector, it can be opened and not be read
    with capture_logs() as logs:
        for number in range(30):
            if number < archiver.BASE_PIECES:
                service.append("b", 1, "disk")
            service.ship(0)
    [told] = [line for line in logs if line["log_level"] == "error"]
    assert told["event"].endswith("moments are shipped" if is_based else "nothing new can be restored until then")
    reason = (
        f"{data}: was replaced or removed, and the newest snapshot lists it"
        if is_missing
        else f"{data}: Is a directory"
    )
    assert reason in told["reason"]
    assert service.archive.bases(1) == bases
    if not is_missing:
        data.rmdir()
    away.rename(data)
    service.leader.rig.clock.ms += archiver.BASE_RETRY_MS
    for _ in range(3):
        service.ship(0)
    assert service.archive.bases(1) != bases


def test_an_archive_that_is_away_while_files_are_copied_has_its_base_soon(
    service: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was not mounted counted as a segment's file that is missing: nothing was archived for a minute."""

    def away(name: str, _content: bytes) -> bool:
        raise FileNotFoundError(errno.ENOENT, "is missing", name)

    service.append("a", 12, "disk")
    service.cut()
    service.ship(0)
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(service.leader.bucket, "create", away)
        service.archiver_dies(0)
        for _ in range(3):
            service.ship(0)
    assert logs
    assert not [line for line in logs if "no base" in line["event"]]
    for _ in range(3):
        service.ship(0)
    assert service.archive.bases(1)


def test_a_follower_does_not_lead_with_what_its_leader_lost_and_wrote_anew(service: Archiving) -> None:
    """The leader had told more than the archive had. Its machine failed, and what it wrote then was in the archive."""
    service.leader.answers = True
    followed(service)
    service.copy_directory()
    service.append("a", 8, "disk")
    service.append("b", 8, "disk")
    service.follow([])
    assert service.follower is not None
    told = service.follower.shown_words
    service.put_copy_in_its_place()
    service.append("a", 1, "disk")
    service.append("b", 1, "disk")
    service.ship(0)
    assert service.archived_ends[max(service.moments)] < told
    service.archived_is_in_the_last_moment()
    expected = service.moments[max(service.moments)]
    for _ in range(8):
        service.follow([])
    service.follower.assert_shown()
    assert service.follower.read("a") == sorted(expected["a"].items())
    service.take_over([])


def follow_and_go_back(service: Archiving) -> None:
    """Have a follower take what is shipped, then put the directory back to where it was before."""
    service.append("a", 3, "disk")
    service.copy_directory()
    followed(service)
    service.put_copy_in_its_place()


def test_a_takeover_right_after_the_directory_went_back_is_from_the_new_generation(service: Archiving) -> None:
    """It closed the former generation, and led with that; the leader went on in the next one."""
    follow_and_go_back(service)
    service.append("a", 1, "disk")
    for _ in range(3):
        service.ship(0)
    assert max(service.moments)[0] == 2
    service.take_over([])


def test_a_takeover_closes_a_generation_that_has_no_base_yet(service: Archiving) -> None:
    follow_and_go_back(service)
    service.leader.helpers.hangs = True
    service.ship(0)
    assert (service.archive.generations(), service.archive.bases(2)) == ([1, 2], [])
    former = service.leader
    service.take_over([])
    former.helpers.go_on()
    former.append("a", 1)
    for _ in range(3):
        former.step(0)
    assert former.rig.shared.control.is_taken_over


def test_what_was_told_is_compared_over_the_pieces_of_a_moment(keeping: Archiving) -> None:
    """A frame goes on in the next piece, and marks in the follower's log list no segments any more."""
    keeping.leader.answers = True
    followed(keeping)
    for _ in range(5):
        keeping.append_much("a")
        keeping.append("d", 3, "disk")
        keeping.cut()
    keeping.append("a", 1, "disk")
    for _ in range(4):
        keeping.follow([])
    follower = keeping.follower
    assert follower is not None
    replica, told = follower.replica, follower.shown_words
    assert told > tuple([end.word for end in replica.archived_ends])
    keeping.append("a", 1, "disk")
    keeping.leader.answers = False
    pieces = _last_piece(keeping)[1]
    keeping.ship(0)
    assert _last_piece(keeping)[1] > pieces + 1
    for _ in range(3):
        keeping.follow([])
    assert follower.replica is replica, "nothing is copied again"
    assert (follower.shown, replica.note.told) == (max(keeping.moments), [])


def test_a_follower_that_was_told_more_stays_there_at_a_hole(service: Archiving) -> None:
    """It copied the base before the hole again, and showed less than before."""
    service.leader.answers = True
    followed(service)
    service.append("a", 8, "disk")
    service.follow([])
    rig = service.follower
    assert rig is not None
    replica, told = rig.replica, rig.shown_words
    assert told > tuple([end.word for end in replica.archived_ends])
    service.leader.answers = False
    service.leader.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    for _ in range(4):
        service.follow([])
    assert replica.has_hole
    assert (rig.replica is replica, rig.shown_words) == (True, told)
    service.leader.helpers.go_on()
    for _ in range(3):
        service.ship(0)
    for _ in range(8):
        service.follow([])
    assert rig.shown == max(service.moments)


def test_a_follower_with_the_note_of_an_earlier_build_copies_everything_again(service: Archiving) -> None:
    rig = followed(service)
    write_note(OsFileSystem(), rig.settings.data_dir, replace(rig.replica.note, archived=[]))
    rig.follower_dies()
    for _ in range(4):
        service.follow([])
    assert rig.replica.note.archived
    assert rig.shown == max(service.moments)


def test_a_follower_whose_leader_told_it_over_a_hole_copies_nothing_again(service: Archiving) -> None:
    """Once the leader had told what was missing, the hole still counted, and the next base was copied as a whole."""
    service.leader.answers = True
    rig = followed(service)
    replica = rig.replica
    service.leader.bucket.is_away = True
    for _ in range(3):
        service.leader.append_much("a")
        service.ship(0)
        for _ in range(4):
            service.follow([])
        service.cut()
    service.leader.answers = False
    service.append("a", 1, "disk")
    service.cut()
    service.leader.helpers.hangs = True
    service.leader.bucket.is_away = False
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    for _ in range(4):
        service.follow([])
    assert (rig.replica is replica, replica.has_hole) == (True, True)
    service.leader.answers = True
    for _ in range(4):
        service.world.clock.ms += 20_000
        service.follow([])
    service.leader.helpers.go_on()
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
        service.world.clock.ms += 20_000
        service.follow([])
    for _ in range(3):
        service.follow([])
    assert (rig.replica is replica, rig.shown) == (True, max(service.moments))


def test_a_follower_looks_into_the_archive_before_it_asks_the_leader(service: Archiving) -> None:
    """The archive ended with a part of a moment that the leader had lost. The leader told other bytes first, so each
    start copied everything again, until there was a base of the next generation.
    """
    ship_bases(service)
    name = base_name(1, service.archive.bases(1)[-1])
    whole = service.bucket.objects[name]
    damage(service, name)
    service.copy_directory()
    service.archiver_dies(0)
    service.leader.helpers.hangs = True
    service.append("a", 3, "disk")
    service.ship(0)
    assert not service.archive.piece(1, service.archive.last_piece(1, 0))[0].is_moment
    service.put_copy_in_its_place()
    service.append("b", 3, "disk")
    service.leader.answers = True
    for _ in range(2):
        service.follow([])
    rig = service.follower
    assert rig is not None
    replica = rig.replica
    for _ in range(4):
        service.follow([])
    assert (rig.replica is replica, rig.shown) == (True, max(service.moments))
    service.bucket.objects[name] = whole


@pytest.mark.parametrize("trouble", ["away", "damaged"])
def test_a_follower_that_starts_while_the_archive_cannot_be_read_serves_what_it_has(
    service: Archiving, trouble: str
) -> None:
    """Its shards waited until it had looked into the archive once, and it served nothing."""
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    rig = service.follower
    assert rig is not None
    shown, bucket = rig.shown, rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    assert shown == max(service.moments)
    service.append("d", 1, "disk")
    service.ship(0)
    name = piece_name(1, shown[1] + 1)
    whole = service.bucket.objects[name]
    if trouble == "away":
        bucket.is_away = True
    else:
        damage(service, name)
    rig.restart_service()
    for _ in range(3):
        service.follow([])
    assert rig.shown == shown
    bucket.is_away = False
    service.bucket.objects[name] = whole
    for _ in range(3):
        service.follow([])
    assert rig.shown == max(service.moments)


def test_a_service_starts_with_a_first_copy_only_once_that_is_noted(service: Archiving) -> None:
    """If the disk was full at the note, all its processes started again for ever, each time to copy everything, and
    nothing said why.
    """
    ship_bases(service)
    failed = []
    for nth in itertools.count(1):
        rig = service.follower_in(f"{service.directory}/follower-of-{nth}")
        rig.process_fs.arm(Fault(nth, errno.ENOSPC, calls=frozenset({"rename"})))
        rig.follower.step()
        note = read_note(rig.fs, rig.settings.data_dir)
        assert note is not None
        assert (rig.follower.exit_code is not None) == (note.piece > 0)
        failed.append(rig.shared.control.cell(Role.ARCHIVER, 0).get("failures"))
        struck = rig.process_fs.struck
        rig.close()
        if not struck:
            break
    assert len(failed) > 3
    assert failed[0] == 1
    assert failed[-1] == 0


@pytest.mark.parametrize("trouble", ["away", "damaged", "pruned"])
def test_a_follower_that_was_told_more_starts_without_its_last_piece(service: Archiving, trouble: str) -> None:
    """It needed that piece to start. It served nothing while the archive was away, and copied everything again if the
    piece was damaged, even if it could not.
    """
    service.leader.answers = True
    ship_bases(service)
    for _ in range(4):
        service.follow([])
    service.append("d", 1, "disk")
    service.ship(0)
    service.append("d", 3, "disk")
    for _ in range(3):
        service.follow([])
    rig = service.follower
    assert rig is not None
    told, note = rig.shown_words, rig.replica.note
    assert note.told
    assert rig.noted_words == told > tuple([end.word for end in rig.replica.archived_ends])
    bucket, name = rig.archive.store, piece_name(1, note.piece)
    assert isinstance(bucket, SimulatedBucket)
    whole = service.bucket.objects[name]
    service.leader.answers = False
    if trouble == "away":
        bucket.is_away = True
    elif trouble == "damaged":
        damage(service, name)
    else:
        del service.bucket.objects[name]
    rig.restart_service()
    replica = rig.replica
    for _ in range(3):
        service.follow([])
    assert (rig.replica is replica, rig.shown, rig.shown_words) == (True, (1, note.piece), told)
    bucket.is_away = False
    service.bucket.objects[name] = whole
    service.ship(0)
    for _ in range(3):
        service.follow([])
    assert (rig.replica is replica, rig.shown) == (True, max(service.moments))


def test_a_second_archiver_leaves_the_files_of_a_base_alone(keeping: Archiving) -> None:
    """It read a segment with other deletions in it, and put that under the name that the base has."""
    for tag in (0, 1):
        keeping.append("d", 8, "disk", tag)
    keeping.cut()
    first, second = keeping.leader.shipper(), keeping.leader.shipper()
    first.begin()
    second.begin()
    first.base()
    keeping.delete("d", 0.75, 1)
    second.begin_base().copy()
    assert check(keeping.archive, lambda _done, _total: None) == []


def test_a_deletion_that_a_power_loss_took_from_the_log_alone_is_in_the_archive(keeping: Archiving) -> None:
    """Segments had it, and the service obeyed these: moments and followers showed the record until the next base."""
    keeping.append("d", 8, "disk", 0)
    keeping.append("d", 8, "disk", 1)
    keeping.cut()
    for _ in range(3):
        keeping.ship(0)
        keeping.follow([])
    keeping.delete("d", 0.75, 1)
    left = len(keeping.leader.live["d"])
    keeping.leader.lose_power(0.0)
    assert len(keeping.leader.live["d"]) == left
    keeping.append("b", 1, "disk")
    keeping.ship(0)
    keeping.follow([])
    keeping.restore(1.0)


@pytest.mark.long
@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH])
def test_a_promotion_that_is_killed_at_any_call_goes_on(service: Archiving, error: int) -> None:
    service.leader.answers = True
    service.append("a", 3, "disk")
    service.append("d", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.append("a", 2, "disk")
    service.ship(0)
    follower = service.follower
    assert follower is not None
    follower.close()
    service.followers[0] = None
    kept, objects, owner_id = follower.settings.data_dir, dict(service.bucket.objects), service.owner_id
    for nth in itertools.count(1):
        data_dir = f"{kept}-{nth}"
        shutil.copytree(kept, data_dir)
        service.bucket.objects.clear()
        service.bucket.objects |= objects
        service.owner_id = owner_id
        rig = service.follower_in(data_dir)
        faulty = rig.process_fs
        rig.follower.ask_promotion()
        faulty.arm(Fault(nth, error))
        try:
            _promote(rig)
        except Crash:
            note = read_note(OsFileSystem(), data_dir)
            if note is not None and note.is_promoted:
                rig.close()
            else:
                rig.follower_dies()
                rig.follower.ask_promotion()  # its operator hears of no success, and repeats the command
                _promote(rig)
        with case(nth):
            assert verify(data_dir, lambda _done, _total: None).damage == []
            promoted = Small(data_dir, SHARDS, service.world.clock)
            compare(promoted, service.moments[max(service.moments)])
            promoted.close()
        if not faulty.struck:
            break
    assert nth > 20


def _promote(rig: FollowerRig) -> None:
    for _ in range(20):
        if rig.leads:
            break
        rig.advance()
    rig.end_promotion()


@pytest.mark.parametrize(("is_last", "tells"), [(True, False), (False, False), (True, True)])
def test_a_takeover_waits_for_a_damaged_piece_and_says_so(service: Archiving, is_last: bool, tells: bool) -> None:
    """It waited without a word of a way out. Once the piece is put back, the takeover goes on."""
    followed(service)
    rig = service.follower
    assert rig is not None
    service.followers[0] = None
    for _ in range(1 if is_last else 3):
        service.append("a", 1, "disk")
        service.leader.archivers[0].step()
    if tells:
        service.leader.answers = True
        rig.advance()
    expected = copied(service.leader.live)
    first = rig.replica.laid_piece + 1
    name = piece_name(1, first)
    assert service.archive.has_piece(1, first + 1) != is_last
    whole = service.bucket.objects[name]
    damage(service, name)
    rig.follower.ask_promotion()
    with capture_logs() as logs:
        for _ in range(4):
            rig.advance()
    assert not rig.leads
    told = [line for line in logs if "cannot take over" in line["event"]]
    assert len(told) == 1, "it is told once"
    assert name in told[0]["reason"]
    assert "put the object back from a copy" in told[0]["event"]
    service.bucket.objects[name] = whole
    _promote(rig)
    promoted = Small(rig.settings.data_dir, SHARDS, service.world.clock)
    compare(promoted, expected)
    promoted.close()
    service.append("a", 1, "disk")
    for _ in range(2):
        service.leader.archivers[0].step()
    assert service.leader.rig.shared.control.is_taken_over


def test_a_promoted_service_is_followed_and_taken_over_in_turn(service: Archiving) -> None:
    """A to B to C, and A comes back as a follower each time."""
    for _ in range(3):
        service.append("a", 3, "archived")
        service.append("d", 3, "disk")
        for _ in range(3):
            service.ship(0)
        service.cut()
        service.delete("d", 1.0)
        service.ship(0)
        for _ in range(4):
            service.follow([])
        former = service.leader
        service.take_over([])
        assert service.former is former
        service.former_leader("comes back")
        assert service.followers[1] is not None
        service.followers.reverse()
    assert len(service.leaders) == 4
    assert min(service.moments)[0] == 1
    for moment in sorted(service.moments):
        service.restores = 0
        service.restore(sorted(service.moments).index(moment) / max(1, len(service.moments) - 1))


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("nth", range(1, 17))
def test_a_generation_that_is_begun_in_the_moment_of_a_takeover(service: Archiving, nth: int, dies: bool) -> None:
    """The leader went on in that generation, and the service that took over shipped nothing. Each place between two of
    its requests; it may die right after it has begun the generation.
    """
    follow_and_go_back(service)
    former = service.leader

    def takes_over() -> None:
        service.take_over([])
        if dies:
            former.before(1, _die)

    service.append("a", 1, "archived")
    former.before(nth, takes_over)
    for _ in range(3):
        former.step(0)
    former.before(0, lambda: None)
    if service.former is former:
        former.reshard(3)
        former.step(0)
        assert former.shipped == [0] * 3 or not any(former.shipped)


def _die() -> None:
    raise KilledError


@pytest.mark.parametrize("nth", range(1, 24))
def test_a_leader_begins_a_generation_between_two_requests_of_a_takeover(service: Archiving, nth: int) -> None:
    follow_and_go_back(service)
    service.append("a", 1, "archived")
    service.take_over([], 0, nth, "ship")


@pytest.mark.parametrize("nth", range(1, 17))
def test_an_archive_is_closed_while_its_leader_begins_a_generation(service: Archiving, nth: int) -> None:
    """`restore --take-over`: what the leader acknowledges is in what is restored, wherever it is."""
    follow_and_go_back(service)
    follower = service.followers[0]
    assert follower is not None
    follower.close()
    service.followers[0] = None
    service.append("a", 1, "archived")
    service.leader.before(nth, lambda: close_archive(service.archive, service.world.clock, "another machine"))
    for _ in range(4):
        service.ship(0)
    service.leader.before(0, lambda: None)
    last = max(service.moments)
    close_archive(service.archive, service.world.clock, "another machine")
    service.archived_is_in_the_last_moment()
    service.restore(1.0)
    assert max(service.moments) == last


@pytest.mark.parametrize("nth", range(1, 13))
def test_one_restore_takes_over_whatever_its_leader_begins_meanwhile(service: Archiving, nth: int) -> None:
    """A second one closed the generation that had been begun in the moment of the first one, and succeeded as well."""
    follow_and_go_back(service)
    service.append("a", 1, "archived")
    service.leader.before(nth, lambda: close_archive(service.archive, service.world.clock, "one"))
    service.ship(0)
    service.leader.before(0, lambda: None)
    if not service.owner_id:
        with pytest.raises(TakenOverError, match="one took over from this service already"):
            close_archive(service.archive, service.world.clock, "another")
    service.archived_is_in_the_last_moment()


def test_of_two_that_take_over_by_a_restore_one_succeeds(service: Archiving) -> None:
    """Both succeeded, and so did one after a follower that had begun nothing in the archive yet: two led."""
    service.append("a", 3, "archived")
    for _ in range(3):
        service.ship(0)
    clock = service.world.clock
    before = dict(service.bucket.objects)
    for _ in range(2):  # a restore that failed is repeated
        close_archive(service.archive, clock, "one")
    with pytest.raises(TakenOverError, match="one took over from this service already"):
        close_archive(service.archive, clock, "another")
    service.bucket.objects.clear()
    service.bucket.objects |= before
    service.owner_id = service.leader.id
    for _ in range(4):
        service.follow([])
    service.take_over([])
    with pytest.raises(TakenOverError, match="use that one"):
        close_archive(service.archive, clock, "one")
    service.ship(0)
    assert service.archive.generations() == [1, 2]
    close_archive(service.archive, clock, "one")
    with pytest.raises(AssertionError, match="all is shipped"):
        service.ship_all()
    assert service.leader.rig.shared.control.is_taken_over


def test_the_last_moment_stays_until_the_next_generation_has_a_base(service: Archiving) -> None:
    """It was pruned: there was nothing to restore until that base was whole."""
    follow_and_go_back(service)
    service.leader.helpers.hangs = True
    service.append("b", 1, "disk")
    service.ship(0)
    assert (service.archive.generations(), service.archive.bases(2)) == ([1, 2], [])
    service.prune(1, [])
    service.restore(1.0)


def test_what_a_generation_without_a_base_has_goes_with_it(service: Archiving) -> None:
    """Its pieces, and files of its first base, stayed for ever."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    service.copy_directory()
    service.append("a", 3, "disk")
    service.ship(0)
    secret = b'"a secret"'
    for _ in range(2):
        service.put_copy_in_its_place()
        service.leader.helpers.hangs = True
        for _ in range(3):
            service.leader.rig.append("a", secret)
            service.leader.live["a"] = dict(shown(service.leader.rig)["a"])
            service.ship(0)
    service.put_copy_in_its_place()
    service.leader.helpers.go_on()
    service.append("a", 1, "disk")
    for _ in range(3):
        service.ship(0)
    assert any(secret in body for body in service.bucket.objects.values())
    service.prune(1, [])
    assert not any(secret in body for body in service.bucket.objects.values())
    newest = max(service.moments)[0]
    left = [name for name in service.bucket.objects if not name.startswith((f"g{newest:08d}.", "generations/"))]
    assert len(left) == newest - 1, "only what closed them"
    assert all(decode(service.bucket.objects[name], Piece, name)[0].taken_over_by for name in left)


@pytest.mark.long
def test_a_pruning_that_is_killed_at_any_request_ends_next_time(service: Archiving) -> None:
    """Pieces and files that only the bases needed which were gone already stayed for ever."""
    before_ms = ship_bases(service)

    def pruned(nth: int) -> tuple[set[str], bool]:
        here, is_killed = SimulatedBucket(), False
        here.objects = dict(service.bucket.objects)
        here.before(nth, _die)
        try:
            prune(Archive(here), before_ms)
        except KilledError:
            is_killed = True
            assert check(Archive(here), lambda _done, _total: None) == []
            prune(Archive(here), before_ms)
        return set(here.objects), is_killed

    expected, _ = pruned(0)
    assert len(expected) < len(service.bucket.objects) - 20
    for nth in itertools.count(1):
        found, is_killed = pruned(nth)
        with case(nth):
            assert found == expected
        if not is_killed:
            break
    assert nth > 20


def ship_bases(service: Archiving) -> int:
    """Have some bases in the archive, of which only the last one is needed; return a time after it."""
    for _ in range(4):
        service.append("a", 7, "disk")
        service.cut()
        service.delete("a", 1.0, 1)
        for _ in range(5):
            service.append("d", 1, "disk")
            service.ship(0)
    assert len(service.archive.bases(1)) > 2
    return service.world.clock.ms + 1


@pytest.mark.long
@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_look_at_an_archive_beside_a_pruning_finds_no_damage(service: Archiving, command: str) -> None:
    """`topics archive` called what the service had just pruned missing, and the archive damaged."""
    early_ms = ship_bases(service)
    follow_and_go_back(service)  # another generation, so that the first one goes as a whole
    for _ in range(3):
        service.append("b", 1, "disk")
        service.ship(0)
    for before_ms in (early_ms, service.world.clock.ms + 1):
        for nth in itertools.count(1, 3):
            here, pruned = SimulatedBucket(), list[bool]()
            here.objects = dict(service.bucket.objects)

            def prune_meanwhile(
                here: SimulatedBucket = here, pruned: list[bool] = pruned, before_ms: int = before_ms
            ) -> None:
                prune(Archive(SimulatedBucket(here)), before_ms)
                pruned.append(True)

            here.before(nth, prune_meanwhile)
            with case(before_ms, nth):
                if command == "list":
                    found = figures(Archive(here))
                    assert [one.damaged for one in found] == [[] for _ in found] != []
                elif command == "verify":
                    assert check(Archive(here), lambda _done, _total: None) == []
                else:
                    assert prune(Archive(here), before_ms).damaged == []
            if not pruned:
                break
        assert nth > 20


def test_topics_that_became_archived_at_once_are_shown_a_part_at_a_time(
    keeping: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of a follower showed all of them in one turn, and held up its requests for 20 ms with 5,000."""
    shown_max = 16
    for module in (shard_module, follower_shard):
        monkeypatch.setattr(module, "MOVED_MAX", shown_max)
    leader = keeping.leader
    leader.answers = True
    keeping.append("a", 3, "disk")
    for _ in range(2):
        keeping.ship(0)
    for _ in range(4):
        keeping.follow([])
    names = [f"t-{number}" for number in range(3 * shown_max)]
    for name in names:
        leader.rig.append(name, b"1")
    for _ in range(2):
        keeping.follow([])
    rig = keeping.follower
    assert rig is not None

    def archived() -> list[int]:
        found = [(rig.owner(name), rig.reader_of(rig.owner(name)).look_up(name)) for name in names]
        assert all(view for _, view in found), "the leader has told of them"
        return [sum(view[1].archived_seq for at, view in found if at == shard and view) for shard in range(SHARDS)]

    assert archived() == [0, 0]
    keeping.ship(0)
    shard = rig.every[0].shard
    for _ in range(10):
        keeping.world.clock.ms += 1000
        rig.follower.step()
    before = archived()
    shard.copy()
    assert archived() == [before[0] + shown_max, before[1]]
    assert not shard.is_idle
    # One whose turn has not come yet gets more, which is durable as it becomes `ephemeral`.
    reader = rig.reader_of(0)
    views = [(name, reader.look_up(name)) for name in names if rig.owner(name) == 0]
    late = next(name for name, view in views if view is not None and not view[1].archived_seq)
    leader.rig.append(late, b"2")
    leader.rig.call(PutTopic(late, TopicConfig(durability="ephemeral"), False), leader.rig.owner(late))
    rig.follower.step()
    while not shard.is_idle:
        shard.copy()
    assert archived()[0] == sum(rig.owner(name) == 0 for name in names)
    view = reader.look_up(late)
    assert view is not None
    assert view[1].durable_seq == 2, "it went back to what is archived"


def test_what_two_prunings_began_at_once_goes_with_the_next_one(service: Archiving) -> None:
    """Both put what they were about to remove under one number, so that of one was not noted. It was killed, and files
    that nothing names stayed for ever.
    """
    before_ms = ship_bases(service)
    expected, early_ms = SimulatedBucket(), service.archive.base(1, service.archive.bases(1)[1])[0].taken_ms + 1
    expected.objects = dict(service.bucket.objects)
    prune(Archive(expected), before_ms)

    def begin_another() -> None:
        other = SimulatedBucket(service.bucket)
        other.sent = lambda _name: _die
        with pytest.raises(KilledError):
            prune(Archive(other), early_ms)

    here = SimulatedBucket(service.bucket)
    here.before(FIRST_OBJECT, begin_another)
    here.sent = lambda name: lambda: here.before(2 * len(service.archive.bases(1)), _die)
    with pytest.raises(KilledError):
        prune(Archive(here), before_ms)
    prune(Archive(SimulatedBucket(service.bucket)), before_ms)
    assert service.bucket.objects.keys() == expected.objects.keys()


def test_a_former_leader_notices_when_its_generations_are_pruned(service: Archiving) -> None:
    """It took writes on: nothing in the archive said that it had ever been there. Found by seed 36."""
    for _ in range(2):
        service.append("a", 3, "disk")
        for _ in range(3):
            service.ship(0)
        for _ in range(4):
            service.follow([])
        former = service.leader
        service.take_over([])
        for _ in range(3):
            service.ship(0)
        service.prune(1, [])
        assert len(service.archive.generations()) == 1
        former.restart()
        former.step(0)
        assert former.rig.shared.control.is_taken_over


def test_a_former_leader_that_stood_still_ships_nothing_where_its_generation_was_pruned(service: Archiving) -> None:
    """The end of its history was pruned, too: it went on there, and counted what it shipped as archived. Found by seed
    9500.
    """
    followed(service)
    former = service.leader
    service.take_over([])
    for _ in range(3):
        service.ship(0)
    service.prune(1, [])
    assert len(service.archive.generations()) == 1
    shipped = former.shipped
    former.append("a", 1)
    former.step(0)
    assert former.shipped == shipped
    former.step(0)
    assert former.rig.shared.control.is_taken_over


def test_what_an_archiver_puts_where_its_generation_was_pruned_goes(service: Archiving) -> None:
    """It stood still while it copied the files of a base. They stayed in the bucket for ever."""
    followed(service)
    former = service.leader
    former.helpers.hangs = True
    for _ in range(2):
        service.world.clock.ms += archiver.BASE_MS
        service.append("a", 7, "disk")
        service.cut()
        service.ship(0)
    service.take_over([])
    for _ in range(3):
        service.ship(0)
    service.prune(1, [])
    assert len(service.archive.generations()) == 1
    former.helpers.go_on()
    former.step(0)
    assert any(name.startswith("g00000001.files/") for name in service.bucket.objects)
    told: list[bool] = []
    prune(service.archive, service.world.clock.ms + 1, lambda done, total: told.append(done <= total))
    assert told
    assert all(told)
    assert [name for name in service.bucket.objects if name.startswith(("g00000001.files/", "g00000001.bases/"))] == []


def test_a_follower_takes_over_though_the_pieces_that_it_lacks_are_pruned(service: Archiving) -> None:
    """It waited for them for ever, when it had closed the leader's history: nobody led. Found by seed 9474."""
    followed(service)
    service.partition(True, 0)
    for turn in range(15):
        service.append("a", 1, "disk")
        service.ship(0)
        if turn == 2:
            service.cut()
    service.prune(1, [])
    rig = service.follower
    assert rig is not None
    assert not service.archive.has_piece(1, rig.replica.laid_piece + 1)
    service.partition(False, 0)
    former = service.leader
    service.take_over([])
    assert service.leader is not former


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("nth", range(1, 17))
def test_of_two_archivers_none_goes_on_in_an_older_generation(service: Archiving, nth: int, shards: int) -> None:
    """Each began one: what the archiver of the older one counted as archived was not in the newest moment. Found by
    seed 39, with a backup beside a service whose number of shards was changed.
    """
    service.append("a", 3, "archived")
    for _ in range(3):
        service.ship(0)
    service.leader.reshard(shards)
    service.append("d", 3, "archived")
    service.leader.before(nth, lambda: service.ship(0))
    service.ship(1)
    service.leader.before(0, lambda: None)
    for turn in range(8):
        service.append("a", 1, "disk")
        service.append("d", 1, "disk")
        service.ship(turn % 2)
        service.archived_is_in_the_last_moment()
    assert service.leader.shards == shards


@pytest.mark.parametrize("nth", range(1, 12))
def test_an_archiver_that_begins_while_another_one_ships_goes_on(service: Archiving, nth: int) -> None:
    """It looked at the logs before it looked at the archive, took them for older, and began a generation."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)

    def ships() -> None:
        service.append("a", 1, "disk")
        service.ship(0)

    service.leader.before(nth, ships)
    service.ship(1)
    service.leader.before(0, lambda: None)
    assert service.archive.generations() == [1]


@pytest.mark.parametrize("nth", range(1, 17))
def test_a_former_leader_closes_nothing_of_its_heir(service: Archiving, nth: int) -> None:
    """It had looked at its own generation before the takeover, began one behind its heir's, and went on there."""
    follow_and_go_back(service)
    former = service.leader

    def is_replaced() -> None:
        service.take_over([])
        for _ in range(3):
            service.ship(0)

    former.before(nth, is_replaced)
    for _ in range(3):
        former.step(0)
    former.before(0, lambda: None)


def test_a_former_leader_begins_no_generation_in_the_place_of_a_pruned_one(service: Archiving) -> None:
    """It had looked before the takeover. Its heir had left that generation, which was pruned: it went on there, and
    counted what it shipped as archived.
    """
    follow_and_go_back(service)
    former = service.leader

    def is_replaced() -> None:
        service.take_over([])
        for shards in (SHARDS, 1):
            service.leader.reshard(shards)
            for _ in range(3):
                service.ship(0)
        service.prune(1, [])
        assert service.archive.generations() == [3]

    shipped = former.shipped
    former.before(FIRST_OBJECT, is_replaced)
    former.step(0)
    assert service.leader is not former
    for _ in range(2):
        former.append("a", 1)
        former.step(0)
    assert former.shipped == shipped
    assert former.rig.shared.control.is_taken_over


def followed_into_a_new_generation(service: Archiving, takeover_after_ms: str = "0") -> FollowerRig:
    """Have the leader go on in the next generation, which has no base yet; return a follower of the one before."""
    service.leader.answers = True
    service.append("a", 3, "archived")
    for _ in range(3):
        service.ship(0)
    rig = service.followers[0] = service.follower_in(
        f"{service.directory}/follower", takeover_after_ms=takeover_after_ms
    )
    for _ in range(4):
        service.follow([])
    service.append("a", 3, "archived")
    service.ship(0)
    service.follow([])
    service.leader.reshard(3)
    service.leader.helpers.hangs = True
    service.append("a", 1, "archived")
    service.ship(0)
    assert (service.archive.generations(), service.archive.bases(2)) == ([1, 2], [])
    return rig


def test_a_follower_takes_over_behind_a_generation_that_its_leader_closed(service: Archiving) -> None:
    """The pieces of the next generation count for nothing without a base."""
    rig = followed_into_a_new_generation(service)
    service.follow([])
    assert rig.replica.is_over
    former = service.leader
    service.take_over([])
    assert service.former is former
    former.helpers.go_on()
    former.append("a", 1)
    for _ in range(3):
        former.step(0)
    assert former.rig.shared.control.is_taken_over


def test_a_leader_gives_signs_in_a_generation_without_a_base(service: Archiving) -> None:
    """Its followers took over while the files of the first base were copied."""
    rig = followed_into_a_new_generation(service, "10000")
    shipper = service.leader.shipper()
    shipper.begin()
    shipper.begin_base()
    for _ in range(30):
        shipper.ship(is_sign=True)
        service.follow([])
    assert not rig.leads, "the leader lives"
    for _ in range(30):
        service.follow([])
        if service.former is not None:
            break
    assert service.former is not None


def test_a_follower_of_a_generation_that_was_pruned_copies_the_newest_one(service: Archiving) -> None:
    """Told to take over, it tried to close that generation for ever."""
    service.append("a", 3, "disk")
    service.copy_directory()
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.partition(True, 0)
    service.put_copy_in_its_place()
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    service.prune(1, [])
    assert service.archive.generations() == [2]
    service.partition(False, 0)
    rig = service.follower
    assert rig is not None
    rig.follower.ask_promotion()
    for _ in range(8):
        service.follow([])
    assert rig.shown == max(service.moments)
    service.take_over([])


def test_a_follower_copies_a_base_behind_moments_whose_files_are_pruned(service: Archiving) -> None:
    """It took the pieces between the base's snapshot and the base for moments, whose files of transactions were in
    older pieces: it tried to read those for ever. Found by seed 46.
    """
    service.append("a", 3, "disk")
    service.commit(False)
    for _ in range(3):
        service.ship(0)
    service.cut()
    for _ in range(12):
        service.append("a", 1, "disk")
        service.ship(0)
    service.prune(1, [])
    assert not service.archive.has_piece(1, 3)
    for _ in range(4):
        service.follow([])
    assert service.follower is not None
    assert service.follower.shown == max(service.moments)


def test_time_in_which_a_follower_cannot_reach_the_archive_is_no_silence_of_its_leader(service: Archiving) -> None:
    """The bucket was away for both: a follower that reached it first took over from a leader that lived."""
    rig = followed(service, takeover_after_ms="5000")
    service.partition(True)
    service.partition(True, 0)
    for _ in range(4):
        service.world.clock.ms += 4000
        service.follow([])
    service.partition(False, 0)
    for _ in range(2):
        service.world.clock.ms += 2000
        rig.follower.step()
        assert rig.follower.exit_code is None, "it took over"
    service.world.clock.ms += 2000
    rig.follower.step()
    assert rig.follower.exit_code is not None, "the leader is silent"


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("what", ["step", "look_for_base"])
def test_a_request_that_takes_long_is_no_silence_of_the_leader(
    service: Archiving, monkeypatch: pytest.MonkeyPatch, what: str, fails: bool
) -> None:
    """A follower took over from a leader that lived if the bucket had been away for both while it waited for an answer,
    or while it looked for a base.
    """
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    rig = service.followers[0] = service.follower_in(f"{service.directory}/follower", takeover_after_ms="15000")
    for _ in range(4):
        service.follow([])
    clock, request, answers = service.world.clock, getattr(rig.replica, what), []

    def waits() -> bool:
        clock.ms += 25_000
        if fails:
            raise OSError("cannot be reached")
        answers.append(request())
        return False

    clock.ms += follow_main.LOOK_MS
    monkeypatch.setattr(rig.replica, what, waits)
    rig.follower.step()
    monkeypatch.undo()
    assert clock.ms - follow_main.LOOK_MS >= 25_000
    for _ in range(2):
        clock.ms += 2000
        rig.follower.step()
        assert rig.follower.exit_code is None, "it took over"
    clock.ms += 15_000
    rig.follower.step()
    assert rig.follower.exit_code is not None, "the leader is silent"


def ship_over_holes(service: Archiving, bases: int) -> None:
    """Ship this many bases, with a hole behind each."""
    service.append("a", 3, "disk")
    for _ in range(bases):
        shipper = service.leader.shipper()
        shipper.begin()
        shipper.base()
        for _ in range(3):
            service.append_much("a")
            service.cut()


def _first_with(service: Archiving, seq: int) -> tuple[int, int]:
    """Return the (base, piece) of the first moment that has this record of topic a."""
    found = plan(service.archive, WantedMoment(topic="a", seq=seq))
    return found.base.number, found.moment.number


def test_a_record_that_came_in_a_hole_is_in_the_base_behind_it(service: Archiving) -> None:
    """A restore to its seq said that there is no such record: backups lack the logs that went between two of them."""
    ship_over_holes(service, 2)
    assert _first_with(service, 3) == (1, 1)
    assert {_first_with(service, seq) for seq in range(4, 22)} == {(2, 2)}
    with pytest.raises(NotThereError, match="has no record 22"):
        _first_with(service, 22)


def test_a_record_is_not_looked_for_behind_a_damaged_base_with_a_hole_before_it(service: Archiving) -> None:
    """A restore to its seq gave the later moment of the next base without a word."""
    ship_over_holes(service, 3)
    assert _first_with(service, 4) == (2, 2)
    name = damage(service, base_name(1, 2))
    assert _first_with(service, 3) == (1, 1)
    for seq in (4, 22):
        with pytest.raises(ArchiveDamagedError, match=name):
            _first_with(service, seq)
    damage(service, name)


@pytest.mark.parametrize("again", [False, True])
def test_a_record_of_a_topic_that_was_deleted_is_found_in_front_of_later_bases(keeping: Archiving, again: bool) -> None:
    """A restore to its seq said that there is no such record. So it did if a topic was made again under this name."""
    shipper = keeping.leader.shipper()
    shipper.begin()
    shipper.base()
    moments: list[int] = []
    for name in ("a", "b"):  # the first one is in a base, the other one comes and goes between two
        for _ in range(2):
            keeping.append(name, 4, "disk")
            moments.append(shipper.ship().piece)
        if name == "a":
            keeping.cut()
            shipper.base()
    for name in ("a", "b"):
        keeping.delete_topic(name)
        if again:
            keeping.append(name, 2, "disk")
    for _ in range(2):
        keeping.append("d", 3, "disk")
        keeping.cut()
        shipper.base()
    first, *_ = keeping.archive.bases(1)
    for at, (name, seq) in enumerate((name, seq) for name in ("a", "b") for seq in (3, 7)):
        found = plan(keeping.archive, WantedMoment(topic=name, seq=seq))
        assert found.moment.number == moments[at]
        assert found.base.number <= moments[at]
    for name in ("a", "b", "never"):
        with pytest.raises(NotThereError, match=f"{name!r} has no record 9"):
            plan(keeping.archive, WantedMoment(topic=name, seq=9))
    whole = keeping.bucket.objects[base_name(1, first)]
    damage(keeping, base_name(1, first))
    with pytest.raises(ArchiveDamagedError, match=base_name(1, first)):
        plan(keeping.archive, WantedMoment(topic="a", seq=9))
    keeping.bucket.objects[base_name(1, first)] = whole


def test_a_record_is_found_behind_a_snapshot_that_ends_in_a_frame_of_two_pieces(
    keeping: Archiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore to its seq said that there is no such record: the pieces of the base began within a frame."""
    keeping.append("a", 3, "disk")
    shipper = keeping.leader.shipper()
    shipper.begin()
    shipper.base()
    monkeypatch.setattr(shipping, "PIECE_BYTES", 1000)
    keeping.append("a", 20, "disk")
    keeping.append("b", 20, "disk")
    keeping.cut()
    keeping.append("a", 2, "disk")
    shipper.ship()
    base = shipper.base().piece
    keeping.append("a", 1, "disk")
    last = shipper.ship().piece
    assert keeping.archive.base(1, base)[0].first_piece > 2
    assert _first_with(keeping, 25) == (base, base)
    assert _first_with(keeping, 26) == (base, last)


def test_a_base_reads_no_piece_that_its_shipper_has_put(keeping: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read whole pieces, one after another, while no other piece was shipped."""
    shipper = keeping.leader.shipper()
    shipper.begin()
    shipper.base()
    monkeypatch.setattr(shipping, "PIECE_BYTES", 1000)
    for seq in range(8):
        keeping.append("a", 20, "disk")
        if seq == 4:
            keeping.cut()
        shipper.ship()
    read: list[int] = []
    known = Archive.piece

    def piece(archive: Archive, generation: int, number: int) -> tuple[Piece, memoryview]:
        read.append(number)
        return known(archive, generation, number)

    monkeypatch.setattr(Archive, "piece", piece)
    base = shipper.base().piece
    assert read == []
    first_piece = keeping.archive.base(1, base)[0].first_piece
    assert first_piece > 2
    other = keeping.leader.shipper()
    other.begin()
    keeping.append("a", 1, "disk")
    assert keeping.archive.base(1, other.base().piece)[0].first_piece == first_piece
    assert read, "another shipper finds the same by reading"


def test_a_hole_that_comes_while_the_files_of_a_base_are_copied_needs_that_base(service: Archiving) -> None:
    """A backup that was killed before it had put the base left a moment that nobody could restore, as the last one."""
    service.append("a", 3, "disk")
    shipper = service.leader.shipper()
    shipper.begin()
    shipper.base()
    service.append_much("a")
    service.cut()
    files = shipper.begin_base()
    files.copy()
    service.append_much("a")
    service.cut()
    service.leader.bucket.troubles = ["lost_answer"]
    with pytest.raises(OSError, match="lost_answer"):
        shipper.end_base(files)
    service.restore(1.0)
    shipper.begin()
    assert not shipper.is_based
    shipper.base()
    assert shipper.is_based
