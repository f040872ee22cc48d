"""The tags of a sealed segment and the records of each, so that a delete by tag costs its matches (api §5).

The compactor writes `seg-<20 digits>.tags` once, when it seals the segment, even if no record has a tag. The file lists
every record with a tag and a frame, deleted or not. Version 1; docs/storage-format.md has the order of the fields.

    magic      = "topicTAG"
    records    = the number of records in the segment, from first_seq on
    topic      = the low half of the XXH3-64 of the topic's id (u64); 0 in files of 0.1.0, which do not say it
    checksum   = XXH3-64 of the whole file but its own 8 bytes
    text       = the tags back to back, strictly ascending by their bytes; tag i is text[text_end[i-1]:text_end[i]]
    seq offset = seq - first_seq; those of tag i are [list_end[i-1]:list_end[i]], strictly ascending
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from struct import Struct
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from topics.core.tags import Match
from topics.storage import layout
from topics.storage.filesystem import FileSystem, replace_file
from topics.storage.frame import CHECKSUM
from topics.storage.segment import CommittedFile, Content, CorruptFile, CorruptSegment

MAGIC: Final = b"topicTAG"
VERSION: Final = 1
HEADER: Final = Struct("<8sIIQIIII")
BODY_AT: Final = HEADER.size + CHECKSUM.size
_U32_LEN: Final = 4
BLOCK_TAGS: Final = 128
"""A reader keeps one tag in this many in memory: less than a byte for each record of a segment with 10,000 tags."""


class CorruptPostings(CorruptFile):
    """A `.tags` file is not what was written, or of another release."""


class UnknownPostingsVersion(CorruptPostings):
    """Another release wrote the file, in a format that this one does not know."""


def write_postings(
    fs: FileSystem, directory: str, first_seq: int, records: int, tagged: Iterable[tuple[int, bytes]], version: int = 0
) -> None:
    """Make or replace the segment's `.tags` durably; `tagged` are (seq, tag) by ascending seq. Raise OSError; the file
    is there as a whole or not at all.
    """
    content = encode(first_seq, records, tagged, _topic_word(directory))
    replace_file(fs, layout.segment_tags_path(directory, first_seq, version), content)


def encode(first_seq: int, records: int, tagged: Iterable[tuple[int, bytes]], topic: int = 0) -> bytes:
    """Encode the whole file; `tagged` are (seq, tag) by ascending seq."""
    lists: dict[bytes, array[int]] = {}
    for seq, tag in tagged:
        if tag not in lists:
            lists[tag] = array("I")
        lists[tag].append(seq - first_seq)
    tags = sorted(lists)
    text = b"".join(tags)
    seq_lists = [lists[tag] for tag in tags]
    list_ends = array("I", accumulate(map(len, seq_lists)))
    header = HEADER.pack(MAGIC, VERSION, records, first_seq, len(tags), sum(map(len, seq_lists)), len(text), topic)
    body = b"".join((array("I", accumulate(map(len, tags))), list_ends, *seq_lists, text))
    checksum = CHECKSUM.pack(xxh3_64_intdigest(header + body))
    return header + checksum + body


def _topic_word(directory: str) -> int:
    topic_id = layout.topic_id_of(os.path.basename(directory))
    return 0 if topic_id is None else xxh3_64_intdigest(topic_id.to_bytes(8, "little")) & 0xFFFF_FFFF


class Postings:
    """A `.tags` file, checked as a whole when it is opened. Raise CorruptPostings."""

    def __init__(self, path: str, content: bytes) -> None:
        if len(content) < BODY_AT:
            raise CorruptPostings(path, len(content), f"the file ends inside its header of {BODY_AT} bytes")
        magic, version, self.records, self.first_seq, tag_count, seq_count, text_len, self.topic = HEADER.unpack_from(
            content
        )
        if magic != MAGIC:
            raise CorruptPostings(path, 0, f"begins with {magic!r} instead of {MAGIC!r}")
        with memoryview(content) as view:
            digest = xxh3_64(view[: HEADER.size])
            digest.update(view[BODY_AT:])
        if CHECKSUM.unpack_from(content, HEADER.size)[0] != digest.intdigest():
            raise CorruptPostings(path, HEADER.size, "checksum does not match")
        if version != VERSION:
            raise UnknownPostingsVersion(path, 8, f"version {version} is unknown, this release reads {VERSION}")
        self._list_ends_at = BODY_AT + tag_count * _U32_LEN
        self._seqs_at = self._list_ends_at + tag_count * _U32_LEN
        self._text_at = self._seqs_at + seq_count * _U32_LEN
        if self._text_at + text_len != len(content):
            raise CorruptPostings(path, 24, f"the lengths add up to {self._text_at + text_len}, not {len(content)}")
        self._content: Content = content
        self._tag_count = tag_count
        text_ends = array("I")
        text_ends.frombytes(content[BODY_AT : self._list_ends_at])
        self._block_ends = text_ends[BLOCK_TAGS - 1 :: BLOCK_TAGS]
        if tag_count % BLOCK_TAGS:
            self._block_ends.append(text_len)
        self._firsts = [self._tag(number) for number in range(0, tag_count, BLOCK_TAGS)]
        """First tag of each block; they tell where a wanted tag would be without a read of the file."""

    @classmethod
    def open(
        cls, directory: str, first_seq: int, records: int, version: int = 0, *, in_memory: bool = False
    ) -> Postings:
        """Open the file of a segment with this many records. Unless `in_memory`, it keeps hardly anything in memory and
        reads parts as needed, which may raise CorruptSegment. Raise FileNotFoundError if the segment is not sealed,
        OSError.
        """
        path = layout.segment_tags_path(directory, first_seq, version)
        try:
            file = CommittedFile.whole(path)
            postings = cls(path, file[:])
        except CorruptSegment as unread:
            raise CorruptPostings(path, unread.offset, unread.reason) from unread
        if reason := postings.misplaced(directory, first_seq, records):
            raise CorruptPostings(path, 12, reason)
        if not in_memory:
            postings._content = file
        return postings

    def misplaced(self, directory: str, first_seq: int, records: int) -> str | None:
        """Return why this file belongs to another segment than the given one, None if it does not."""
        if (self.first_seq, self.records) != (first_seq, records):
            return f"is of {self.records} records from seq {self.first_seq}, not of {records} from {first_seq}"
        is_other = 0 not in (own := _topic_word(directory), self.topic) and own != self.topic
        return "is of a segment of another topic" if is_other else None

    def find(self, match: Match) -> list[int]:
        """Return the seqs of the records with a matching tag, ascending; some may be deleted meanwhile."""
        tag = match.tag
        block = bisect_right(self._firsts, tag) - 1
        is_in_block = block >= 0 and tag in self._block_text(block)
        if match.op == "eq":
            if not is_in_block:
                return []
        elif not is_in_block and not any(first.startswith(tag) for first in self._firsts[block + 1 : block + 2]):
            return []
        # The tag's bytes may also stand across two tags of the block's text, or inside a longer one.
        numbers = range(self._tag_count)
        low = max(0, block) * BLOCK_TAGS
        first = bisect_left(numbers, tag, lo=low, hi=min(self._tag_count, low + BLOCK_TAGS), key=self._tag)
        if match.op == "eq":
            last = first + (first < self._tag_count and self._tag(first) == tag)
        else:
            last = bisect_right(numbers, tag, lo=first, key=lambda number: self._tag(number)[: len(tag)])
        if first == last:
            return []
        seqs = self._seqs(self._end(self._list_ends_at, first - 1), self._end(self._list_ends_at, last - 1))
        return seqs if last - first == 1 else sorted(seqs)

    def items(self) -> Iterator[tuple[bytes, list[int]]]:
        """Yield every tag with its seqs, in order."""
        for number in range(self._tag_count):
            at = self._list_ends_at
            yield self._tag(number), self._seqs(self._end(at, number - 1), self._end(at, number))

    def _block_text(self, block: int) -> bytes:
        start = self._block_ends[block - 1] if block else 0
        return bytes(self._content[self._text_at + start : self._text_at + self._block_ends[block]])

    def _seqs(self, start: int, end: int) -> list[int]:
        offsets = array("I")
        offsets.frombytes(self._content[self._seqs_at + start * _U32_LEN : self._seqs_at + end * _U32_LEN])
        return [self.first_seq + offset for offset in offsets]

    def _tag(self, number: int) -> bytes:
        start = self._text_at + self._end(BODY_AT, number - 1)
        return bytes(self._content[start : self._text_at + self._end(BODY_AT, number)])

    def _end(self, column_at: int, number: int) -> int:
        if number < 0:
            return 0
        at = column_at + number * _U32_LEN
        return int.from_bytes(self._content[at : at + _U32_LEN], "little")
