"""Which handler answers a request, what a key needs for it, and what becomes of one that fails.

The two routes that carry the load are found by their path alone; everything else goes through Starlette's router.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.routing import Route as Path
from starlette.routing import Router

from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.frontend.access import Access
from topics.frontend.answers import send_error
from topics.frontend.append import AppendRoute
from topics.frontend.bodies import ClientGoneError
from topics.frontend.diff import DiffRoute
from topics.frontend.http1_exchange import ROUTE, Receive, Scope, Send
from topics.frontend.metrics import MetricsRoute
from topics.frontend.probes import ProbeRoutes
from topics.frontend.topics import TopicRoutes
from topics.frontend.watch import WatchRoutes
from topics.frontend.websocket import WebSocketRoute, needs_upgrade, refuse
from topics.log import get_logger
from topics.shm.control import ProcessCell
from topics.shm.durations import Route

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
NamedEndpoint = Callable[[str, Scope, Receive, Send], Awaitable[None]]

_TOPICS: Final = "/v0/topics/"
_DIFF: Final = "/diff"
_WS: Final = "/v0/ws"
_READ: Final = KeyScope.READ
_WRITE: Final = KeyScope.WRITE

_log = get_logger()


class App:
    """The ASGI application of a frontend."""

    def __init__(
        self,
        append: AppendRoute,
        diff: DiffRoute,
        topics: TopicRoutes,
        watch: WatchRoutes,
        probes: ProbeRoutes,
        metrics: MetricsRoute,
        websocket: WebSocketRoute,
        access: Access,
        cell: ProcessCell,
        observe: Callable[[Route, int], None],
    ) -> None:
        """`observe(route, took_us)` is told of every request that has been answered."""
        self._append = append
        self._diff = diff
        self._websocket = websocket
        self._access = access
        self._cell = cell
        self._observe = observe
        health = Resource(GET=_timed(Route.HEALTH, self._probe(probes.health)))
        ready = Resource(GET=_timed(Route.READY, self._probe(probes.ready)))
        read, write, delete, admin = map(self._needing, (_READ, _WRITE, KeyScope.DELETE, KeyScope.ADMIN))
        one_topic = Resource(
            GET=_timed(Route.GET_TOPIC, read(topics.get)),
            PUT=_timed(Route.PUT_TOPIC, admin(topics.put)),
            DELETE=_timed(Route.DELETE_TOPIC, delete(topics.delete)),
            POST=_timed(Route.APPEND, write(_of_topic(append))),
        )
        delete_records = Resource(POST=_timed(Route.DELETE_RECORDS, delete(topics.delete_records)))
        self._router = Router(
            [
                Path("/v0/topics", Resource(GET=_timed(Route.LIST_TOPICS, read(topics.list_all)))),
                Path("/v0/topics/{topic}", one_topic),
                Path("/v0/topics/{topic}/diff", Resource(POST=_timed(Route.DIFF, read(_of_topic(diff))))),
                Path("/v0/topics/{topic}/delete", delete_records),
                Path("/v0/watch", Resource(POST=_timed(Route.CREATE_WATCH, read(watch.create)))),
                # An unknown wid is 404 whoever asks, so it looks for the key itself.
                Path("/v0/watch/{wid}", Resource(GET=_timed(None, watch.stream))),
                Path(_WS, Resource(GET=_timed(None, needs_upgrade))),
                Path("/v0/metrics", Resource(GET=_timed(Route.METRICS, read(metrics.get)))),
                *(Path(path, health) for path in ("/v0/health", "/healthz")),
                *(Path(path, ready) for path in ("/v0/ready", "/readyz")),
            ],
            redirect_slashes=False,
            default=_no_such_path,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        self._cell.add("requests")
        started_ns = time.perf_counter_ns()
        route = Route.OTHER
        try:
            if scope["method"] == "POST" and scope["path"].startswith(_TOPICS):
                name: str = scope["path"][len(_TOPICS) :]
                if name and "/" not in name:
                    route = Route.APPEND
                    self._access.admit(scope, _WRITE, (name,))
                    await self._append(name, scope, receive, send)
                    return
                if name.endswith(_DIFF) and 0 < name.index("/") == len(name) - len(_DIFF):
                    route = Route.DIFF
                    name = name[: -len(_DIFF)]
                    self._access.admit(scope, _READ, (name,))
                    await self._diff(name, scope, receive, send)
                    return
            await self._router(scope, receive, send)
        except TopicsError as error:
            await self._refuse(error, scope, send)
        except (ClientGoneError, ConnectionError):
            return
        except Exception:  # noqa: BLE001 — whatever it is, the client gets an answer and the operator a line
            _log.exception("request failed", method=scope["method"], path=scope["path"])
            await self._refuse(TopicsError("internal", "the request failed inside the server"), scope, send)
        finally:
            timed_as = scope.get(ROUTE, route)
            if timed_as is not None:
                self._observe(timed_as, (time.perf_counter_ns() - started_ns) // 1000)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket, or the life span, which Starlette's router answers."""
        if scope["type"] != "websocket":
            await self._router(scope, receive, send)
        elif scope["path"] == _WS:
            self._cell.add("requests")
            await self._websocket(scope, receive, send)
        else:
            await refuse(no_such_path(scope), scope, send)

    def _needing(self, needed: KeyScope) -> Callable[[Endpoint], Endpoint]:
        """An endpoint for holders of these scopes, over the topic in its path if there is one."""

        def guard(endpoint: Endpoint) -> Endpoint:
            async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
                self._access.admit(scope, needed, scope["path_params"].values())
                await endpoint(scope, receive, send)

            return guarded

        return guard

    def _probe(self, endpoint: Endpoint) -> Endpoint:
        return self._needing(KeyScope.NONE)(endpoint) if self._access.probe_auth else endpoint

    async def _refuse(self, error: TopicsError, scope: Scope, send: Send) -> None:
        self._cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
        allow = error.detail.get("allow") if error.detail else None
        headers = [] if allow is None else [(b"allow", str(allow).encode())]
        if error.code == "upgrade_required":
            headers += [(b"upgrade", b"websocket")]
        if error.code == "unauthorized":
            headers.append((b"www-authenticate", b"Bearer"))
        await send_error(send, dict(scope["headers"]), error, headers)


class Resource:
    """One path: an endpoint for each method it knows."""

    def __init__(self, **methods: Endpoint) -> None:
        self._methods = dict(methods)
        if "GET" in methods:
            # The server drops the body (RFC 9110 §9.3.2).
            self._methods["HEAD"] = methods["GET"]
        self._allow = ", ".join(sorted([*self._methods, "OPTIONS"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._methods.get(scope["method"])
        if endpoint is not None:
            await endpoint(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", self._allow.encode())]})
            await send({"type": "http.response.body", "body": b""})
        else:
            raise TopicsError(
                "method_not_allowed",
                f"{scope['path']} does not know {scope['method'][:32]}, only {self._allow}",
                {"allow": self._allow},
            )


def _timed(route: Route | None, endpoint: Endpoint) -> Endpoint:
    def named(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope[ROUTE] = route
        return endpoint(scope, receive, send)

    return named


def _of_topic(endpoint: NamedEndpoint) -> Endpoint:
    async def with_name(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoint(scope["path_params"]["topic"], scope, receive, send)

    return with_name


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise no_such_path(scope)


def no_such_path(scope: Scope) -> TopicsError:
    return TopicsError("not_found", f"there is nothing at {scope['path'][:300]}")
