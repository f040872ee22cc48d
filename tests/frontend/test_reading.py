"""Pages: what follows a cursor, checked against a reader that knows only the rules (api §3, §4)."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.hosting import Hosting, ServedRecord, Written, served
from topics.core.clock import SETTLE_MS, STEP_MAX_MS
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.location import LOCATION_IN_RAM_LOG, LOCATION_LOST, flags_of
from topics.core.segment_list import SEALED
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.reads.files import LogFiles
from topics.frontend.reads.located_records import MovedError
from topics.frontend.reads.reading import SCAN_MAX, RecordPage, TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Arenas
from topics.shm import shm_names
from topics.shm.control import Role
from topics.storage import layout

ALL = PageOptions(limit=1000, max_batch_bytes=1 << 20)


def page(hosting: Hosting, name: str, from_seq: int = 0, options: PageOptions = ALL, **more: int) -> RecordPage:
    ref = hosting.reader.get(name)
    try:
        return hosting.reader.read_page(ref, from_seq, options, **more)
    except ColdMissError:
        return asyncio.run(hosting.reader.fetch_page(ref, from_seq, options, **more))


def seqs(read: RecordPage) -> list[int]:
    return [record.seq for record in served(read.body)]


def numbered(count: int, start: int = 1) -> list[Written]:
    return [Written(b"%d" % n) for n in range(start, start + count)]


# -- what a record looks like


def test_a_record_comes_back_byte_for_byte(hosting: Hosting) -> None:
    hosting.make("t")
    raw = b'{ "a" : 1.50, "a":"\\u00e9",\t"meta":{"x":"y"}}'
    hosting.write("t", [Written(raw, "né".encode(), b'ta"g', b'{"k": ",\\"meta\\":{"}'), Written(b"null")])
    body = page(hosting, "t", options=ALL._replace(include_tags=True)).body
    assert body == (
        b'{"$seq":1,"$ts":1000000,"$node":"n\xc3\xa9","$tag":"ta\\"g","data":'
        + raw
        + b',"meta":{"k": ",\\"meta\\":{"}}'
        b',{"$seq":2,"$ts":1000000,"data":null}'
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, b'"data":"d","meta":{"m":"v"}'),
        ({"include_meta": False}, b'"data":"d"'),
        ({"include_data": False}, b'"meta":{"m":"v"}'),
    ],
)
def test_parts_of_a_record(hosting: Hosting, options: dict[str, Any], expected: bytes) -> None:
    hosting.make("t")
    hosting.write("t", [Written(b'"d"', meta=b'{"m":"v"}')])
    assert page(hosting, "t", options=ALL._replace(**options)).body == b'{"$seq":1,"$ts":1000000,' + expected + b"}"


def test_neither_data_nor_meta_leaves_the_numbers(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", [Written(b"1", meta=b'{"m":"v"}'), Written(b"2")])
    bare = ALL._replace(include_data=False, include_meta=False)
    assert page(hosting, "t", options=bare).body == b'{"$seq":1,"$ts":1000000},{"$seq":2,"$ts":1000000}'
    no_data = ALL._replace(include_data=False)
    assert page(hosting, "t", 1, options=no_data).body == b'{"$seq":2,"$ts":1000000}'


# -- where a page ends


def test_a_page_over_several_files_and_the_ram_log(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.make("other")
    for file_no in range(1, 6):
        hosting.file_no, hosting.in_ram = file_no, file_no == 3
        hosting.write("t", numbered(30, hosting.topics["t"].topic.head_seq + 1))
        hosting.write("other", numbered(7))
    read = page(hosting, "t")
    assert [(record.seq, bytes(record.data)) for record in served(read.body)] == [(n, b"%d" % n) for n in range(1, 151)]
    assert (read.count, read.scanned, read.next_from_seq, read.caught_up) == (150, 150, 150, True)


def test_bytes_bound_a_page_but_for_its_first_record(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", [Written(b'"' + b"x" * 998 + b'"') for _ in range(10)])
    frame_bytes = hosting.topics["t"].topic.live_bytes // 10
    for records, bound in ((1, 1), (1, frame_bytes), (2, 2 * frame_bytes), (2, 3 * frame_bytes - 1)):
        for options in (ALL, ALL._replace(include_data=False)):  # the common way and the general one
            read = page(hosting, "t", options=options._replace(max_batch_bytes=bound))
            assert (seqs(read), read.next_from_seq) == (list(range(1, records + 1)), records)


def test_a_reader_that_may_not_see_beyond_a_seq(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", numbered(10))
    read = page(hosting, "t", 3, to_seq=5)
    assert (seqs(read), read.next_from_seq, read.head_seq) == ([4, 5], 5, 10)
    assert seqs(page(hosting, "t", 5, to_seq=5)) == []


def test_a_page_of_one_record_is_that_of_any_other_page(hosting: Hosting) -> None:
    """Records that have only data have a way of their own."""
    hosting.make("t")
    hosting.write("t", numbered(2))
    hosting.write("t", [Written(b"3", node=b"me"), Written(b"4", b"", b"tag"), Written(b"5", meta=b'{"m":1}')])
    hosting.file_no, hosting.in_ram = 2, True
    hosting.write("t", numbered(3, start=6))
    hosting.delete_record("t", 7)
    wanted = ALL._replace(include_tags=True)
    whole = page(hosting, "t", options=wanted)
    single = [page(hosting, "t", seq - 1, wanted._replace(limit=1)) for seq in (1, 2, 3, 4, 5, 6, 8)]
    assert b",".join(one.body for one in single) == whole.body
    assert [one.next_from_seq for one in single] == [1, 2, 3, 4, 5, 6, 8]
    last = page(hosting, "t", 7, wanted)
    assert (last.body, last.count, last.scanned, last.caught_up) == (single[-1].body, 1, 1, True)


def test_filtering_a_long_log_is_done_in_steps(hosting: Hosting) -> None:
    hosting.make("t")
    for _ in range(3):
        hosting.write("t", [Written(b"1", node=b"me")] * SCAN_MAX)
    hosting.write("t", [Written(b'"other"')])
    options = ALL._replace(nodes=frozenset([b"me"]), limit=10)
    cursor, steps = 0, 0
    while True:
        read = page(hosting, "t", cursor, options)
        assert SCAN_MAX <= read.scanned < SCAN_MAX + 1024 or read.caught_up
        cursor, steps = read.next_from_seq, steps + 1
        if read.caught_up:
            break
    assert (seqs(read), steps) == ([3 * SCAN_MAX + 1], 3)


# -- floors and tombstones


def test_a_gap_that_caps_made(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(cap_records=3))
    for n in range(5):
        hosting.write("t", numbered(1, n))
    read = page(hosting, "t")
    assert read.tombstone is not None
    assert (read.tombstone.gap_from, read.tombstone.gap_to, read.tombstone.reason) == (1, 2, "cap")
    assert (read.tombstone.missed_estimate, read.tombstone.earliest_seq, read.tombstone.head_seq) == (2, 3, 5)
    assert (seqs(read), read.earliest_seq) == ([3, 4, 5], 3)
    assert page(hosting, "t", 1).tombstone is not None
    assert page(hosting, "t", 2).tombstone is None


def test_what_expired_is_gone_before_the_shard_looks(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=150))
    hosting.write("t", numbered(3))
    hosting.clock.ms += 150
    assert seqs(page(hosting, "t")) == [1, 2, 3]  # strictly older than ttl_ms (api §1)
    assert not hosting.reader.has_expired(hosting.reader.get("t"))
    hosting.clock.ms += 1
    assert hosting.reader.has_expired(hosting.reader.get("t"))
    hosting.write("t", numbered(1))
    before = page(hosting, "t")
    hosting.expire("t")
    after = page(hosting, "t")
    assert before == after
    assert before.tombstone is not None
    assert (before.tombstone.gap_from, before.tombstone.gap_to, before.tombstone.reason) == (1, 3, "ttl")
    assert (seqs(before), before.earliest_seq) == ([4], 4)


def test_what_was_deleted_behind_what_expired_is_no_gap(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=150))
    hosting.write("t", numbered(3))
    hosting.clock.ms += 100
    hosting.write("t", numbered(3))
    for seq in (2, 3, 4):
        hosting.delete_record("t", seq)
    hosting.clock.ms += 51
    before = [page(hosting, "t", from_seq) for from_seq in range(6)]
    hosting.expire("t")
    assert [page(hosting, "t", from_seq) for from_seq in range(6)] == before
    assert {read.earliest_seq for read in before} == {5}
    assert [read.tombstone is None for read in before] == [False, True, True, True, True, True]
    assert before[0].tombstone is not None
    assert (before[0].tombstone.gap_from, before[0].tombstone.gap_to) == (1, 4)


def test_readers_expire_nothing_by_a_clock_that_was_put_forward(hosting: Hosting) -> None:
    """The shard does not either, and no reader remembers what the clock said for a while."""
    day_ms = 86_400_000
    hosting.make("t", TopicConfig(ttl_ms=2 * SETTLE_MS))
    hosting.write("t", numbered(3))
    reader = hosting.reader

    def read() -> RecordPage:
        return reader.read_page(reader.get("t"), 0, ALL)

    assert seqs(read()) == [1, 2, 3]
    hosting.clock.skew_ms += day_ms
    assert seqs(read()) == [1, 2, 3]
    assert not reader.has_expired(reader.get("t"))
    hosting.clock.ms += SETTLE_MS - 1
    hosting.clock.skew_ms -= day_ms
    assert seqs(read()) == [1, 2, 3]
    hosting.clock.skew_ms += day_ms
    assert seqs(read()) == [1, 2, 3]
    hosting.clock.ms += SETTLE_MS
    after = read()
    assert (after.count, after.earliest_seq) == (0, 4)
    assert len(hosting.clock.warnings) == 4


def test_a_clock_that_goes_back_hides_nothing_that_is_written_then(hosting: Hosting) -> None:
    """A little: what was gone stays gone. Far: time is what the clock says, and new records do not count as old."""
    hosting.make("t", TopicConfig(ttl_ms=1000))
    hosting.write("t", numbered(3))
    hosting.clock.ms += 1001
    reader = hosting.reader

    def read() -> RecordPage:
        return reader.read_page(reader.get("t"), 0, ALL)

    assert read().count == 0
    hosting.clock.skew_ms -= STEP_MAX_MS
    assert read().count == 0
    hosting.clock.skew_ms -= 86_400_000
    hosting.make("u", TopicConfig(ttl_ms=1000))
    hosting.write("u", numbered(3))
    assert reader.read_page(reader.get("u"), 0, ALL).count == 3


def test_an_expired_topic_is_empty_at_its_head(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=10))
    hosting.write("t", numbered(3))
    hosting.clock.ms += 11
    read = page(hosting, "t", 1)
    assert (read.count, read.next_from_seq, read.earliest_seq, read.head_seq, read.caught_up) == (0, 3, 4, 3, True)
    assert read.tombstone is not None
    assert (read.tombstone.gap_from, read.tombstone.gap_to) == (2, 3)


def test_a_gap_of_two_reasons_is_mixed(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=100, cap_records=5))
    hosting.write("t", numbered(8))  # caps take 1..3
    hosting.clock.ms += 50
    hosting.write("t", numbered(1))
    hosting.clock.ms += 60  # the first eight have expired
    reasons = {}
    for from_seq in (0, 2, 3, 5):
        read = page(hosting, "t", from_seq)
        assert read.tombstone is not None
        reasons[from_seq] = read.tombstone.reason
    assert reasons == {0: "mixed", 2: "mixed", 3: "mixed", 5: "ttl"}
    hosting.expire("t")
    for from_seq, reason in reasons.items():
        read = page(hosting, "t", from_seq)
        assert read.tombstone is not None
        assert read.tombstone.reason == reason


def test_the_clock_of_a_reader_never_goes_back(hosting: Hosting) -> None:
    first = hosting.reader.now_ms()
    hosting.clock.ms -= 500
    assert hosting.reader.now_ms() == first


def test_deletions_are_silent(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", numbered(6))
    for seq in (2, 3, 6):
        hosting.delete_record("t", seq)
    read = page(hosting, "t")
    assert (seqs(read), read.tombstone, read.next_from_seq, read.caught_up) == ([1, 4, 5], None, 6, True)


def test_a_cursor_beyond_the_head_of_a_recreated_topic_is_the_former_ones(hosting: Hosting) -> None:
    hosting.make("t", recreated=True)
    read = page(hosting, "t", 10)
    assert (read.tombstone, read.next_from_seq, read.count) == (None, 0, 0), "nothing to miss yet"
    hosting.write("t", numbered(2))
    read = page(hosting, "t", 10)
    assert read.tombstone is not None
    assert (read.tombstone.reason, read.tombstone.gap_from, read.tombstone.gap_to) == ("recreated", 1, 2)
    assert (seqs(read), read.next_from_seq) == ([1, 2], 2)


def test_a_cursor_beyond_the_head_of_the_only_topic_of_a_name_is_the_head(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", numbered(2))
    read = page(hosting, "t", 10)
    assert (read.tombstone, read.count, read.next_from_seq, read.caught_up) == (None, 0, 2, True)


def test_lost_records_between_live_ones_are_a_gap_of_their_own(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", numbered(8))
    for seq in (3, 4, 5, 8):
        hosting.flag("t", seq, LOCATION_LOST)
    first = page(hosting, "t")
    assert (seqs(first), first.next_from_seq, first.tombstone) == ([1, 2], 2, None)
    second = page(hosting, "t", first.next_from_seq)
    assert second.tombstone is not None
    assert (second.tombstone.gap_from, second.tombstone.gap_to, second.tombstone.reason) == (3, 5, "restart")
    assert (seqs(second), second.next_from_seq) == ([6, 7], 7)
    third = page(hosting, "t", second.next_from_seq)
    assert third.tombstone is not None
    assert (third.tombstone.gap_from, third.tombstone.gap_to, third.caught_up) == (8, 8, True)


# -- time


def test_the_first_record_at_a_time(hosting: Hosting) -> None:
    hosting.make("t")
    for step in (0, 10, 0, 10):
        hosting.clock.ms += step
        hosting.write("t", numbered(2))
    ref = hosting.reader.get("t")
    start = hosting.clock.ms - 20
    cursors = [hosting.reader.seq_before(ref, start + n) for n in (-1, 0, 1, 10, 11, 20, 21)]
    assert cursors == [0, 0, 2, 2, 6, 6, 8]


# -- what goes wrong


def test_a_topic_that_went_away_under_the_reader(hosting: Hosting) -> None:
    hosting.make("t")
    hosting.write("t", numbered(3))
    ref = hosting.reader.get("t")
    hosting.retire("t")
    assert hosting.reader.find("t") is None
    with pytest.raises(TopicsError) as refused:
        hosting.reader.refresh(ref)
    assert refused.value.code == "topic_not_found"


def test_a_slot_taken_over_is_another_topic(hosting: Hosting) -> None:
    hosting.make("old")
    hosting.write("old", numbered(3))
    ref = hosting.reader.get("old")
    hosting.retire("old")
    hosting.make("new")
    hosting.write("new", numbered(40))  # its ring, grown, takes blocks over
    with pytest.raises(TopicsError) as refused:
        hosting.reader.refresh(ref)
    assert refused.value.code == "topic_not_found"
    assert len(seqs(page(hosting, "new"))) == 40


def test_a_view_overtaken_by_the_ring_is_taken_anew(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(cap_records=10))
    hosting.write("t", numbered(10))
    ref = hosting.reader.get("t")
    for n in range(30):  # 16 entries wrap around: those of `ref` are overwritten
        hosting.write("t", numbered(1, n))
    read = hosting.reader.read_page(ref, 0, ALL)
    assert seqs(read) == list(range(31, 41))


def test_a_damaged_frame_is_an_error_that_says_where(hosting: Hosting, tmp_path: Path) -> None:
    hosting.make("t")
    hosting.write("t", numbered(3))
    path = layout.log_path(layout.group_dir(str(tmp_path), 0, 1), 1)
    with open(path, "r+b") as file:
        file.seek(hosting.topics["t"].ring.entries(2, 2)[2] & 0xFFFF_FFFF)
        file.write(b"\x01")
    with pytest.raises(TopicsError) as refused:
        page(hosting, "t")
    assert refused.value.code == "storage_unavailable"
    assert "seq 2, file 1" in refused.value.message


@pytest.mark.parametrize("damage", ["gone", "short", "empty"])
def test_a_log_file_that_is_not_there(hosting: Hosting, tmp_path: Path, damage: str) -> None:
    hosting.make("t")
    hosting.write("t", numbered(3))
    path = layout.log_path(layout.group_dir(str(tmp_path), 0, 1), 1)
    if damage == "gone":
        os.unlink(path)
    else:
        os.truncate(path, 0 if damage == "empty" else 60)
    with pytest.raises(TopicsError) as refused:
        page(hosting, "t")
    assert refused.value.code == "storage_unavailable"


def test_no_topics_before_the_shard_has_recovered(hosting: Hosting, tmp_path: Path) -> None:
    cell = hosting.shared.control.cell(Role.WALSHARD, 0)
    cell.set("generation", 0)
    cell.set("progress_ppm", 250_000)
    files = LogFiles(str(tmp_path), hosting.shared.ram_dir, 1)
    reader = TopicReader(Arenas(hosting.shared), files, 1, hosting.clock)
    with pytest.raises(TopicsError) as refused:
        reader.find("t")
    assert (refused.value.code, refused.value.detail) == ("not_ready", {"replay_progress": 0.25})


# -- any log, any reader

NODES = [b"", b"a", b"b", b"ab"]
written = st.builds(
    Written,
    data=st.sampled_from([b"0", b'"text"', b'{"a":[1,2]}', b'"' + b"x" * 300 + b'"']),
    node=st.sampled_from(NODES),
    tag=st.sampled_from([b"", b"t1", b"t2"]),
    meta=st.sampled_from([b"", b"", b'{"m":"1"}']),
)
batches = st.lists(
    st.tuples(
        st.lists(written, min_size=1, max_size=40),
        st.integers(0, 40),
        st.sampled_from([(1, False), (1, False), (2, False), (2, True)]),
        st.sampled_from([*[None] * 4, "checkpoint", "checkpoint", "half", "relocate"]),
    ),
    max_size=12,
)
options = st.builds(
    PageOptions,
    limit=st.sampled_from([1, 2, 7, 256]),
    max_batch_bytes=st.sampled_from([1, 700, 1 << 20]),
    nodes=st.sampled_from([None, None, frozenset([b"a"]), frozenset([b"a", b"ab"])]),
    include_tags=st.booleans(),
    include_meta=st.booleans(),
    include_data=st.booleans(),
    extras=st.none(),  # else Hypothesis makes some up that are no JSON
)


def move(hosting: Hosting, upkeep: str | None) -> None:
    """Move records, as the compactor does between two writes."""
    ring = hosting.topics["t"].ring
    if upkeep in ("checkpoint", "half"):
        # Records in RAM never come into segments.
        flags = flags_of(ring.entries(ring.base_seq, ring.next_seq - 1))
        in_ram = (seq for seq, flag in enumerate(flags, ring.base_seq) if flag & LOCATION_IN_RAM_LOG)
        last_seq = next(in_ram, ring.next_seq) - 1
        hosting.checkpoint("t", last_seq if upkeep == "checkpoint" else (ring.base_seq + last_seq) // 2, records_max=25)
    elif upkeep == "relocate":
        sealed = [info for info in hosting.segments("t") if info.flags == SEALED]
        for info in sealed[: (len(sealed) + 1) // 2]:
            hosting.relocate("t", info.first_seq)


def as_served(record: Written, seq: int, ts: int, wanted: PageOptions) -> ServedRecord:
    return ServedRecord(
        seq,
        ts,
        record.node.decode() or None,
        (record.tag.decode() or None) if wanted.include_tags else None,
        msgspec.Raw(record.data if wanted.include_data else b""),
        msgspec.Raw(record.meta if wanted.include_meta else b""),
    )


def comparable(record: ServedRecord) -> tuple[object, ...]:
    return (record.seq, record.ts, record.node, record.tag, bytes(record.data), bytes(record.meta))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    batches=batches,
    deleted=st.sets(st.integers(1, 300), max_size=30),
    cap_records=st.sampled_from([0, 0, 5, 40]),
    ttl_ms=st.sampled_from([0, 0, 60]),
    dedupe_node=st.booleans(),
    wanted=options,
    from_seq=st.integers(0, 400),
    rewritten=st.booleans(),
)
def test_pages_of_any_log_follow_the_rules(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[tuple[list[Written], int, tuple[int, bool], str | None]],
    deleted: set[int],
    cap_records: int,
    ttl_ms: int,
    dedupe_node: bool,
    wanted: PageOptions,
    from_seq: int,
    rewritten: bool,
) -> None:
    identity = secrets.token_hex(8)
    hosting = Hosting(identity, str(tmp_path_factory.mktemp("log")))
    try:
        hosting.make("t", TopicConfig(cap_records=cap_records, ttl_ms=ttl_ms, dedupe_node=dedupe_node))
        log: dict[int, tuple[Written, int]] = {}
        for records, pause_ms, (hosting.file_no, hosting.in_ram), upkeep in batches:
            hosting.write("t", records)
            move(hosting, upkeep)
            for record in records:
                log[len(log) + 1] = (record, hosting.clock.ms)
            hosting.clock.ms += pause_ms
        topic = hosting.topics["t"].topic
        deleted = {seq for seq in deleted if topic.earliest_seq < seq <= topic.head_seq}
        for seq in deleted:
            hosting.delete_record("t", seq)
        if rewritten:
            for info in hosting.segments("t"):
                if info.flags == SEALED:
                    hosting.rewrite("t", info.first_seq)

        # What the rules say, one record at a time.
        now_ms, head_seq = hosting.clock.ms, len(log)
        expired = [seq for seq in range(topic.earliest_seq, head_seq + 1) if ttl_ms and now_ms - log[seq][1] > ttl_ms]
        floor = max([topic.earliest_seq, *[seq + 1 for seq in expired]])
        evict_floor = max([topic.evict_floor, *[seq + 1 for seq in expired if seq not in deleted]])
        if expired:
            floor = next((seq for seq in range(floor, head_seq + 1) if seq not in deleted), head_seq + 1)
        start = min(from_seq, head_seq)
        own = wanted.nodes if wanted.nodes and dedupe_node else frozenset()
        deliverable = [
            seq
            for seq in range(max(start + 1, floor), head_seq + 1)
            if seq not in deleted and log[seq][0].node not in own
        ]

        read = page(hosting, "t", from_seq, wanted)
        got = served(read.body)
        assert [comparable(record) for record in got] == [
            comparable(as_served(log[seq][0], seq, log[seq][1], wanted)) for seq in deliverable[: len(got)]
        ]
        assert read.count == len(got) <= wanted.limit
        # Examined: nothing deliverable was passed over, and a page that is not full went to the head.
        rest = deliverable[len(got) :]
        last = got[-1].seq if got else start
        assert last <= read.next_from_seq <= head_seq
        assert not rest or read.next_from_seq < rest[0]
        assert got or not rest
        if not rest and len(got) < wanted.limit and wanted.max_batch_bytes == 1 << 20:
            assert read.next_from_seq == head_seq
        # Gaps: only what was not asked for, and never a silent one.
        if from_seq > head_seq:
            assert (read.tombstone, read.next_from_seq) == (None, head_seq)
        elif from_seq + 1 < evict_floor:
            assert read.tombstone is not None
            assert (read.tombstone.gap_from, read.tombstone.gap_to) == (from_seq + 1, floor - 1)
        else:
            assert read.tombstone is None
        assert read.earliest_seq == floor
        # The shard, when it comes to it, finds the same.
        hosting.expire("t")
        again = page(hosting, "t", from_seq, wanted)
        assert (again.tombstone, again.earliest_seq) == (read.tombstone, read.earliest_seq)
        # Cursor by cursor, everything comes once.
        paged: list[int] = []
        cursor = start
        for _ in range(len(log) + 2):
            step = page(hosting, "t", cursor, wanted)
            paged += seqs(step)
            cursor = step.next_from_seq
            if step.caught_up:
                break
        assert paged == deliverable
        assert cursor == head_seq
    finally:
        hosting.close()
        shm_names.unlink_all(identity)


def test_a_read_that_was_tried_again_leaves_nothing_to_the_collector(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the first try names its frames, in which is the page that was being made."""

    class Gathered: ...

    found: list[weakref.ref[Gathered]] = []
    read: Callable[..., RecordPage] = vars(TopicReader)["_read"]

    def moved_once(*arguments: Any) -> RecordPage:
        gathered = Gathered()
        found.append(weakref.ref(gathered))
        if len(found) == 1:
            raise MovedError
        return read(*arguments)

    monkeypatch.setattr(TopicReader, "_read", moved_once)
    hosting.make("t")
    hosting.write("t", numbered(3))
    gc.disable()
    try:
        assert seqs(page(hosting, "t")) == [1, 2, 3]
        assert [one() for one in found] == [None, None]
    finally:
        gc.enable()
