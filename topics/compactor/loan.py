"""The end of a loan. A service borrows segment data from the archive that it was restored from.

`Rewriting` brings the data home. `Loan` counts the segments that are left. Once none is left, it ends the loan in the
archive, so that the archive can be pruned, and removes the note. It waits until two snapshots list no borrowed segment,
because a start from the older snapshot must find all data that it lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from typing import Final

from topics.compactor.shard_copy import ShardCopy
from topics.compactor.work_queue import RETRY_MAX_MS, RETRY_MS
from topics.core.clock import Clock, doubled_ms
from topics.core.segment_list import COLD, SegmentInfo
from topics.log import get_logger
from topics.storage import layout
from topics.storage.archive_objects import open_archive
from topics.storage.borrowed import BorrowedNote, end_loan
from topics.storage.filesystem import FileSystem

AGREEING: Final = 2

log = get_logger()


class Loan:
    """The loan of one service. `helper` has one thread, which alone uses the archive."""

    def __init__(self, fs: FileSystem, data_dir: str, note: BorrowedNote, helper: Executor, clock: Clock) -> None:
        self._note = note
        self._helper = helper
        self._clock = clock
        self._end = lambda: end_loan(fs, data_dir, note, open_archive(fs, note.place))
        self._names = note.names()
        self._agreeing = 0
        """Snapshots in a row that list no borrowed segment."""
        self._ending: Future[None] | None = None
        self._failures = 0
        self._not_before_ms = 0
        self.segments = self.data_bytes = 0
        """Segments that are not home yet, and their bytes, by the last count."""
        self.is_over = False

    @property
    def waits_for_snapshot(self) -> bool:
        """True if all data are home, but a snapshot that shows it is still missing."""
        return not self.segments and self._agreeing < AGREEING

    def has(self, topic_id: int, info: SegmentInfo) -> bool:
        """Return whether the data of this segment are still borrowed."""
        return bool(info.flags & COLD) and layout.object_name(*info.key_in(topic_id)) in self._names

    def came_home(self, info: SegmentInfo) -> None:
        """Count a segment that has a new version now."""
        self.segments -= 1
        self.data_bytes -= info.data_bytes

    def count(self, shard_copies: Iterable[ShardCopy]) -> None:
        """Count the segments that are not home yet."""
        self.segments = self.data_bytes = 0
        for shard_copy in shard_copies:
            for topic in shard_copy.fold.topics.values():
                for info in shard_copy.index_of(topic).segments:
                    if self.has(topic.id, info):
                        self.segments += 1
                        self.data_bytes += info.data_bytes

    def snapshot_saved(self, shard_copies: Iterable[ShardCopy]) -> None:
        """Note that a snapshot of all shards is on the disk, and that the snapshot before it is valid too."""
        self.count(shard_copies)
        self._agreeing = 0 if self.segments else self._agreeing + 1

    def step(self) -> None:
        """End the loan, if it is time to. A failure is logged and repeated."""
        if self._ending is not None and self._ending.done():
            ending, self._ending = self._ending, None
            try:
                ending.result()
            except OSError as error:
                log.error("the archive does not let the loan be ended, which will be repeated", reason=str(error))
                self._not_before_ms = self._clock.monotonic_ms() + doubled_ms(RETRY_MS, self._failures, RETRY_MAX_MS)
                self._failures += 1
            else:
                self.is_over = True
                log.info("all data are here: the archive is not needed any more", archive=self._note.place)
        is_due = self._agreeing >= AGREEING and self._clock.monotonic_ms() >= self._not_before_ms
        if is_due and self._ending is None and not self.is_over:
            self._ending = self._helper.submit(self._end)
