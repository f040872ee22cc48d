"""Ways through more answers than one: lists, and the records of a topic, page by page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from topics.api.answers import CursorState, DiffAnswer, Record, TombstoneAnswer, TopicEntry
from topics.client import calls
from topics.client.calls import Call
from topics.client.errors import GapError

T_co = TypeVar("T_co", covariant=True)
PageT = TypeVar("PageT", bound="ListPage")
T = TypeVar("T")

Item: TypeAlias = Record | TombstoneAnswer
Tombstones = Literal["raise", "yield"]
"""What a reader gets for a gap: a GapError, as no gap is passed over by default, or a tombstone among the records."""


class Walk(Protocol[T_co]):
    """Says what to ask for next, and what each answer brings."""

    def next_call(self) -> Call[Any] | None:
        """None at the end."""

    def take(self, answer: Any) -> Iterable[T_co]:
        """The items of the answer to `next_call`."""


class ListPage(Protocol):
    """A page of a list."""

    @property
    def next_cursor(self) -> str | None: ...


class Listing(Generic[PageT, T]):
    """All pages of a list: `ask` makes the call for one, `items` has what is on it."""

    def __init__(self, ask: Callable[[str | None], Call[PageT]], items: Callable[[PageT], Sequence[T]]) -> None:
        self._ask = ask
        self._items = items
        self._call: Call[PageT] | None = ask(None)

    def next_call(self) -> Call[PageT] | None:
        return self._call

    def take(self, answer: PageT) -> Sequence[T]:
        self._call = None if answer.next_cursor is None else self._ask(answer.next_cursor)
        return self._items(answer)


class Reading:
    """Every record behind a seq, up to the head, or for ever with `wait` (long polls)."""

    def __init__(self, topic: str, from_seq: int, tombstones: Tombstones, wait: bool, options: dict[str, Any]) -> None:
        self._topic = topic
        self._tombstones = tombstones
        self._wait = wait
        self._options = {"wait_ms": 30_000} | options if wait else options
        self._call: Call[DiffAnswer] | None = calls.diff(topic, from_seq, **self._options)
        self._options.pop("from_ts", None)

    def next_call(self) -> Call[DiffAnswer] | None:
        return self._call

    def take(self, answer: DiffAnswer) -> Iterator[Item]:
        if answer.tombstone is not None:
            if self._tombstones == "raise":
                raise GapError(self._topic, answer.tombstone)
            yield answer.tombstone
        yield from answer.records
        ended = answer.caught_up and not self._wait
        self._call = None if ended else calls.diff(self._topic, answer.next_from_seq, **self._options)


def list_topics(prefix: str = "") -> Walk[TopicEntry]:
    """Every topic whose name begins with `prefix`, by name."""
    return Listing(lambda cursor: calls.list_topics(prefix, cursor=cursor), lambda page: page.topics)


def list_cursors(topic: str) -> Walk[CursorState]:
    """Every cursor of a topic, by name."""
    return Listing(lambda cursor: calls.list_cursors(topic, cursor), lambda page: page.cursors)


def read(
    topic: str, from_seq: int = 0, *, tombstones: Tombstones = "raise", wait: bool = False, **options: Any
) -> Walk[Item]:
    """Every record behind `from_seq`, page by page, up to the head, or for ever with `wait` (long polls). Options are
    those of `diff`.
    """
    return Reading(topic, from_seq, tombstones, wait, options)
