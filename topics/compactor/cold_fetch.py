"""What still lives of a cold segment, back here, so that it can be rewritten.

Fetched by the helper thread that alone talks to the cold directory, one segment at a time, while this process goes on
with other things. The bytes come into a file that has no name once they are there: nobody can take it for a segment,
and a kill leaves at most one file, under a name that is never looked at (`.tmp`) and is used again.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Final

from topics.compactor.rewriting import live_pieces
from topics.core.segment_list import SegmentInfo
from topics.storage import layout
from topics.storage.committed_file import CommittedFile, Content
from topics.storage.filesystem import FileSystem, write_all
from topics.storage.segment import ENTRY_LEN
from topics.storage.segment_columns import check_frames, read_columns
from topics.storage.segment_store import SegmentStore

PIECE_BYTES: Final = 4 * 2**20

Data = Content


class ColdFetch:
    """`helper` has one thread, which is all that uses `store`."""

    def __init__(self, fs: FileSystem, data_dir: str, store: SegmentStore, helper: Executor) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._store = store
        self._helper = helper
        self._tmp_path = os.path.join(layout.topics_dir(data_dir), f"fetched{layout.TMP_SUFFIX}")
        self._future: Future[Data] | None = None
        helper.submit(self._remove_tmp)

    @property
    def busy(self) -> bool:
        """Whether something was begun and not taken."""
        return self._future is not None

    def begin(self, topic_id: int, info: SegmentInfo) -> None:
        """Gets the live frames of this segment."""
        assert self._future is None
        self._future = self._helper.submit(self._fetch, topic_id, info)

    def take(self) -> Future[Data] | None:
        """What was begun, once it is done: the segment's `.data`, every live frame checked and zeros for the rest, or
        OSError; CorruptSegment and EOFError when it is not what it was.
        """
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        return future

    # -- on the helper's thread

    def _fetch(self, topic_id: int, info: SegmentInfo) -> Data:
        directory = layout.topic_dir(self._data_dir, topic_id)
        path = layout.segment_data_path(directory, info.first_seq, info.version)
        name = f"{os.path.basename(directory)}/{os.path.basename(path)}"
        pieces = live_pieces(directory, info)
        try:
            fd = self._fs.open(self._tmp_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                self._fs.ftruncate(fd, info.data_bytes)
                for start, end in pieces:
                    for at in range(start, end, PIECE_BYTES):
                        content = self._store.read_range(name, at, min(PIECE_BYTES, end - at))
                        write_all(self._fs, fd, content, at)
            finally:
                self._fs.close(fd)
            data = CommittedFile(self._tmp_path, info.data_bytes)
        finally:
            self._remove_tmp()
        idx = CommittedFile(layout.segment_idx_path(directory, info.first_seq, info.version), info.records * ENTRY_LEN)
        columns = read_columns(idx, 0, info.records)
        check_frames(path, data, 0, info.first_seq, columns, columns.offsets)
        return data

    def _remove_tmp(self) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self._tmp_path)
