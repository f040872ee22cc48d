"""Names of topics and routers (api §0.3), the shard that owns a topic, and topic ids.

A topic id is a u64 that is never used again, by any shard and whatever their number becomes:

    | creation time, ms: 44 bits | shard: 8 bits | counter: 12 bits |

A shard sees only its own topics, and after a change of the shard count not even all that it created. So the id begins
with the time: every topic that was created before has a smaller id.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from topics.core.errors import invalid

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_ROUTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


def is_topic_name(name: str) -> bool:
    return _TOPIC.fullmatch(name) is not None


def check_topic_name(name: str, field: str = "topic") -> str:
    """Return the name, or raise `400 invalid_request` for its `field`. Sinks are named like topics."""
    return _check(_TOPIC, name, field, "A-Z a-z 0-9 . _ : -")


def check_router_name(name: str) -> str:
    """Return the name, or raise `400 invalid_request`."""
    return _check(_ROUTER, name, "router", "A-Z a-z 0-9 . _ : - >")


def _check(pattern: re.Pattern[str], name: str, field: str, characters: str) -> str:
    if pattern.fullmatch(name) is None:
        raise invalid(
            f"{field} name {name[:300]!r} is not valid: 1 to 255 of {characters}, starting with a letter or digit",
            field=field,
        )
    return name


@lru_cache(maxsize=4096)
def owner_shard(name: str, shards: int) -> int:
    """Return the shard that owns a topic. It depends on nothing but the name and the shard count."""
    import xxhash  # commands check names and configurations with this module, and a client's packages lack it

    return xxhash.xxh3_64_intdigest(name.encode()) % shards


_SHARD_BITS: Final = 8
_COUNTER_BITS: Final = 12
_TIME_SHIFT: Final = _SHARD_BITS + _COUNTER_BITS


class TopicIds:
    """Assigns the topic ids of one shard, each once."""

    def __init__(self, shard: int) -> None:
        assert 0 <= shard < 1 << _SHARD_BITS
        self._shard = shard
        self._time_ms = 0
        self._counter = 0

    def used(self, topic_id: int) -> None:
        """Assign only ids above this one, which the log has, even if the clock stepped back."""
        self._advance_to((topic_id >> _TIME_SHIFT) + 1)

    def next(self, now_ms: int) -> int:
        """Return an id that was never assigned before."""
        self._advance_to(now_ms)
        self._counter += 1
        if self._counter >> _COUNTER_BITS:
            self._advance_to(self._time_ms + 1)
        return self._time_ms << _TIME_SHIFT | self._shard << _COUNTER_BITS | self._counter

    def _advance_to(self, time_ms: int) -> None:
        if time_ms > self._time_ms:
            self._time_ms = time_ms
            self._counter = 0
