"""The archive as one shard sees it: log files that must stay until the archive has them, and topics whose records it
does not have yet. The shard never waits: the word `shipped` of the control page says how far the archive is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final, NamedTuple

from topics.log import get_logger
from topics.walshard.hosted.hosted import Hosted

GROUPS_MAX: Final = 8192

log = get_logger()


class _Group(NamedTuple):
    """Topics with their head seqs when the durable log ended at `end`, a `committed` word (file no << 32 | offset)."""

    end: int
    heads: list[tuple[Hosted, int]]


class ArchiveWait:
    """Follows the archive for one shard. It owns `archived_seq` of the shard's topics.

    `shipped` returns the `committed` word up to which the archive has the log, 0 if that is not known. `room_bytes`
    returns the room left on the disk. At most `files_max` finished log files are kept for the archive.
    """

    def __init__(self, shipped: Callable[[], int], room_bytes: Callable[[], int], files_max: int) -> None:
        self._shipped = shipped
        self._room_bytes = room_bytes
        self._files_max = files_max
        self._groups: deque[_Group] = deque()
        self._seen = 0

    # -- log files

    def removable_below(self, file_no: int, newest_no: int) -> int:
        """Return the number below which log files may be removed. Snapshots need none below `file_no`; the archive may
        still need some of them. Files that it lacks go only if the disk is full or too many wait, which is logged.
        """
        shipped_no = self._shipped() >> 32
        if shipped_no >= file_no:
            return file_no
        is_full = self._room_bytes() < 0
        bound = file_no if is_full else min(file_no, max(shipped_no, newest_no - self._files_max))
        if bound > shipped_no > 0:
            log.error(
                "logs are removed that are not in the archive, so it begins anew behind them: the moments before are"
                " kept, those in between cannot be restored",
                files=f"{shipped_no} to {bound - 1}",
                reason="the disk is full" if is_full else "TOPICS_ARCHIVE_BACKLOG_BYTES is reached",
                way_out="let the service reach its archive, or allow it more bytes",
            )
        return bound

    # -- topics

    def committed(self, touched: Iterable[Hosted], end: int) -> None:
        """Note the topics of a committed group; the durable log ends at `end` now. `ephemeral` topics are left out:
        the archive gets records from the durable log alone.
        """
        durable = (hosted for hosted in touched if hosted.topic.config.durability != "ephemeral")
        heads = [(hosted, hosted.topic.head_seq) for hosted in durable]
        if not heads:
            return
        if end <= self._seen:
            self._seen = 0  # a follower's archive may be ahead of what its shard has read
        self._groups.append(_Group(end, heads))
        if len(self._groups) > GROUPS_MAX:
            self._merge()

    @property
    def is_due(self) -> bool:
        """True if `poll` may find something."""
        return bool(self._groups) and self._shipped() != self._seen

    def poll(self) -> list[Hosted]:
        """Return the topics whose archived_seq moved."""
        shipped = self._shipped()
        if shipped == self._seen:
            return []
        self._seen = shipped
        moved: dict[int, Hosted] = {}
        while self._groups and self._groups[0].end <= shipped:
            for hosted, head_seq in self._groups.popleft().heads:
                topic = hosted.topic
                if head_seq > topic.archived_seq and topic.config.durability != "ephemeral":
                    topic.archived_seq = head_seq
                    moved[topic.id] = hosted
        return list(moved.values())

    def forget(self, hosted: Hosted) -> None:
        """Forget a deleted topic."""
        for group in self._groups:
            group.heads[:] = [head for head in group.heads if head[0] is not hosted]

    def _merge(self) -> None:
        """Put all groups into one, to bound their number. The archive is far behind, so little is lost by it."""
        newest = {hosted.topic.id: (hosted, seq) for hosted, seq in chain.from_iterable(g.heads for g in self._groups)}
        merged = _Group(self._groups[-1].end, list(newest.values()))
        self._groups.clear()
        self._groups.append(merged)
