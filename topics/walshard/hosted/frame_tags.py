"""The tags of records that are in the logs, read from their frames: for deletes by tag (`core/tags.py`)."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from typing import Final

from topics.core.location import FLAGS_SHIFT, LOCATION_GONE, LOCATION_IN_RAM_LOG, LOW_WORD
from topics.core.topic import Topic
from topics.shm.arena_heap import LocationRing
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import HEADER, HEADER_LEN, LOCATION_HAS_TAG, NODE_MAX_BYTES, TAG_MAX_BYTES

READS_MAX: Final = 16
"""Reads of one piece, for which a request may have to wait."""
_RUN_BYTES: Final = 1 << 18
_NEAR_BYTES: Final = 1 << 14
"""Bytes between two frames that one read may cover."""
_HEAD_BYTES: Final = HEADER_LEN + NODE_MAX_BYTES + TAG_MAX_BYTES
"""Bytes from the beginning of a frame within which its tag is."""
_FILES_MAX: Final = 8
_FILE_BITS: Final = LOCATION_IN_RAM_LOG << FLAGS_SHIFT | LOW_WORD
_TAGGED_BIT: Final = LOCATION_HAS_TAG << FLAGS_SHIFT
_WANTED_BITS: Final = _TAGGED_BIT | LOCATION_GONE << FLAGS_SHIFT


_Place = tuple[int, int, int, int]
"""(seq, file bits of its location, offset of the frame, offset behind its tag)."""


class FrameTags:
    """Reads tags from both logs of one shard. It keeps a few files open."""

    def __init__(self, fs: FileSystem, directory: str, ram_directory: str) -> None:
        self._fs = fs
        self._directories = (directory, ram_directory)
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()

    def forget_below(self, file_no: int, in_ram: bool) -> None:
        """Close files of a log that were removed, numbered below `file_no`."""
        for key in [key for key in self._open if bool(key[0]) == in_ram and key[1] < file_no]:
            self._fs.close(self._open.pop(key))

    def tagged(
        self, topic: Topic, ring: LocationRing, first_seq: int, last_seq: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Return (seq, tag) of tagged records among these, all in the ring, and the seq up to which these are all: as
        far as `READS_MAX` reads go. Neighbours in a file are read with one call. Raises OSError when a log cannot be
        read.
        """
        entries = ring.entries(first_seq, last_seq)
        wanted = [
            (seq, word & _FILE_BITS, offset := offset_len & LOW_WORD, offset + min(offset_len >> 32, _HEAD_BYTES))
            for seq, offset_len, word in zip(entries[0::4], entries[2::4], entries[3::4], strict=True)
            if word & _WANTED_BITS == _TAGGED_BIT
        ]
        found: list[tuple[int, bytes]] = []
        at = 0
        for _ in range(READS_MAX):
            if at == len(wanted):
                return found, last_seq
            end = _run_end(wanted, at)
            self._read(topic, wanted[at:end], found)
            at = end
        return found, wanted[at][0] - 1 if at < len(wanted) else last_seq

    def _read(self, topic: Topic, run: list[_Place], found: list[tuple[int, bytes]]) -> None:
        """Add the tags of neighbours in one file."""
        _, file, begin, _ = run[0]
        end = run[-1][3]
        file_no = file & LOW_WORD
        buffer = self._fs.pread(self._fd((file >> FLAGS_SHIFT, file_no)), end - begin, begin)
        if len(buffer) < end - begin:
            # The file was cut in place.
            raise OSError(errno.EIO, f"log file {file_no} ends at {begin + len(buffer)}, before {end}")
        topic_id = topic.id
        for seq, _, offset, _ in run:
            at = offset - begin
            _, _, _, found_id, found_seq, _, node_len, tag_len, _ = HEADER.unpack_from(buffer, at)
            if found_id != topic_id or found_seq != seq:
                raise OSError(
                    errno.EIO, f"log file {file_no}, offset {offset}: not record {seq} of topic {topic.name!r}"
                )
            start = at + HEADER_LEN + node_len
            found.append((seq, buffer[start : start + tag_len]))

    def _fd(self, key: tuple[int, int]) -> int:
        fd = self._open.get(key)
        if fd is None:
            fd = self._open[key] = self._fs.open(layout.log_path(self._directories[key[0]], key[1]), os.O_RDONLY)
            if len(self._open) > _FILES_MAX:
                self._fs.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(key)
        return fd


def _run_end(places: list[_Place], at: int) -> int:
    """Return the index behind the last place that one read covers, from the one at `at` on."""
    _, first_file, first_offset, end_offset = places[at]
    for end in range(at + 1, len(places)):
        _, file, offset, head_end = places[end]
        if file != first_file or not end_offset <= offset <= end_offset + _NEAR_BYTES:
            return end
        if head_end - first_offset > _RUN_BYTES:
            return end
        end_offset = head_end
    return len(places)
