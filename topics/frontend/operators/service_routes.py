"""Probes and metrics for operators (api §8).

`/v0/health` and `/v0/ready` read only the control page, so they are always answered. Any frontend answers `/v0/metrics`
for the whole service, from shared memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, Final

from starlette.datastructures import QueryParams

from topics import __version__
from topics.api import answers
from topics.core.clock import Clock
from topics.core.keys import KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import limits
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.entry.responses import elapsed_ms, encode_json, reserve_room, send_json, send_whole, weight
from topics.frontend.entry.wire import flag
from topics.frontend.operators import exposition
from topics.frontend.operators.exposition import TEXT_TYPE, Family, Sample, single
from topics.frontend.operators.figures import ServiceFigures
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiOperation, ApiRequest, JsonReply
from topics.frontend.shards.arenas import Arenas, Slices, live_names
from topics.shm.control import HEARTBEAT_STALE_MS, ControlPage, ProcessState, Role, not_ready
from topics.shm.durations import Route

_SHORT_PATHS: Final = {"/v0/health": "/healthz", "/v0/ready": "/readyz"}


class ProbeRoutes:
    """The probes. Health: this process answers. Ready: every shard has recovered, so that all topics can be read."""

    def __init__(self, control: ControlPage, clock: Clock) -> None:
        self._control = control
        self._clock = clock
        self._shards = [control.cell(Role.WALSHARD, shard) for shard in range(control.shards)]

    @api.json_route("GET", "/v0/health", Route.HEALTH, None, "service")
    @api.describe("Alive?", api.ok("It answers", answers.Health))
    async def health(self, _request: ApiRequest) -> JsonReply:
        uptime_ms = max(0, self._clock.now_ms() - self._control.header.get("started_ms"))
        return JsonReply({"status": "ok", "version": __version__, "uptime_ms": uptime_ms})

    @api.json_route("GET", "/v0/ready", Route.READY, None, "service")
    @api.describe("Recovered?", api.ok("All topics can be read", answers.Ready), "not_ready")
    async def ready(self, _request: ApiRequest) -> JsonReply:
        waiting = [cell for cell in self._shards if cell.get("generation") == 0]
        if waiting:
            raise not_ready(self._shards, f"{len(waiting)} of {len(self._shards)} shards still replay their log")
        # The topics of a shard that restarts can be read; only writes to them wait.
        recovering = [n for n, cell in enumerate(self._shards) if cell.get("state") != ProcessState.READY]
        read_only = [n for n, cell in enumerate(self._shards) if cell.get("wal_read_only")]
        oldest_ms = self._clock.now_ms() - HEARTBEAT_STALE_MS
        hanging = [
            n for n, cell in enumerate(self._shards) if n not in recovering and 0 < cell.get("heartbeat_ms") < oldest_ms
        ]
        answer: dict[str, Any] = {
            "status": "ready",
            "wal_replay_complete": not recovering,
            "topics": sum(cell.get("topics") for cell in self._shards),
            "pressure": round(self._control.pressure(), 3),
        }
        if recovering:
            answer["recovering_shards"] = recovering
        if hanging:
            answer["hanging_shards"] = hanging
        if read_only:
            answer["read_only_shards"] = read_only
        return JsonReply(answer)


def probe_operations(probes: ProbeRoutes, probe_auth: bool) -> list[ApiOperation]:
    """Return the operations of the probes, two paths for each. With `probe_auth` they need a key, of any scopes."""
    needs = KeyScope.NONE if probe_auth else None
    return [
        one._replace(path=path, needs=needs, public=not probe_auth)
        for one in api.operations_of(probes)
        for path in (one.path, _SHORT_PATHS[one.path])
    ]


ANSWER_BYTES: Final = 8 << 20
"""Room taken for one scrape; 10,000 topics are about 3 MB."""
PAGE_TOPICS: Final = 64
_SCRAPED: Final = {200: api.Answer("Prometheus text, or JSON by Accept", {api.TEXT: None, api.JSON: dict[str, Any]})}
_LOG_SERIES: Final = (
    ("head_seq", "head_seq", "The last seq of a topic"),
    ("earliest_seq", "earliest_seq", "The first live seq of a topic, head_seq + 1 if there is none"),
    ("records_live", "records", "Live records of a topic"),
    ("bytes_live", "live_bytes", "Live bytes of a topic"),
)
_QUEUE_SERIES: Final = (
    *_LOG_SERIES,
    ("queue_ready", "jobs_ready", "Jobs of a queue that a claim would get now"),
    ("queue_in_flight", "jobs_in_flight", "Jobs of a queue that are leased"),
    ("queue_dead_lettered", "jobs_dead_lettered", "Jobs of a queue that were moved to its dead letters"),
)
"""(name, field of a `TopicView`, help) of each series."""


class MetricsRoute:
    """The scrapes of this frontend. The first `topics_max` topics by name have series of their own."""

    def __init__(self, figures: ServiceFigures, arenas: Arenas, shards: int, topics_max: int) -> None:
        self._figures = figures
        self._arenas = arenas
        self._shards = shards
        self._topics_max = topics_max
        self._budget = Budget(limits.SCRAPES)

    @api.asgi_route("GET", "/v0/metrics", Route.METRICS, KeyScope.READ, "service")
    @api.describe("Metrics of the whole service", _SCRAPED)
    @api.takes(api.flag_query("topic_series", True, "whether topics have series of their own"))
    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        headers = dict(scope["headers"])
        accept = headers.get(b"accept", b"")
        most = self._topics_max if flag(QueryParams(scope.get("query_string", b"")), "topic_series", True) else 0
        await reserve_room(scope, ANSWER_BYTES)
        as_json = wants_json(accept)
        series = await self._series(caller_of(scope).narrowed(""), as_json, most)
        if as_json:
            took_ms = str(elapsed_ms(started_ns)).encode()
            totals = encode_json(self._figures.totals())[:-1]
            series = b'%b,%b,"performance":{"server_total_ms":%b}}' % (totals, series, took_ms)
            await send_json(send, headers, 200, series, [(b"vary", b"accept")])
        else:
            await send_whole(send, headers, 200, TEXT_TYPE, series, [(b"vary", b"accept")])

    async def _series(self, prefixes: tuple[str, ...], as_json: bool, topics_max: int) -> bytes:
        """Return all series, as text or as the members of a JSON object, once there is room for this scrape."""
        most = limits.SCRAPES.most_count
        if self._budget.held_bytes // ANSWER_BYTES + len(self._budget.waiting) >= most:
            message = f"{most} scrapes of the metrics are under way already; scrape less often, or ask again later"
            raise limits.SCRAPES.refused(message, most)
        room = Reservation(self._budget)  # each scrape has all its series in memory
        try:
            await room.grow(ANSWER_BYTES)
            slices = Slices()
            families = [*self._figures.families(), *await self._topic_families(prefixes, slices, topics_max)]
            rendered, left = [], _used_up(families)
            for piece in exposition.json(left) if as_json else exposition.text(left):
                rendered.append(piece)
                await slices.yield_if_over()
            return b"".join(rendered)
        finally:
            room.close()

    async def _topic_families(self, prefixes: tuple[str, ...], slices: Slices, topics_max: int) -> list[Family]:
        """Return the series of the topics that begin with one of `prefixes`: a key learns of no others."""
        columns: dict[str, list[Sample]] = {name: [] for name, _, _ in _QUEUE_SERIES}
        await self._arenas.learn(slices)
        after, room = "", topics_max
        while names := list(itertools.islice(self._names(prefixes, after), min(room, PAGE_TOPICS))):
            for name in names:
                view = self._arenas.view(name)
                if view is not None:  # else it was deleted in the meantime
                    labels = (name,)
                    for series, field, _ in _QUEUE_SERIES if view.is_queue else _LOG_SERIES:
                        columns[series].append((labels, getattr(view, field)))
            after, room = names[-1], room - len(names)
            await slices.yield_if_over()
        truncated = int(next(self._names(prefixes, after), None) is not None)
        help = "1 if there are more topics than may have series of their own"
        found = [Family(f"topics_topic_{name}", of, ("topic",), columns[name]) for name, _, of in _QUEUE_SERIES]
        return [*found, single("topics_topic_metrics_truncated", help, truncated)]

    def _names(self, prefixes: tuple[str, ...], after: str) -> Iterator[str]:
        """Yield the topics after a name, of the shards that have recovered, as `live_names` does."""
        arenas = [self._arenas.of(shard) for shard in range(self._shards)]
        return live_names([arena for arena in arenas if arena], prefixes, after)


def _used_up(families: list[Family]) -> Iterator[Family]:
    """Yield families and keep none: to free 200,000 samples at once takes over 10 ms."""
    families.reverse()
    while families:
        yield families.pop()


def wants_json(accept: bytes) -> bool:
    """Tell whether an Accept header names JSON and does not prefer text, which scrapers expect whatever they accept."""
    json = weight(accept, b"application/json")
    return b"application/json" in accept.lower() and 0 < json >= weight(accept, b"text/plain")
