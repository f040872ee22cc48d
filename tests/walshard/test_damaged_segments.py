"""Segments whose files are damaged, missing or cannot be opened: what a shard still does, and what it waits for."""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_segments import fill, numbers
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.shm.asks import Done
from topics.shm.topic_messages import (
    Checkpoint,
    CheckpointReply,
    DeleteRecords,
    Expire,
    MarkAgain,
    PutTopic,
    TopicCheckpoint,
)
from topics.storage import layout
from topics.walshard.hosted.segment_files import SegmentFiles

pytestmark = pytest.mark.shard(segment_max_events="8")


@pytest.mark.parametrize("damage", ["short", "unreadable"])
def test_a_former_version_whose_index_is_damaged_keeps_no_shard_from_starting(
    compaction: Compaction, damage: str
) -> None:
    """The log tells of it between the snapshot and the mark of the version that counts."""
    for number in range(1, 25):
        compaction.rig.append("t", b"%d" % number, tag=b"a" if number % 4 else b"b")
    compaction.cut()
    compaction.rig.call(DeleteRecords("t", None, "eq", b"a"))
    compaction.cut()
    compaction.upkeep()
    assert {info.version for info in compaction.segments("t")} == {1}
    path = Path(segment_path(compaction, 9, layout.segment_idx_path))
    if damage == "short":
        path.write_bytes(path.read_bytes()[:50])
    else:
        path.unlink()
        path.symlink_to(path)  # ELOOP
    compaction.rig.boot()
    assert numbers(compaction) == [4, 8, 12, 16, 20, 24]
    compaction.begin_again()
    fill(compaction, 1, start=25)
    for _ in range(3):
        compaction.cut()
    compaction.rig.restart_service()
    assert numbers(compaction) == [4, 8, 12, 16, 20, 24, 25]


def test_a_former_version_that_cannot_be_opened_for_now_is_not_passed_over(compaction: Compaction) -> None:
    """Its deletions may be nowhere else: it is not damaged where the process may open no more files."""
    fill(compaction, 8)
    compaction.cut()
    view = compaction.rig.view("t")
    info = compaction.segments("t")[0]
    files = SegmentFiles(compaction.rig.fs, compaction.rig.settings.data_dir, 64)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what other tests left open must not be closed in the middle of it
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            files.replaced(view.topic_id, info, msgspec.structs.replace(info, version=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def segment_path(compaction: Compaction, first_seq: int, path_of: Callable[[str, int], str]) -> str:
    view = compaction.rig.view("t")
    return path_of(layout.topic_dir(compaction.rig.settings.data_dir, view.topic_id), first_seq)


def test_deletions_that_no_index_can_be_told_hold_up_snapshots_and_nothing_else(compaction: Compaction) -> None:
    rig = compaction.rig
    assert isinstance(rig.fs, FaultyFileSystem)
    fill(compaction, 1)
    fill(compaction, 19, start=2, tag=b"x")
    compaction.cut()
    rig.fs.arm(Fault(1, errno.EMFILE, always=True, calls=frozenset({"open"})))
    reply = rig.call(DeleteRecords("t", None, "eq", b"x"))
    assert (reply.deleted, reply.records) == (19, 1)
    fill(compaction, 1, start=21)
    assert rig.call(DeleteRecords("t", None, "eq", b"x")).deleted == 0
    with pytest.raises(TopicsError, match="cannot be marked"):
        rig.call(Checkpoint([]))
    assert rig.call(Checkpoint([TopicCheckpoint(5, 24, [])])) == CheckpointReply([5], [])
    assert rig.call(MarkAgain(5, [(1, 2)])) == Done()
    rig.fs.arm(None)
    rig.shard.sweep()
    compaction.begin_again()
    compaction.cut()
    rig.restart_service()
    assert numbers(compaction) == [1, 21]


@pytest.mark.parametrize("damage", ["header", "missing", "index gone"])
def test_a_damaged_segment_keeps_no_deletion_from_readers_and_no_snapshot_from_the_shard(
    compaction: Compaction, damage: str
) -> None:
    """The segment with records 9 to 16 is damaged: a frame in its middle, its data, or its index."""
    rig = compaction.rig
    fill(compaction, 8)
    for number in range(9, 17):
        fill(compaction, 1, start=number, tag=b"odd" if number % 2 else b"even")
    fill(compaction, 4, start=17)
    compaction.cut()
    data, idx = (segment_path(compaction, 9, of) for of in (layout.segment_data_path, layout.segment_idx_path))
    assert rig.call(DeleteRecords("t", None, "eq", b"odd")).deleted == 4
    if damage == "header":
        with open(data, "r+b") as file:
            file.seek(os.path.getsize(data) // 8 * 3 + 4)
            file.write(b"damage")
    else:
        os.unlink(data if damage == "missing" else idx)
    assert rig.call(DeleteRecords("t", None, "eq", b"even")).deleted == 4
    assert rig.call(DeleteRecords("t", None, "eq", b"even")).deleted == 0
    if damage != "index gone":
        with open(idx, "rb") as file:
            assert {flags & 2 for flags in file.read()[16::20]} == {2}
    for number in (1, 2):
        fill(compaction, 1, start=number, name="other")
        assert compaction.compactor.cut()
    rig.boot()
    view = rig.view("t")
    assert (view.earliest_seq, view.records) == (1, 12)
    if damage != "index gone":
        assert rig.call(DeleteRecords("t", 17, None, b"")).deleted == 8


class Opened(FaultyFileSystem):
    """A file system that notes which files were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.broken = "none"

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self.paths.append(path)
        if path.endswith(self.broken):
            raise OSError(errno.EIO, "Input/output error", path)
        return super().open(path, flags, mode)


def test_what_a_try_does_not_help_is_not_tried_for_ever(tmp_path: Path) -> None:
    """Marks that cannot be made are tried ever more seldom, and no more where the file is gone. The index has these
    deletions, a frame cannot take them. Where the index is gone, a restored one need not wait long for them.
    """
    fs = Opened()
    compaction = Compaction(Rig(str(tmp_path), fs, segment_max_events="8"))
    rig = compaction.rig
    for number in range(1, 25):
        compaction.rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"even" if number % 8 > 1 else b"")
    compaction.cut()
    gone = segment_path(compaction, 1, layout.segment_data_path)
    failing = segment_path(compaction, 9, layout.segment_data_path)
    lost_idx = segment_path(compaction, 17, layout.segment_idx_path)

    def tried(sweeps: int) -> list[int]:
        fs.paths.clear()
        for _ in range(sweeps):
            rig.shard.sweep()
        return [fs.paths.count(path) for path in (gone, failing, lost_idx)]

    rig.call(DeleteRecords("t", None, "eq", b"odd"))
    idx = Path(lost_idx).read_bytes()
    os.unlink(gone)
    os.unlink(lost_idx)
    fs.broken = failing
    assert rig.call(DeleteRecords("t", None, "eq", b"even")).deleted == 9
    gone_tried, failing_tried, lost_idx_tried = tried(500)
    assert gone_tried == 0
    assert 4 < failing_tried < 20
    assert 4 < lost_idx_tried < 20
    Path(lost_idx).write_bytes(idx)
    fs.broken = "none"
    assert tried(100) == [0, 1, 1]
    assert [flags & 2 for flags in Path(lost_idx).read_bytes()[16::20]] == [2] * 7 + [0]
    rig.close()


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_an_index_that_cannot_be_read_takes_down_nobody(compaction: Compaction, damage: str) -> None:
    """Caps and expiry move past it; what is asked of it by tag is refused."""
    rig = compaction.rig
    rig.call(PutTopic("t", TopicConfig(cap_records=22, ttl_ms=10_000), True))
    fill(compaction, 20, tag=b"x")
    compaction.cut()
    view = rig.view("t")
    path = layout.segment_idx_path(layout.topic_dir(rig.settings.data_dir, view.topic_id), 1)
    rig.boot()
    with open(path, "rb") as file:
        content = file.read()
    if damage == "gone":
        os.unlink(path)
    else:
        with open(path, "wb") as file:
            file.write(content[:50])
    with capture_logs() as lines:
        for _ in range(3):
            with pytest.raises(TopicsError, match="cannot be read to delete them"):
                rig.call(DeleteRecords("t", None, "eq", b"x"))
    assert [line["event"] for line in lines].count("a delete could not find its records") == 1
    fill(compaction, 5, start=21)
    view = rig.view("t")
    assert (view.earliest_seq, view.records, view.evict_floor) == (4, 22, 4)
    rig.boot()
    fill(compaction, 5, start=26)
    rig.clock.ms += 10_001
    rig.call(Expire("t"))
    view = rig.view("t")
    assert (view.earliest_seq, view.records, view.live_bytes) == (31, 0, 0)


@pytest.mark.parametrize("restored", ["in place", "renamed"])
def test_an_index_that_is_cut_while_the_shard_has_it_open_takes_down_nobody(
    compaction: Compaction, restored: str
) -> None:
    """The file is cut in place, as `cp` does first to the file it writes to: for a map of it that is the
    shard's end.
    """
    rig = compaction.rig
    fill(compaction, 20, tag=b"x")
    fill(compaction, 4, start=21, tag=b"y")
    compaction.cut()
    assert rig.call(DeleteRecords("t", 3, None, b"")).deleted == 2, "the index is open"
    path = Path(segment_path(compaction, 1, layout.segment_idx_path))
    content = path.read_bytes()
    os.truncate(path, 0)
    fill(compaction, 2, start=25)
    with pytest.raises(TopicsError, match="cannot be read to delete them"):
        rig.call(DeleteRecords("t", None, "eq", b"x"))
    assert rig.call(DeleteRecords("t", 5, None, b"")).records == 22
    if restored == "in place":
        path.write_bytes(content)
    else:
        copy = path.with_suffix(".copy")
        copy.write_bytes(content)
        copy.rename(path)
        rig.shard.sweep()
    assert rig.call(DeleteRecords("t", None, "eq", b"x")).deleted == 16
    assert numbers(compaction) == [21, 22, 23, 24, 25, 26]
    compaction.cut()
    rig.restart_service()
    assert numbers(compaction) == [21, 22, 23, 24, 25, 26]


def test_marks_are_read_where_they_are_written_when_an_index_was_replaced(compaction: Compaction) -> None:
    rig = compaction.rig
    fill(compaction, 1)
    fill(compaction, 7, start=2, tag=b"x")
    compaction.cut()
    view = rig.view("t")
    rig.parts.files.ts_at(view.topic_id, compaction.segments("t")[0], 2)
    path = Path(segment_path(compaction, 1, layout.segment_idx_path))
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    rig.shard.sweep()
    assert rig.call(DeleteRecords("t", None, "eq", b"x")).deleted == 7
    assert rig.call(DeleteRecords("t", None, "eq", b"x")).deleted == 0
    assert numbers(compaction) == [1]
