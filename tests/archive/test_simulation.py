"""Archives against a model (`archiving.py`): schedules that Hypothesis draws, and those that found something."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.archive.archiving import SHARDS, STEPS, Archiving, small_world
from tests.archive.follower_rig import FollowerRig
from tests.cases import case
from tests.storage.faults import Crash, Fault, FaultyFileSystem
from topics.archive import archiver
from topics.archive.taking_over import take_over
from topics.storage.archive_objects import piece_name
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note

EXAMPLES = 10
"""A sample; `make archive-sim` runs any number (`schedules.py`)."""


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_world():
        yield


TestArchiving = pytest.mark.long(Archiving.TestCase)
TestArchiving.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)


def test_behind_a_hole_there_is_no_moment_until_the_next_base(service: Archiving) -> None:
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    assert len(service.moments) == 1
    service.archived_is_in_the_last_moment()
    service.archiver_dies(0)
    service.ship(0)
    assert len(service.moments) == 1, "nor does the next archiver take them for moments"
    service.helpers.go_on()
    service.ship(0)
    assert len(service.moments) == 2
    service.archived_is_in_the_last_moment()


def test_a_moment_behind_a_hole_is_none_without_its_base(service: Archiving) -> None:
    """An archiver that died between the piece and its base took the hole for closed."""
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.long_outage("a", 3)
    shipper = service.shipper()
    shipper.begin()
    files = shipper.begin_base()
    files.copy()
    service.bucket.troubles = ["lost_answer"]
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
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    service.take_over([])
    assert service.is_taken_over
    service.live = {}  # what it has written since is its own


def test_a_takeover_goes_on_when_everything_has_to_be_copied_again(service: Archiving) -> None:
    """It forgot that the fence was its own, and nobody could take over any more."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    assert len(service.moments) > 2
    assert service.follower is not None
    service.follower.follower.promote.set()  # once: a command is given once
    for _ in range(8):
        service.follow([])
        if service.follower.leads:
            break
    assert service.follower.leads
    service.take_over([])
    service.live = {}


def test_logs_that_go_just_before_a_base_leave_a_hole(service: Archiving) -> None:
    service.append("a", 3, "disk")
    shipper = service.shipper()
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
    service.bucket.troubles = ["lost_answer"]
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
    yield from _service(0)


@pytest.fixture
def keeping() -> Iterator[Archiving]:
    """A service that keeps its logs until they are in the archive."""
    yield from _service(1 << 30)


def _service(backlog: int) -> Iterator[Archiving]:
    found = Archiving.__new__(Archiving)
    Archiving.begin(found, backlog=backlog, answers=False)
    yield found
    found.teardown()


def test_nothing_counts_as_archived_after_somebody_took_over(service: Archiving) -> None:
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    take_over(service.archive, service.archive.generations()[-1], service.rig.clock, "another machine")
    moments, words = len(service.moments), _shipped(service)
    for which in (0, 1, 0):
        service.append("a", 1, "disk")
        service.ship(which)
        service.archiver_dies(which)
        service.ship(which)
    assert (len(service.moments), _shipped(service)) == (moments, words)
    assert service.rig.shared.control.is_taken_over
    take_over(service.archive, service.archive.generations()[-1], service.rig.clock, "a third one")
    service.live = service.moments[max(service.moments)]  # what it has written since is its own


def test_what_was_deleted_leaves_the_archive_with_the_history_that_is_kept(service: Archiving) -> None:
    service.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    service.append("a", 3, "disk")
    secret = b'"a secret"'
    service.live["a"][service.rig.append("a", secret).first_seq] = secret
    for _ in range(3):
        service.ship(0)
    service.cut()
    service.delete("a", 1.0)
    service.cut()
    assert any(secret in body for body in service.bucket.objects.values())
    for _ in range(9):  # days, with a record each
        service.rig.clock.ms += archiver.BASE_MS
        service.append("b", 1, "disk")
        service.cut()
        for _ in range(3):
            service.ship(0)
    assert not any(secret in body for body in service.bucket.objects.values())
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def _shipped(service: Archiving) -> list[int]:
    return [service.rig.shared.control.shipped(shard) for shard in range(SHARDS)]


def test_a_follower_does_not_lead_with_what_its_leader_lost_and_wrote_anew(service: Archiving) -> None:
    """The leader had told more than the archive had. Its machine failed, and what it wrote then was in the archive."""
    service.leader_answers = True
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
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
    service.live = {}


def follow_and_go_back(service: Archiving) -> None:
    """Have a follower take what is shipped, then put the directory back to where it was before."""
    service.append("a", 3, "disk")
    service.copy_directory()
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.put_copy_in_its_place()


def test_a_takeover_right_after_the_directory_went_back_is_from_the_new_generation(service: Archiving) -> None:
    """It closed the former generation, and led with that; the leader went on in the next one."""
    follow_and_go_back(service)
    service.append("a", 1, "disk")
    for _ in range(3):
        service.ship(0)
    assert max(service.moments)[0] == 2
    service.take_over([])
    service.live = {}


def test_a_takeover_closes_a_generation_that_has_no_base_yet(service: Archiving) -> None:
    follow_and_go_back(service)
    service.helpers.hangs = True
    service.ship(0)
    assert (service.archive.generations(), service.archive.bases(2)) == ([1, 2], [])
    service.take_over([])
    service.helpers.go_on()
    service.append("a", 1, "disk")
    for _ in range(3):
        service.ship(0)
    assert service.rig.shared.control.is_taken_over
    service.live = {}


def test_what_was_told_is_compared_over_the_pieces_of_a_moment(keeping: Archiving) -> None:
    """A frame goes on in the next piece, and marks in the follower's log list no segments any more."""
    keeping.leader_answers = True
    keeping.append("a", 3, "disk")
    for _ in range(3):
        keeping.ship(0)
    for _ in range(4):
        keeping.follow([])
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
    keeping.leader_answers = False
    pieces = _last_piece(keeping)[1]
    keeping.ship(0)
    assert _last_piece(keeping)[1] > pieces + 1
    for _ in range(3):
        keeping.follow([])
    assert follower.replica is replica, "nothing is copied again"
    assert (follower.shown, replica.note.told) == (max(keeping.moments), [])


@pytest.mark.long
@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH])
def test_a_promotion_that_is_killed_at_any_call_goes_on(service: Archiving, error: int) -> None:
    service.leader_answers = True
    service.append("a", 3, "disk")
    service.append("d", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.append("a", 2, "disk")
    service.ship(0)
    assert service.follower is not None
    service.follower.close()
    service.is_taken_over = True
    kept, objects = service.follower.settings.data_dir, dict(service.bucket.objects)
    for nth in itertools.count(1):
        data_dir = f"{kept}-{nth}"
        shutil.copytree(kept, data_dir)
        service.bucket.objects = dict(objects)
        rig = service.follower_in(data_dir)
        rig.fs = faulty = FaultyFileSystem()
        rig.follower_dies()
        rig.follower.promote.set()
        faulty.arm(Fault(nth, error))
        try:
            _promote(rig)
        except Crash:
            rig.fs = OsFileSystem()
            note = read_note(rig.fs, data_dir)
            if note is not None and note.is_promoted:
                rig.close()
            else:
                rig.follower_dies()
                rig.follower.promote.set()  # its operator hears of no success, and repeats the command
                _promote(rig)
        with case(nth):
            service.compare_promoted(data_dir, service.moments[max(service.moments)])
        if not faulty.struck:
            break
    assert nth > 20
    service.live = {}


def _promote(rig: FollowerRig) -> None:
    for _ in range(20):
        if rig.leads:
            break
        rig.advance()
    rig.end_promotion()
