"""Head ceilings: the shard logs how far a topic may give out seqs before anybody sees one of them. Pure.

If the log may have lost its end, or a RAM log is lost, seqs go on above the ceiling, so that none is given out twice.
If a write needs a ceiling at once, the shard syncs it with the write's group. A durable topic logs the next ceiling
about half a step ahead, and the background sync brings it to the disk, so an ordinary write waits for no sync. A write
to an `fsync` topic needs no ceiling, because it is on the disk before anybody sees it. A router's copies in such a
topic do need one: they are seen earlier.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from topics.core.config import TopicConfig

RAM_STEP: Final = 4096
"""Seqs that an `ephemeral` topic may give out before its ceiling must move: one fsync for this many records."""
TAIL_STEP: Final = 128
"""The same for a durable topic at rest: a power loss skips at most so many seqs of it."""
TAIL_STEP_MAX: Final = 1 << 19


class Ceiling(NamedTuple):
    """A ceiling to log before a write. With `sync` it must be on the disk before anybody sees the write."""

    seq: int
    sync: bool


class Ceilings(msgspec.Struct, eq=False):
    """The ceilings of one topic. A group plans with a `copy`; once it is logged, it notes that in the topic's own."""

    seq: int = 0
    """Last seq that the log on the disk lets the topic give out."""
    _ahead_seq: int = 0
    """The ceiling that is logged, but not surely synced. It is on the disk once `durable_seq` reaches `_covering_seq`.
    """
    _covering_seq: int = 0
    _step: int = 0

    @classmethod
    def of_new(cls, config: TopicConfig, count: int = 0) -> Ceilings:
        """Return the ceilings of a topic that a write of `count` records creates: the write needs no other."""
        return cls(0 if config.durability == "ephemeral" or config.is_synced else 4 * count + TAIL_STEP)

    def copy(self, durable_seq: int) -> Ceilings:
        """Return a copy to plan with; everything up to `durable_seq` is on the disk."""
        if self._ahead_seq > self.seq and durable_seq >= self._covering_seq:
            self.seq = self._ahead_seq
        return Ceilings(self.seq, self._ahead_seq, self._covering_seq, self._step)

    def plan(self, config: TopicConfig, head_seq: int, count: int, durable_seq: int) -> Ceiling | None:
        """Return the ceiling that a write of `count` seqs behind `head_seq` needs before it, None if none is due."""
        last_seq = head_seq + count
        if config.durability == "ephemeral":
            return Ceiling(head_seq + max(count, RAM_STEP), True) if last_seq > self.seq else None
        # The number of records written while one sync runs tells how far ahead the next ceiling must be.
        step = max(TAIL_STEP, min(TAIL_STEP_MAX, 4 * (last_seq - durable_seq)), self._step * 3 // 4)
        if last_seq > self.seq:
            return Ceiling(last_seq + step, True)
        if last_seq + step // 2 > max(self.seq, self._ahead_seq):
            return Ceiling(last_seq + step, False)
        return None

    def logged(self, ceiling: Ceiling, last_seq: int) -> None:
        """Note a planned ceiling that the log has, before a write that ends at `last_seq`."""
        self._step = ceiling.seq - last_seq
        if ceiling.sync:
            self.seq = ceiling.seq
        else:
            self._ahead_seq, self._covering_seq = ceiling.seq, last_seq
