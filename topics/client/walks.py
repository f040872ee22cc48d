"""Walks through several answers: lists, and the records of a topic, page by page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from topics.api.answers import CursorState, DiffAnswer, Record, TombstoneAnswer, TopicEntry
from topics.client import calls
from topics.client.calls import Call
from topics.client.errors import GapError

T = TypeVar("T")

Item: TypeAlias = Record | TombstoneAnswer
Tombstones = Literal["raise", "yield"]
"""The two ways to report a gap: as a GapError, the default, or as a tombstone among the records."""


class Walk(NamedTuple, Generic[T]):
    """The first call of a walk. `take` returns the items of an answer, and the next call or None at the end."""

    first: Call[Any]
    take: Callable[[Any], tuple[Iterable[T], Call[Any] | None]]


class ListPage(Protocol):
    """A page of a list."""

    @property
    def next_cursor(self) -> str | None: ...


PageT = TypeVar("PageT", bound=ListPage)


def list_topics(prefix: str = "") -> Walk[TopicEntry]:
    """Yield the topics whose names begin with `prefix`, by name."""
    return _listing(lambda cursor: calls.list_topics(prefix, cursor=cursor), lambda page: page.topics)


def list_cursors(topic: str) -> Walk[CursorState]:
    """Yield the cursors of a topic, by name."""
    return _listing(lambda cursor: calls.list_cursors(topic, cursor), lambda page: page.cursors)


def _listing(ask: Callable[[str | None], Call[PageT]], items: Callable[[PageT], Iterable[T]]) -> Walk[T]:
    """Return a walk through all pages of a list: `ask` makes the call for a page, `items` takes the items off it."""

    def take(page: PageT) -> tuple[Iterable[T], Call[PageT] | None]:
        return items(page), None if page.next_cursor is None else ask(page.next_cursor)

    return Walk(ask(None), take)


def read(
    topic: str, from_seq: int = 0, *, tombstones: Tombstones = "raise", wait: bool = False, **options: Any
) -> Walk[Item]:
    """Yield the records behind `from_seq`, up to the head, or without end with `wait` (long polls). Options are those
    of `diff`.
    """
    if wait:
        options = {"wait_ms": 30_000} | options
    first = calls.diff(topic, from_seq, **options)
    options.pop("from_ts", None)

    def take(page: DiffAnswer) -> tuple[Iterator[Item], Call[DiffAnswer] | None]:
        ended = page.caught_up and not wait
        return items(page), None if ended else calls.diff(topic, page.next_from_seq, **options)

    def items(page: DiffAnswer) -> Iterator[Item]:
        if page.tombstone is not None:
            if tombstones == "raise":
                raise GapError(topic, page.tombstone)
            yield page.tombstone
        yield from page.records

    return Walk(first, take)
