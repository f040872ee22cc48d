"""Named cursors of one topic (api §10): read positions that the server keeps. Pure.

A reader reads from where the cursor is and then asks to move it on. It moves only if it is still where the reader found
it, so of two readers one gets the records and the other tries again behind them: nothing is read twice, and there is
no lock for a dead reader to keep. What differs is when a move is in the log:

    strictly_at_once   each move, and on the disk, before the reader may pass on what it read: nothing comes twice
    at_least_once      when `persist_every` answers have been passed on since the last time, without those that have not

Between its move and the word that its answer was passed on, a read is *under way*. If that fails, or its frontend dies,
what it read is *missing*, and read again before anything new; the log says so of all that is under way.

    ├── read and passed on ──┤ missing ├── passed on ──┤ under way ├── passed on ──┤ not read yet …
                             └ the next read                                       └ front

So a crash brings again what was under way, and what `persist_every` answers had at most, however long others take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from topics.api.requests import Consistency as Consistency
from topics.core.errors import TopicsError

Stretch = tuple[int, int]
"""Records behind the first seq, up to the second."""
CURSORS_MAX: Final = 10_000
"""Of one topic."""
UNDER_WAY_MAX: Final = 1000
"""Of one cursor: each may be a stretch in every CURSOR frame."""


class CursorFrameBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Payload of a CURSOR frame, and what a snapshot holds of a cursor. A nil `consistency`: it was deleted. `missing`,
    ascending and apart, was read before `seq` and is to be read again.
    """

    name: str
    consistency: Consistency | None
    persist_every: int = 1
    seq: int = 0
    missing: tuple[Stretch, ...] = ()

    @property
    def next_seq(self) -> int:
        """Where the first read begins."""
        return self.missing[0][0] if self.missing else self.seq


class NamedCursor:
    """`revision` changes whenever it is moved by anything but a reader."""

    __slots__ = (
        "_front",
        "_logged",
        "_missing",
        "_passed_on",
        "_under_way",
        "consistency",
        "name",
        "persist_every",
        "revision",
    )

    def __init__(self, body: CursorFrameBody, revision: int) -> None:
        assert body.consistency is not None
        self.name = body.name
        self.consistency: Consistency = body.consistency
        self.persist_every = body.persist_every
        self.revision = revision
        self._front = body.seq
        """The last seq that was ever read."""
        self._missing = list(body.missing)
        self._under_way: dict[tuple[int, int], Stretch] = {}
        """By frontend, and its number of the read."""
        self._logged = body
        """What the log has."""
        self._passed_on = 0
        """Answers since that was logged."""

    @property
    def strict(self) -> bool:
        """Whether no record may come twice."""
        return self.consistency == "strictly_at_once"

    @property
    def seq(self) -> int:
        """Where the next read begins."""
        return self._missing[0][0] if self._missing else self._front

    @property
    def up_to_seq(self) -> int | None:
        """Where it ends at the latest: others have read on from there."""
        return self._missing[0][1] if self._missing else None

    def behind(self, passed_seq: int) -> tuple[int, int | None]:
        """`seq` and `up_to_seq` for one who has read up to `passed_seq`."""
        for begin, end in self._missing:
            if end > passed_seq:
                return max(begin, passed_seq), end
        return max(self._front, passed_seq), None

    @property
    def persisted_seq(self) -> int:
        """Where it would begin after a crash."""
        return self._logged.next_seq

    def body(self) -> CursorFrameBody:
        """As it is logged."""
        seq, missing = _settled(self._front, (*self._missing, *self._under_way.values()))
        return CursorFrameBody(self.name, self.consistency, self.persist_every, seq, tuple(missing))

    def logged_body(self) -> CursorFrameBody:
        """What the log has."""
        return self._logged

    def advance(self, revision: int, from_seq: int, to_seq: int, frontend: int, read: int) -> bool:
        """Moves on what a reader found at `from_seq`; False when it is not there any more. `read` is the frontend's
        number of this read: unless no record may come twice, it is under way until that was passed on or failed.
        `throttled` when UNDER_WAY_MAX are.
        """
        if revision != self.revision or to_seq <= from_seq:
            return False
        again = bool(self._missing) and from_seq == self._missing[0][0] and to_seq <= self._missing[0][1]
        if not again and from_seq != self._front:
            return False
        if not self.strict:
            if len(self._under_way) >= UNDER_WAY_MAX:
                raise TopicsError(
                    "throttled",
                    f"{UNDER_WAY_MAX} answers of cursor {self.name!r} are under way to readers that do not take them",
                    {"limit": "cursor_reads", "max": UNDER_WAY_MAX},
                )
            self._under_way[frontend, read] = (from_seq, to_seq)
        if again:
            end_seq = self._missing[0][1]
            self._missing[:1] = [(to_seq, end_seq)] if to_seq < end_seq else []
        else:
            self._front = to_seq
        return True

    def passed_on(self, revision: int, frontend: int, read: int) -> None:
        """The answer of that read was given to its connection."""
        if revision == self.revision and self._under_way.pop((frontend, read), None) is not None:
            self._passed_on += 1

    def failed(self, revision: int, frontend: int, read: int) -> None:
        """The answer of that read never was."""
        stretch = self._under_way.pop((frontend, read), None) if revision == self.revision else None
        if stretch is not None:
            self.give_back([stretch])

    def frontend_died(self, frontend: int) -> None:
        """And with it all answers that it had not passed on."""
        reads = [read for read in self._under_way if read[0] == frontend]
        if reads:
            self.give_back([self._under_way.pop(read) for read in reads])

    def give_back(self, stretches: Iterable[Stretch]) -> None:
        """These are to be read again."""
        self._front, self._missing = _settled(self._front, (*self._missing, *stretches))

    @property
    def unlogged(self) -> bool:
        """Whether the log has it somewhere else."""
        return self.body() != self._logged

    @property
    def to_persist(self) -> bool:
        """Whether it is to be logged where it is."""
        return (self.strict or self._passed_on >= self.persist_every) and self.unlogged

    def persisting(self) -> None:
        """The next answers are counted from here: what is logged now covers those so far."""
        self._passed_on = 0

    def persisted(self, body: CursorFrameBody) -> None:
        """The log has it."""
        self._logged = body

    def not_persisted(self) -> None:
        """The log does not have it: it is tried again with the next answer."""
        self._passed_on += self.persist_every

    def configured(self, body: CursorFrameBody) -> None:
        """The log says: it is this from now on, where it was. What is under way stays what it was."""
        assert body.consistency is not None
        self.consistency = body.consistency
        self.persist_every = body.persist_every
        self.persisting()
        self.persisted(body)


def _settled(front: int, stretches: Iterable[Stretch]) -> tuple[int, list[Stretch]]:
    """Front and what is missing before it: what nobody has read last was never read."""
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
    """All of one topic, by name."""

    __slots__ = ("_by_name", "_revisions")

    def __init__(self) -> None:
        self._by_name: dict[str, NamedCursor] = {}
        self._revisions = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[NamedCursor]:
        return iter(self._by_name.values())

    def get(self, topic: str, name: str) -> NamedCursor:
        """`404 cursor_not_found` without it."""
        cursor = self._by_name.get(name)
        if cursor is None:
            raise TopicsError(
                "cursor_not_found", f"topic {topic!r} has no cursor {name!r}", {"topic": topic, "cursor": name}
            )
        return cursor

    def find(self, name: str) -> NamedCursor | None:
        return self._by_name.get(name)

    def every(self) -> list[NamedCursor]:
        """In the order of their names."""
        return self.behind("", CURSORS_MAX)

    def behind(self, name: str, most: int) -> list[NamedCursor]:
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

    def logged(self, body: CursorFrameBody) -> None:
        """The log says: it is now like this."""
        if body.consistency is None:
            self._by_name.pop(body.name, None)
            return
        self._revisions += 1
        self._by_name[body.name] = NamedCursor(body, self._revisions)

    def restart(self, first_revision: int) -> None:
        """A new life: what a reader of the former one knows of a cursor does not count in this one."""
        self._revisions = first_revision
        for cursor in self._by_name.values():
            self._revisions += 1
            cursor.revision = self._revisions

    def bodies(self) -> list[CursorFrameBody]:
        """For a snapshot: what the log has, not what is only in memory."""
        return [cursor.logged_body() for cursor in self.every()]
