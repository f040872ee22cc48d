"""Reads of several answers: lists and the records of a topic, page by page, and followed streams. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import msgspec

from topics.api.answers import CursorState, DiffAnswer, Record, RouterEntry, TombstoneAnswer, TopicEntry, WatchAnswer
from topics.client import calls
from topics.client.arguments import require
from topics.client.attempts import STOPPING, Attempts
from topics.client.calls import Call
from topics.client.errors import GapError, NotFoundError
from topics.client.http import Event, TransportError

T = TypeVar("T")

Item: TypeAlias = Record | TombstoneAnswer
Raised = Literal["raise"]
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


def list_routers(prefix: str = "", **ends: str) -> Walk[RouterEntry]:
    """Yield the routers whose names begin with `prefix`, by name; all, or those from a `source`, or into a `dest`."""
    return _listing(lambda cursor: calls.list_routers(prefix, cursor=cursor, **ends), lambda page: page.routers)


def _listing(ask: Callable[[str | None], Call[PageT]], items: Callable[[PageT], Iterable[T]]) -> Walk[T]:
    """Return a walk through all pages of a list: `ask` makes the call for a page, `items` takes the items off it."""

    def take(page: PageT) -> tuple[Iterable[T], Call[PageT] | None]:
        return items(page), None if page.next_cursor is None else ask(page.next_cursor)

    return Walk(ask(None), take)


def read(
    topic: str, from_seq: int = 0, *, tombstones: Tombstones = "raise", wait: bool = False, **options: Any
) -> Walk[Item]:
    """Yield the records behind `from_seq`, up to the head, or endlessly with `wait`. Options are those of `diff`."""
    require(tombstones in get_args(Tombstones), "tombstones", tombstones, "'raise' or 'yield'")
    if wait:
        options = {"wait_ms": 30_000} | options
    first = calls.diff(topic, from_seq, **options)
    options.pop("from_ts", None)

    def take(page: DiffAnswer) -> tuple[Iterable[Item], Call[DiffAnswer] | None]:
        ended = page.caught_up and not wait
        items = page.records if page.tombstone is None else after_gap(page.tombstone, page.records)
        return items, None if ended else calls.diff(topic, page.next_from_seq, **options)

    def after_gap(tombstone: TombstoneAnswer, records: list[Record]) -> Iterator[Item]:
        if tombstones == "raise":
            raise GapError(topic, tombstone)
        yield tombstone
        yield from records

    return Walk(first, take)


HEARTBEAT_MS = 5_000
HEARTBEAT_MAX_MS = 60_000
"""The longest pause between two heartbeats that the service grants (api §7)."""
SILENCE_MAX_S = 3 * HEARTBEAT_MS / 1000
"""A stream without a byte for this long is taken for dead, even if TCP reports nothing."""


class TopicGone(msgspec.Struct, frozen=True):
    """The end of a followed topic, which was deleted: no more records of it follow.

    `head_seq` is its last seq, or how far it was followed if it was deleted while the service could not be reached.
    """

    head_seq: int


class _RecordFrame(msgspec.Struct):
    topic: str
    records: list[Record]
    to_seq: int


class _TombstoneFrame(TombstoneAnswer, frozen=True, kw_only=True):
    missed_estimate: int = 0  # frames do not have it
    topic: str


class _EndFrame(msgspec.Struct):
    topic: str
    head_seq: int


_record_frame = msgspec.json.Decoder(_RecordFrame).decode
_tombstone_frame = msgspec.json.Decoder(_TombstoneFrame).decode
_end_frame = msgspec.json.Decoder(_EndFrame).decode


class Following:
    """A follower's session and its `positions`: the seqs behind which a new session finds all that was not yielded.

    The session lives on the server. A lost stream is opened again with the id of the last frame that was taken whole
    (Last-Event-ID). When the session itself is gone, because the service restarted, a new one begins at `positions`.
    """

    def __init__(
        self,
        positions: Mapping[str, int] | str,
        tombstones: Tombstones,
        options: dict[str, Any],
        attempts: Callable[[str], Attempts],
    ) -> None:
        if not isinstance(positions, (str, Mapping)):  # a list of names would be taken for pairs of letters
            raise TypeError(f"positions are a topic or seqs by topic, not {positions!r}: give them as {{'orders': 0}}")
        require(len(positions) > 0, "positions", positions, "at least one topic, as {'orders': 0}")
        require(tombstones in get_args(Tombstones), "tombstones", tombstones, "'raise' or 'yield'")
        self.positions = {positions: 0} if isinstance(positions, str) else dict(positions)
        self._tombstones = tombstones
        self._options = {"heartbeat_ms": HEARTBEAT_MS, "include_tags": True} | options
        self._last_event_id: str | None = None
        self.wid: str | None = None
        self._began = False
        self._make_attempts = attempts
        self._attempts: Attempts | None = None
        self._end_announced = False

    @property
    def silence_max_s(self) -> float:
        """The longest time without a byte of a stream: three of the heartbeats that the session has asked for."""
        return max(SILENCE_MAX_S, 3 * min(int(self._options["heartbeat_ms"]), HEARTBEAT_MAX_MS) / 1000)

    def ended(self) -> bool:
        """Return whether every topic was deleted."""
        return not self.positions

    def session_call(self) -> Call[WatchAnswer]:
        """Return the call for a session. In the first all topics must exist; later ones leave out deleted topics."""
        return calls.watch(self.positions, self._options, lenient=self._began)

    def begin(self, session: WatchAnswer) -> Iterator[tuple[str, TopicGone]]:
        """Take over a new session; yield the topics that it leaves out, since they were deleted."""
        self.wid = session.wid
        self._last_event_id = None
        self._began = True
        for name in [name for name in self.positions if name not in session.topics]:
            yield name, TopicGone(self.positions.pop(name))

    @property
    def path(self) -> str:
        return f"/v0/watch/{self.wid}"

    def headers(self) -> dict[str, str]:
        return {} if self._last_event_id is None else {"Last-Event-ID": self._last_event_id}

    def pause_s(self, trouble: Exception | None) -> float:
        """Return the pause before the next stream, or the next session if the service does not know this one (404).
        `trouble` broke the last stream; None if it just ended. UnreachableError when the time for repeats is over.
        """
        if isinstance(trouble, NotFoundError):
            self.wid = None
            return 0.0
        self._attempts = self._attempts or self._make_attempts(self.path)
        announced, self._end_announced = self._end_announced, False
        if announced:
            return self._attempts.pause_after_announced_end()
        return self._attempts.pause_after_failure(trouble or TransportError("the stream ended"))

    def take(self, frame: Event) -> Iterator[tuple[str, Item | TopicGone]]:
        """Yield the items of one frame, then take over its id: if the stream breaks after that, nothing is repeated."""
        self._attempts = None
        event, data, id = frame
        if event == "record":
            page = _record_frame(data)
            for record in page.records:
                self.positions[page.topic] = record.seq
                yield page.topic, record
            self.positions[page.topic] = page.to_seq
        elif event == "tombstone":
            gap = _tombstone_frame(data)
            if self._tombstones == "raise":
                raise GapError(gap.topic, gap)
            self.positions[gap.topic] = gap.next_from_seq
            yield gap.topic, gap
        elif event == "topic-deleted":
            end = _end_frame(data)
            del self.positions[end.topic]
            yield end.topic, TopicGone(end.head_seq)
        elif event == "error":
            code = msgspec.json.decode(data)["code"]
            if code == 410:
                self.wid = None
                return
            self._end_announced = code == STOPPING
        if id:
            self._last_event_id = id
