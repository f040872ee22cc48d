"""Tag postings of a sealed segment."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import case
from tests.storage.faults import ERRNOS, Crash, Fault, FaultyFileSystem
from topics.core.tags import Match
from topics.storage import layout
from topics.storage import postings as postings_module
from topics.storage.filesystem import OsFileSystem
from topics.storage.postings import CorruptPostings, Postings, UnknownPostingsVersion, write_postings

tag_lists = st.lists(st.sampled_from(["", "a", "ab", "abc", "b", "ä", "äb", "\U0010ffff"]).map(str.encode), max_size=20)
prefixes = st.sampled_from(["", "a", "ab", "abc", "abcd", "c", "ä", "\U0010ffff"]).map(str.encode)
FIRST_SEQ = 1000


def tagged(tags: list[bytes]) -> list[tuple[int, bytes]]:
    return [(FIRST_SEQ + at, tag) for at, tag in enumerate(tags) if tag]


def golden() -> tuple[bytes, bytes]:
    """The file of a segment whose three records have tags b, a and b, and its first 40 bytes in hex."""
    body = struct.pack("<2I", 1, 2) + struct.pack("<2I", 1, 3) + struct.pack("<3I", 1, 0, 2) + b"ab"
    header = b"topicTAG" + struct.pack("<IIQIII4x", 1, 3, FIRST_SEQ, 2, 3, 2)
    return header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + body)) + body, header


def write_golden(directory: str) -> str:
    write_postings(OsFileSystem(), directory, FIRST_SEQ, 3, tagged([b"b", b"a", b"b"]))
    return layout.segment_tags_path(directory, FIRST_SEQ)


def test_every_byte_is_where_the_format_says(tmp_path: Path) -> None:
    path = write_golden(str(tmp_path))
    content, header = golden()
    assert Path(path).name == "seg-00000000000000001000.tags"
    assert Path(path).read_bytes() == content
    assert header.hex() == (
        "746f706963544147"
        + "01000000"
        + "03000000"
        + "e803000000000000"
        + "02000000"
        + "03000000"
        + "02000000"
        + "00000000"
    )
    assert xxhash.xxh3_64_hexdigest(content[:40] + content[48:]) == "49297e94e0686007"


@settings(deadline=None)
@given(st.sampled_from([1, 2, 3, 128]), tag_lists, prefixes)
def test_what_is_found_is_what_matches(block_tags: int, tags: list[bytes], wanted: bytes) -> None:
    with TemporaryDirectory() as directory, patch.object(postings_module, "BLOCK_TAGS", block_tags):
        write_postings(OsFileSystem(), directory, FIRST_SEQ, len(tags), tagged(tags))
        postings = Postings.open(directory, FIRST_SEQ, len(tags))
        assert (postings.first_seq, postings.records) == (FIRST_SEQ, len(tags))
        assert postings.find(Match("eq", wanted)) == [seq for seq, tag in tagged(tags) if tag == wanted]
        assert postings.find(Match("glob", wanted)) == [seq for seq, tag in tagged(tags) if tag.startswith(wanted)]
        expected = {tag: [seq for seq, other in tagged(tags) if other == tag] for _, tag in tagged(tags)}
        assert list(postings.items()) == sorted(expected.items())


def test_a_lookup_costs_its_matches(tmp_path: Path) -> None:
    """The number of tags does not count: the tags that are looked at grow with its logarithm."""
    looked_at = []

    class Counting(Postings):
        def _tag(self, number: int) -> bytes:
            looked_at.append(number)
            return super()._tag(number)

    tags = [(seq, b"tag-%06d" % (seq // 2)) for seq in range(20_000)]
    write_postings(OsFileSystem(), str(tmp_path), 0, len(tags), tags)
    path = layout.segment_tags_path(str(tmp_path), 0)
    postings = Counting(path, Path(path).read_bytes())
    looked_at.clear()
    assert postings.find(Match("eq", b"tag-004321")) == [8642, 8643]
    assert postings.find(Match("glob", b"tag-00432")) == list(range(8640, 8660))
    assert 0 < len(looked_at) < 60
    looked_at.clear()
    for absent in (b"tag-004321x", b"a", b"z", b"tag-01"):
        assert postings.find(Match("eq", absent)) == []
    for absent in (b"tag-004321x", b"a", b"z"):
        assert postings.find(Match("glob", absent)) == []
    assert looked_at == [], "most segments do not have what is asked for"


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    content, _ = golden()
    path = write_golden(str(tmp_path))
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptPostings) as caught:
            Postings(path, bytes(flipped))
        assert caught.value.path == path
        assert not isinstance(caught.value, UnknownPostingsVersion)


def test_a_file_of_another_length_is_found(tmp_path: Path) -> None:
    path, (content, _) = write_golden(str(tmp_path)), golden()
    for length in (*range(len(content)), len(content) + 1):
        Path(path).write_bytes((content + b"\0")[:length])
        with case(length), pytest.raises(CorruptPostings):
            Postings.open(str(tmp_path), FIRST_SEQ, 1)


def test_another_release_is_refused(tmp_path: Path) -> None:
    header = b"topicTAG" + struct.pack("<IIQIII4x", 2, 0, FIRST_SEQ, 0, 0, 0)
    path = layout.segment_tags_path(str(tmp_path), FIRST_SEQ)
    Path(path).write_bytes(header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header)))
    with pytest.raises(UnknownPostingsVersion, match="version 2 is unknown, this release reads 1"):
        Postings.open(str(tmp_path), FIRST_SEQ, 0)


@pytest.mark.parametrize(("first_seq", "records"), [(FIRST_SEQ + 1, 1), (FIRST_SEQ, 2)])
def test_the_file_of_another_segment_is_found(tmp_path: Path, first_seq: int, records: int) -> None:
    path = layout.segment_tags_path(str(tmp_path), FIRST_SEQ)
    Path(path).write_bytes(postings_module.encode(first_seq, records, [(first_seq, b"a")]))
    reason = f"is of {records} records from seq {first_seq}, not of 1 from {FIRST_SEQ}"
    with pytest.raises(CorruptPostings, match=reason):
        Postings.open(str(tmp_path), FIRST_SEQ, 1)


def test_where_no_topic_is_named_the_file_is_of_any(tmp_path: Path) -> None:
    """A whole file counted as one of another topic in a directory under another name, a copy of it, say."""
    directory = tmp_path / os.path.basename(layout.topic_dir("", 7))
    directory.mkdir()
    write_postings(OsFileSystem(), str(directory), FIRST_SEQ, 1, [(FIRST_SEQ, b"a")])
    copy = directory.rename(tmp_path / "copy")
    assert list(Postings.open(str(copy), FIRST_SEQ, 1).items()) == [(b"a", [FIRST_SEQ])]
    other = copy.rename(tmp_path / os.path.basename(layout.topic_dir("", 8)))
    with pytest.raises(CorruptPostings, match="of another topic"):
        Postings.open(str(other), FIRST_SEQ, 1)


def test_a_segment_that_is_not_sealed_has_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Postings.open(str(tmp_path), FIRST_SEQ, 0)


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.TORN_CRASH, Fault.LATE_CRASH])
@pytest.mark.parametrize("nth", range(1, 6))
def test_killed_at_any_call_it_is_there_as_a_whole_or_not_at_all(tmp_path: Path, nth: int, error: int) -> None:
    fs = FaultyFileSystem()
    fs.arm(Fault(nth, error))
    with pytest.raises(Crash):
        write_postings(fs, str(tmp_path), FIRST_SEQ, 1, tagged([b"a"]))
    assert fs.log == ["open", "pwritev", "fdatasync", "rename", "fsync_dir"][:nth]
    fs.bury()
    path = layout.segment_tags_path(str(tmp_path), FIRST_SEQ)
    if os.path.exists(path):
        assert Postings.open(str(tmp_path), FIRST_SEQ, 1).find(Match("eq", b"a")) == [FIRST_SEQ]
    assert os.path.exists(path) == (nth > 4 or (nth == 4 and error == Fault.LATE_CRASH))
    assert Path(write_golden(str(tmp_path))).read_bytes() == golden()[0]


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename", "fsync_dir"])
@pytest.mark.parametrize("error", ERRNOS)
def test_a_failure_is_told_and_leaves_no_half(tmp_path: Path, call: str, error: int) -> None:
    fs = FaultyFileSystem()
    fs.arm(Fault(1, error, calls=frozenset({call})))
    with pytest.raises(OSError, match=call):
        write_postings(fs, str(tmp_path), FIRST_SEQ, 1, tagged([b"a"]))
    assert os.listdir(tmp_path) == ([] if call != "fsync_dir" else ["seg-00000000000000001000.tags"])


def test_a_short_write_goes_on(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    fs.arm(Fault(1, Fault.SHORT, calls=frozenset({"pwritev"})))
    write_postings(fs, str(tmp_path), FIRST_SEQ, 3, tagged([b"b", b"a", b"b"]))
    assert fs.struck == 1
    assert Path(layout.segment_tags_path(str(tmp_path), FIRST_SEQ)).read_bytes() == golden()[0]
