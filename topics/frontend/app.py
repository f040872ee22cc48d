"""Finds the handler of a request, checks its key, and answers requests that fail.

The two routes that carry the load are found by their path alone. All other requests go through Starlette's router,
which is made from the table of operations (`operations.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from starlette.routing import Route as Path
from starlette.routing import Router

from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.core.names import check_router_name, check_topic_name, owner_shard
from topics.frontend.asgi import REFUSAL, ROUTE, AsgiApp, Receive, Scope, Send
from topics.frontend.entry.bodies import ClientGoneError, check_repeated
from topics.frontend.entry.responses import send_error
from topics.frontend.live.websocket import Services, WebSocketRoute, refuse
from topics.frontend.operators.openapi import OpenApiRoutes
from topics.frontend.reads.diff import DiffRoute
from topics.frontend.routes.operations import ApiOperation, Endpoint
from topics.frontend.shards.arenas import Arenas
from topics.log import get_logger
from topics.shm.control import ProcessCell
from topics.shm.durations import Route

_TOPICS: Final = "/v0/topics/"
_DIFF: Final = "/diff"
_WS: Final = "/v0/ws"
_UNSCOPED_NAMES: Final = frozenset(("cursor", "pin"))
"""Path parameters without a check against the key's prefixes: cursors and pins belong to a topic, which is checked."""
_NAMED: Final = frozenset((b"topics", b"routers", b"stage", b"txn"))  # words in a path that a name follows
_READ: Final = KeyScope.READ
_WRITE: Final = KeyScope.WRITE

log = get_logger()


class App:
    """The ASGI application of a frontend. It answers every request, also one whose handler fails."""

    def __init__(
        self,
        operations: Sequence[ApiOperation],
        pages: Sequence[ApiOperation],
        services: Services,
        diff: DiffRoute,
        websocket: WebSocketRoute,
    ) -> None:
        """`operations` are the routes of the API, `pages` all others. `services.observe` is told of every answer."""
        self._append = services.appends
        self._diff = diff
        self._websocket = websocket
        self._access = services.access
        self._pages = services.pages
        self._cell = services.cell
        self._observe = services.observe
        documented = OpenApiRoutes(operations)
        methods: dict[str, dict[str, Endpoint]] = {}
        for one in (*operations, *documented.operations, *pages):
            of_path = methods.setdefault(one.path, {})
            of_path[one.method] = self._admitting(one)
            # The server drops the body (RFC 9110 §9.3.2). A stream has no HEAD: beginning one would take jobs, or take
            # a session over from the stream that is open.
            if one.method == "GET" and not one.is_stream:
                of_path["HEAD"] = of_path["GET"]
        self._whole = Resource(**{name: self._no_such_path for of_path in methods.values() for name in of_path})
        self.router = Router(
            [Path(path, Resource(**of_path)) for path, of_path in methods.items()],
            redirect_slashes=False,
            default=self._no_such_path,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["path"] != _WS:
                return await refuse(no_such_path(scope), scope, send)
            self._cell.add("requests")
            return await self._websocket(scope, receive, send)
        self._cell.add("requests")
        started_ns = time.perf_counter_ns()
        route = Route.OTHER
        try:
            if (refusal := scope.get(REFUSAL)) is not None:
                raise refusal
            self._pages.check(scope)
            check_repeated(scope["headers"])
            if b"%2" in scope.get("raw_path", b""):
                self._check_slashes(scope)
            if scope["method"] == "POST" and scope["path"].startswith(_TOPICS):
                name: str = scope["path"][len(_TOPICS) :]
                if name and "/" not in name:
                    route = Route.APPEND
                    self._access.admit(scope, _WRITE, (name,))
                    scope["path_params"] = {"topic": name}
                    await self._append.post(scope, receive, send)
                    return None
                if name.endswith(_DIFF) and 0 < name.index("/") == len(name) - len(_DIFF):
                    route = Route.DIFF
                    name = name[: -len(_DIFF)]
                    self._access.admit(scope, _READ, (name,))
                    scope["path_params"] = {"topic": name}
                    await self._diff.post(scope, receive, send)
                    return None
            await self.router(scope, receive, send)
        except TopicsError as error:
            # The traceback is part of a reference cycle, which would be left to the garbage collector.
            await self._refuse(error.with_traceback(None), scope, send)
        except (ClientGoneError, ConnectionError):
            return None
        except Exception:  # any fault has an answer for the client and a line for the operator
            log.exception("request failed", method=scope["method"], path=scope["path"])
            await self._refuse(TopicsError("internal", "the request failed inside the server"), scope, send)
        finally:
            self._access.release(scope)
            timed_as = scope.get(ROUTE, route)
            if timed_as is not None:
                self._observe(timed_as, (time.perf_counter_ns() - started_ns) // 1000)

    def _check_slashes(self, scope: Scope) -> None:
        """Refuse a name with a slash in it, which is written as %2F and separates nothing (api §0.3)."""
        kind, *segments = scope["raw_path"].removeprefix(b"/v0/").split(b"/")
        for at, segment in enumerate((kind, *segments)):
            if b"%2f" not in segment.lower():
                continue
            if at % 2 == 0 or kind not in _NAMED:
                raise no_such_path(scope)
            self._access.authenticate(scope)
            check_name = check_router_name if kind == b"routers" else check_topic_name
            check_name(unquote(segment.decode("latin-1")))

    def _admitting(self, operation: ApiOperation) -> Endpoint:
        """Return the endpoint behind the check of the key, measured as the route that the operation says."""
        endpoint, timed, needs = operation.endpoint, operation.timed, operation.needs

        def admitting(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            scope[ROUTE] = timed
            if needs is not None:
                names = [value for name, value in scope["path_params"].items() if name not in _UNSCOPED_NAMES]
                self._access.admit(scope, needs, names)
            return endpoint(scope, receive, send)

        return admitting

    async def _no_such_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["method"], scope["path"]) != ("OPTIONS", "*"):  # which asks about the whole service
            raise no_such_path(scope)
        await self._whole(scope, receive, send)

    async def _refuse(self, error: TopicsError, scope: Scope, send: Send) -> None:
        self._cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
        await send_error(send, dict(scope["headers"]), error)


class Resource:
    """The endpoints of one path, by method."""

    def __init__(self, **methods: Endpoint) -> None:
        self._methods = methods
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
                f"{scope['path']} does not allow {scope['method'][:32]}, only {self._allow}",
                {"allow": self._allow},
            )


def no_such_path(scope: Scope) -> TopicsError:
    return TopicsError("not_found", f"there is nothing at {scope['path'][:300]}")


_GATED: Final = ("/v0/topics", "/v0/routers", "/v0/watch", "/v0/stage", "/v0/txn", "/v0/ws")
"""Beginnings of the paths that need a shard. Probes and metrics never wait."""
_POLL_S: Final = 0.01


@dataclass(eq=False)
class StartGate:
    """Lets requests through to `app` once every shard has read its log and this process has learned all topics
    (`learn`). After `wait_s` it waits for no shard any more: then `app` answers `not_ready`, with the progress of the
    recovery. Once open, it stays open. Later, a request waits only while this process learns the topics of a restarted
    shard which the request may need (`arenas`).
    """

    app: AsgiApp
    shards: Sequence[ProcessCell]
    wait_s: float
    learn: Callable[[], Coroutine[Any, Any, None]]
    arenas: Arenas
    _learning: asyncio.Task[None] | None = None
    _is_open: bool = False

    def __post_init__(self) -> None:
        self._opens_s = asyncio.get_running_loop().time() + self.wait_s

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if not scope["path"].startswith(_GATED):
            return self.app(scope, receive, send)
        if not self._is_open:
            return self._wait(scope, receive, send)
        if self.arenas.is_behind() and (shards := self._renewed_for(scope["path"])) is not None:
            return self._wait_for(shards, scope, receive, send)
        return self.app(scope, receive, send)

    def _renewed_for(self, path: str) -> Sequence[int] | None:
        """Return the shards that this request waits for; None if it waits for none."""
        name = path[len(_TOPICS) :].partition("/")[0] if path.startswith(_TOPICS) else ""
        shards = [owner_shard(name, len(self.shards))] if name and name.isascii() else range(len(self.shards))
        return shards if any(self.arenas.renewal(shard) for shard in shards) else None

    async def _wait_for(self, shards: Sequence[int], scope: Scope, receive: Receive, send: Send) -> None:
        await self.arenas.renewed(shards)
        await self.app(scope, receive, send)

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self._opens_s and any(cell.get("generation") == 0 for cell in self.shards):
            await asyncio.sleep(_POLL_S)
        if self._learning is None:
            self._learning = asyncio.create_task(self.learn())
        await asyncio.shield(self._learning)
        self._is_open = True
        await self.app(scope, receive, send)
