"""Making small segments out of log frames."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from tests.storage.logs import TOPIC_ID, TS_MS
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import lay_out, stamp
from topics.storage.postings import write_postings
from topics.storage.segment_reader import SegmentReader
from topics.storage.segment_writer import SegmentWriter


class Record(NamedTuple):
    data: bytes
    node: bytes = b""
    tag: bytes = b""
    meta: bytes = b""

    @property
    def payload(self) -> bytes:
        return b'"data":' + self.data + (b',"meta":' + self.meta if self.meta else b"")


class Logged(NamedTuple):
    """A log file's bytes and the index entries of its records."""

    buffer: bytes
    entries: array[int]

    def flagged(self, position: int, flags: int, offset_len: int | None = None) -> Logged:
        """The same with location flags added to one record."""
        entries = self.entries[:]
        entries[position * 4 + 3] |= flags << 32
        if offset_len is not None:
            entries[position * 4 + 2] = offset_len
        return Logged(self.buffer, entries)

    def part(self, first: int, last: int) -> Logged:
        return Logged(self.buffer, self.entries[first * 4 : last * 4])


def logged(records: Sequence[Record], first_seq: int = 1, topic_id: int = TOPIC_ID, file_no: int = 1) -> Logged:
    """One write a record, a millisecond apart, behind something else in the same file."""
    buffer = bytearray(b"something else")
    entries = array("Q")
    for seq, record in enumerate(records, first_seq):
        laid_out = lay_out([(record.node, record.tag, record.data, record.meta)])
        stamp(laid_out.buffer, laid_out.offset_len, topic_id, seq, TS_MS + seq, 0)
        entries.extend((seq, TS_MS + seq, laid_out.offset_len[0] + len(buffer), file_no | laid_out.flags[0] << 32))
        buffer += laid_out.buffer
    return Logged(bytes(buffer), entries)


def make_segment(
    fs: FileSystem, data_dir: str, records: Sequence[Record], first_seq: int = 1, sealed: bool = True
) -> SegmentReader:
    directory = layout.topic_dir(data_dir, TOPIC_ID)
    buffer, entries = logged(records, first_seq)
    writer = SegmentWriter.create(fs, directory, first_seq)
    writer.append(buffer, TOPIC_ID, entries)
    writer.sync()
    writer.close()
    reader = SegmentReader.open(directory, first_seq, writer.records, writer.data_bytes)
    if sealed:
        write_postings(fs, directory, first_seq, reader.records, reader.tagged())
    return reader
