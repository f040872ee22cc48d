"""Files that are removed, when, and files that are only reported."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.storage.logs import TOPIC_ID
from tests.storage.segments import Record, make_segment
from topics.compactor.leftovers import Leftovers, TopicFiles
from topics.core.segment_list import COLD, SEALED, SegmentInfo, SegmentList
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem

FS = OsFileSystem()


def info(first_seq: int, last_seq: int, version: int = 0, flags: int = SEALED) -> SegmentInfo:
    return SegmentInfo(first_seq, last_seq, 0, 0, 100, version, flags)


class Directory:
    """Segments 1–5, 6–10 and 11–15 of a topic, and what its log says of them."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = str(data_dir)
        self.path = Path(layout.topic_dir(self.data_dir, TOPIC_ID))
        for first_seq in (1, 6, 11):
            make_segment(FS, self.data_dir, [Record(b"1")] * 5, first_seq)
        self.needed: TopicFiles | None = TopicFiles(SegmentList([info(1, 5), info(6, 10), info(11, 15)]), 1)
        self.leftovers = Leftovers(FS, self.data_dir)
        self.failures: list[OSError] = []
        self.unsaid: set[int] = set()
        """Topics of which the snapshots say nothing new."""

    def in_snapshot(self, topic_id: int) -> bool:
        return topic_id not in self.unsaid

    def tidy(self) -> list[int]:
        """First seqs of what went without a snapshot."""
        removed, self.failures = self.leftovers.tidy(lambda topic_id: self.needed)
        return [key.first_seq for key in removed]

    def sweep(self) -> list[int]:
        """First seqs of what went."""
        self.leftovers.consider(TOPIC_ID)
        removed, self.failures = self.leftovers.sweep(lambda topic_id: self.needed, self.in_snapshot)
        return [key.first_seq for key in removed]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def files(*first_seqs: int) -> list[str]:
    return sorted(f"seg-{first_seq:020d}.{kind}" for first_seq in first_seqs for kind in ("data", "idx", "tags"))


def test_what_is_needed_stays(directory: Directory) -> None:
    assert [directory.sweep() for _ in range(3)] == [[], [], []]
    assert directory.names() == files(1, 6, 11)


def test_below_the_floor_it_goes_one_snapshot_later(directory: Directory) -> None:
    directory.needed = TopicFiles(SegmentList([info(6, 10), info(11, 15)]), 6)
    assert directory.sweep() == []
    assert directory.names() == files(1, 6, 11)
    assert directory.sweep() == [1]
    assert directory.names() == files(6, 11)


def test_what_is_needed_again_by_then_stays(directory: Directory) -> None:
    """Files behind the end may be those of a checkpoint that was made in between."""
    all_three = directory.needed
    directory.needed = TopicFiles(SegmentList([info(1, 5), info(6, 10)]), 1)
    assert directory.sweep() == []
    directory.needed = all_three
    assert directory.sweep() == []
    assert directory.names() == files(1, 6, 11)


def test_of_a_rewritten_segment_the_old_version_goes(directory: Directory) -> None:
    for kind in ("data", "idx", "tags"):
        (directory.path / f"seg-{6:020d}.1.{kind}").write_bytes(b"")
    directory.needed = TopicFiles(SegmentList([info(1, 5), info(6, 10, version=1), info(11, 15)]), 1)
    directory.sweep()
    assert directory.sweep() == [6]
    assert directory.names() == sorted([*files(1, 11), *(f"seg-{6:020d}.1.{kind}" for kind in ("data", "idx", "tags"))])


def test_of_a_rewriting_that_was_never_marked_the_new_version_goes(directory: Directory) -> None:
    (directory.path / f"seg-{6:020d}.1.idx").write_bytes(b"")
    directory.sweep()
    assert directory.sweep() == [6]
    assert directory.names() == files(1, 6, 11)


def test_of_a_cold_segment_only_the_data_go(directory: Directory) -> None:
    directory.needed = TopicFiles(SegmentList([info(1, 5, flags=SEALED | COLD), info(6, 10), info(11, 15)]), 1)
    directory.sweep()
    assert directory.sweep() == []
    assert directory.names() == sorted([*files(6, 11), f"seg-{1:020d}.idx", f"seg-{1:020d}.tags"])


def test_of_a_deleted_topic_everything_goes(directory: Directory) -> None:
    directory.needed = TopicFiles(None, 0)
    directory.sweep()
    assert directory.sweep() == [1, 6, 11]
    assert not directory.path.exists()


def test_files_of_others_keep_the_directory_of_a_deleted_topic(directory: Directory) -> None:
    (directory.path / "notes.txt").write_text("mine")
    directory.needed = TopicFiles(None, 0)
    directory.sweep()
    directory.sweep()
    assert directory.names() == ["notes.txt"]


def test_what_nothing_explains_is_said_and_left(directory: Directory, capsys: pytest.CaptureFixture[str]) -> None:
    directory.needed = TopicFiles(SegmentList([info(1, 5), info(11, 15)]), 1)
    for _ in range(3):
        assert directory.sweep() == []
    assert directory.names() == files(1, 6, 11)
    assert directory.leftovers.unexplained == 1
    said = capsys.readouterr().out
    assert said.count("no log or snapshot explains these segments") == 1
    assert str(directory.path) in said
    assert "docs/operations.md" in said, "the way out"
    directory.needed = None
    directory.sweep()
    assert directory.leftovers.unexplained == 3
    assert directory.names() == files(1, 6, 11)


def test_a_file_that_never_came_to_be_goes(directory: Directory) -> None:
    (directory.path / f"seg-{6:020d}.tags.tmp").write_bytes(b"half")
    directory.sweep()
    assert directory.names() == files(1, 6, 11)


def test_a_former_life_s_directories_are_all_looked_at(directory: Directory) -> None:
    directory.needed = TopicFiles(None, 0)
    directory.leftovers.consider_all()
    assert directory.leftovers.waiting
    directory.leftovers.sweep(lambda topic_id: directory.needed, directory.in_snapshot)
    assert directory.leftovers.waiting
    removed, _ = directory.leftovers.sweep(lambda topic_id: directory.needed, directory.in_snapshot)
    assert {key.topic_id for key in removed} == {TOPIC_ID}
    assert not directory.leftovers.waiting


def test_what_could_not_be_removed_is_tried_again(directory: Directory) -> None:
    fs = FaultyFileSystem()
    directory.leftovers = Leftovers(fs, directory.data_dir)
    directory.needed = TopicFiles(SegmentList([info(6, 10), info(11, 15)]), 6)
    directory.sweep()
    fs.arm(Fault(2, errno.EIO, calls=frozenset(("unlink",))))
    assert directory.sweep() == []
    assert [error.errno for error in directory.failures] == [errno.EIO]
    assert directory.names() == sorted([*files(6, 11), f"seg-{1:020d}.idx", f"seg-{1:020d}.tags"])
    fs.arm(None)
    assert directory.tidy() == [1]
    assert directory.names() == files(6, 11)
    assert directory.failures == []


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_whichever_of_its_files_cannot_be_removed_a_segment_that_went_is_told_of(
    directory: Directory, nth: int
) -> None:
    """The cold directory would keep its copies until the next start."""
    fs = FaultyFileSystem()
    directory.leftovers = Leftovers(fs, directory.data_dir)
    directory.needed = TopicFiles(SegmentList([info(6, 10), info(11, 15)]), 6)
    directory.sweep()
    fs.arm(Fault(nth, errno.EIO, calls=frozenset(("unlink",))))
    assert directory.sweep() == []
    fs.arm(None)
    assert directory.sweep() == [1]


class Stuck(OsFileSystem):
    """Some files cannot be removed: they are immutable, say."""

    def __init__(self, stuck: str) -> None:
        super().__init__()
        self.stuck = stuck

    def unlink(self, path: str) -> None:
        if path.endswith(self.stuck):
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        super().unlink(path)


@pytest.mark.parametrize("stuck", [f"{1:020d}.data", ".aaa.tmp"])
def test_a_file_that_cannot_be_removed_keeps_no_other(directory: Directory, stuck: str) -> None:
    """The cold directory hears all the same what was removed."""
    fs = Stuck(stuck)
    directory.leftovers = Leftovers(fs, directory.data_dir)
    for name in (".aaa.tmp", "seg.zzz.tmp"):
        (directory.path / name).write_bytes(b"half")
    directory.needed = TopicFiles(SegmentList([info(11, 15)]), 11)
    gone = directory.sweep() + directory.sweep()
    assert gone == ([6] if stuck.endswith("data") else [1, 6])
    assert len(directory.failures) == 1
    kept = files(1, 11) if stuck.endswith("data") else [".aaa.tmp", *files(11)]
    assert directory.names() == kept
    directory.sweep()
    assert not directory.leftovers.waiting, "that is no reason for a snapshot"
    fs.stuck = "none"
    gone += directory.tidy() + directory.sweep()
    assert sorted(gone) == [1, 6]
    assert directory.names() == files(11)
    assert directory.failures == []
    assert not directory.leftovers.waiting


def test_what_a_snapshot_says_nothing_new_of_waits(directory: Directory) -> None:
    """Its shard could not take part: what is known of it here is ahead of both snapshots."""
    other = layout.topic_dir(directory.data_dir, TOPIC_ID + 1)
    shutil.copytree(directory.path, other)
    directory.needed = TopicFiles(SegmentList([info(11, 15)]), 11)
    directory.leftovers.consider(TOPIC_ID + 1)
    directory.unsaid = {TOPIC_ID}
    assert directory.sweep() == []
    assert directory.sweep() == [1, 6]
    assert directory.names() == files(1, 6, 11)
    directory.unsaid = set()
    assert directory.sweep() == []
    directory.unsaid = {TOPIC_ID}
    assert directory.sweep() == []
    assert directory.names() == files(1, 6, 11)
    directory.unsaid = set()
    assert directory.sweep() == [1, 6]
    assert directory.names() == files(11)


def test_on_a_full_disk_only_what_is_gone_for_good_goes_at_once(directory: Directory) -> None:
    """An old version stays, because a start may read deletions from it; so does a file that a former state may need."""
    for name in (f"seg-{6:020d}.1", f"seg-{16:020d}"):
        for kind in ("data", "idx", "tags"):
            (directory.path / f"{name}.{kind}").write_bytes(b"")
    rewritten = [f"seg-{6:020d}.1.{kind}" for kind in ("data", "idx", "tags")]

    def make_room(needed: TopicFiles | None) -> list[int]:
        swept = directory.leftovers.make_room([TOPIC_ID], lambda _topic_id: needed)
        assert swept.failures == []
        return [key.first_seq for key in swept.removed]

    assert make_room(None) == []
    assert make_room(TopicFiles(SegmentList([info(6, 10, version=1), info(11, 15, flags=SEALED | COLD)]), 6)) == [1]
    kept = sorted([*files(6, 16), *rewritten, f"seg-{11:020d}.idx", f"seg-{11:020d}.tags"])
    assert directory.names() == kept
    assert make_room(TopicFiles(None, 0)) == [6, 6, 11, 16]
    assert not directory.path.exists()


def test_what_went_for_its_room_is_not_told_of_again(directory: Directory) -> None:
    directory.needed = TopicFiles(SegmentList([info(6, 10), info(11, 15)]), 6)
    directory.sweep()
    directory.leftovers.make_room([], lambda _topic_id: directory.needed)
    assert directory.names() == files(6, 11)
    assert directory.sweep() == []


class Stubborn(OsFileSystem):
    """The next file with that suffix is not removed."""

    def __init__(self, suffix: str) -> None:
        super().__init__()
        self.suffix = suffix

    def unlink(self, path: str) -> None:
        if self.suffix and path.endswith(self.suffix):
            self.suffix = ""
            raise OSError(errno.EIO, "Input/output error", path)
        super().unlink(path)


@pytest.mark.parametrize("suffix", [".data", ".idx", ".tags"])
def test_what_went_for_its_room_by_halves_is_told_of_when_all_of_it_did(directory: Directory, suffix: str) -> None:
    directory.needed = TopicFiles(SegmentList([info(6, 10), info(11, 15)]), 6)
    directory.leftovers = Leftovers(Stubborn(suffix), directory.data_dir)
    swept = directory.leftovers.make_room([TOPIC_ID], lambda _topic_id: directory.needed)
    assert (swept.removed, len(swept.failures)) == ([], 1)
    assert directory.tidy() == [1]
    assert directory.names() == files(6, 11)
    assert directory.tidy() == []


def test_files_inside_of_a_segment_that_counts_go(directory: Directory) -> None:
    """Written, never told of, and written again with another beginning."""
    directory.needed = TopicFiles(SegmentList([info(1, 10), info(11, 15)]), 1)
    assert directory.sweep() == []
    assert directory.sweep() == [6]
    assert directory.names() == files(1, 11)
    assert directory.leftovers.unexplained == 0


class Unlisted(OsFileSystem):
    """One directory cannot be looked into."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = directory

    def listdir(self, path: str) -> list[str]:
        if path == self.directory:
            raise OSError(errno.EIO, "Input/output error", path)
        return super().listdir(path)


def test_a_topic_that_cannot_be_looked_into_keeps_no_other(directory: Directory, tmp_path: Path) -> None:
    other = layout.topic_dir(directory.data_dir, TOPIC_ID + 1)
    shutil.copytree(directory.path, other)
    directory.needed = TopicFiles(SegmentList([info(11, 15)]), 11)
    directory.leftovers = Leftovers(Unlisted(str(directory.path)), directory.data_dir)
    directory.leftovers.consider(TOPIC_ID + 1)
    assert directory.sweep() == []
    assert directory.sweep() == [1, 6]
    assert len(directory.failures) == 1
    assert sorted(path.name for path in Path(other).iterdir()) == files(11)
    assert directory.names() == files(1, 6, 11)


class Listing(OsFileSystem):
    """Counts the looks at directories, of which the first ones fail."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.failing = failing
        self.looks = 0

    def listdir(self, path: str) -> list[str]:
        self.looks += 1
        if self.looks <= self.failing:
            raise OSError(errno.EIO, "Input/output error", path)
        return super().listdir(path)


def snapshots_while_waiting(directory: Directory) -> list[list[int]]:
    """Return the snapshots that an idle service makes: only if something would be removed."""
    gone = []
    while directory.leftovers.waiting:
        removed, failures = directory.leftovers.sweep(lambda topic_id: directory.needed, directory.in_snapshot)
        assert failures == []
        gone.append([key.first_seq for key in removed])
        assert len(gone) < 5, "and no more"
    return gone


def test_a_look_that_failed_is_repeated_without_a_snapshot(directory: Directory) -> None:
    """Files that it finds wait for the next two snapshots: the last one may need what the log has given up since."""
    fs = Listing(failing=2)
    directory.leftovers = Leftovers(fs, directory.data_dir)
    assert directory.sweep() == []
    assert len(directory.failures) == 1
    directory.needed = TopicFiles(None, 0)
    assert directory.tidy() == []
    assert len(directory.failures) == 1
    assert not directory.leftovers.waiting
    assert directory.tidy() == []
    assert directory.failures == []
    assert directory.names() == files(1, 6, 11)
    assert snapshots_while_waiting(directory) == [[], [1, 6, 11]]
    assert not directory.path.exists()


def test_a_look_that_is_repeated_and_finds_nothing_asks_for_no_snapshot_and_no_further_look(
    directory: Directory,
) -> None:
    fs = Listing(failing=1)
    directory.leftovers = Leftovers(fs, directory.data_dir)
    directory.sweep()
    directory.tidy()
    assert not directory.leftovers.waiting
    looks = fs.looks
    assert looks > 1
    for _ in range(3):
        assert directory.tidy() == []
    assert fs.looks == looks
