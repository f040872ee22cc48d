"""Who asks, and whether they may (api §0.10): the keys of this frontend, what one key may have open, and web pages.

`core/keys.py` says what a key is and allows. Requests carry one, SIGHUP makes the frontend read all of them again, and
`TOPICS_CORS_ORIGINS` says which pages may call the API from a browser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, QueryParams
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from topics.core.errors import TopicsError, invalid
from topics.core.keys import ANYONE, ApiKey, KeyRing, KeyScope
from topics.frontend.asgi import AsgiApp, Scope
from topics.frontend.entry.responses import error_body
from topics.key_sources import read_keys
from topics.log import get_logger
from topics.settings import Settings, SettingsError
from topics.shm.cap import Counted, KeyCounts
from topics.shm.control import Cell, ProcessCell

_NAMES: Final = {Counted.STREAMS: "sse_connections_per_key", Counted.REQUESTS: "inflight_per_key"}


class KeyLimits:
    """The limits of each key. `give_back` returns what `take` granted, once."""

    def __init__(self, counts: KeyCounts, settings: Settings) -> None:
        self._counts = counts
        self._most = {
            Counted.STREAMS: settings.max_sse_connections_per_key,
            Counted.REQUESTS: settings.max_inflight_per_key,
        }

    def take(self, key: ApiKey, what: Counted) -> None:
        """`429 throttled` when the key has as many as it may."""
        most = self._most[what]
        if most and key.digest and not self._counts.claim(key.digest, what, most):
            limit = _NAMES[what]
            raise TopicsError(
                "throttled",
                f"{most} at once are all that a key may have: wait for one to end or raise TOPICS_MAX_{limit.upper()}",
                {"limit": limit, "max": most},
            )

    def give_back(self, key: ApiKey, what: Counted) -> None:
        if self._most[what] and key.digest:
            self._counts.release(key.digest, what)


_CALLER: Final = "topics.caller"
"""Where the ASGI scope has the key of an admitted request."""


class Access:
    """The keys of this frontend. An empty ring means that nobody has to authenticate."""

    def __init__(self, ring: KeyRing, probe_auth: bool, limits: KeyLimits) -> None:
        self._ring = ring
        self.limits = limits
        self._on_change: list[Callable[[], None]] = []
        self.probe_auth = probe_auth

    @property
    def on(self) -> bool:
        """True if requests need a key."""
        return bool(self._ring.keys)

    @property
    def serial(self) -> int:
        """The serial of the ring that counts."""
        return self._ring.serial

    def replace(self, ring: KeyRing) -> None:
        """These keys count from now on; whoever serves one for longer than a request looks again."""
        self._ring = ring
        for listener in self._on_change:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after each `replace`."""
        self._on_change.append(listener)

    def caller(self, scope: Scope, *, token: bool = False) -> ApiKey:
        """The key that a request carries; `token` allows it as `?token=`. `401 unauthorized` for none or another."""
        keys = self._ring
        if not keys.keys:
            return ANYONE
        presented = _bearer(scope["headers"])
        if presented is None and token:
            presented = _token(scope["query_string"])
        if presented is None:
            raise TopicsError("unauthorized", "this needs a key: send Authorization: Bearer <key>")
        key = keys.find(presented)
        if key is None:
            raise TopicsError("unauthorized", "the key is not one that is valid here")
        return key

    def admit(self, scope: Scope, needed: KeyScope, names: Iterable[str] = ()) -> None:
        """Let a request pass whose key has these scopes and covers these names; then `caller_of` returns the key."""
        key = self.caller(scope)
        key.require(needed, names)
        if _CALLER not in scope:
            self.limits.take(key, Counted.REQUESTS)
        scope[_CALLER] = key

    def leave(self, scope: Scope) -> None:
        """The request is over, whether or not it was admitted."""
        key = scope.get(_CALLER)
        if key is not None:
            self.limits.give_back(key, Counted.REQUESTS)

    def key_of(self, digest: bytes) -> ApiKey | None:
        """The key of this digest as it counts now; None when it is no longer valid."""
        return self._ring.with_digest(digest) if self._ring.keys else ANYONE

    def still_allows(self, digest: bytes, needed: KeyScope, names: Iterable[str]) -> bool:
        """Tell whether the key of this digest is valid now, with these scopes and over these names."""
        key = self.key_of(digest)
        return key is not None and key.has(needed) and all(map(key.covers, names))


def caller_of(scope: Scope) -> ApiKey:
    """The key of an admitted request."""
    key: ApiKey = scope[_CALLER]
    return key


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key in `Authorization: Bearer`, None without one. Of two such headers neither is believed."""
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, key = given[0].partition(b" ")
    return key.strip(b" ") if scheme.lower() == b"bearer" else None


def _token(query_string: bytes) -> bytes | None:
    """The first `token` of a query, decoded as a form value."""
    values = QueryParams(query_string).getlist("token")
    return values[0].encode() if values else None


RETRY_S: Final = 1.0
"""The time between attempts while older keys count here than were asked for: one of them may have been revoked."""

_log = get_logger()


class KeyReload:
    """SIGHUP: this frontend reads the keys again. The supervisor has read them before and found them good, but the file
    may have changed since, or be missing for a moment.

    `header` has the serial of the newest ring; `cell` says which one counts here.
    """

    def __init__(self, settings: Settings, access: Access, header: Cell, cell: ProcessCell) -> None:
        self._settings = settings
        self._access = access
        self._header = header
        self._cell = cell
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: list[str] = []
        """The problems that were logged last."""
        cell.set("keys_serial", access.serial)

    def request(self) -> None:
        """Read the keys soon, and once more if that is under way: they may have changed again. A failure is repeated
        until these keys or newer ones count here.
        """
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def _is_behind(self) -> bool:
        return self._access.serial < self._header.get("keys_serial")

    async def _run(self) -> None:
        try:
            while self._wanted.is_set() or self._is_behind:
                self._wanted.clear()
                if not await self._reload() and self._is_behind:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(RETRY_S):
                            await self._wanted.wait()
        finally:
            self._task = None

    async def _reload(self) -> bool:
        # Before the file: what is read later is at least as new as what this serial stands for.
        serial = self._header.get("keys_serial")
        try:
            ring = await asyncio.to_thread(read_keys, self._settings, serial)
        except SettingsError as error:
            if error.problems != self._said:
                _log.error("keys not reloaded, the former ones stay", problems=error.problems)
            self._said = error.problems
            return False
        if self._said:
            _log.info("keys reloaded, which had failed")
            self._said = []
        self._access.replace(ring)
        self._cell.set("keys_serial", serial)
        return True


_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
_REQUEST_HEADERS: Final = ("Authorization", "Cache-Control", "Content-Encoding", "Idempotency-Key", "Last-Event-ID")
_ANSWER_HEADERS: Final = ("Retry-After",)
_MAX_AGE_S: Final = 600


class Cors(CORSMiddleware):
    """`app` for pages of these origins, with our error envelope. Browsers keep the answers from other pages.

    Never with credentials: keys travel in a header that the page itself sets, so `*` is safe.
    """

    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=_REQUEST_HEADERS,
            expose_headers=_ANSWER_HEADERS,
            max_age=_MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return 204, or the refusal in the envelope of api §0.6."""
        answer = super().preflight_response(request_headers)
        headers = {name: answer.headers[name] for name in answer.headers if not name.startswith("content-")}
        if answer.status_code == 200:
            return Response(status_code=204, headers=headers)
        refusal = invalid(bytes(answer.body).decode())
        return Response(error_body(refusal), refusal.status, headers, media_type="application/json")
