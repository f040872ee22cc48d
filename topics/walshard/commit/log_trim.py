"""Removal of log files that snapshots have made superfluous, when the compactor asks for it.

No location may name such a file any more. This is checked in steps, so that a hundred thousand topics hold up nobody.
Files that are still needed stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from topics.core.location import LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST, LOW_WORD
from topics.log import get_logger
from topics.walshard.commit.logs import Logs
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.tag_search import TagSearch

log = get_logger()

TOPICS_PER_STEP: Final = 2048
_CHUNK_ENTRIES: Final = 1024


class LogTrim:
    """Removes files of one shard's durable log. `poll` between groups."""

    def __init__(self, logs: Logs, catalog: Catalog, tags: TagSearch) -> None:
        self._logs = logs
        self._catalog = catalog
        self._tags = tags
        self._file_no = 0
        self._unchecked: Iterator[Hosted] | None = None

    def request(self, file_no: int) -> None:
        """Have files numbered below removed in the next steps."""
        if file_no > self._file_no:
            self._file_no = file_no
            self._unchecked = iter(list(self._catalog))

    @property
    def busy(self) -> bool:
        """Return whether `poll` has something to do."""
        return self._unchecked is not None

    def poll(self) -> None:
        """Take the next step."""
        if self._unchecked is None:
            return
        looked = 0
        for hosted in islice(self._unchecked, TOPICS_PER_STEP):
            looked += 1
            if self._catalog.find_id(hosted.topic.id) is not hosted:
                continue  # deleted meanwhile
            seq = _first_below(hosted, self._file_no)
            if seq is not None:
                self._give_up(f"record {seq} of topic {hosted.topic.name!r} is in one of them")
                return
        if looked < TOPICS_PER_STEP:
            self._unchecked = None
            self._drop()

    def _drop(self) -> None:
        self._tags.forget_log_files(self._file_no, in_ram=False)
        try:
            self._logs.wal.drop_files_below(self._file_no)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        """Stop until the next request."""
        log.error("log files cannot be removed", below=self._file_no, reason=reason)
        self._unchecked = None
        self._file_no = 0


def _first_below(hosted: Hosted, file_no: int) -> int | None:
    """Return the first record in a file of the durable log numbered below, None if none is: file numbers ascend."""
    ring = hosted.ring
    elsewhere = LOCATION_IN_RAM_LOG | LOCATION_DELETED | LOCATION_LOST
    for first_seq in range(ring.base_seq, ring.next_seq, _CHUNK_ENTRIES):
        entries = ring.entries(first_seq, min(ring.next_seq - 1, first_seq + _CHUNK_ENTRIES - 1))
        for at, word in enumerate(entries[3::4]):
            if not word >> 32 & elsewhere:
                return first_seq + at if word & LOW_WORD < file_no else None
    return None
