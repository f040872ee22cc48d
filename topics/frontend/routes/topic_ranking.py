"""Topics in the order of a figure, and all named cursors: what somebody looks for among 100,000 topics (api §1, §10).

To sort topics every one has to be looked at. A pass does that in slices of a millisecond, between which other requests
are served, and is kept 50 times as long as it took: all rankings together take 2 % of a frontend at most.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from starlette.datastructures import QueryParams

from topics.core.errors import TopicsError, invalid
from topics.core.names import owner_shard
from topics.frontend.shards.arenas import Arenas, live_names
from topics.frontend.shards.gateway import Gateway
from topics.shm.arena import TopicView
from topics.shm.queue_messages import CursorGet, CursorReply

KEPT_MIN_S: Final = 2.0
KEPT_TIMES: Final = 50
SLICE_S: Final = 0.001
LOOKED_AT: Final = 64
FOLLOWED_MAX: Final = 1000
"""The most topics whose cursors a pass reads, the first ones by name."""
CURSORS_MAX: Final = 1000
"""The most cursors that a pass reads of one topic."""
SORTS: Final = ("topic", "rate", "count", "bytes", "lag", "last_write_ts")
_NONE: Final = -1.0
"""A figure that a topic does not have. It comes last in either order."""


class Slices:
    """The slices of time in which long work is done. Other tasks run between two of them."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + SLICE_S

    async def yield_if_over(self) -> None:
        if time.monotonic() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.monotonic() + SLICE_S


class FollowedCursor(NamedTuple):
    """A cursor of a topic, and how far it is behind."""

    topic: str
    cursor: CursorReply
    head_seq: int

    @property
    def lag(self) -> int:
        return max(0, self.head_seq - self.cursor.seq)


class Wanted(NamedTuple):
    """What a list of topics is asked for: the key's prefixes, a part of the name, a type, an order."""

    prefixes: tuple[str, ...]
    contains: str
    type: str | None
    sort: str
    ascending: bool

    @classmethod
    def of(cls, query: QueryParams, prefixes: tuple[str, ...]) -> Wanted:
        """Read `?sort`, `?order`, `?type` and `?contains`. Raise `400 invalid_request`."""
        given = {"sort": (query.get("sort", "topic"), SORTS), "type": (query.get("type"), (None, "log", "queue"))}
        sort = given["sort"][0]
        given["order"] = (query.get("order", "asc" if sort == "topic" else "desc"), ("asc", "desc"))
        for name, (value, known) in given.items():
            if value not in known:
                allowed = ", ".join(filter(None, known))
                raise invalid(f"?{name} must be one of {allowed}, not {str(value)[:100]!r}", field=name)
        ascending = given["order"][0] == "asc"
        return cls(prefixes, query.get("contains", ""), given["type"][0], str(sort), ascending)


class Pass:
    """The figures of all topics as one look found them: columns in the order of the names."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ids = array("Q")
        self.heads = array("Q")
        self.queues = array("b")
        self.columns = {sort: array("d") for sort in SORTS[1:]}
        self.cursors: list[FollowedCursor] = []
        self.began_s = time.monotonic()
        self.until_s = 0.0
        self.ranked: dict[tuple[Wanted, int], tuple[list[int], int]] = {}
        """Answers that were made from this pass."""

    def add(self, name: str, view: TopicView, rate: float) -> None:
        """Add the next topic by name."""
        self.names.append(name)
        self.ids.append(view.topic_id)
        self.heads.append(view.head_seq)
        self.queues.append(view.is_queue)
        lag = view.jobs_ready if view.is_queue else _NONE
        figures = (rate, view.records, view.live_bytes, lag, view.last_write_ts or _NONE)
        for column, figure in zip(self.columns.values(), figures, strict=True):
            column.append(figure)


class TopicRanking:
    """The newest pass of this frontend. Requests at the same time share one."""

    def __init__(self, arenas: Arenas, gateway: Gateway) -> None:
        self._arenas = arenas
        self._gateway = gateway
        self._pass: Pass | None = None
        self._lock = asyncio.Lock()

    async def best(self, wanted: Wanted, most: int) -> tuple[list[dict[str, Any]], int]:
        """Return the names of the first `most` topics with rate and lag, and how many there are in all."""
        found = await self._fresh()
        if (wanted, most) not in found.ranked:
            found.ranked[wanted, most] = await self._rank(found, wanted, most)
        at, count = found.ranked[wanted, most]
        figures = {name: found.columns[name] for name in ("rate", "lag")}
        rows = [
            {"topic": found.names[one], **{name: of[one] for name, of in figures.items() if of[one] != _NONE}}
            for one in at
        ]
        return rows, count

    async def cursors(self, covers: Callable[[str], bool], contains: str, most: int) -> tuple[list[Any], int]:
        """Return the `most` cursors that are furthest behind, and how many there are in all."""
        found = [
            one
            for one in (await self._fresh()).cursors
            if covers(one.topic) and (contains in one.topic or contains in one.cursor.cursor)
        ]
        return heapq.nsmallest(most, found, key=lambda one: (-one.lag, one.topic, one.cursor.cursor)), len(found)

    async def _fresh(self) -> Pass:
        async with self._lock:
            if self._pass is None or time.monotonic() >= self._pass.until_s:
                self._pass = await self._look(self._pass)
            return self._pass

    async def _look(self, before: Pass | None) -> Pass:
        found, slices, work_s, at = Pass(), Slices(), 0.0, 0
        passed_s = found.began_s - before.began_s if before else 0.0
        after, followed = "", list[int]()
        arenas = [self._arenas.require(shard) for shard in range(self._gateway.shards)]
        for arena in arenas:
            while not arena.learn(LOOKED_AT):
                await slices.yield_if_over()
        while True:
            began_s = time.monotonic()
            names = list(itertools.islice(live_names(arenas, ("",), after), LOOKED_AT))
            for name in names:
                hit = arenas[owner_shard(name, self._gateway.shards)].look_up(name)
                if hit is None:
                    continue
                rate, view = _NONE, hit[1]
                while before and at < len(before.names) and before.names[at] < name:
                    at += 1
                if before and at < len(before.names) and before.ids[at] == view.topic_id:
                    rate = (view.head_seq - before.heads[at]) / passed_s
                if view.has_cursors and len(followed) < FOLLOWED_MAX:
                    followed.append(len(found.names))
                found.add(name, view, rate)
            work_s += time.monotonic() - began_s
            if not names:
                break
            after = names[-1]
            await slices.yield_if_over()
        await self._follow(found, followed)
        # Rates need two passes: the second one comes soon.
        kept_s = max(KEPT_MIN_S, KEPT_TIMES * work_s) if before else KEPT_MIN_S / 2
        found.until_s = time.monotonic() + kept_s
        return found

    async def _follow(self, found: Pass, followed: Iterable[int]) -> None:
        """Read the cursors of these topics from their shards. Those of a shard that does not answer are left out."""
        for at in followed:
            name = found.names[at]
            try:
                reply = await self._gateway.call(self._gateway.owner(name), CursorGet(name, None, "", CURSORS_MAX))
            except TopicsError:
                continue
            cursors = [FollowedCursor(name, cursor, found.heads[at]) for cursor in reply.cursors]
            found.cursors += cursors
            if cursors:
                lag = found.columns["lag"]
                lag[at] = max(lag[at], *[one.lag for one in cursors])

    async def _rank(self, found: Pass, wanted: Wanted, most: int) -> tuple[list[int], int]:
        slices = Slices()
        sign = 1 if wanted.ascending else -1
        column = found.columns.get(wanted.sort)
        best: list[tuple[float, int]] = []
        count = 0
        for begin in range(0, len(found.names), LOOKED_AT * 16):
            rows = []
            for at in range(begin, min(begin + LOOKED_AT * 16, len(found.names))):
                name = found.names[at]
                if wanted.contains not in name or not name.startswith(wanted.prefixes):
                    continue
                if wanted.type is not None and found.queues[at] != (wanted.type == "queue"):
                    continue
                figure = float(at) if column is None else column[at]
                rows.append((float("inf") if figure == _NONE else sign * figure, at))
            count += len(rows)
            best = heapq.nsmallest(most, [*best, *rows])
            await slices.yield_if_over()
        return [at for _, at in best], count
