"""The tags of records that are in the logs, read from their frames: for deletes by tag (`core/tags.py`)."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from topics.core.location import LOCATION_GONE, LOCATION_IN_RAM_LOG
from topics.core.topic import Topic
from topics.shm.location_ring import LocationRing
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import HEADER, HEADER_LEN, LOCATION_HAS_TAG

_RUN_BYTES: Final = 1 << 20
_FILES_MAX: Final = 8


class FrameTags:
    """Reads both logs of one shard; keeps a few files open."""

    def __init__(self, fs: FileSystem, directory: str, ram_directory: str) -> None:
        self._fs = fs
        self._directories = (directory, ram_directory)
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()

    def forget_below(self, file_no: int) -> None:
        """Files of the durable log numbered below are gone."""
        for key in [key for key in self._open if not key[0] and key[1] < file_no]:
            self._fs.close(self._open.pop(key))

    def tagged(self, topic: Topic, ring: LocationRing, first_seq: int, last_seq: int) -> Iterator[tuple[int, bytes]]:
        """(seq, tag) of the tagged ones among these, all in the ring; OSError when a log cannot be read.

        Neighbours in a file are read with one call.
        """
        entries = ring.entries(first_seq, last_seq)
        buffer = b""
        buffer_key: tuple[int, int] | None = None
        buffer_at = 0
        for seq, offset_len, file_flags in zip(entries[0::4], entries[2::4], entries[3::4], strict=True):
            flags = file_flags >> 32
            if not flags & LOCATION_HAS_TAG or flags & LOCATION_GONE:
                continue
            key = (flags & LOCATION_IN_RAM_LOG, file_flags & 0xFFFF_FFFF)
            offset, length = offset_len & 0xFFFF_FFFF, offset_len >> 32
            at = offset - buffer_at
            if key != buffer_key or at < 0 or at + length > len(buffer):
                buffer = self._fs.pread(self._fd(key), max(_RUN_BYTES, length), offset)
                buffer_key, buffer_at, at = key, offset, 0
            _, _, _, topic_id, frame_seq, _, node_len, tag_len, _ = HEADER.unpack_from(buffer, at)
            if (topic_id, frame_seq) != (topic.id, seq):
                raise OSError(f"log file {key[1]}, offset {offset}: not record {seq} of topic {topic.name!r}")
            start = at + HEADER_LEN + node_len
            yield seq, buffer[start : start + tag_len]

    def _fd(self, key: tuple[int, int]) -> int:
        fd = self._open.get(key)
        if fd is None:
            fd = self._open[key] = self._fs.open(layout.log_path(self._directories[key[0]], key[1]), os.O_RDONLY)
            if len(self._open) > _FILES_MAX:
                self._fs.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(key)
        return fd
