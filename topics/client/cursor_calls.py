"""The calls of named cursors (api §10) as values, and what they answer."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import msgspec

from topics.client.calls import Call, topic_path
from topics.client.records import Page

Consistency: TypeAlias = Literal["strictly_at_once", "at_least_once"]
"""Nothing comes twice, or nothing is left out, whatever crashes."""


class CursorState(msgspec.Struct, frozen=True):
    """Where the server's readers of a topic stand: `cursor_seq` was read last, `persisted_seq` survives every crash."""

    cursor: str
    consistency: str
    persist_every: int
    cursor_seq: int
    persisted_seq: int


class CursorMade(CursorState, frozen=True, kw_only=True):
    """`created` is False when there was one."""

    topic: str
    created: bool


class Cursors(msgspec.Struct, frozen=True):
    """A page of the cursors of a topic, by name."""

    topic: str
    cursors: list[CursorState]
    next_cursor: str | None = None


class CursorPage(Page, frozen=True, kw_only=True):
    """The answer of one read: as of a diff, and where the cursor stands now, which a peek leaves where it was."""

    cursor: str
    cursor_seq: int


class CursorDeleted(msgspec.Struct, frozen=True):
    """`deleted` is False when there was none."""

    topic: str
    cursor: str
    deleted: bool


PAGE_SIZE = 1000
"""The most that one list may hold (api §0.8)."""

_encode = msgspec.json.Encoder().encode
_made = msgspec.json.Decoder(CursorMade).decode
_state = msgspec.json.Decoder(CursorState).decode
_cursors = msgspec.json.Decoder(Cursors).decode
_page = msgspec.json.Decoder(CursorPage).decode
_deleted = msgspec.json.Decoder(CursorDeleted).decode


def put_cursor(
    topic: str,
    cursor: str,
    *,
    consistency: Consistency | None = None,
    persist_every: int | None = None,
    from_seq: int | None = None,
    tail: bool = False,
) -> Call[CursorMade]:
    """Makes a cursor (`at_least_once`, 1), or changes what is given. `from_seq` or `tail` moves it."""
    body: dict[str, Any] = {"tail": tail}
    optional = {"consistency": consistency, "persist_every": persist_every, "from_seq": from_seq}
    body |= {name: value for name, value in optional.items() if value is not None}
    # A second move would undo what others have read since the first.
    moves = tail or from_seq is not None
    return Call("PUT", _cursor_path(topic, cursor), _made, _encode(body), repeatable=not moves)


def get_cursor(topic: str, cursor: str) -> Call[CursorState]:
    return Call("GET", _cursor_path(topic, cursor), _state)


def list_cursors(topic: str, after: str | None = None) -> Call[Cursors]:
    """`after`: the `next_cursor` of the page before."""
    query = {"page_size": str(PAGE_SIZE)}
    return Call(
        "GET", f"{topic_path(topic)}/cursors", _cursors, query=query if after is None else query | {"cursor": after}
    )


def delete_cursor(topic: str, cursor: str) -> Call[CursorDeleted]:
    return Call("DELETE", _cursor_path(topic, cursor), _deleted)


def read_cursor(
    topic: str,
    cursor: str,
    *,
    limit: int | None = None,
    max_bytes: int | None = None,
    checkpoint: bool = True,
    node: str | list[str] | None = None,
    include_tags: bool = True,
    include_meta: bool = True,
) -> Call[CursorPage]:
    """One page behind the cursor, which moves on with it unless `checkpoint` is False."""
    body: dict[str, Any] = {"checkpoint": checkpoint, "include_tags": include_tags, "include_meta": include_meta}
    optional = {"limit": limit, "max_bytes": max_bytes, "node": node}
    body |= {name: value for name, value in optional.items() if value is not None}
    # What the first answer held would be left out by a second read, if the cursor is strictly_at_once.
    return Call("POST", f"{_cursor_path(topic, cursor)}/read", _page, _encode(body), repeatable=not checkpoint)


def _cursor_path(topic: str, cursor: str) -> str:
    return f"{topic_path(topic)}/cursors/{quote(cursor, safe='')}"
