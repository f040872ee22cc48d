"""Topic ids: u64, never used again, unique over all shards and over every change of their number.

    | creation time, ms: 44 bits | shard: 8 bits | counter: 12 bits |

A shard sees only its own topics, and after a change of the shard count not even all it created itself. So the id
carries the time: whatever was created before has a smaller one.
"""

from __future__ import annotations

from typing import Final

SHARDS_MAX: Final = 256
_COUNTER_BITS: Final = 12
_TIME_SHIFT: Final = 20


class TopicIds:
    """The ids one shard gives out."""

    def __init__(self, shard: int) -> None:
        assert 0 <= shard < SHARDS_MAX
        self._shard = shard
        self._time_ms = 0
        self._counter = 0

    def saw(self, topic_id: int) -> None:
        """An id found in the log: never to be given again, also when the clock stepped back."""
        self._advance_to((topic_id >> _TIME_SHIFT) + 1)

    def next(self, now_ms: int) -> int:
        self._advance_to(now_ms)
        self._counter += 1
        if self._counter >> _COUNTER_BITS:
            self._advance_to(self._time_ms + 1)
        return self._time_ms << _TIME_SHIFT | self._shard << _COUNTER_BITS | self._counter

    def _advance_to(self, time_ms: int) -> None:
        if time_ms > self._time_ms:
            self._time_ms = time_ms
            self._counter = 0
