"""Named cursors of one topic (api §10): read positions that the server keeps. Pure.

A reader reads from the cursor's position and then asks to advance the cursor. The shard advances it only if it is still
where the reader found it. So of two readers one gets the records, and the other tries again behind them: nothing is
read twice, and there is no lock that a dead reader could keep. The consistency says when the shard logs a move:

    strictly_at_once   each move, on the disk before the reader may pass on what it read: no record comes twice
    at_least_once      after every `persist_every` answers that were passed on; the log has the others as missing

A read is *under way* from its move of the cursor until its frontend reports that the answer was passed on. If the
answer fails, or the frontend dies, its records are *missing*: a reader gets them again before anything new. The log has
all records under way as missing.

    ├── read and passed on ──┤ missing ├── passed on ──┤ under way ├── passed on ──┤ not read yet …
                             └ the next read                                       └ front

So a crash repeats what was under way and at most `persist_every` answers, however long other readers take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from topics.api.requests import Consistency as Consistency
from topics.core.errors import TopicsError, throttled

Stretch = tuple[int, int]
"""(after_seq, last_seq): the records behind the first seq, up to the second."""
CURSORS_MAX: Final = 10_000
"""The most cursors of one topic."""
UNDER_WAY_MAX: Final = 1000
"""The most reads of one cursor under way at once: each may add a stretch to every CURSOR frame."""


class CursorFrameBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Payload of a CURSOR frame, and a cursor in a snapshot. A nil `consistency` means that it was deleted. `missing`
    stretches, ascending and apart, were read before `seq` and must be read again.
    """

    name: str
    consistency: Consistency | None
    persist_every: int = 1
    seq: int = 0
    missing: tuple[Stretch, ...] = ()

    @property
    def next_seq(self) -> int:
        """Position of the first read."""
        return self.missing[0][0] if self.missing else self.seq


@dataclass(eq=False, slots=True, weakref_slot=True)
class NamedCursor:
    """One cursor: its position and the reads under way. `revision` changes when anything but a reader moves it."""

    logged_body: CursorFrameBody
    """The cursor as the log has it."""
    revision: int
    name: str = field(init=False)
    consistency: Consistency = field(init=False)
    persist_every: int = field(init=False)
    _front: int = field(init=False)
    """The last seq that was ever read."""
    _missing: list[Stretch] = field(init=False)
    _under_way: dict[tuple[int, int], Stretch] = field(default_factory=dict)
    """Reads under way, by frontend and its number of the read."""
    _passed_on: int = 0
    """Answers that were passed on since it was logged."""

    def __post_init__(self) -> None:
        body = self.logged_body
        assert body.consistency is not None
        self.name, self.consistency, self.persist_every = body.name, body.consistency, body.persist_every
        self._front, self._missing = body.seq, list(body.missing)

    @property
    def strict(self) -> bool:
        """True if no record may come twice."""
        return self.consistency == "strictly_at_once"

    @property
    def seq(self) -> int:
        """Position of the next read."""
        return self._missing[0][0] if self._missing else self._front

    @property
    def is_being_read(self) -> bool:
        """Return whether reads are under way."""
        return bool(self._under_way)

    @property
    def up_to_seq(self) -> int | None:
        """The furthest that the next read may go: other readers have read on from there."""
        return self._missing[0][1] if self._missing else None

    def behind(self, passed_seq: int) -> tuple[int, int | None]:
        """Return `seq` and `up_to_seq` for a reader that has read up to `passed_seq`."""
        for begin, end in self._missing:
            if end > passed_seq:
                return max(begin, passed_seq), end
        return max(self._front, passed_seq), None

    @property
    def persisted_seq(self) -> int:
        """Position of the first read after a crash."""
        return self.logged_body.next_seq

    def body(self) -> CursorFrameBody:
        """Return the cursor as it would be logged now."""
        seq, missing = _joined(self._front, (*self._missing, *self._under_way.values()))
        return CursorFrameBody(self.name, self.consistency, self.persist_every, seq, tuple(missing))

    def advance(self, revision: int, from_seq: int, to_seq: int, frontend: int, read: int) -> bool:
        """Move the cursor for a reader that found it at `from_seq`; False if it is not there any more. `read` is the
        number of the read at its frontend. Unless the cursor is strict, the read is now under way. Raise `throttled` if
        UNDER_WAY_MAX reads are.
        """
        if revision != self.revision or to_seq <= from_seq:
            return False
        again = bool(self._missing) and from_seq == self._missing[0][0] and to_seq <= self._missing[0][1]
        if not again and from_seq != self._front:
            return False
        if not self.strict:
            if len(self._under_way) >= UNDER_WAY_MAX:
                raise throttled(
                    f"{UNDER_WAY_MAX} answers of cursor {self.name!r} are under way to readers that do not take them",
                    limit="cursor_reads",
                    max=UNDER_WAY_MAX,
                )
            self._under_way[frontend, read] = (from_seq, to_seq)
        if again:
            end_seq = self._missing[0][1]
            self._missing[:1] = [(to_seq, end_seq)] if to_seq < end_seq else []
        else:
            self._front = to_seq
        return True

    def passed_on(self, revision: int, frontend: int, read: int) -> None:
        """Count a read whose answer was written to its connection."""
        if revision == self.revision and self._under_way.pop((frontend, read), None) is not None:
            self._passed_on += 1

    def failed(self, revision: int, frontend: int, read: int) -> None:
        """Mark the records of a read missing: its answer did not get to its connection."""
        stretch = self._under_way.pop((frontend, read), None) if revision == self.revision else None
        if stretch is not None:
            self.mark_missing([stretch])

    def frontend_died(self, frontend: int) -> None:
        """Mark the records of all reads missing that were under way at a frontend."""
        reads = [read for read in self._under_way if read[0] == frontend]
        if reads:
            self.mark_missing([self._under_way.pop(read) for read in reads])

    def mark_missing(self, stretches: Iterable[Stretch]) -> None:
        """Have these stretches read again."""
        self._front, self._missing = _joined(self._front, (*self._missing, *stretches))

    @property
    def unlogged(self) -> bool:
        """True if the log has another state of the cursor."""
        return self.body() != self.logged_body

    @property
    def to_persist(self) -> bool:
        """True if it must be logged now."""
        return (self.strict or self._passed_on >= self.persist_every) and self.unlogged

    def persisting(self) -> None:
        """Count answers from 0 again: the state that is being logged covers all answers so far."""
        self._passed_on = 0

    def persisted(self, body: CursorFrameBody) -> None:
        """Note that the log has `body`."""
        self.logged_body = body

    def persist_failed(self) -> None:
        """Have the cursor logged with the next answer: it could not be logged with this one."""
        self._passed_on += self.persist_every

    def configured(self, body: CursorFrameBody) -> None:
        """Take a new configuration that is in the log. The position and the reads under way stay."""
        assert body.consistency is not None
        self.consistency = body.consistency
        self.persist_every = body.persist_every
        self.persisting()
        self.persisted(body)


def _joined(front: int, stretches: Iterable[Stretch]) -> tuple[int, list[Stretch]]:
    """Join stretches that touch; return the front, moved back over a stretch that ends there, and the others."""
    missing: list[Stretch] = []
    for begin, end in sorted(stretches):
        if missing and missing[-1][1] == begin:
            missing[-1] = (missing[-1][0], end)
        else:
            missing.append((begin, end))
    if missing and missing[-1][1] == front:
        front = missing.pop()[0]
    return front, missing


class Cursors:
    """All cursors of one topic, by name."""

    __slots__ = ("_by_name", "_revisions")

    def __init__(self) -> None:
        self._by_name: dict[str, NamedCursor] = {}
        self._revisions = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[NamedCursor]:
        return iter(self._by_name.values())

    def get(self, topic: str, name: str) -> NamedCursor:
        """Return a cursor; `404 cursor_not_found` if there is none of that name."""
        cursor = self._by_name.get(name)
        if cursor is None:
            raise TopicsError(
                "cursor_not_found", f"topic {topic!r} has no cursor {name!r}", {"topic": topic, "cursor": name}
            )
        return cursor

    def find(self, name: str) -> NamedCursor | None:
        return self._by_name.get(name)

    def behind(self, name: str, most: int) -> list[NamedCursor]:
        """Return the first `most` cursors whose names follow `name`, in order."""
        return [self._by_name[one] for one in sorted(one for one in self._by_name if one > name)[:most]]

    def check_room(self, name: str) -> None:
        """Refuse (`429 throttled`) a new cursor beyond CURSORS_MAX."""
        if name not in self._by_name and len(self._by_name) >= CURSORS_MAX:
            raise throttled(f"a topic has at most {CURSORS_MAX} cursors; delete some", limit="cursors", max=CURSORS_MAX)

    def logged(self, body: CursorFrameBody) -> None:
        """Apply a CURSOR frame of the log."""
        if body.consistency is None:
            self._by_name.pop(body.name, None)
            return
        self._revisions += 1
        self._by_name[body.name] = NamedCursor(body, self._revisions)

    def restart(self, first_revision: int) -> None:
        """Give all cursors new revisions: what a reader knows from before the restart must not count."""
        self._revisions = first_revision
        for cursor in self._by_name.values():
            self._revisions += 1
            cursor.revision = self._revisions

    def bodies(self) -> list[CursorFrameBody]:
        """Return all cursors as the log has them, by name."""
        return [cursor.logged_body for cursor in self.behind("", CURSORS_MAX)]
