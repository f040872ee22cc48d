"""A rewritten segment holds the same live records at the same seqs, and nothing of the deleted ones."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.logs import TOPIC_ID
from tests.storage.segments import Record, make_segment
from topics.compactor.relocation import HotRetention
from topics.compactor.rewriting import dead_bytes, rewrite
from topics.core.location import LOCATION_DELETED, LOCATION_LOST
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.postings import Postings
from topics.storage.segment import CHECKED_BYTES, CHECKED_RECORDS, ENTRY_LEN, CommittedFile, CorruptSegment, check_whole
from topics.storage.segment_deletes import mark_deleted
from topics.storage.segment_reader import SegmentReader

FS = OsFileSystem()
FIRST_SEQ = 100


def segment(data_dir: str, records: list[Record], deleted: list[int]) -> tuple[str, SegmentInfo]:
    reader = make_segment(FS, data_dir, records, FIRST_SEQ)
    directory = layout.topic_dir(data_dir, TOPIC_ID)
    mark_deleted(FS, directory, FIRST_SEQ, deleted)
    entries = reader.entries(FIRST_SEQ, reader.last_seq)
    return directory, SegmentInfo(FIRST_SEQ, reader.last_seq, entries[1], entries[-3], len(reader.data), 0, SEALED)


def reader_of(directory: str, info: SegmentInfo) -> SegmentReader:
    return SegmentReader.open(directory, info.first_seq, info.records, info.data_bytes, info.version)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    dead=st.sets(st.integers(0, 39)),
    twice=st.sets(st.integers(0, 39)),
)
def test_live_records_stay_and_deleted_ones_take_no_room(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dead: set[int], twice: set[int]
) -> None:
    data_dir = str(tmp_path_factory.mktemp("data"))
    records = [
        Record(b'"' + b"x" * length + b'"', tag=b"t%d" % (length % 3) if length % 4 else b"", node=b"n" * (length % 2))
        for length in lengths
    ]
    deleted = sorted(FIRST_SEQ + at for at in dead if at < len(records))
    directory, info = segment(data_dir, records, deleted)
    again = rewrite(FS, directory, info)
    more = sorted(FIRST_SEQ + at for at in twice if at < len(records))
    mark_deleted(FS, directory, FIRST_SEQ, [seq for seq in more if seq not in deleted], 1)
    last = rewrite(FS, directory, again)
    live = {
        FIRST_SEQ + at: (record.payload, record.tag, record.node)
        for at, record in enumerate(records)
        if FIRST_SEQ + at not in {*deleted, *more}
    }
    for version in (again, last):
        reader = reader_of(directory, version)
        assert list(reader.damage(())) == []
        frames = [frame for seq in range(FIRST_SEQ, version.last_seq + 1) if (frame := reader.frame(seq)) is not None]
        assert {f.seq: (f.data, f.tag, f.node) for f in frames if not f.deleted} == live
    assert dead_bytes(directory, last) == 0
    postings = Postings.open(directory, FIRST_SEQ, last.records, last.version)
    tagged = {seq: tag for tag, seqs in postings.items() for seq in seqs}
    assert tagged == {seq: tag for seq, (_, tag, _) in live.items() if tag}
    assert (last.version, last.flags, last.first_ts, last.last_ts) == (2, SEALED, info.first_ts, info.last_ts)


def test_how_much_is_dead(tmp_path: Path) -> None:
    records = [Record(b'"' + b"x" * 100 + b'"')] * 10
    directory, info = segment(str(tmp_path), records, [FIRST_SEQ, FIRST_SEQ + 5])
    assert dead_bytes(directory, info) == info.data_bytes // 5


def test_the_old_version_is_as_it_was(tmp_path: Path) -> None:
    directory, info = segment(str(tmp_path), [Record(b"1")] * 4, [FIRST_SEQ + 1])
    before = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    rewrite(FS, directory, info)
    after = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    assert {name: after[name] for name in before} == before
    assert len(after) == 2 * len(before)


@pytest.mark.parametrize("word", [0, 1, 4], ids=["offset", "length", "flags"])
@pytest.mark.parametrize("flipped", [LOCATION_LOST, 1 << 2, 0xFFFF_FFFF])
def test_one_with_a_damaged_index_is_left_alone(tmp_path: Path, word: int, flipped: int) -> None:
    """The data are whole, and a copy of the index brings everything back: nothing may be made of what it says now."""
    records = [Record(b'"' + b"%d" % number * 50 + b'"', tag=b"t") for number in range(10)]
    directory, info = segment(str(tmp_path), records, [FIRST_SEQ + at for at in (1, 3, 5, 7)])
    before = sorted(Path(directory).iterdir())
    path = Path(layout.segment_idx_path(directory, FIRST_SEQ))
    words = array("I", path.read_bytes())
    for number in (4, 6):
        words[number * ENTRY_LEN // 4 + word] ^= flipped
    path.write_bytes(words.tobytes())
    with pytest.raises(CorruptSegment):
        rewrite(FS, directory, info)
    assert sorted(Path(directory).iterdir()) == before


def test_a_record_that_is_deleted_by_the_index_alone_is_not_left_out(tmp_path: Path) -> None:
    """A flipped bit in an index cannot be told from a deletion, and the new version was without the record for good. Of
    a damaged frame nothing else can say so.
    """
    records = [Record(b"%d" % number, tag=b"t") for number in range(10)]
    directory, info = segment(str(tmp_path), records, [FIRST_SEQ + at for at in range(6)])
    idx, data = (Path(path_of(directory, FIRST_SEQ)) for path_of in (layout.segment_idx_path, layout.segment_data_path))
    content = bytearray(idx.read_bytes())
    content[7 * ENTRY_LEN + 16] ^= LOCATION_DELETED
    idx.write_bytes(content)
    with pytest.raises(CorruptSegment, match=rf"idx.* offset {7 * ENTRY_LEN}: seq {FIRST_SEQ + 7} is deleted here"):
        rewrite(FS, directory, info)
    whole, frame = data.read_bytes(), info.data_bytes // 10
    for at, mask in ((-3 * frame + 32, 1), (-2 * frame - 1, 0xD4)):  # a frame, and a mark that was one
        damaged = bytearray(whole)
        damaged[at] ^= mask
        data.write_bytes(damaged)
        assert rewrite(FS, directory, info).data_bytes == 3 * frame


def test_a_damaged_frame_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Frames are checked so many at a time."""
    records = [Record(b"1", tag=b"t")] * (2 * CHECKED_RECORDS + 2)
    directory, info = segment(str(tmp_path), records, [FIRST_SEQ, FIRST_SEQ + CHECKED_RECORDS])
    path = Path(layout.segment_data_path(directory, FIRST_SEQ))
    content = path.read_bytes()
    for number in (1, CHECKED_RECORDS - 1, CHECKED_RECORDS + 1, 2 * CHECKED_RECORDS, len(records) - 1):
        at = number * info.data_bytes // len(records)
        path.write_bytes(content[: at + 32] + b"y" + content[at + 33 :])
        with pytest.raises(CorruptSegment, match=f"offset {at}: checksum of seq {FIRST_SEQ + number} "):
            rewrite(FS, directory, info)
    path.write_bytes(content)
    rewritten = rewrite(FS, directory, info)
    assert rewritten.data_bytes == info.data_bytes // len(records) * (len(records) - 2)
    assert list(reader_of(directory, rewritten).damage(())) == []


class Noting(CommittedFile):
    """A file that notes how much of it is read at once."""

    def __init__(self, path: str, len_bytes: int) -> None:
        super().__init__(path, len_bytes)
        self.read_bytes: list[int] = []

    def __getitem__(self, part: slice) -> bytes:
        found = super().__getitem__(part)
        self.read_bytes.append(len(found))
        return found


def test_what_is_checked_at_once_has_a_bound(tmp_path: Path) -> None:
    """A segment may have 2 GiB, and the compactor little memory."""
    lengths = [CHECKED_BYTES // 3, 10] * 4 + [2 * CHECKED_BYTES, 5, CHECKED_BYTES // 2]
    directory, info = segment(str(tmp_path), [Record(b'"' + b"x" * length + b'"') for length in lengths], [])
    data = Noting(layout.segment_data_path(directory, FIRST_SEQ), info.data_bytes)
    check_whole(
        CommittedFile(layout.segment_idx_path(directory, FIRST_SEQ), info.records * ENTRY_LEN), data, "", FIRST_SEQ
    )
    assert sum(data.read_bytes) == info.data_bytes
    large = [length for length in data.read_bytes if length > CHECKED_BYTES]
    assert len(large) == 1
    assert large[0] < 2 * CHECKED_BYTES + 100
    assert len(data.read_bytes) == 4


def row(first_seq: int, data_bytes: int, flags: int = SEALED) -> SegmentInfo:
    return SegmentInfo(first_seq, first_seq + 9, 0, 0, data_bytes, 0, flags)


@pytest.mark.parametrize(
    ("retention", "cold"),
    [
        (HotRetention(4, 0), []),
        (HotRetention(2, 0), [11]),
        (HotRetention(0, 0), [11, 21, 31]),
        (HotRetention(4, 250), [11]),
        (HotRetention(4, 99), [11, 21, 31]),
        (HotRetention(1, 10_000), [11, 21]),
    ],
)
def test_the_stricter_bound_decides_what_becomes_cold(retention: HotRetention, cold: list[int]) -> None:
    segments = [row(1, 100, SEALED | COLD), row(11, 100), row(21, 100), row(31, 100), row(41, 100, 0)]
    assert [info.first_seq for info in retention.excess(segments)] == cold
