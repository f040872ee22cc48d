"""Removing log files that snapshots have made superfluous, when the compactor says so.

They are the last to say which records were deleted, so first all marks of deletions in segments must be on the disk.
That takes its time and is done by a helper thread. And no location may name such a file any more: it is looked after in
steps, so that a hundred thousand topics hold up nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from typing import Final

from topics.core.topic import LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST
from topics.log import get_logger
from topics.shm.wake import Wake
from topics.walshard.catalog import Catalog
from topics.walshard.commit import Logs
from topics.walshard.hosted import Hosted
from topics.walshard.segment_files import SegmentFiles
from topics.walshard.tag_search import TagSearch

log = get_logger()

TOPICS_PER_STEP: Final = 2048
_CHUNK_ENTRIES: Final = 1024
_LOW_WORD: Final = 0xFFFF_FFFF


class LogTrim:
    """Of one shard's durable log. `poll` between groups."""

    def __init__(
        self, logs: Logs, catalog: Catalog, files: SegmentFiles, tags: TagSearch, helper: Executor, wake: Wake
    ) -> None:
        self._logs = logs
        self._catalog = catalog
        self._files = files
        self._tags = tags
        self._helper = helper
        self._wake = wake
        self._is_over = False
        self._wanted = 0
        self._file_no = 0
        """Of the trimming that is under way."""
        self._syncing: Future[None] | None = None
        self._looking: Iterator[Hosted] | None = None

    def request(self, file_no: int) -> None:
        """Files numbered below are superfluous; they go when they can."""
        if not self._is_over:
            self._wanted = max(self._wanted, file_no)

    def poll(self) -> None:
        """The next step, if there is one."""
        if self._syncing is not None:
            self._synced()
        elif self._looking is not None:
            self._look()
        elif self._wanted > self._file_no and self._files.is_marked:
            self._file_no = self._wanted
            self._sync()

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do at once."""
        return self._looking is not None

    def _sync(self) -> None:
        unsynced = self._files.take_unsynced()
        if not unsynced:
            self._looking = iter(list(self._catalog))
            return
        future = self._helper.submit(self._files.sync, unsynced)
        self._syncing = future
        future.add_done_callback(lambda _future: self._wake.signal_always())

    def _synced(self) -> None:
        assert self._syncing is not None
        future = self._syncing
        if not future.done():
            return
        self._syncing = None
        error = future.exception()
        if error is None:
            self._looking = iter(list(self._catalog))
            return
        if not isinstance(error, OSError):
            raise error
        # What a failed sync covered may be on the disk or not, and no other sync tells. Only reading the log again
        # marks it again: in this life no more files go.
        self._is_over = True
        self._give_up(f"deletions could not be synced, so none until this shard is started again: {error}")

    def _look(self) -> None:
        assert self._looking is not None
        looked = 0
        for hosted in islice(self._looking, TOPICS_PER_STEP):
            looked += 1
            if self._catalog.find_id(hosted.topic.id) is not hosted:
                continue  # deleted meanwhile
            seq = _first_below(hosted, self._file_no)
            if seq is not None:
                self._looking = None
                self._give_up(f"record {seq} of topic {hosted.topic.name!r} is in a file below {self._file_no}")
                return
        if looked < TOPICS_PER_STEP:
            self._looking = None
            self._drop()

    def _drop(self) -> None:
        self._tags.forget_log_files(self._file_no)
        try:
            self._logs.wal.drop_files_below(self._file_no)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        """Until it is asked for again."""
        log.error("log files cannot be removed", below=self._file_no, reason=reason)
        self._wanted = self._file_no = 0


def _first_below(hosted: Hosted, file_no: int) -> int | None:
    """The first record that is in a file of the durable log numbered below, None if none is: file numbers ascend."""
    ring = hosted.ring
    elsewhere = LOCATION_IN_RAM_LOG | LOCATION_DELETED | LOCATION_LOST
    for first_seq in range(ring.base_seq, ring.next_seq, _CHUNK_ENTRIES):
        entries = ring.entries(first_seq, min(ring.next_seq - 1, first_seq + _CHUNK_ENTRIES - 1))
        for at, word in enumerate(entries[3::4]):
            if not word >> 32 & elsewhere:
                return first_seq + at if word & _LOW_WORD < file_no else None
    return None
