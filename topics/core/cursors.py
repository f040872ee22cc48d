"""Named cursors of one topic (api §10): read positions that the server keeps. Pure.

A reader reads from where the cursor is and then asks to move it on. It moves only if it is still where the reader found
it, so of two readers one gets the records and the other tries again behind them: nothing is read twice, and there is
no lock for a dead reader to keep. What differs is when a move is in the log:

    strictly_at_once   each move, and on the disk, before the reader may pass on what it read: nothing comes twice
    at_least_once      when `persist_every` answers have been passed on since the last time, up to the first one that
                       has not: a crash takes back what comes after it, so nothing is left out

Between its move and the word that its answer was passed on, a read is *under way*. If that fails, or its frontend dies,
the cursor goes back to where it began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from topics.core.errors import TopicsError

Consistency = Literal["strictly_at_once", "at_least_once"]
CURSORS_MAX: Final = 10_000
"""Of one topic."""


class CursorBody(msgspec.Struct, frozen=True):
    """Payload of a CURSOR frame, and what a snapshot holds of a cursor. A nil `consistency`: it was deleted."""

    name: str
    consistency: Consistency | None
    persist_every: int = 1
    seq: int = 0


class Cursor:
    """`seq` is the last seq that was read. `revision` changes whenever it is moved by anything but a reader."""

    __slots__ = (
        "_passed_on",
        "_under_way",
        "consistency",
        "name",
        "persist_every",
        "persisted_seq",
        "revision",
        "seq",
    )

    def __init__(self, body: CursorBody, revision: int) -> None:
        assert body.consistency is not None
        self.name = body.name
        self.consistency = body.consistency
        self.persist_every = body.persist_every
        self.seq = self.persisted_seq = body.seq
        self.revision = revision
        self._under_way: dict[tuple[int, int], int] = {}
        """By frontend, and its number of the read: where it began."""
        self._passed_on = 0
        """Answers since the position was last logged."""

    @property
    def strict(self) -> bool:
        """Whether no record may come twice."""
        return self.consistency == "strictly_at_once"

    @property
    def settled_seq(self) -> int:
        """Everything up to here has been passed on, as far as that matters."""
        return min(self._under_way.values(), default=self.seq)

    def body(self) -> CursorBody:
        """As it is logged."""
        return CursorBody(self.name, self.consistency, self.persist_every, self.settled_seq)

    def advance(self, revision: int, from_seq: int, to_seq: int, frontend: int, read: int) -> bool:
        """Moves on what a reader found at `from_seq`; False when it is not there any more. `read` is the frontend's
        number of this read: unless no record may come twice, it is under way until that was passed on or failed.
        """
        if (revision, from_seq) != (self.revision, self.seq) or to_seq < from_seq:
            return False
        self.seq = to_seq
        if not self.strict:
            self._under_way[frontend, read] = from_seq
        return True

    def passed_on(self, revision: int, frontend: int, read: int) -> None:
        """The answer of that read was given to its connection."""
        if revision == self.revision and self._under_way.pop((frontend, read), None) is not None:
            self._passed_on += 1

    def failed(self, revision: int, frontend: int, read: int) -> None:
        """The answer of that read never was."""
        began = self._under_way.get((frontend, read))
        if revision == self.revision and began is not None:
            self.take_back(began)

    def frontend_died(self, frontend: int) -> None:
        """And with it all answers that it had not passed on."""
        begins = [began for (of, _), began in self._under_way.items() if of == frontend]
        if begins:
            self.take_back(min(begins))

    def take_back(self, seq: int) -> None:
        """What was read behind it is to be read again."""
        self.seq = min(self.seq, seq)
        self._under_way = {read: began for read, began in self._under_way.items() if began < seq}

    @property
    def unlogged(self) -> bool:
        """Whether the log has it somewhere else."""
        return self.settled_seq != self.persisted_seq

    @property
    def to_persist(self) -> bool:
        """Whether it is to be logged where it is."""
        return self.unlogged and (self.strict or self._passed_on >= self.persist_every)

    def persisting(self) -> None:
        """The next answers are counted from here: what is logged now covers those so far."""
        self._passed_on = 0

    def persisted(self, seq: int) -> None:
        """The log has it."""
        self.persisted_seq = seq

    def not_persisted(self) -> None:
        """The log does not have it: it is tried again with the next answer."""
        self._passed_on += self.persist_every


class Cursors:
    """All of one topic, by name."""

    __slots__ = ("_by_name", "_revisions")

    def __init__(self) -> None:
        self._by_name: dict[str, Cursor] = {}
        self._revisions = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Cursor]:
        return iter(self._by_name.values())

    def get(self, topic: str, name: str) -> Cursor:
        """`404 cursor_not_found` without it."""
        cursor = self._by_name.get(name)
        if cursor is None:
            raise TopicsError(
                "cursor_not_found", f"topic {topic!r} has no cursor {name!r}", {"topic": topic, "cursor": name}
            )
        return cursor

    def find(self, name: str) -> Cursor | None:
        return self._by_name.get(name)

    def every(self) -> list[Cursor]:
        """In the order of their names."""
        return self.behind("", CURSORS_MAX)

    def behind(self, name: str, most: int) -> list[Cursor]:
        """The first so many whose names follow this one, in order."""
        return [self._by_name[one] for one in sorted(one for one in self._by_name if one > name)[:most]]

    def check_room(self, name: str) -> None:
        """`429 throttled` for one more than there may be."""
        if name not in self._by_name and len(self._by_name) >= CURSORS_MAX:
            raise TopicsError(
                "throttled",
                f"a topic has at most {CURSORS_MAX} cursors; delete some",
                {"limit": "cursors", "max": CURSORS_MAX},
            )

    def logged(self, body: CursorBody) -> None:
        """The log says: it is now like this."""
        if body.consistency is None:
            self._by_name.pop(body.name, None)
            return
        self._revisions += 1
        self._by_name[body.name] = Cursor(body, self._revisions)

    def restart(self, first_revision: int) -> None:
        """A new life: what a reader of the former one knows of a cursor does not count in this one."""
        self._revisions = first_revision
        for cursor in self._by_name.values():
            self._revisions += 1
            cursor.revision = self._revisions

    def bodies(self) -> list[CursorBody]:
        """For a snapshot: what the log has, not what is only in memory."""
        return [
            CursorBody(cursor.name, cursor.consistency, cursor.persist_every, cursor.persisted_seq)
            for cursor in self.every()
        ]
