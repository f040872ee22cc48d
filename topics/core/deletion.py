"""What a delete is going to take, before it is logged (api §5), and where the live records begin behind it."""

from __future__ import annotations

from typing import NamedTuple

from topics.core.floors import EvictReason


class Front(NamedTuple):
    """Where the live records begin, and what was lost just before them: everything below `lost_below_seq` (0: nothing),
    for `lost_reason`.
    """

    earliest_seq: int
    lost_below_seq: int = 0
    lost_reason: EvictReason = EvictReason.NONE


class Deletion(NamedTuple):
    """What one delete takes: everything below `below_seq`, and `seqs`; so many records and bytes that were live, and
    where the live ones begin afterwards. Less than nothing is taken where the count was too low, and is put right.
    """

    below_seq: int
    seqs: tuple[int, ...]
    records: int
    size_bytes: int
    front: Front

    @property
    def earliest_seq(self) -> int:
        return self.front.earliest_seq
