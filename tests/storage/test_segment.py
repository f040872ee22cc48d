"""Segments: log frames come back whole, what is not committed is cut, what is damaged is refused."""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import case
from tests.storage.faults import ERRNOS, Crash, Fault, FaultyFileSystem
from tests.storage.logs import TOPIC_ID, TS_MS
from tests.storage.segments import Record, logged, make_segment
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST
from topics.storage import layout, segment_writer
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import FLAG_META, FLAG_NODE, FLAG_TAG, Bytes
from topics.storage.segment import DATA_MAX_BYTES, LOG_FRAME_EXTRA_LEN, CorruptSegment
from topics.storage.segment_deletes import mark_deleted, sync_segment
from topics.storage.segment_reader import SegmentReader
from topics.storage.segment_writer import SegmentWriter

texts = st.text(max_size=6).map(str.encode)
payloads = st.binary(max_size=15).map(lambda noise: b'"' + noise.hex().encode() + b'"')
record = st.builds(Record, payloads, texts, texts, st.sampled_from([b"", b'{"a":1}']))
some_records = st.lists(record, max_size=12)
few_records = st.lists(record, min_size=1, max_size=2)
plain = [Record(b'"%d"' % number) for number in range(1, 7)]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return layout.topic_dir(str(tmp_path), TOPIC_ID)


def contents(directory: str, first_seq: int = 1) -> tuple[bytes, bytes]:
    return (
        Path(layout.segment_data_path(directory, first_seq)).read_bytes(),
        Path(layout.segment_idx_path(directory, first_seq)).read_bytes(),
    )


def read_back(reader: SegmentReader) -> list[Record | None]:
    """The live records, None for the others."""
    found: list[Record | None] = []
    for seq in range(reader.first_seq, reader.last_seq + 1):
        frame = reader.frame(seq)
        if frame is None or frame.deleted:
            found.append(None)
            continue
        assert frame.ts == TS_MS + seq
        data, _, meta = frame.data.removeprefix(b'"data":').partition(b',"meta":')
        found.append(Record(data, frame.node, frame.tag, meta))
    return found


def test_every_byte_is_where_the_format_says(directory: str) -> None:
    """Golden bytes: a change of the format is a change of this test."""
    records = logged([Record(b'"a"', b"n", b"t\xc3\xa4", b'{"k":"v"}'), Record(b"1"), Record(b"2")], first_seq=5)
    records = records.flagged(1, LOCATION_DELETED)
    records = records.flagged(2, LOCATION_LOST, offset_len=EvictReason.RESTART)
    writer = SegmentWriter.create(OsFileSystem(), directory, 5)
    writer.append(records.buffer, TOPIC_ID, records.entries)
    writer.close()
    payload = b'"data":"a","meta":{"k":"v"}'
    body = struct.pack("<BQQHHI", FLAG_TAG | FLAG_NODE | FLAG_META, 5, TS_MS + 5, 1, 3, len(payload))
    body += b"n" + b"t\xc3\xa4" + payload
    frame = struct.pack("<I", len(body) + 9) + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + b"\0"
    assert sorted(os.listdir(directory)) == ["seg-00000000000000000005.data", "seg-00000000000000000005.idx"]
    assert contents(directory, 5) == (
        frame,
        struct.pack("<IIQB3x", 0, len(frame), TS_MS + 5, 4 | 8 | 16)
        + struct.pack("<IIQB3x", 0, 0, TS_MS + 6, 2)
        + struct.pack("<IIQB3x", 4, 0, TS_MS + 7, 32),
    )
    assert frame.hex() == (
        "410000001305000000000000000568e5cf8b010000010003001b0000006e74c3a4226461746122"
        "3a2261222c226d657461223a7b226b223a2276227d85829ca2a3e3960800"
    )


@settings(deadline=None)
@given(some_records, st.integers(1, 2**63), st.data())
def test_what_was_logged_comes_back(records: list[Record], first_seq: int, data: st.DataObject) -> None:
    """Appended in pieces, from several log files."""
    with TemporaryDirectory() as root:
        directory = layout.topic_dir(root, TOPIC_ID)
        writer = SegmentWriter.create(FaultyFileSystem(), directory, first_seq)
        expected_entries = array("Q")
        done = 0
        while done < len(records):
            count = data.draw(st.integers(1, len(records) - done))
            source = logged(records[done : done + count], first_seq + done, file_no=done + 1)
            offset = writer.data_bytes
            writer.append(memoryview(source.buffer), TOPIC_ID, source.entries)
            for at in range(0, len(source.entries), 4):
                seq, ts, offset_len, file_flags = source.entries[at : at + 4]
                length = (offset_len >> 32) - LOG_FRAME_EXTRA_LEN
                expected_entries.extend((seq, ts, offset | length << 32, file_flags >> 32 << 32))
                offset += length
            done += count
        writer.sync()
        writer.close()
        assert writer.records == len(records)
        assert writer.next_seq == first_seq + len(records)
        reader = SegmentReader.open(directory, first_seq, writer.records, writer.data_bytes)
        assert list(reader.damage(())) == []
        assert reader.entries(first_seq, first_seq + len(records) - 1) == expected_entries
        for position in range(len(records)):
            seq = first_seq + position
            assert reader.entries(seq, seq) == expected_entries[position * 4 : position * 4 + 4]
            frame = reader.frame(seq)
            assert frame is not None
            record = records[position]
            assert (frame.seq, frame.ts, frame.node, frame.tag, frame.data, frame.deleted) == (
                (seq, TS_MS + seq, record.node, record.tag, record.payload, False)
            )
        assert list(reader.tagged()) == [
            (first_seq + at, record.tag) for at, record in enumerate(records) if record.tag
        ]


def test_more_records_than_are_converted_at_once(directory: str) -> None:
    records = [Record(b"%d" % number, tag=b"t" * (number % 3)) for number in range(9000)]
    source = logged(records).flagged(4095, LOCATION_DELETED).flagged(4096, LOCATION_DELETED)
    writer = SegmentWriter.create(OsFileSystem(), directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.entries)
    reader = SegmentReader.open(directory, 1, writer.records, writer.data_bytes)
    assert list(reader.damage(())) == []
    assert read_back(reader) == [*records[:4095], None, None, *records[4097:]]


def test_gone_records_keep_their_place_and_nothing_else(directory: str) -> None:
    source = logged(plain).flagged(0, LOCATION_DELETED).flagged(2, LOCATION_DELETED | LOCATION_IN_RAM_LOG)
    source = source.flagged(3, LOCATION_LOST, offset_len=EvictReason.RESTART)
    writer = SegmentWriter.create(OsFileSystem(), directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.entries)
    writer.append(source.buffer, TOPIC_ID, array("Q"))
    reader = SegmentReader.open(directory, 1, writer.records, writer.data_bytes)
    assert list(reader.damage(())) == []
    assert read_back(reader) == [None, plain[1], None, None, plain[4], plain[5]]
    entries = reader.entries(1, 6)
    assert entries[2] == 0
    assert entries[3] == entries[11] == LOCATION_DELETED << 32
    assert entries[14] == EvictReason.RESTART
    assert entries[15] == LOCATION_LOST << 32
    assert not any(b'"1"' in content for content in contents(directory))


def test_only_the_right_records_are_taken(directory: str) -> None:
    writer = SegmentWriter.create(OsFileSystem(), directory, 1)
    source = logged(plain)
    with pytest.raises(ValueError, match="goes on with 5 from seq 1, not with"):
        writer.append(source.buffer, TOPIC_ID, source.entries[4:])
    with pytest.raises(ValueError, match="not those of topic 0x8"):
        writer.append(source.buffer, TOPIC_ID + 1, source.entries)
    with pytest.raises(ValueError, match="not those of topic"):
        writer.append(logged([Record(b'"9"')] * 6, first_seq=2).buffer, TOPIC_ID, source.entries)
    writer.append(source.buffer, TOPIC_ID, source.entries)
    assert read_back(SegmentReader.open(directory, 1, writer.records, writer.data_bytes)) == plain


def test_room(directory: str) -> None:
    writer = SegmentWriter.create(OsFileSystem(), directory, 1)
    source = logged([Record(b'"%d"' % number) for number in range(1, 7)])
    length = (source.entries[2] >> 32) - LOG_FRAME_EXTRA_LEN
    assert writer.room(source.entries, 4, DATA_MAX_BYTES) == 4
    assert writer.room(source.entries, 9, 3 * length) == 3
    assert writer.room(source.entries, 9, 3 * length - 1) == 2
    assert writer.room(source.entries, 9, 1) == 1  # a record longer than a segment still has one
    assert writer.room(array("Q"), 9, 1) == 0
    assert writer.room(source.flagged(0, LOCATION_DELETED).entries, 9, 3 * length) == 4
    writer.append(source.buffer, TOPIC_ID, source.entries[:8])
    assert writer.data_bytes == 2 * length
    assert writer.room(source.entries[8:], 4, DATA_MAX_BYTES) == 2
    assert writer.room(source.entries[8:], 9, 3 * length) == 1
    assert writer.room(source.entries[8:], 9, length) == 0
    assert writer.room(source.entries[8:], 2, DATA_MAX_BYTES) == 0


# -- what a crash leaves


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(few_records, few_records)
def test_cut_at_every_byte_behind_the_mark(before: list[Record], after: list[Record]) -> None:
    """Bytes behind the committed ones of either file do not matter: the reopened segment goes on as if they were not
    there.
    """
    with TemporaryDirectory() as root:
        directory = layout.topic_dir(root, TOPIC_ID)
        fs = FaultyFileSystem()
        source = logged([*before, *after])
        writer = SegmentWriter.create(fs, directory, 1)
        writer.append(source.buffer, TOPIC_ID, source.part(0, len(before)).entries)
        writer.sync()
        marked = (writer.records, writer.data_bytes)
        marked_idx_bytes = len(contents(directory)[1])
        writer.append(source.buffer, TOPIC_ID, source.part(len(before), len(source.entries)).entries)
        writer.close()
        whole = contents(directory)
        paths = (layout.segment_data_path(directory, 1), layout.segment_idx_path(directory, 1))
        cuts = [(cut, len(whole[1])) for cut in range(marked[1], len(whole[0]) + 1)]
        cuts += [(len(whole[0]), cut) for cut in range(marked_idx_bytes, len(whole[1]) + 1)]
        for cut in cuts:
            for garbage in (b"", b"\xd5garbage"):
                for path, content, length in zip(paths, whole, cut, strict=True):
                    Path(path).write_bytes(content[:length] + garbage)
                writer = SegmentWriter.reopen(fs, directory, 1, *marked)
                assert [len(content) for content in contents(directory)] == [marked[1], marked_idx_bytes]
                reader = SegmentReader.open(directory, 1, *marked)
                assert read_back(reader) == before
                writer.append(source.buffer, TOPIC_ID, source.part(len(before), len(source.entries)).entries)
                writer.sync()
                writer.close()
                assert contents(directory) == whole


def test_less_than_is_committed_is_corruption(directory: str) -> None:
    reader = make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), plain, sealed=False)
    whole = contents(directory)
    committed = (reader.records, len(reader.data))
    for path, content in zip((reader.data_path, reader.idx_path), whole, strict=True):
        Path(path).write_bytes(content[:-1])
        with pytest.raises(CorruptSegment, match=f"{path}: corrupt at offset {len(content) - 1}: the file ends there"):
            SegmentWriter.reopen(OsFileSystem(), directory, 1, *committed)
        with pytest.raises(CorruptSegment, match="the file ends there"):
            SegmentReader.open(directory, 1, *committed)
        Path(path).write_bytes(content)
    with pytest.raises(CorruptSegment, match="the last frame ends at"):
        SegmentWriter.reopen(OsFileSystem(), directory, 1, reader.records - 1, len(reader.data))
    with pytest.raises(CorruptSegment, match="no record has a frame"):
        SegmentWriter.reopen(OsFileSystem(), directory, 1, 0, len(reader.data))
    os.unlink(reader.idx_path)
    with pytest.raises(FileNotFoundError):
        SegmentWriter.reopen(OsFileSystem(), directory, 1, *committed)


def test_a_segment_without_a_mark_begins_again(directory: str) -> None:
    data_dir = str(Path(directory).parents[1])
    make_segment(FaultyFileSystem(), data_dir, plain, sealed=False)
    expected = plain[:2]
    reader = make_segment(FaultyFileSystem(), data_dir, expected, sealed=False)
    assert list(reader.damage(())) == []
    assert read_back(reader) == expected


def test_what_is_written_again_has_no_postings(directory: str) -> None:
    """Killed between sealing and the mark."""
    data_dir = str(Path(directory).parents[1])
    tags_path = layout.segment_tags_path(directory, 1)
    reader = make_segment(FaultyFileSystem(), data_dir, plain)
    assert os.path.exists(tags_path)
    fs = FaultyFileSystem()
    writer = SegmentWriter.reopen(fs, directory, 1, 3, len(reader.data) // 2)
    assert not os.path.exists(tags_path)
    writer.sync()
    writer.close()
    assert fs.log[-3:] == ["fsync_dir"] * 3  # it must not come back with the records of before
    make_segment(FaultyFileSystem(), data_dir, plain)
    make_segment(FaultyFileSystem(), data_dir, plain, sealed=False)
    assert not os.path.exists(tags_path)


FIRST_MARK_CALLS = 13
"""Calls until the first `sync` of `fill` returns."""


def fill(fs: FaultyFileSystem, directory: str) -> tuple[int, int]:
    """Two marks; returns what the second one says."""
    source = logged(plain)
    writer = SegmentWriter.create(fs, directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.part(0, 2).entries)
    writer.sync()
    writer.append(source.buffer, TOPIC_ID, source.part(2, 6).entries)
    writer.sync()
    writer.close()
    return writer.records, writer.data_bytes


def count_calls() -> int:
    with TemporaryDirectory() as root:
        fs = FaultyFileSystem()
        fill(fs, layout.topic_dir(root, TOPIC_ID))
        return len(fs.log)


def test_every_name_and_every_byte_is_synced_before_the_mark(directory: str) -> None:
    fs = FaultyFileSystem()
    fill(fs, directory)
    parents = ["mkdir", "fsync_dir"] * 2
    first = ["open", "open", "pwritev", "pwritev", "fdatasync", "fdatasync", "fsync_dir", "fsync_dir", "fsync_dir"]
    assert len(parents) + len(first) == FIRST_MARK_CALLS
    assert fs.log == [*parents, *first, "pwritev", "pwritev", "fdatasync", "fdatasync"]


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.TORN_CRASH, Fault.LATE_CRASH])
def test_killed_at_any_call(tmp_path: Path, error: int) -> None:
    """Begun again without a mark, or reopened at the first mark: the same files in the end."""
    for nth in range(1, count_calls() + 1):
        with case(nth):
            check_killed_at(layout.topic_dir(str(tmp_path / str(nth)), TOPIC_ID), nth, error)


def check_killed_at(directory: str, nth: int, error: int) -> None:
    fs = FaultyFileSystem()
    marked = fill(fs, directory)
    whole = contents(directory)
    for path in (layout.segment_data_path, layout.segment_idx_path):
        os.unlink(path(directory, 1))
    os.rmdir(directory)
    os.rmdir(os.path.dirname(directory))
    fs.arm(Fault(nth, error))
    with pytest.raises(Crash):
        fill(fs, directory)
    fs.bury()
    source = logged(plain)
    if nth > FIRST_MARK_CALLS:
        first_bytes = sum((offset_len >> 32) - LOG_FRAME_EXTRA_LEN for offset_len in source.part(0, 2).entries[2::4])
        writer = SegmentWriter.reopen(OsFileSystem(), directory, 1, 2, first_bytes)
        writer.append(source.buffer, TOPIC_ID, source.part(2, 6).entries)
        writer.close()
    else:
        fill(FaultyFileSystem(), directory)
    assert contents(directory) == whole
    assert read_back(SegmentReader.open(directory, 1, *marked)) == plain


@pytest.mark.parametrize("nth", [1, 2])
def test_of_a_short_write_the_rest_says_why(directory: str, nth: int) -> None:
    """A disk with room for a part takes that part: what the next one meets is the reason."""
    fs = FaultyFileSystem()
    source = logged(plain)
    writer = SegmentWriter.create(fs, directory, 1)
    fs.arm(Fault(nth, Fault.SHORT, calls=frozenset({"pwritev"})))
    writer.append(source.buffer, TOPIC_ID, source.part(0, 6).entries)
    assert fs.struck == 1
    writer.sync()
    assert read_back(SegmentReader.open(directory, 1, writer.records, writer.data_bytes)) == plain


@pytest.mark.parametrize("error", ERRNOS)
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("before", [0, 2])
def test_a_failed_append_appends_nothing_and_may_be_repeated(directory: str, nth: int, error: int, before: int) -> None:
    fs = FaultyFileSystem()
    source = logged(plain)
    writer = SegmentWriter.create(fs, directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.part(0, before).entries)
    held = (writer.records, writer.data_bytes)
    fs.arm(Fault(nth, error, calls=frozenset({"pwritev"})))
    with pytest.raises(OSError, match=r"Input/output|No space"):
        writer.append(source.buffer, TOPIC_ID, source.part(before, 6).entries)
    assert (writer.records, writer.data_bytes) == held
    fs.arm(None)
    writer.sync()  # a mark now is one of what was there before, and nothing is behind it
    assert [len(content) for content in contents(directory)] == [held[1], held[0] * 20]
    writer.append(source.buffer, TOPIC_ID, source.part(before, 6).entries)
    assert read_back(SegmentReader.open(directory, 1, writer.records, writer.data_bytes)) == plain


@pytest.mark.parametrize("call", ["open", "mkdir", "fsync_dir", "fdatasync"])
def test_a_failure_of_any_other_call_is_told(directory: str, call: str) -> None:
    fs = FaultyFileSystem()
    fs.arm(Fault(1, errno.EIO, calls=frozenset({call})))
    with pytest.raises(OSError, match=call):
        fill(fs, directory)
    fs.arm(None)
    marked = fill(fs, directory)
    assert read_back(SegmentReader.open(directory, 1, *marked)) == plain


def test_no_write_is_longer_than_the_system_takes(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes stay short however large records are, and a segment may be; a record alone is one write."""
    written: list[int] = []

    class Recording(OsFileSystem):
        def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
            written.append(sum(map(len, buffers)))
            return super().pwritev(fd, buffers, offset)

    monkeypatch.setattr(segment_writer, "CHUNK_BYTES", 1000)
    records = [Record(b"1" * length) for length in (300, 300, 300, 1500, 10, 900, 1, 1, 1)]
    source = logged(records).flagged(6, LOCATION_DELETED)
    writer = SegmentWriter.create(Recording(), directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.entries)
    *data, idx = written
    assert (idx, sum(data)) == (9 * 20, writer.data_bytes)
    assert len(data) < len(records), "neighbours go together"
    assert sorted(data)[-1] > 1500 > 1000 >= sorted(data)[-2]
    reader = SegmentReader.open(directory, 1, 9, writer.data_bytes)
    assert list(reader.damage(())) == []
    assert [None if (frame := reader.frame(seq)) is None else frame.data for seq in range(1, 10)] == [
        None if at == 6 else record.payload for at, record in enumerate(records)
    ]


# -- deletions


def test_deletion_is_seen_by_who_has_it_mapped(directory: str) -> None:
    fs = FaultyFileSystem()
    reader = make_segment(fs, str(Path(directory).parents[1]), plain, first_seq=10, sealed=False)
    before = contents(directory, 10)
    mark_deleted(fs, directory, 10, [11, 13, 14])
    mark_deleted(fs, directory, 10, [])
    assert read_back(reader) == [plain[0], None, plain[2], None, None, plain[5]]
    assert [flags >> 32 for flags in reader.entries(10, 15)[3::4]] == [0, 2, 0, 2, 2, 0]
    assert list(reader.damage(())) == []
    changed = [
        [at for at, (old, new) in enumerate(zip(*pair, strict=True)) if old != new]
        for pair in zip(before, contents(directory, 10), strict=True)
    ]
    length = len(before[0]) // 6
    assert changed == [[at * length - 1 for at in (2, 4, 5)], [at * 20 + 16 for at in (1, 3, 4)]]
    assert all(contents(directory, 10)[0][at] == 0xD5 for at in changed[0])
    once = contents(directory, 10)
    mark_deleted(fs, directory, 10, [11, 12])
    mark_deleted(fs, directory, 10, [11, 12])
    assert read_back(reader) == [plain[0], None, None, None, None, plain[5]]
    assert once != contents(directory, 10)
    fs.log.clear()
    sync_segment(fs, directory, 10)
    assert fs.log == ["open", "fdatasync", "open", "fdatasync"]


def test_deletion_of_what_has_no_frame_changes_nothing(directory: str) -> None:
    source = logged(plain).flagged(1, LOCATION_LOST, offset_len=EvictReason.RESTART).flagged(2, LOCATION_DELETED)
    writer = SegmentWriter.create(OsFileSystem(), directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.entries)
    before = contents(directory)
    mark_deleted(OsFileSystem(), directory, 1, [2, 3])
    assert contents(directory) == before


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH])
def test_a_deletion_killed_anywhere_is_repeated(directory: str, error: int) -> None:
    data_dir = str(Path(directory).parents[1])
    for nth in range(1, 5):  # open, open, both del, idx
        reader = make_segment(FaultyFileSystem(), data_dir, plain, sealed=False)
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        with pytest.raises(Crash):
            mark_deleted(fs, directory, 1, [2, 5])
        fs.bury()
        assert list(reader.damage(None)) == []
        halfway = (nth, error) in ((3, Fault.LATE_CRASH), (4, Fault.CRASH))
        assert bool(list(reader.damage(()))) == halfway
        mark_deleted(OsFileSystem(), directory, 1, [2, 5])
        assert list(reader.damage(())) == []
        assert read_back(reader) == [plain[0], None, plain[2], plain[3], None, plain[5]]


def test_a_wrong_index_never_makes_a_deletion_write_elsewhere(directory: str) -> None:
    reader = make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), plain, sealed=False)
    idx = bytearray(contents(directory)[1])
    idx[20:24] = idx[40:44]  # seq 2 where seq 3 lies
    Path(reader.idx_path).write_bytes(idx)
    before = contents(directory)
    assert "not the frame of seq 2" in str(mark_deleted(OsFileSystem(), directory, 1, [2]))
    idx[20:24] = b"\xff\xff\xff\x7f"
    Path(reader.idx_path).write_bytes(idx)
    assert "the file ends there" in str(mark_deleted(OsFileSystem(), directory, 1, [2]))
    assert contents(directory)[0] == before[0]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from([1, 90, 2500, 4090, 9000, 300_000]), st.booleans()), min_size=1, max_size=30),
    st.booleans(),
)
def test_a_deletion_changes_the_bytes_that_it_is_about(records: list[tuple[int, bool]], damaged: bool) -> None:
    """The deleted records may be far apart, and other bytes between them damaged."""
    with TemporaryDirectory() as root:
        reader = make_segment(FaultyFileSystem(), root, [Record(b"1" * size) for size, _ in records], sealed=False)
        directory = layout.topic_dir(root, TOPIC_ID)
        data, idx = (bytearray(content) for content in contents(directory))
        asked = [seq for seq, (_, asked) in enumerate(records, 1) if asked]
        ends = [(word & 0xFFFF_FFFF) + (word >> 32) for word in reader.entries(1, len(records))[2::4]]
        bad = asked[len(asked) // 2] if damaged and asked else 0
        if bad:
            data[ends[bad - 2] if bad > 1 else 0] ^= 0xFF
            Path(reader.data_path).write_bytes(data)
        fs = FaultyFileSystem()
        assert (mark_deleted(fs, directory, 1, asked) is None) == (not bad)
        for seq in asked:
            idx[(seq - 1) * 20 + 16] |= 2
            if seq != bad:
                data[ends[seq - 1] - 1] = 0xD5
        assert contents(directory) == (bytes(data), bytes(idx))


def test_neighbours_are_marked_by_few_writes(directory: str) -> None:
    make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), plain * 500, sealed=False)
    fs = FaultyFileSystem()
    assert mark_deleted(fs, directory, 1, range(1, 3001, 3)) is None
    assert fs.log.count("pwritev") == 2, "they lie within a window, and no two a page apart"


class BadSector(FaultyFileSystem):
    """One byte of one file cannot be written."""

    def __init__(self, path: str, offset: int) -> None:
        super().__init__()
        self._ino = os.stat(path).st_ino
        self._offset = offset

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if os.fstat(fd).st_ino == self._ino and 0 <= self._offset - offset < sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("damage", ["header", "short", "missing", "EMFILE", "EIO"])
def test_what_cannot_be_marked_in_its_frame_is_in_the_index(directory: str, damage: str) -> None:
    """All that can be marked is marked in both, so that no reader goes on seeing it."""
    reader = make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), plain, sealed=False)
    path, data = Path(reader.data_path), contents(directory)[0]
    length = len(data) // 6
    fs = FaultyFileSystem()
    if damage == "header":
        path.write_bytes(data[: 2 * length] + b"x" * 10 + data[2 * length + 10 :])
    elif damage == "short":
        path.write_bytes(data[:-1])
    elif damage == "missing":
        path.unlink()
    elif damage == "EMFILE":
        fs.arm(Fault(2, errno.EMFILE, calls=frozenset({"open"})))
    else:
        fs = BadSector(str(path), 3 * length - 1)
    assert isinstance(mark_deleted(fs, directory, 1, [2, 3, 6]), (OSError, CorruptSegment))
    assert [flags >> 32 for flags in reader.entries(1, 6)[3::4]] == [0, 2, 2, 0, 0, 2]
    marked = {"header": [2, 6], "short": [2, 3], "missing": [], "EMFILE": [], "EIO": [2, 6]}[damage]
    if damage == "missing":
        assert not path.exists()
    else:
        now = path.read_bytes()
        assert [seq for seq in range(1, 7) if now[seq * length - 1 : seq * length] == b"\xd5"] == marked
        assert len(now) == len(data) - (damage == "short"), "nothing was written behind the end"
    sync_segment(fs, directory, 1)


# -- damage


def flips(content: bytes) -> list[bytes]:
    return [
        content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]
        for bit in range(len(content) * 8)
    ]


def test_every_flipped_bit_is_found(directory: str) -> None:
    """In both files, and the record is not served if its own bytes are wrong."""
    records = [Record(b'"a"', b"n", b"t", b'{"k":1}'), Record(b"1"), Record(b"2", tag=b"u")]
    reader = make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), records, sealed=False)
    mark_deleted(OsFileSystem(), directory, 1, [2])
    data, idx = contents(directory)
    damaged = [(flipped, idx) for flipped in flips(data)] + [(data, flipped) for flipped in flips(idx)]
    assert len(damaged) == (len(data) + len(idx)) * 8
    for bad_data, bad_idx in damaged:
        bad = SegmentReader(directory, 1, bad_idx, bad_data)
        found = list(bad.damage(()))
        assert found
        path = reader.data_path if bad_idx == idx else reader.idx_path
        assert any(path in str(one) for one in found) or bad_idx != idx
        for seq in (1, 2, 3):
            try:
                frame = bad.frame(seq)
            except CorruptSegment:
                continue
            # What is served is what was written; only the mark of a deletion may be wrong, which `damage` tells.
            assert frame is None or (frame.data, frame.ts) == (records[seq - 1].payload, TS_MS + seq)


@pytest.mark.parametrize("extra", [b"\0", bytes(20), bytes(38)])
def test_anything_too_much_is_found(directory: str, extra: bytes) -> None:
    make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), plain, sealed=False)
    data, idx = contents(directory)
    assert [one.offset for one in SegmentReader(directory, 1, idx, data + extra).damage(())] == [len(data)]
    assert list(SegmentReader(directory, 1, idx + extra, data).damage(()))
    assert list(SegmentReader(directory, 1, idx[:-20], data).damage(()))
    assert list(SegmentReader(directory, 1, idx, data[:-1]).damage(()))


def test_an_entry_without_a_frame_is_in_order_of_time(directory: str) -> None:
    """Nothing repeats its ts, but its neighbours bound it."""
    source = logged(plain).flagged(2, LOCATION_DELETED)
    writer = SegmentWriter.create(OsFileSystem(), directory, 1)
    writer.append(source.buffer, TOPIC_ID, source.entries)
    data, idx = contents(directory)
    for wrong_ts, at in ((TS_MS + 1, 2), (TS_MS + 5, 3)):
        bad = idx[:48] + struct.pack("<Q", wrong_ts) + idx[56:]
        (found,) = SegmentReader(directory, 1, bad, data).damage(())
        assert (found.path, found.offset) == (layout.segment_idx_path(directory, 1), at * 20)
        assert "is before that of the record before" in found.reason


def test_two_frames_swapped_are_found(directory: str) -> None:
    make_segment(FaultyFileSystem(), str(Path(directory).parents[1]), plain, sealed=False)
    data, idx = contents(directory)
    length = len(data) // 6
    swapped = data[length : 2 * length] + data[:length] + data[2 * length :]
    found = list(SegmentReader(directory, 1, idx, swapped).damage(()))
    assert [one.offset for one in found] == [0, length]
    assert "holds seq 2" in found[0].reason
