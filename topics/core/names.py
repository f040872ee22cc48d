"""Names of topics and routers (api §0.3), the shard that owns a topic, and topic ids.

A topic id is a u64 that is never used again. It is unique over all shards and over every change of their number:

    | creation time, ms: 44 bits | shard: 8 bits | counter: 12 bits |

A shard sees only its own topics, and after a change of the shard count not even all that it created. So the id carries
the time: every topic that was created before has a smaller one.
"""

from __future__ import annotations

import re
from typing import Final

import xxhash

from topics.core.errors import invalid

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_ROUTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


def check_topic_name(name: str, field: str = "topic") -> str:
    """Returns the name, or raises `400 invalid_request` for the `field` it came in. Sinks are named like topics."""
    if _TOPIC.fullmatch(name) is None:
        raise invalid(
            f"{field} name {name[:300]!r} is not valid: 1 to 255 of A-Z a-z 0-9 . _ : -, starting with a letter or"
            " digit",
            field=field,
        )
    return name


def check_router_name(name: str) -> str:
    """Returns the name, or raises `400 invalid_request`."""
    if _ROUTER.fullmatch(name) is None:
        raise invalid(
            f"router name {name[:300]!r} is not valid: 1 to 255 of A-Z a-z 0-9 . _ : - >, starting with a letter or"
            " digit",
            field="router",
        )
    return name


def owner_shard(name: str, shards: int) -> int:
    """The shard that owns a topic. It is stable for a shard count, and anybody can compute it."""
    return xxhash.xxh3_64_intdigest(name.encode()) % shards


SHARDS_MAX: Final = 256
_COUNTER_BITS: Final = 12
_TIME_SHIFT: Final = 20


class TopicIds:
    """Gives out the ids of one shard, each once."""

    def __init__(self, shard: int) -> None:
        assert 0 <= shard < SHARDS_MAX
        self._shard = shard
        self._time_ms = 0
        self._counter = 0

    def saw(self, topic_id: int) -> None:
        """The log has this id: it is never given out again, even if the clock stepped back."""
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
