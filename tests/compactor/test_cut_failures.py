"""Failures of one topic, one shard or the whole disk cost a cut no more than they must."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.storage.faults import Crash, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.compactor import checkpoints
from topics.core.segment_list import COLD, SEALED
from topics.core.topic import Topic
from topics.shm.arena import TopicView
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage import kill_points, layout
from topics.storage.frame import Bytes
from topics.storage.verify import verify

BIG = b'"' + b"x" * 2000 + b'"'
BLOCK = b"x" * 200_000
BLOCKS = 6
"""Blocks that do not fit into one log file."""


class Picky(FaultyFileSystem):
    """`fails` says which calls do: (call, path) → an errno, 0 for none. `room_bytes`: so much fits below `limited`."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Callable[[str, str], int] = lambda _call, _path: 0
        self.limited: list[Path] = []
        self.room_bytes = 0
        self._paths: dict[int, str] = {}

    def _meet(self, call: str, path: str) -> None:
        if code := self.fails(call, path):
            raise OSError(code, os.strerror(code), path)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._meet("open", path)
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def unlink(self, path: str) -> None:
        self._meet("unlink", path)
        super().unlink(path)

    def fdatasync(self, fd: int) -> None:
        self._meet("fdatasync", self._paths[fd])
        super().fdatasync(fd)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        path = Path(self._paths[fd])
        if any(root in path.parents for root in self.limited):
            growth = max(0, offset + sum(map(len, buffers)) - self.size_bytes(fd))
            if growth and self.used_bytes() + growth > self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().pwritev(fd, buffers, offset)

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for root in self.limited for path in root.rglob("*") if path.is_file())


class Machine:
    """Shards, a compactor, and a disk of which the test says what is wrong with it."""

    def __init__(self, root: Path, shards: int, **settings: str) -> None:
        self.data_dir = root / "data"
        self.data_dir.mkdir()
        self.fs = Picky()
        self.rig = Rig(str(self.data_dir), self.fs, shards, segment_max_events="4", **settings)
        self.compaction = Compaction(self.rig)
        self._directories: dict[str, Path] = {}

    def is_full(self) -> None:
        """From now on, but for what is freed."""
        self.fs.limited = [self.data_dir / "topics", self.data_dir / "meta"]
        self.fs.room_bytes = self.fs.used_bytes()

    def snapshots(self) -> list[int]:
        return layout.list_snapshots(self.fs, str(self.data_dir))

    def directory_of(self, name: str) -> Path:
        """The topic was there when it was first asked for it."""
        if name not in self._directories:
            found = self.rig.reader_of(self.rig.owner(name)).look_up(name)
            assert found is not None, name
            self._directories[name] = Path(layout.topic_dir(str(self.data_dir), found[1].topic_id))
        return self._directories[name]

    def files_of(self, name: str, kind: str = "*") -> list[str]:
        """Return the files of its segments."""
        return sorted(path.name for path in self.directory_of(name).glob(f"seg-*.{kind}"))

    def delete(self, name: str) -> None:
        self.rig.call(DeleteTopic(name, False), self.rig.owner(name))

    def seqs(self, name: str) -> list[int]:
        return [seq for seq, _ in self.compaction.read(name)]

    def in_segments(self, name: str) -> int:
        """Return the last seq that is in segments."""
        return max((info.last_seq for info in self.compaction.segments(name)), default=0)


def machine_of(root: Path, shards: int, **settings: str) -> Iterator[Machine]:
    machine = Machine(root, shards, **settings)
    yield machine
    for shard in machine.rig.shards:
        shard.close()
    machine.rig.close()
    cold_dir = machine.rig.settings.cold_dir
    assert verify(str(machine.data_dir), lambda *_: None, cold_dir).damage == []


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield from machine_of(tmp_path, 1)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Machine]:
    yield from machine_of(tmp_path, 2)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Machine]:
    yield from machine_of(tmp_path, 1, cold_dir=str(tmp_path / "cold"), hot_retain_segments="1")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("kind", ["data", "idx"])
def test_one_unreadable_segment_holds_up_no_cut(machine: Machine, code: int, kind: str) -> None:
    for name in ("bad", "good", "gone"):
        machine.rig.append(name, b"1", b"2")
    assert machine.compaction.cut()
    assert machine.files_of("gone")
    path = machine.directory_of("bad") / f"seg-{1:020d}.{kind}"
    machine.fs.fails = lambda _call, failing: code if Path(failing) == path else 0
    machine.delete("gone")
    for name in ("bad", "good"):
        machine.rig.append(name, b"3")
    before = machine.snapshots()
    for goes_on in (False, True, True):
        # The first time it may be over at the next one.
        assert machine.compaction.cut() == goes_on
        machine.rig.append("good", b"4")
    assert machine.snapshots() > before
    assert machine.files_of("gone") == []
    assert (machine.in_segments("good"), machine.in_segments("bad")) == (5, 3)
    # What could not be read goes on in the next one, and is there when it can be read again.
    machine.fs.fails = lambda _call, _path: 0
    assert [info.first_seq for info in machine.compaction.segments("bad")] == [1, 3]
    assert machine.seqs("bad") == [1, 2, 3]


def test_a_segment_is_gone_on_with_after_one_error(machine: Machine) -> None:
    machine.rig.append("t", b"1")
    assert machine.compaction.cut()
    path = machine.directory_of("t") / f"seg-{1:020d}.idx"
    for seq in (2, 3):
        machine.fs.fails = lambda _call, failing: errno.ESTALE if Path(failing) == path else 0
        machine.rig.append("t", b"%d" % seq)
        assert not machine.compaction.cut()
        machine.fs.fails = lambda _call, _path: 0
        assert machine.compaction.cut(), "what worked in between makes the next one a first one"
    assert [(info.first_seq, info.last_seq) for info in machine.compaction.segments("t")] == [(1, 3)]


def die() -> None:
    raise Crash


def names_of(machine: Machine, shard: int, count: int) -> list[str]:
    return [name for name in (f"t{n}" for n in range(100)) if machine.rig.owner(name) == shard][:count]


@pytest.mark.parametrize("what", ["a record", "a mark"])
def test_a_shard_whose_segments_cannot_be_synced_holds_up_no_other(pair: Machine, what: str) -> None:
    bad, good, gone_bad = names_of(pair, 1, 3)
    other, gone = names_of(pair, 0, 2)
    for name in (bad, good, gone_bad, other, gone):
        pair.rig.append(name, b"1", tag=b"x")
        pair.rig.append(name, b"2")
    assert pair.compaction.cut()
    for name in (gone, gone_bad):
        assert pair.files_of(name)
    for name in (gone, gone_bad):
        pair.delete(name)
    directory = pair.directory_of(bad)
    pair.fs.fails = lambda call, path: errno.EIO if call == "fdatasync" and Path(path).parent == directory else 0
    if what == "a record":
        pair.rig.append(bad, b"3")
    else:
        pair.rig.call(DeleteRecords(bad, None, "eq", b"x"), 1)
    pair.rig.append(good, b"3")
    logs = pair.data_dir / "wal" / "shard-00"
    for turn in range(1, 4):
        for _ in range(BLOCKS):
            pair.rig.append(other, BLOCK)
        assert not pair.compaction.cut()
        assert pair.in_segments(other) == 2 + turn * BLOCKS
    assert min(int(path.stem[4:]) for path in logs.glob("wal-*.log")) > 2, "its log is trimmed"
    assert pair.files_of(gone) == [], "its files are swept"
    assert pair.files_of(gone_bad), "what a snapshot may ask for stays"
    assert pair.in_segments(good) == 3, "of the failing shard, too, only one topic fails"
    pair.fs.fails = lambda _call, _path: 0
    for _ in range(2):
        assert pair.compaction.cut()
    assert pair.files_of(gone_bad) == []
    assert pair.seqs(bad) == ([1, 2, 3] if what == "a record" else [2])
    assert pair.seqs(good) == [1, 2, 3]


@pytest.mark.parametrize(
    "restarted", ["nobody", "compactor", "service", "service, from the older snapshot", "service, killed amid it"]
)
@pytest.mark.parametrize("how", ["topic", "before_seq"])
def test_on_a_full_disk_what_is_deleted_gives_its_room_back(machine: Machine, how: str, restarted: str) -> None:
    for _ in range(3):
        machine.rig.append("big", *[BIG] * 9)
        machine.rig.append("small", b"1")
        assert machine.compaction.cut()
    assert machine.files_of("big")
    machine.is_full()
    for _ in range(3):
        machine.rig.append("small", BIG)
        machine.rig.append("new", BIG)
        assert not machine.compaction.cut()
    assert machine.seqs("small") == list(range(1, 7))
    before = machine.snapshots()

    def check() -> None:
        if how == "topic":
            assert not machine.rig.exists("big")
        else:
            assert machine.seqs("big") == [26, 27]
            view = machine.rig.view("big")
            assert (view.records, view.evict_floor) == (2, 1)
        for name, seqs in (("small", range(1, 7)), ("new", range(1, 4))):
            assert machine.seqs(name) == list(seqs)

    if how == "topic":
        machine.delete("big")
    else:
        machine.rig.call(DeleteRecords("big", 26, None, b""))
    if restarted.endswith("amid it"):
        kill_points.arm("drop.some", die)
        with pytest.raises(Crash):
            machine.compaction.cut()
        kill_points.arm(None, die)
        assert len(machine.files_of("big", "data")) == 6, "of seven"
        machine.rig.restart_service()
        machine.compaction.begin_again()
        check()
    assert not machine.compaction.cut(), "it did not fit"
    assert machine.snapshots() == before
    assert len(machine.files_of("big", "data")) <= (0 if how == "topic" else 1), "but this made room"
    assert verify(str(machine.data_dir), lambda *_: None).damage == []
    if restarted == "compactor":
        machine.compaction.begin_again()
    elif restarted.startswith("service"):
        if restarted != "service":
            os.unlink(layout.snapshot_path(str(machine.data_dir), before[-1]))
        machine.rig.restart_service()
        machine.compaction.begin_again()
    assert machine.compaction.cut()
    assert machine.snapshots()[-1] >= before[-1]
    assert (machine.in_segments("small"), machine.in_segments("new")) == (6, 3)
    check()


def test_a_full_disk_is_told_once_then_rarely_and_once_that_it_is_over(machine: Machine) -> None:
    """Two lines came each second for as long as it lasted."""
    machine.rig.append("t", BIG)
    assert machine.compaction.cut()

    def cuts(count: int) -> list[tuple[str, str, object]]:
        with capture_logs() as said:
            for _ in range(count):
                machine.rig.append("t", BIG)
                machine.compaction.cut()
                machine.rig.clock.ms += 1_000
        told = [line for line in said if line["log_level"] != "debug"]
        return [(line["log_level"], line.get("failure", line["event"]), line.get("more_like_it")) for line in told]

    machine.is_full()
    not_cut = "a checkpoint failed and will be repeated, so the log keeps its length"
    assert cuts(60) == [("error", not_cut, 0)]
    assert cuts(61) == [("error", not_cut, 59), ("error", not_cut, 59)]
    machine.fs.limited = []
    assert cuts(3) == [("info", not_cut, None)]
    machine.is_full()
    assert cuts(120)[0][:2] == ("error", not_cut), "the next time is told again"


def test_files_that_stay_are_told_once_then_rarely_and_once_that_they_are_gone(machine: Machine) -> None:
    for name in ("gone", "other"):
        machine.rig.append(name, b"1")
    assert machine.compaction.cut()
    stuck = machine.directory_of("gone")
    machine.delete("gone")
    machine.fs.fails = lambda call, path: errno.EACCES if call == "unlink" and Path(path).parent == stuck else 0
    with capture_logs() as said:
        for _ in range(30):
            machine.rig.append("other", b"1")
            assert machine.compaction.cut()
            machine.compaction.compactor.tidy()
        machine.fs.fails = lambda _call, _path: 0
        machine.compaction.compactor.tidy()
    event = "superfluous files could not be removed, which will be repeated"
    told = [line for line in said if line["log_level"] != "debug"]
    assert [(line["event"], line.get("failure")) for line in told] == [(event, None), ("a failure is over", event)]


def test_another_failure_does_not_hide_that_the_disk_is_full(machine: Machine) -> None:
    machine.rig.append("bad", b"1")
    machine.rig.append("big", *[BIG] * 9)
    assert machine.compaction.cut()
    bad = machine.directory_of("bad")
    assert machine.files_of("big")
    machine.is_full()
    machine.fs.fails = lambda call, path: errno.EIO if call == "fdatasync" and Path(path).parent == bad else 0
    machine.fs.room_bytes += 500
    for name, data in (("bad", b"2"), ("new", BIG)):
        machine.rig.append(name, data)
    machine.delete("big")
    assert not machine.compaction.cut()
    assert machine.files_of("big") == []
    machine.fs.fails = lambda _call, _path: 0
    assert machine.compaction.cut()


def test_half_a_step_counts_and_the_rest_leaves_nothing(machine: Machine) -> None:
    """A full disk is not written full again with the same records at each try."""
    machine.rig.append("t", b"0")
    assert machine.compaction.cut()
    machine.is_full()
    machine.fs.room_bytes += 4 * 3 * len(BIG)
    machine.rig.append("t", *[BIG] * 40)
    assert not machine.compaction.cut()
    done = machine.in_segments("t")
    assert done in (8, 12)
    written: list[str] = []

    def note(call: str, path: str) -> int:
        if call == "fdatasync" and path.endswith(".data"):
            written.append(path)
        return 0

    machine.fs.fails = note
    for _ in range(3):
        used_bytes = machine.fs.used_bytes()
        assert not machine.compaction.cut()
        assert machine.fs.used_bytes() == used_bytes
    assert machine.in_segments("t") == done
    assert written == []
    machine.fs.room_bytes = 1 << 30
    assert machine.compaction.cut()
    assert machine.seqs("t") == list(range(1, 42))


def test_on_a_full_disk_what_became_cold_gives_its_room_back(tiers: Machine) -> None:
    for _ in range(4):
        tiers.rig.append("big", *[BIG] * 4)
    assert tiers.compaction.cut()
    assert len(tiers.files_of("big", "data")) == 4
    tiers.is_full()
    tiers.rig.append("small", BIG)
    tiers.compaction.upkeep()
    assert [info.flags for info in tiers.compaction.segments("big")] == [SEALED | COLD] * 3 + [SEALED]
    assert not tiers.compaction.cut(), "it did not fit"
    assert len(tiers.files_of("big", "data")) == 1
    tiers.rig.restart_service()
    tiers.compaction.begin_again()
    assert tiers.compaction.cut()
    assert tiers.in_segments("small") == 1
    assert tiers.seqs("big") == list(range(1, 17))


def test_a_topic_that_its_shard_does_not_show_holds_up_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SHOWN_WITHIN_S", 0.0)
    names = ["a", "b", "c"]
    for name in names:
        machine.rig.append(name, b"1")
    assert machine.compaction.cut()
    (shard_copy,) = machine.compaction.compactor.shard_copies
    first, *others = sorted(shard_copy.fold.topics.values(), key=lambda topic: topic.id)
    for name in names:
        machine.rig.append(name, b"2")
    look_up = shard_copy.look_up
    looks: list[str] = []

    def hiding(topic: Topic) -> TopicView | None:
        view = look_up(topic)
        if topic is not first or view is None:
            return view
        looks.append(topic.name)
        return view._replace(head_seq=1)

    monkeypatch.setattr(shard_copy, "look_up", hiding)
    assert not machine.compaction.cut()
    assert looks == [first.name]
    assert [machine.in_segments(topic.name) for topic in (first, *others)] == [1, 2, 2]
    monkeypatch.undo()
    assert machine.compaction.cut()
    assert [machine.in_segments(name) for name in names] == [2, 2, 2]


def test_a_deletion_that_cannot_be_marked_keeps_no_new_life_from_making_segments(machine: Machine) -> None:
    for name in ("bad", "good"):
        machine.rig.append(name, b"1", tag=b"x")
        machine.rig.append(name, b"2", b"3", b"4")
    assert machine.compaction.cut()
    directory, before = machine.directory_of("bad"), machine.snapshots()
    machine.fs.fails = lambda call, path: errno.EIO if call == "open" and Path(path).parent == directory else 0
    machine.rig.call(DeleteRecords("bad", None, "eq", b"x"))
    machine.rig.append("good", b"5")
    machine.compaction.begin_again()
    assert not machine.compaction.cut()
    assert machine.in_segments("good") == 5
    assert machine.snapshots() == before, "no snapshot takes the deletion for done"
    machine.fs.fails = lambda _call, _path: 0
    assert machine.compaction.cut()
    assert machine.seqs("bad") == [2, 3, 4]
