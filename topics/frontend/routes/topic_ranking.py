"""Topics sorted by a figure, to find the interesting ones among 100,000 (api §1).

Sorting needs a look at every topic. A pass does that in slices of a millisecond, between which other requests are
served. It is kept 50 times as long as it took, so rankings take at most 2 % of a frontend's time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
from starlette.datastructures import QueryParams

from topics.core.errors import TopicsError, invalid
from topics.core.names import owner_shard
from topics.frontend.entry.wire import parameter
from topics.frontend.shards.arenas import SLICE_TOPICS, Arenas, Slices, live_names
from topics.frontend.shards.gateway import Gateway
from topics.shm.queue_messages import CursorGet, CursorReply

KEPT_MIN_S: Final = 2.0
KEPT_TIMES: Final = 50
FOLLOWED_MAX: Final = 1000
"""The most topics whose cursors a pass reads, the first ones by name."""
CURSORS_MAX: Final = 100
"""The most cursors that a pass reads of one topic, the first ones by name."""
ANSWERS_MAX: Final = 64
_NO_CURSORS: Final[Sequence[CursorReply]] = ()
ALLOWED: Final = {
    "sort": ("topic", "rate", "count", "bytes", "lag", "last_write_ts"),
    "order": ("asc", "desc"),
    "kind": ("any", "log", "queue", "followed"),
}


class RankedTopic(msgspec.Struct, frozen=True, gc=False):
    """A topic as a pass found it. `rate` and `lag` are None where there is none. The garbage collector passes over it:
    100,000 of them would hold up the loop.
    """

    topic: str
    rate: float | None
    count: int
    bytes: int
    lag: int | None
    last_write_ts: int | None
    kind: str
    cursors: Sequence[CursorReply]


class TopicPass(NamedTuple):
    """All topics by name, when they were looked at, until when that counts, and the answers made from it."""

    topics: list[RankedTopic]
    heads: dict[int, int]
    """The head of each topic, by id: the next pass computes rates from them."""
    began_s: float
    until_s: float
    answers: dict[object, tuple[list[RankedTopic], int]]


class TopicRanking:
    """The newest pass of this frontend. Requests at the same time share one."""

    def __init__(self, arenas: Arenas, gateway: Gateway) -> None:
        self._arenas = arenas
        self._gateway = gateway
        self._pass: TopicPass | None = None
        self._lock = asyncio.Lock()

    async def best(self, query: QueryParams, prefixes: tuple[str, ...], most: int) -> tuple[list[RankedTopic], int]:
        """Return the first `most` topics as `?sort`, `?order`, `?kind` and `?contains` ask, and how many fit."""
        sort = _given(query, "sort", "topic")
        order = _given(query, "order", "asc" if sort == "topic" else "desc")
        kind, contains = _given(query, "kind", "any"), parameter(query, "contains") or ""
        async with self._lock:
            if self._pass is None or time.monotonic() >= self._pass.until_s:
                self._pass = await self._look(self._pass)
            topics, answers = self._pass.topics, self._pass.answers
        if sort == "topic" and order == "desc":
            topics = topics[::-1]
        asked = (sort, order, kind, contains, prefixes, most)
        if asked not in answers:
            if len(answers) >= ANSWERS_MAX:
                answers.clear()
            best: list[RankedTopic] = []
            count, slices = 0, Slices()
            sign = 1 if order == "asc" else -1

            def rank(one: RankedTopic) -> tuple[bool, Any]:
                value = getattr(one, sort)
                return value is None, 0 if sort == "topic" else sign * (value or 0)

            for begin in range(0, len(topics), SLICE_TOPICS * 8):
                fitting = [
                    one
                    for one in topics[begin : begin + SLICE_TOPICS * 8]
                    if contains in one.topic
                    and one.topic.startswith(prefixes)
                    and (kind in ("any", one.kind) or (kind == "followed" and one.cursors))
                ]
                count += len(fitting)
                best = heapq.nsmallest(most, [*best, *fitting], rank)
                await slices.yield_if_over()
            answers[asked] = best, count
        return answers[asked]

    async def _look(self, before: TopicPass | None) -> TopicPass:
        slices, began_s, work_s, after = Slices(), time.monotonic(), 0.0, ""
        topics, heads, followed, silent = list[RankedTopic](), dict[int, int](), 0, set[int]()
        await self._arenas.learn(slices)
        arenas = [self._arenas.require(shard) for shard in range(self._gateway.shards)]
        while names := list(itertools.islice(live_names(arenas, ("",), after), SLICE_TOPICS)):
            slice_s = time.monotonic()
            for after in names:
                shard = owner_shard(after, self._gateway.shards)
                hit = arenas[shard].look_up(after)
                if hit is None:
                    continue
                view, rate = hit[1], None
                if before is not None and (head_seq := before.heads.get(view.topic_id)) is not None:
                    rate = round((view.head_seq - head_seq) / (began_s - before.began_s), 3)
                heads[view.topic_id] = view.head_seq
                cursors, lag = _NO_CURSORS, view.jobs_ready if view.is_queue else None
                if view.has_cursors and followed < FOLLOWED_MAX and shard not in silent:
                    followed += 1
                    try:
                        cursors = (await self._gateway.call(shard, CursorGet(after, None, "", CURSORS_MAX))).cursors
                        kept = view.head_seq - view.earliest_seq + 1
                        lag = max([lag or 0, *[min(view.head_seq - one.seq, kept) for one in cursors]])
                    except TopicsError as error:
                        if error.code not in ("topic_not_found", "throttled"):
                            silent.add(shard)  # another wait for each of its topics would take an hour
                            slice_s = time.monotonic()  # the wait does not count as work
                kind, written = "queue" if view.is_queue else "log", view.last_write_ts or None
                topics.append(RankedTopic(after, rate, view.records, view.live_bytes, lag, written, kind, cursors))
            work_s += time.monotonic() - slice_s
            await slices.yield_if_over()
        # Rates need two passes: the second one comes soon.
        kept_s = max(KEPT_MIN_S, KEPT_TIMES * work_s) if before else KEPT_MIN_S / 2
        return TopicPass(topics, heads, began_s, time.monotonic() + kept_s, {})


def check_query(query: QueryParams) -> None:
    """Raise `400` for a parameter that this list would pass over."""
    is_sorted = "sort" in query
    reason = "a sorted list has no further pages, raise page_size" if is_sorted else "it needs a sort, add sort=topic"
    for name in ("cursor",) if is_sorted else ("order", "kind", "contains"):
        if name in query:
            raise invalid(f"?{name} is not for this list: {reason}", field=name)


def _given(query: QueryParams, name: str, default: str) -> str:
    value = parameter(query, name)
    if value is None:
        return default
    if value not in ALLOWED[name]:
        raise invalid(f"?{name} must be one of {', '.join(ALLOWED[name])}, not {value[:100]!r}", field=name)
    return value
