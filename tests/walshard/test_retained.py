"""Costs of deletes, expiry and caps for a shard do not grow with what its topics retain (api §5)."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_GONE
from topics.core.segment_list import SEALED, SegmentInfo
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.storage.filesystem import OsFileSystem
from topics.storage.postings import Postings
from topics.supervisor.check import OPEN_FILES_MIN
from topics.walshard.hosted import segment_files
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.hosted.segment_tags import tags_max

pytestmark = pytest.mark.shard(segment_max_events="8")


class Opened:
    """Counts the files of segments that were opened to be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for module, name in ((segment_files, "CommittedFile"), (Postings, "open")):
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count += 1
            return real(*args)

        return counted

    def of(self, action: Callable[[], object]) -> int:
        before = self.count
        action()
        return self.count - before


SMALL_SEGMENTS = 1200


def fill_small_segments(compaction: Compaction) -> None:
    """Ten records in the log behind them."""
    for first in range(1, 8 * SMALL_SEGMENTS + 1, 400):
        records = [b"%d" % number for number in range(first, first + 400)]
        compaction.rig.append("t", *records, tag=b"tag-%d" % first)
    compaction.cut()
    for number in range(8 * SMALL_SEGMENTS + 1, 8 * SMALL_SEGMENTS + 11):
        compaction.rig.append("t", b"%d" % number)
    assert len(compaction.segments("t")) == SMALL_SEGMENTS


def test_a_delete_by_tag_opens_no_segment_that_has_nothing_of_it(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_small_segments(compaction)
    opened = Opened(monkeypatch)

    def delete(tag: bytes) -> int:
        return int(compaction.rig.call(DeleteRecords("t", None, "eq", tag)).deleted)

    assert opened.of(lambda: delete(b"none")) == SMALL_SEGMENTS + 1, "each, once, and where the floor is"
    assert opened.of(lambda: delete(b"none-2")) == 0
    assert opened.of(lambda: compaction.rig.call(DeleteRecords("t", None, "glob", b"none"))) == 0
    assert delete(b"tag-401") == 400
    assert opened.of(lambda: delete(b"tag-801")) == 50, "the indexes of those that have matches"


def test_floors_that_move_far_look_into_the_segment_where_they_stop(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_small_segments(compaction)
    rig = compaction.rig
    monkeypatch.setattr(segment_files, "INDEXES_MAX", 1)  # each index that is asked is opened again
    opened = Opened(monkeypatch)
    while opened.of(rig.shard.sweep):
        pass
    last = 8 * SMALL_SEGMENTS + 10
    rig.call(DeleteRecords("t", None, "eq", b"tag-8001"))
    for before in (last // 4, last // 2, last - 2000):
        assert opened.of(partial(rig.call, DeleteRecords("t", before, None, b""))) <= 4
        view = rig.view("t")
        assert (view.earliest_seq, view.records) == (before, len(compaction.read("t")))
    assert opened.of(lambda: rig.call(PutTopic("t", TopicConfig(cap_records=500), True))) <= 20
    assert [seq for seq, _ in compaction.read("t")] == list(range(last - 499, last + 1))


def test_floors_pass_over_deleted_segments_as_a_whole(compaction: Compaction, monkeypatch: pytest.MonkeyPatch) -> None:
    """`before_seq` in front of what a delete by tag has taken: O(1) in its records (api §5)."""
    rig = compaction.rig
    rig.append("t", b"0", tag=b"first")
    for first in range(1, 8 * SMALL_SEGMENTS, 400):
        rig.append("t", *[b"%d" % number for number in range(first, first + 400)], tag=b"rest")
    rig.append("t", b"1", b"2", tag=b"last")
    compaction.cut()
    assert rig.delete(DeleteRecords("t", None, "eq", b"rest")) == 8 * SMALL_SEGMENTS
    looked_at = 0
    entries = SegmentFiles.entries

    def counting(files: SegmentFiles, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> Any:
        nonlocal looked_at
        looked_at += last_seq - first_seq + 1
        return entries(files, topic_id, info, first_seq, last_seq)

    monkeypatch.setattr(SegmentFiles, "entries", counting)
    reply = rig.call(DeleteRecords("t", 2, None, b""))
    assert (reply.deleted, reply.earliest_seq, reply.records) == (1, 8 * SMALL_SEGMENTS + 2, 2)
    assert looked_at <= 100
    assert [data for _, data in compaction.read("t")] == [b"1", b"2"]


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Compaction]:
    rig = Rig(
        str(tmp_path / "data"),
        segment_max_events="8",
        segment_rewrite_dead_ratio="0.3",
        cold_dir=str(tmp_path / "cold"),
        hot_retain_segments="2",
    )
    yield Compaction(rig)
    rig.close()


def live_size(entries: Sequence[int]) -> tuple[int, int]:
    """Count records and bytes that live, one by one."""
    live = [
        located >> 32
        for located, flags in zip(entries[2::ENTRY_WORDS], entries[3::ENTRY_WORDS], strict=True)
        if not flags >> FLAGS_SHIFT & LOCATION_GONE
    ]
    return len(live), sum(live)


@pytest.mark.parametrize("seed", range(3))
def test_what_lives_in_segments_is_counted_right_whatever_happens_to_them(tiered: Compaction, seed: int) -> None:
    """Deletions, failed marks, growth, sealing, rewriting, both tiers: the counts are always as if counted again."""
    dice = random.Random(seed)
    compaction, rig, fs = tiered, tiered.rig, tiered.rig.fs
    assert isinstance(fs, FaultyFileSystem)
    count = 0
    for _ in range(60):
        match dice.randrange(6):
            case 0 | 1:
                for _ in range(dice.randrange(1, 20)):
                    count += 1
                    rig.append("t", b"%d" % count, tag=b"tag-%d" % dice.randrange(4))
            case 2 if count:
                if dice.random() < 0.3:
                    fs.arm(Fault(1, errno.EIO, calls=frozenset(("open",))))
                with suppress(TopicsError):  # it strikes before the records were found
                    rig.call(DeleteRecords("t", dice.randrange(1, count + 2), "eq", b"tag-%d" % dice.randrange(4)))
                fs.arm(None)
            case 3 if count:
                rig.call(DeleteRecords("t", dice.randrange(1, count // 2 + 2), None, b""))
            case 4:
                rig.shard.sweep()
                compaction.cut()
            case 5:
                compaction.upkeep()
        if not count:
            continue
        hosted = rig.hosted("t")
        index = hosted.index
        files = rig.parts.files
        for info in index.segments:
            asked = (index.topic_id, info, info.first_seq, info.last_seq)
            assert files.live_size(*asked) == live_size(files.entries(*asked))
        view = rig.view("t")
        assert not files.is_marked or view.records == len(compaction.read("t"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """The fewest that the service accepts, on top of those that this process has open already: how many that are."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + OPEN_FILES_MIN, limits[1]))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_tags_leave_open_files_for_everything_else(few_open_files: int, tmp_path: Path) -> None:
    """More sealed segments than the process may open files: each keeps one open as long as its tags are mapped."""
    assert tags_max(resource.RLIM_INFINITY) == tags_max(1 << 20) > tags_max(OPEN_FILES_MIN)
    compaction = Compaction(Rig(str(tmp_path), segment_max_events="8"))
    fill_small_segments(compaction)
    assert SMALL_SEGMENTS > OPEN_FILES_MIN
    for _ in range(2):
        assert compaction.rig.call(DeleteRecords("t", None, "eq", b"none")).deleted == 0
    assert open_files() - few_open_files < OPEN_FILES_MIN
    assert compaction.rig.call(DeleteRecords("t", None, "eq", b"tag-401")).deleted == 400
    assert len(compaction.read("t")) == 8 * SMALL_SEGMENTS + 10 - 400
    compaction.rig.close()


def test_a_sweep_counts_so_many_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep counts so many records, or those of one segment if that has more."""
    half = 1 << 15
    counted: list[int] = []

    def note(
        _files: SegmentFiles, _topic_id: int, _info: SegmentInfo, first_seq: int, last_seq: int
    ) -> tuple[int, int]:
        counted.append(last_seq - first_seq + 1)
        return 0, 0

    monkeypatch.setattr(SegmentFiles, "live_size", note)

    def uncounted_after(*records: int) -> int:
        files, first_seq = SegmentFiles(OsFileSystem(), str(tmp_path), 64), 1
        for count in records:
            files.sealed(7, SegmentInfo(first_seq, first_seq + count - 1, 0, 0, count, 0, SEALED))
            first_seq += count
        counted.clear()
        files.count_some()
        return len(records) - len(counted)

    assert uncounted_after(half, half, half) == 1
    assert uncounted_after(half, half + 1, 1) == 2
    assert uncounted_after(1_000_000, 1) == 1
    assert uncounted_after(*[1] * 100) == 100 - 32
