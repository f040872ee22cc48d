"""What frontends and shards say to each other about named cursors (api §10); `messages.py` carries it."""

from __future__ import annotations

from typing import Literal

import msgspec


class CursorPut(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Make a named cursor or change it. What is nil stays as it is; a new one is `at_least_once`, 1, beginning at 0."""

    name: str
    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"] | None
    persist_every: int | None
    seq: int | None
    tail: bool


class CursorDelete(msgspec.Struct, tag=True, array_like=True, frozen=True):
    name: str
    cursor: str


class CursorLook(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Where is it, or (a nil `cursor`) where are the first `most` whose names follow `after`? With `passed_seq`: where
    would it be for one who has read up to there?
    """

    name: str
    cursor: str | None
    after: str = ""
    most: int = 1000
    passed_seq: int = 0


class CursorAdvance(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A reader has read from `from_seq` to `to_seq`: move the cursor, if it is still there. `read` is a number that the
    frontend has not used before.
    """

    name: str
    cursor: str
    revision: int
    from_seq: int
    to_seq: int
    read: int


class CursorPassedOn(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of the answer of a read: its connection was given it, or not. It follows each CursorAdvance whose
    answer says so, or never came: the shard may have moved the cursor all the same, or be going to.
    """

    name: str
    cursor: str
    revision: int
    read: int
    passed_on: bool


CursorCall = CursorPut | CursorDelete | CursorLook | CursorAdvance | CursorPassedOn


class CursorReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A cursor as it is: the next read begins at `seq`, and ends at `up_to_seq` at the latest. `revision` is another
    one whenever it was moved by anything but a reader.
    """

    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"]
    persist_every: int
    seq: int
    persisted_seq: int
    revision: int
    created: bool = False
    up_to_seq: int | None = None


class CursorList(msgspec.Struct, tag=True, array_like=True, frozen=True):
    cursors: list[CursorReply]


class CursorDeleted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class CursorMoved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`moved`: what was read is the reader's, and if it is `under_way` CursorPassedOn has to follow. Where it is now is
    for another try, as in CursorReply.
    """

    moved: bool
    seq: int
    up_to_seq: int | None
    revision: int
    under_way: bool = False


CursorAnswer = CursorReply | CursorList | CursorDeleted | CursorMoved
