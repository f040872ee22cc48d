"""Pages are the same wherever the records are; what a segment's files may do under a reader (api §3, storage.md)."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.frontend.hosting import COLD_TIMEOUT_MS, Hosting, Written, served
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_LOST
from topics.core.segment_list import COLD, SEALED
from topics.frontend.reads import files
from topics.frontend.reads.cold import FRESH_MS, RUN_BYTES, ColdMissError, ColdTier
from topics.frontend.reads.reading import RecordPage, TopicReader
from topics.frontend.reads.records import PageOptions
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import lay_out
from topics.storage.segment import ENTRY_LEN, HEADER_LEN
from topics.storage.segment_store import LocalStore

ALL = PageOptions(limit=1000, max_batch_bytes=1 << 20)
SHAPES = [
    Written(b'"plain"'),
    Written(b"1", node=b"me"),
    Written(b"[2]", tag=b"t"),
    Written(b"{}", meta=b'{"m":"v"}'),
    Written(b'"all"', "né".encode(), b'ta"g', b'{"m":"v"}'),
]
RECORDS = 60


def read(hosting: Hosting, from_seq: int = 0, options: PageOptions = ALL, name: str = "t") -> RecordPage:
    """A page with whatever waiting it takes."""
    ref = hosting.reader.get(name)
    return asyncio.run(hosting.reader.fetch_page(ref, from_seq, options))


def seqs(page: RecordPage) -> list[int]:
    return [record.seq for record in served(page.body)]


def fill(hosting: Hosting, count: int = RECORDS, plain: bool = False, name: str = "t") -> None:
    shapes = itertools.islice(itertools.cycle(SHAPES[:1] if plain else SHAPES), count)
    for record in shapes:
        hosting.clock.ms += 1
        hosting.write(name, [record])


# -- the same page everywhere


def in_the_log(hosting: Hosting) -> None:
    pass


def in_an_active_segment(hosting: Hosting) -> None:
    hosting.checkpoint("t")
    assert [info.flags for info in hosting.segments("t")] == [0]


def across_segments_and_the_log(hosting: Hosting) -> None:
    for last_seq in (7, 25, 50):
        hosting.checkpoint("t", last_seq, records_max=10)
    assert len(hosting.segments("t")) > 4


def in_rewritten_segments(hosting: Hosting) -> None:
    hosting.checkpoint("t", records_max=20)
    for info in hosting.segments("t"):
        hosting.rewrite("t", info.first_seq)
    assert [info.version for info in hosting.segments("t")] == [1, 1, 1]


def in_the_cold_tier(hosting: Hosting) -> None:
    hosting.checkpoint("t", records_max=20)
    for info in hosting.segments("t"):
        hosting.relocate("t", info.first_seq)
        read(hosting, info.first_seq - 1)  # fetched from now on: a page may go over the bounds of segments
    assert [info.flags for info in hosting.segments("t")] == [SEALED | COLD] * 3


OPTIONS = [
    ALL,
    ALL._replace(limit=7),
    ALL._replace(max_batch_bytes=1),
    ALL._replace(max_batch_bytes=500, include_tags=True),
    ALL._replace(nodes=frozenset([b"me"]), include_meta=False),
    ALL._replace(include_data=False, include_tags=True),
]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("with_deleted", [True, False])
@pytest.mark.parametrize(
    "place", [in_an_active_segment, across_segments_and_the_log, in_rewritten_segments, in_the_cold_tier]
)
def test_a_page_does_not_show_where_its_records_are(
    hosting: Hosting, place: Callable[[Hosting], None], with_deleted: bool, plain: bool
) -> None:
    hosting.make("t")
    fill(hosting, plain=plain)
    deleted = {1, 2, 9, 20, 21, 40, RECORDS} if with_deleted else set()
    for seq in deleted:
        hosting.delete_record("t", seq)
    questions = [(from_seq, options) for from_seq in range(0, RECORDS + 1, 3) for options in OPTIONS]
    expected = [read(hosting, *question) for question in questions]
    place(hosting)
    for question, page in zip(questions, expected, strict=True):
        again = read(hosting, *question)
        assert (again.body, again.count, again.tombstone) == (page.body, page.count, page.tombstone)
        # Behind the last record that fits, a page may or may not look at deleted ones.
        between = sorted((again.next_from_seq, page.next_from_seq))
        assert deleted.issuperset(range(between[0] + 1, between[1] + 1))
        assert (again.head_seq, again.earliest_seq, again.durable_seq) == (
            page.head_seq,
            page.earliest_seq,
            page.durable_seq,
        )


def test_a_deletion_in_a_segment_shows_at_once(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", 25, records_max=10)
    assert len(seqs(read(hosting))) == 30  # everything is mapped, and was found to be whole
    for seq in (3, 10, 25):
        hosting.delete_record("t", seq)
    page = read(hosting)
    assert seqs(page) == [seq for seq in range(1, 31) if seq not in (3, 10, 25)]
    assert (page.tombstone, page.next_from_seq) == (None, 30)


def test_records_lost_before_they_came_into_a_segment_are_a_gap(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 30, plain=True)
    for seq in (9, 10, 11, 12):
        hosting.flag("t", seq, LOCATION_LOST)
    expected = [read(hosting, from_seq) for from_seq in (0, 8, 10, 12)]
    assert expected[1].tombstone is not None
    assert (expected[1].tombstone.gap_from, expected[1].tombstone.gap_to) == (9, 12)
    assert expected[1].tombstone.reason == EvictReason.RESTART.name.lower()
    hosting.checkpoint("t", 20, records_max=10)  # the gap lies across two segments
    for from_seq, page in zip((0, 8, 10, 12), expected, strict=True):
        again = read(hosting, from_seq)
        assert (again.body, again.tombstone, again.next_from_seq) == (page.body, page.tombstone, page.next_from_seq)


# -- time


def test_expiry_is_exact_wherever_the_floor_falls(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=1000))
    fill(hosting, plain=True)
    start = hosting.clock.ms
    for now_ms in range(start + 900, start + 1010, 7):
        hosting.clock.ms = now_ms
        ref = hosting.reader.get("t")
        before = (read(hosting), hosting.reader.has_expired(ref), hosting.reader.seq_before(ref, now_ms - 1000))
        if now_ms == start + 900:
            hosting.checkpoint("t", 50, records_max=10)
        else:
            # The floors of the shard have not moved: only the reader's sight of them.
            assert hosting.segments("t")[0].first_seq == 1
        ref = hosting.reader.get("t")
        assert (read(hosting), hosting.reader.has_expired(ref), hosting.reader.seq_before(ref, now_ms - 1000)) == before
        alive = [seq for seq in range(1, RECORDS + 1) if now_ms - (start - RECORDS + seq) <= 1000]
        assert seqs(before[0]) == alive
        assert before[1] == (len(alive) < RECORDS)
        if before[0].tombstone is not None:
            assert before[0].tombstone.gap_to == RECORDS - len(alive)


def test_the_first_record_at_a_time_is_found_in_segments(hosting: Hosting) -> None:
    hosting.make("t")
    for step in (0, 10, 0, 10, 0, 10):
        hosting.clock.ms += step
        hosting.write("t", [Written(b"1")] * 4)
    times = range(hosting.clock.ms - 35, hosting.clock.ms + 5)
    expected = [hosting.reader.seq_before(hosting.reader.get("t"), ts) for ts in times]
    assert set(expected) == {0, 4, 12, 20, 24}
    for last_seq in (3, 10, 18, 24):
        hosting.checkpoint("t", last_seq, records_max=5)
        assert [hosting.reader.seq_before(hosting.reader.get("t"), ts) for ts in times] == expected


def test_a_floor_inside_a_segment_is_where_times_begin(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(cap_records=22, ttl_ms=1000))
    fill(hosting, 20, plain=True)
    start = hosting.clock.ms - 20
    hosting.checkpoint("t", records_max=10)
    fill(hosting, 7, plain=True)  # the cap takes 1..5
    assert hosting.segments("t")[0].first_seq == 1
    assert hosting.topics["t"].topic.earliest_seq == 6
    ref = hosting.reader.get("t")
    assert [hosting.reader.seq_before(ref, start + seq) for seq in (1, 5, 6, 7, 20, 21, 28)] == [0, 0, 0, 6, 19, 20, 27]
    hosting.clock.ms = start + 6 + 1000
    assert not hosting.reader.has_expired(ref), "what is below the floor does not count"
    hosting.clock.ms += 1
    assert hosting.reader.has_expired(ref)


# -- files that change and go under the reader


def test_an_active_segment_is_followed_as_it_grows(hosting: Hosting) -> None:
    hosting.make("t")
    for round_no in range(1, 6):
        fill(hosting, 10)
        hosting.checkpoint("t")
        assert seqs(read(hosting)) == list(range(1, round_no * 10 + 1))
    assert [(info.last_seq, info.flags) for info in hosting.segments("t")] == [(50, 0)]


def test_what_lies_behind_the_committed_end_is_not_looked_at(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 10)
    hosting.checkpoint("t", 5)
    with open(hosting.data_path("t", 1), "ab") as data:
        data.write(b"\xff" * 1000)
    with open(hosting.data_path("t", 1).with_suffix(".idx"), "ab") as idx:
        idx.write(b"\xff" * 7)
    assert seqs(read(hosting)) == list(range(1, 11))


@pytest.mark.parametrize("step", ["checkpoint", "rewrite", "relocate", "drop"])
def test_a_view_that_was_overtaken_is_taken_anew(hosting: Hosting, step: str) -> None:
    hosting.make("t", TopicConfig(cap_records=50))
    fill(hosting, 40, plain=True)
    if step != "checkpoint":
        hosting.checkpoint("t", records_max=10)
        hosting.delete_record("t", 5)
    first = 1
    ref = hosting.reader.get("t")
    if step == "checkpoint":
        hosting.checkpoint("t", records_max=10)
        hosting.make("other")
        fill(hosting, 64, name="other")  # its entries are where those of the records in the segment were
    elif step == "rewrite":
        hosting.rewrite("t", 1)
    elif step == "relocate":
        hosting.relocate("t", 1)
    else:
        gone = hosting.segments("t")[0]
        fill(hosting, 21, plain=True)  # the cap takes 11, and passes over the deleted one
        first = 13
        hosting.remove_files("t", gone)
    page = asyncio.run(hosting.reader.fetch_page(ref, 0, ALL))
    got, head_seq = seqs(page), hosting.topics["t"].topic.head_seq
    while page.next_from_seq < head_seq:
        page = read(hosting, page.next_from_seq)
        assert page.tombstone is None
        got += seqs(page)
    deleted = [] if step == "checkpoint" else [5]
    assert got == [seq for seq in range(first, head_seq + 1) if seq not in deleted]


def open_files() -> str:
    """Return the open files of this process, a line each."""
    lines = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            lines.append(os.readlink(f"/proc/self/fd/{fd}"))
    return "\n".join(lines)


def test_an_open_segment_stays_readable_after_its_files_are_gone(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 20, plain=True)
    hosting.checkpoint("t", records_max=10)
    expected = read(hosting)
    hosting.remove_files("t", hosting.segments("t")[0])
    assert read(hosting) == expected


def test_removed_files_are_let_go(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 40, plain=True)
    hosting.checkpoint("t", records_max=10)
    read(hosting)
    first, second = (hosting.data_path("t", seq) for seq in (1, 11))
    assert str(first) in open_files()
    hosting.remove_files("t", hosting.segments("t")[0])
    hosting.relocate("t", 11)
    for _ in range(2):  # a few of them each time
        hosting.reader.sweep()
    text = open_files()
    assert str(first.with_suffix("")) not in text
    assert str(second) not in text
    assert str(second.with_suffix(".idx")) in text
    assert str(hosting.data_path("t", 21)) in text


@pytest.mark.parametrize(("bound", "records_max"), [("SEGMENTS_MAX", 1), ("RECORDS_MAX", 5)])
def test_only_so_many_segments_stay_open(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch, bound: str, records_max: int
) -> None:
    monkeypatch.setattr(files, bound, 64)
    hosting.make("t")
    fill(hosting, 130, plain=True)
    hosting.checkpoint("t", records_max=records_max)
    reader = TopicReader(hosting.arenas, hosting.reader.stores.logs, 1, hosting.clock)
    options = PageOptions(limit=records_max, max_batch_bytes=1 << 20)
    for from_seq in range(0, 130, records_max):
        assert reader.read_page(reader.get("t"), from_seq, options).count
    assert open_files().count(str(hosting.data_path("t", 1).parent)) == 2 * (64 // records_max)


@pytest.mark.parametrize(
    ("open_files", "most"), [(1024, 64), (2048, 128), (20_000, 1024), (1 << 20, 1024), (RLIM_INFINITY, 1024)]
)
def test_segments_leave_open_files_to_connections(open_files: int, most: int) -> None:
    assert files.segments_max(open_files) == most


def test_the_hot_copy_of_a_relocated_segment_is_let_go_by_the_next_reader(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 20, plain=True)
    hosting.checkpoint("t", records_max=10)
    path = str(hosting.data_path("t", 1))
    expected = seqs(read(hosting))
    hosting.relocate("t", 1)
    assert path in open_files()
    assert seqs(read(hosting)) == expected
    assert path not in open_files()


def test_what_is_still_here_is_not_asked_of_the_cold_tier(hosting: Hosting) -> None:
    """storage.md Tiers: hot wins while both exist."""
    hosting.make("t")
    fill(hosting, 20, plain=True)
    hosting.checkpoint("t", records_max=10)
    expected = read(hosting)
    object_name = hosting.relocate("t", 1, keep=True)
    content = hosting.store.read_range(object_name, 0, hosting.store.len(object_name))
    hosting.store.delete(object_name)  # readers that ask for it fail
    for _ in range(2):
        page = read(hosting)
        assert (page.body, page.cold_segments) == (expected.body, 0)
    hosting.delete_record("t", 3)
    assert 3 not in seqs(read(hosting))
    hosting.store.put(object_name, [content])
    hosting.data_path("t", 1).unlink()
    page = read(hosting)
    assert (seqs(page)[:3], page.cold_segments) == ([1, 2, 4], 1)


def test_what_was_fetched_is_checked_though_it_was_right_when_it_was_here(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    object_name = hosting.relocate("t", 1, keep=True)
    assert len(seqs(read(hosting))) == 10
    damage(Path(hosting.data_dir, "cold", object_name), WHERE["checksum"])
    hosting.data_path("t", 1).unlink()
    with pytest.raises(TopicsError) as caught:
        read(hosting)
    assert caught.value.code == "storage_unavailable"


def test_frames_are_checked_when_they_are_first_read(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 50, plain=True)
    hosting.checkpoint("t", records_max=50)
    first = read(hosting, 0, ALL._replace(limit=5))
    for seq in (1, 40):
        damage(hosting.data_path("t", 1), (seq - 1) * FRAME_LEN + WHERE["checksum"])
    assert read(hosting, 0, ALL._replace(limit=5)) == first, "not again while the segment is mapped"
    page = read(hosting, 1)
    assert (seqs(page), page.next_from_seq) == (list(range(2, 40)), 39)


# -- damage


def damage(path: Path, offset: int, length: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0x10 for byte in old))


FRAME_LEN = len(lay_out([(b"", b"", b'"plain"', b"")]).buffer) - 8
"""Bytes of a plain record in a segment."""
WHERE = {"flags": 4, "seq": 5, "ts": 13, "payload": HEADER_LEN + 9, "checksum": FRAME_LEN - 2}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("bad_seq", [11, 15, 20])
def test_a_damaged_frame_ends_the_page_before_it_and_is_named(hosting: Hosting, where: str, bad_seq: int) -> None:
    hosting.make("t")
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", records_max=10)
    assert hosting.data_path("t", 11).stat().st_size == 10 * FRAME_LEN
    offset = (bad_seq - 11) * FRAME_LEN
    damage(hosting.data_path("t", 11), offset + WHERE[where])
    got: list[int] = []
    cursor = 0
    for _ in range(20):
        try:
            page = read(hosting, cursor)
        except TopicsError:
            break
        assert page.tombstone is None
        got += seqs(page)
        cursor = page.next_from_seq
    else:
        pytest.fail("read over it")
    assert (got, cursor) == (list(range(1, bad_seq)), bad_seq - 1)
    with pytest.raises(TopicsError) as refused:
        read(hosting, cursor)
    assert (refused.value.code, refused.value.status) == ("storage_unavailable", 503)
    detail = refused.value.detail or {}
    topic_id = hosting.topics["t"].topic.id
    assert detail["topic"] == "t"
    assert detail["segment"] == f"{topic_id:016x}/seg-{11:020d}.data"
    assert detail["offset"] == offset
    assert f"seg-{11:020d}.data is corrupt at offset {offset}" in refused.value.message
    assert seqs(read(hosting, bad_seq)) == list(range(bad_seq + 1, 31)), "what lies behind it can be read"


def test_the_log_tells_of_damage_once_a_second_however_often_it_is_read(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 3, plain=True)
    hosting.checkpoint("t")
    damage(hosting.data_path("t", 1), WHERE["payload"])
    with capture_logs() as said:
        for pause_ms in (0, 0, 0, 1_000):
            hosting.clock.ms += pause_ms
            with pytest.raises(TopicsError, match="is corrupt at offset 0"):
                read(hosting)
    assert [(line["event"], line["more_like_it"]) for line in said] == [("a segment is corrupt", n) for n in (0, 2)]


def test_damage_costs_no_other_segment_what_is_known_of_it(hosting: Hosting) -> None:
    """Otherwise a client that repeats a read of it makes all readers check all frames of the topic again."""
    hosting.make("t")
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", records_max=10)
    read(hosting)
    damage(hosting.data_path("t", 11), WHERE["payload"])
    topic_id = hosting.topics["t"].topic.id
    whole, damaged = (hosting.reader.stores.segments.get(topic_id, info) for info in hosting.segments("t")[:2])
    with pytest.raises(TopicsError):
        read(hosting, 10, ALL._replace(verify=True))
    assert hosting.reader.stores.segments.get(topic_id, hosting.segments("t")[0]) is whole
    assert hosting.reader.stores.segments.get(topic_id, hosting.segments("t")[1]) is not damaged


def test_one_long_record_is_read_without_those_behind_it(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    long = b'"%b"' % (b"x" * 300_000)
    hosting.make("t")
    hosting.write("t", [Written(long) for _ in range(12)])
    hosting.checkpoint("t")
    read_bytes: list[int] = []
    check = files.OpenSegment.check

    def counted(opened: files.OpenSegment, buffer: bytes, *others: Any, **more: Any) -> None:
        read_bytes.append(len(buffer))
        check(opened, buffer, *others, **more)

    monkeypatch.setattr(files.OpenSegment, "check", counted)
    assert seqs(read(hosting, 3, ALL._replace(limit=1, max_batch_bytes=8 << 20))) == [4]
    assert read_bytes[0] < 2 * len(long)
    assert seqs(read(hosting, 3, ALL._replace(limit=3, max_batch_bytes=8 << 20))) == [4, 5, 6]


@pytest.mark.parametrize("file", ["data", "idx"])
def test_a_segment_that_is_too_short_is_damage_and_not_the_end(hosting: Hosting, file: str) -> None:
    hosting.make("t")
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", records_max=10)
    path = hosting.data_path("t", 11).with_suffix(f".{file}")
    os.truncate(path, path.stat().st_size - 1)
    assert seqs(read(hosting)) == list(range(1, 11))
    with pytest.raises(TopicsError) as refused:
        read(hosting, 10)
    assert f"{path.parent.name}/{path.name} is corrupt" in refused.value.message


def test_an_entry_that_leads_behind_the_end_is_damage_of_the_index(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 20, plain=True)
    hosting.checkpoint("t", records_max=10)
    hosting.relocate("t", 1)
    damage(hosting.data_path("t", 1).with_suffix(".idx"), 9 * ENTRY_LEN + 5)
    assert seqs(read(hosting)) == list(range(1, 10))
    with pytest.raises(TopicsError) as refused:
        read(hosting, 9)
    assert f"seg-{1:020d}.idx is corrupt at offset {9 * ENTRY_LEN}" in refused.value.message


@pytest.mark.parametrize("field_at", [0, 4, 8, 17], ids=["offset", "len", "ts", "padding"])
def test_an_entry_that_is_not_its_frames_is_damage(hosting: Hosting, field_at: int) -> None:
    hosting.make("t")
    fill(hosting, 20, plain=True)
    hosting.checkpoint("t", records_max=10)
    damage(hosting.data_path("t", 1).with_suffix(".idx"), 4 * ENTRY_LEN + field_at)
    assert seqs(read(hosting)) == [1, 2, 3, 4]
    with pytest.raises(TopicsError) as refused:
        read(hosting, 4)
    assert "is corrupt at offset" in refused.value.message


def test_a_segment_without_its_files_is_an_error(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 20, plain=True)
    hosting.checkpoint("t", records_max=10)
    hosting.data_path("t", 11).unlink()
    assert seqs(read(hosting, options=ALL._replace(limit=10))) == list(range(1, 11))
    with pytest.raises(TopicsError) as refused:
        read(hosting, 10)
    assert refused.value.code == "storage_unavailable"
    assert hosting.data_path("t", 11).name in refused.value.message


@pytest.mark.parametrize("suffix", [".data", ".idx"])
@pytest.mark.parametrize("restored", ["in place", "renamed"])
def test_a_file_that_is_cut_under_a_reader_is_an_error_until_it_is_restored(
    hosting: Hosting, suffix: str, restored: str
) -> None:
    """The file is cut first, as `cp` does to the file it writes to."""
    hosting.make("t")
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", records_max=10)
    expected = read(hosting)
    assert len(seqs(expected)) == 30
    path = hosting.data_path("t", 11).with_suffix(suffix)
    content = path.read_bytes()
    os.truncate(path, 0)
    for _ in range(2):
        assert seqs(read(hosting)) == list(range(1, 11)), "what is before it"
        with pytest.raises(TopicsError) as refused:
            read(hosting, 10)
        assert refused.value.code == "storage_unavailable"
        assert f"{path.name} is corrupt at offset 0: the file ends there" in refused.value.message
    if restored == "in place":
        path.write_bytes(content)
    else:
        copy = path.with_suffix(".copy")
        copy.write_bytes(content)
        copy.rename(path)
    assert read(hosting) == expected


def test_deletions_are_seen_in_an_index_that_was_replaced(hosting: Hosting) -> None:
    """The shard marks them in the file that has the name."""
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    assert len(seqs(read(hosting))) == 10
    path = hosting.data_path("t", 1).with_suffix(".idx")
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    hosting.delete_record("t", 3)
    hosting.reader.sweep()
    assert 3 not in seqs(read(hosting))


@pytest.mark.parametrize("checked_before", [True, False])
def test_what_a_frame_says_is_deleted_is_so_though_the_index_is_an_older_one(
    hosting: Hosting, checked_before: bool
) -> None:
    """docs/storage-format.md: a record is deleted if either says so."""
    hosting.make("t")
    fill(hosting, 10)
    hosting.checkpoint("t", records_max=10)
    if checked_before:
        assert len(seqs(read(hosting))) == 10
    path = hosting.data_path("t", 1).with_suffix(".idx")
    older = path.read_bytes()
    for seq in (1, 4, 10):
        hosting.delete_record("t", seq)
    path.with_suffix(".copy").write_bytes(older)
    path.with_suffix(".copy").rename(path)
    hosting.reader.sweep()
    for _ in range(2):  # also when they were checked before
        assert seqs(read(hosting)) == [2, 3, 5, 6, 7, 8, 9]
        page = read(hosting, 3, PageOptions(limit=3, max_batch_bytes=1 << 20, verify=True))
        assert seqs(page) == [5, 6, 7]
        assert read(hosting, 9).next_from_seq == 10


@pytest.mark.parametrize("noticed", ["by the sweep", "when the segment has grown"])
def test_data_that_were_replaced_are_checked_again(hosting: Hosting, noticed: str) -> None:
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=20)
    assert len(seqs(read(hosting))) == 10
    path = hosting.data_path("t", 1)
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    damage(copy, 3 * FRAME_LEN + WHERE["payload"])
    copy.rename(path)
    if noticed == "by the sweep":
        hosting.reader.sweep()
    else:
        fill(hosting, 2, plain=True)
        hosting.checkpoint("t", records_max=20)
    assert seqs(read(hosting)) == [1, 2, 3]


def test_what_cannot_be_opened_is_an_error_of_that_topic(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    path = hosting.data_path("t", 1)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(TopicsError, match="Too many levels of symbolic links") as refused:
        read(hosting)
    assert refused.value.code == "storage_unavailable"


def test_an_index_that_cannot_be_opened_keeps_nobody_from_asking_what_expired(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=1000))
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    ref = hosting.reader.get("t")
    path = hosting.data_path("t", 1).with_suffix(".idx")
    path.unlink()
    path.symlink_to(path)
    ref = ref._replace(view=ref.view._replace(earliest_seq=2))
    hosting.clock.ms += 2000
    assert hosting.reader.has_expired(ref) is False


# -- cold


def test_a_page_that_cannot_wait_says_so(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", records_max=10)
    hosting.relocate("t", 11)
    ref = hosting.reader.get("t")
    before = hosting.reader.read_page(ref, 0, ALL)
    assert (seqs(before), before.cold_segments) == (list(range(1, 11)), 0), "what is at hand does not wait for the rest"
    with pytest.raises(ColdMissError) as missed:
        hosting.reader.read_page(ref, 10, ALL)
    assert missed.value.status == 503
    page = read(hosting, 10)
    assert (seqs(page), page.cold_segments) == (list(range(11, 31)), 1)


def test_times_and_floors_never_ask_the_cold_tier(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=1000))
    fill(hosting, 30, plain=True)
    hosting.checkpoint("t", records_max=10)
    for seq in (1, 11, 21):
        os.unlink(os.path.join(hosting.data_dir, "cold", hosting.relocate("t", seq)))
    hosting.clock.ms += 1000 - 30 + 15
    ref, now_ms = hosting.reader.get("t"), hosting.clock.now_ms()
    assert hosting.reader.has_expired(ref)
    assert hosting.reader.seq_before(ref, now_ms - 1000 + 2) == 16
    page = hosting.reader.read_page(ref, 30, ALL)
    assert page.earliest_seq == 15


def test_a_cold_segment_without_a_cold_directory(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    hosting.relocate("t", 1)
    hosting.reader.stores.cold = None
    with pytest.raises(TopicsError) as refused:
        read(hosting)
    assert "TOPICS_COLD_DIR" in refused.value.message


def test_an_object_that_is_not_there_is_an_error_after_one_more_look(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    name = hosting.relocate("t", 1)
    hosting.store.delete(name)
    with pytest.raises(TopicsError) as refused:
        read(hosting)
    assert refused.value.code == "storage_unavailable"
    assert name in refused.value.message


def test_damage_in_the_cold_tier_is_named(hosting: Hosting) -> None:
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    name = hosting.relocate("t", 1)
    damage(Path(hosting.data_dir, "cold", name), 3 * FRAME_LEN + WHERE["payload"])
    assert seqs(read(hosting)) == [1, 2, 3]
    with pytest.raises(TopicsError) as refused:
        read(hosting, 3)
    assert (refused.value.detail or {})["segment"] == name
    assert (refused.value.detail or {})["offset"] == 3 * FRAME_LEN


class Counted(LocalStore):
    """A cold directory that keeps what was asked of it."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__(OsFileSystem(), os.path.join(hosting.data_dir, "cold"))
        self.ranges: list[tuple[int, int]] = []

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self.ranges.append((offset, offset + length))
        return super().read_range(name, offset, length)


def cold_blocks(hosting: Hosting, blocks: int) -> Counted:
    """From now on so much is kept of what is fetched."""
    store = Counted(hosting)
    hosting.reader.stores.cold = ColdTier(store, hosting.clock, COLD_TIMEOUT_MS, blocks * RUN_BYTES)
    return store


def all_pages(hosting: Hosting, options: PageOptions) -> list[RecordPage]:
    pages = [read(hosting, 0, options)]
    while not pages[-1].caught_up:
        pages.append(read(hosting, pages[-1].next_from_seq, options))
        assert pages[-1].next_from_seq > pages[-2].next_from_seq
    return pages


def test_a_stretch_of_own_records_is_longer_than_what_is_kept_of_the_cold_tier(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(dedupe_node=True))
    own = Written(b'"%b"' % (b"x" * (RUN_BYTES // 8)), node=b"me")
    hosting.write("t", [own] * 64)
    hosting.write("t", [Written(b'"theirs"')])
    hosting.checkpoint("t", records_max=65)
    hosting.relocate("t", 1)
    store = cold_blocks(hosting, 3)
    pages = all_pages(hosting, ALL._replace(nodes=frozenset([b"me"])))
    assert [seqs(page) for page in pages if page.count] == [[65]]
    assert sum(end - start for start, end in store.ranges) < 3 * 8 * RUN_BYTES, "each about once"


def test_a_damaged_object_of_the_cold_tier_is_read_again_after_it_was_restored(hosting: Hosting) -> None:
    """It is read no more often than that while it is damaged: many may ask for it."""
    hosting.make("t")
    fill(hosting, 10, plain=True)
    hosting.checkpoint("t", records_max=10)
    path = Path(hosting.data_dir, "cold", hosting.relocate("t", 1))
    store = cold_blocks(hosting, 3)
    whole = path.read_bytes()
    damage(path, 3 * FRAME_LEN + WHERE["payload"])
    assert seqs(read(hosting)) == [1, 2, 3]
    for reads in (1, 2):
        for _ in range(3):
            with pytest.raises(TopicsError, match="is corrupt at offset"):
                read(hosting, 3)
            assert len(store.ranges) == reads
        hosting.clock.ms += FRESH_MS
    path.write_bytes(whole)
    assert seqs(read(hosting, 3)) == [4, 5, 6, 7, 8, 9, 10]
    hosting.clock.ms += FRESH_MS
    assert len(seqs(read(hosting))) == 10
    assert len(store.ranges) == 3, "what is whole is kept"


@pytest.mark.parametrize("live", [[], [64], [1, 64]])
def test_nothing_is_fetched_for_deleted_records(hosting: Hosting, live: list[int]) -> None:
    hosting.make("t")
    hosting.write("t", [Written(b'"%b"' % (b"x" * (RUN_BYTES // 8)))] * 64)
    hosting.checkpoint("t", records_max=64)
    for seq in range(1, 65):
        if seq not in live:
            hosting.delete_record("t", seq)
    hosting.relocate("t", 1)
    store = cold_blocks(hosting, 3)
    pages = all_pages(hosting, ALL)
    assert [seq for page in pages for seq in seqs(page)] == live
    assert len(store.ranges) == len(live)
