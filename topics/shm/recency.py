"""The times at which topics were last read: one object for each frontend, written by it alone, read by all.

    0        entries_backed u64        the number of entries that are backed by memory; no other may be touched
    64       entries                   shard s, slot n is entry n × shards + s

    entry    | topic_id u64 | last_read_ms u64 |

A slot may get another topic later, so an entry counts only for the topic it names. The object outlives its frontend:
reads before a crash stay known until the service ends.
"""

from __future__ import annotations

from typing import Final

from topics.shm.arena import SLOTS_MAX
from topics.shm.memory import SharedObject, unlink
from topics.shm.shm_names import shm_name

_ENTRIES_WORD: Final = 8
_ENTRY_WORDS: Final = 2
_STEP_ENTRIES: Final = 2048


def _name(identity: str, frontend: int) -> str:
    return shm_name(identity, "recency", frontend)


class RecencyWriter:
    """A frontend's own table."""

    def __init__(self, identity: str, frontend: int, shards: int) -> None:
        name = _name(identity, frontend)
        try:
            self._shared = SharedObject.attach(name)
        except FileNotFoundError:
            unlink(name)  # it has no size if a former life was killed while it made it
            size_bytes = (_ENTRIES_WORD + SLOTS_MAX * shards * _ENTRY_WORDS) * 8
            self._shared = SharedObject.create(name, size_bytes, _ENTRIES_WORD * 8)
        self._words = self._shared.words
        self._shards = shards

    def touch(self, shard: int, slot: int, topic_id: int, now_ms: int) -> None:
        """Note that the topic was read now. Note nothing when /dev/shm is full."""
        entry = slot * self._shards + shard
        words = self._words
        if entry >= words[0] and not self._back(entry):
            return
        word = _ENTRIES_WORD + entry * _ENTRY_WORDS
        if words[word] != topic_id:
            # In this order no reader takes the time of the former topic for the time of the new one.
            words[word + 1] = 0
            words[word] = topic_id
        words[word + 1] = now_ms

    def _back(self, entry: int) -> bool:
        backed = self._words[0]
        entries = (entry // _STEP_ENTRIES + 1) * _STEP_ENTRIES - backed
        try:
            self._shared.reserve((_ENTRIES_WORD + backed * _ENTRY_WORDS) * 8, entries * _ENTRY_WORDS * 8)
        except OSError:
            return False
        self._words[0] = backed + entries
        return True


class Recency:
    """The tables of all frontends, as a reader sees them."""

    def __init__(self, identity: str, frontends: int, shards: int) -> None:
        self._identity = identity
        self._shards = shards
        self._tables: list[memoryview | None] = [None] * frontends

    def last_read_ms(self, shard: int, slot: int, topic_id: int) -> int:
        """Return the time of the last read over all frontends, 0 without one."""
        entry = slot * self._shards + shard
        word = _ENTRIES_WORD + entry * _ENTRY_WORDS
        latest = 0
        for frontend, known in enumerate(self._tables):
            words = known if known is not None else self._attach(frontend)
            if words is not None and entry < words[0] and words[word] == topic_id:
                latest = max(latest, words[word + 1])
        return latest

    def _attach(self, frontend: int) -> memoryview | None:
        try:
            words = SharedObject.attach(_name(self._identity, frontend)).words
        except (FileNotFoundError, ValueError):  # ValueError: it is not ready, and still empty
            return None
        self._tables[frontend] = words
        return words
