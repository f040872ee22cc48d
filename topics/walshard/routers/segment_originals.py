"""Records that a router copies from segments: its source was checkpointed before they were copied, since the dest was
full, or the router had to wait for something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from topics.core.location import LOCATION_LOST
from topics.core.segment_list import COLD, SegmentInfo
from topics.storage import layout
from topics.storage.copies import Original, read_segment_original
from topics.storage.filesystem import FileSystem
from topics.storage.segment import ENTRY_LEN, entries_of_idx
from topics.walshard.hosted.cold_reads import ColdReads


class SegmentOriginals:
    """Reads segments of topics of any shard. `cold` is None without a cold directory."""

    def __init__(self, fs: FileSystem, data_dir: str, cold: ColdReads | None) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._cold = cold

    def locations(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> tuple[list[int], list[int]]:
        """Return the columns (offset | len_bytes << 32 in `.data`) and (flags << 32) of records of that segment. A
        record without a frame was deleted before it came here, or was rewritten: it counts as lost.

        Raises FileNotFoundError when there is no such segment any more, OSError, ValueError.
        """
        path = layout.segment_idx_path(layout.topic_dir(self._data_dir, topic_id), info.first_seq, info.version)
        start = (first_seq - info.first_seq) * ENTRY_LEN
        entries = entries_of_idx(self._pread(path, start, start + (last_seq - first_seq + 1) * ENTRY_LEN), first_seq)
        offset_lens, words = entries[2::4].tolist(), entries[3::4].tolist()
        lost = LOCATION_LOST << 32
        return offset_lens, [
            word if offset_len >> 32 else word | lost for offset_len, word in zip(offset_lens, words, strict=True)
        ]

    def read(self, topic_id: int, info: SegmentInfo, first_seq: int, offset_lens: list[int]) -> Iterator[Original]:
        """Yield the records at these places, which follow each other. Raises NotReadYetError while a cold segment is
        being read, FileNotFoundError, OSError, and ValueError when a record is not what its location says.
        """
        if not offset_lens:
            return
        start = offset_lens[0] & 0xFFFF_FFFF
        end = (offset_lens[-1] & 0xFFFF_FFFF) + (offset_lens[-1] >> 32)
        path = layout.segment_data_path(layout.topic_dir(self._data_dir, topic_id), info.first_seq, info.version)
        name = layout.segment_data_path(f"{topic_id:016x}", info.first_seq, info.version)
        if not start < end <= info.data_bytes:
            raise ValueError(f"{path}: records from {first_seq} on are said to lie at {start}..{end}")
        try:
            # Also of a cold one: its data are here as well for a while, and need no waiting.
            content = memoryview(self._pread(path, start, end))
        except FileNotFoundError:
            if not info.flags & COLD:
                raise
            if self._cold is None:
                raise ValueError(f"{path} is in the cold directory, and TOPICS_COLD_DIR is not set") from None
            content = self._cold.get(name, start, end, info.data_bytes)
        for seq, offset_len in enumerate(offset_lens, first_seq):
            offset = (offset_len & 0xFFFF_FFFF) - start
            try:
                yield read_segment_original(content[offset : offset + (offset_len >> 32)], seq)
            except ValueError as error:
                if self._cold is not None:
                    self._cold.forget(name, start + offset)
                raise ValueError(f"{path}: at offset {start + offset}: {error}") from error

    def _pread(self, path: str, start: int, end: int) -> bytes:
        fd = self._fs.open(path, os.O_RDONLY)
        try:
            content = self._fs.pread(fd, end - start, start)
        finally:
            self._fs.close(fd)
        if len(content) != end - start:
            raise ValueError(f"{path} ends before byte {end}")
        return content
