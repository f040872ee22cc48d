"""Admission of requests (api §0.10): the keys of this frontend, the limits of each key, CORS, and pages of other sites.

`core/keys.py` says what a key is and allows. SIGHUP makes the frontend read its keys again (`KeyReload`).
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from topics.core.errors import TopicsError, forbidden, invalid, throttled
from topics.core.keys import ANYONE, ApiKey, KeyRing, KeyScope
from topics.frontend.asgi import ADMITTED, AsgiApp, Scope
from topics.frontend.entry.responses import error_body
from topics.frontend.entry.wire import parameter
from topics.log import get_logger
from topics.settings import Settings, SettingsError, is_loopback, read_keys
from topics.shm.control import Cell, ProcessCell
from topics.shm.quotas import Counted, KeyCounts

RETRY_S: Final = 1.0
"""Time between attempts to read new keys. Meanwhile this frontend accepts the old ones, which may be revoked."""
_LIMIT_NAMES: Final = {Counted.STREAMS: "sse_connections_per_key", Counted.REQUESTS: "inflight_per_key"}
_CALLER: Final = "topics.caller"  # name in the ASGI scope of an admitted request's key
LEADER_REQUIRED: Final = (b"topics-leader", b"required")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
_REQUEST_HEADERS: Final = (
    "Authorization",
    "Cache-Control",
    "Content-Encoding",
    "Idempotency-Key",
    "Last-Event-ID",
    "Topics-Leader",
)

log = get_logger()


class KeyLimits:
    """Limits how many streams and requests each key has open. Each `acquire` needs one `release`."""

    def __init__(self, counts: KeyCounts, settings: Settings) -> None:
        self._counts = counts
        self._most = {
            Counted.STREAMS: settings.max_sse_connections_per_key,
            Counted.REQUESTS: settings.max_inflight_per_key,
        }

    def acquire(self, key: ApiKey, what: Counted) -> None:
        """Count one more. Raise `429 throttled` at the limit."""
        most = self._most[what]
        if most and key.digest and not self._counts.claim(key.digest, what, most):
            limit = _LIMIT_NAMES[what]
            raise throttled(
                f"this key has {most} open, its limit: wait for one to end or raise TOPICS_MAX_{limit.upper()}",
                limit=f"max_{limit}",
                max=most,
            )

    def release(self, key: ApiKey, what: Counted) -> None:
        if self._most[what] and key.digest:
            self._counts.release(key.digest, what)


class Access:
    """Owns the keys that this frontend accepts, and decides what each may do. With an empty ring none is needed."""

    def __init__(
        self, ring: KeyRing, limits: KeyLimits, why_not_leader: Callable[[], TopicsError | None] = lambda: None
    ) -> None:
        """`why_not_leader` returns the error for requests that change anything if the service only reads, else None."""
        self._ring = ring
        self.limits = limits
        self._why_not_leader = why_not_leader
        self._leads = True
        self._on_change: dict[Callable[[], None], None] = {}

    @property
    def on(self) -> bool:
        """True if requests need a key."""
        return bool(self._ring.keys)

    @property
    def serial(self) -> int:
        return self._ring.serial

    def replace(self, ring: KeyRing) -> None:
        """Accept these keys from now on. Tell the listeners, which end streams that are no longer allowed."""
        self._ring = ring
        self._tell()

    def look_who_leads(self) -> None:
        """Tell the listeners, too, when another service has taken over from this one."""
        leads = self._why_not_leader() is None
        if leads != self._leads:
            self._leads = leads
            self._tell()

    def _tell(self) -> None:
        for listener in list(self._on_change):
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` when something may not be allowed any more, until `forget`."""
        self._on_change[listener] = None

    def forget(self, listener: Callable[[], None]) -> None:
        del self._on_change[listener]

    def authenticate(self, scope: Scope, *, token: bool = False) -> ApiKey:
        """Return the request's key; `token` accepts it as `?token=`, too. Raise `401 unauthorized`."""
        keys = self._ring
        if not keys.keys:
            return ANYONE
        presented = _bearer(scope["headers"])
        if presented is None and token:
            text = parameter(QueryParams(scope["query_string"]), "token")
            presented = None if text is None else text.encode()
        if presented is None:
            raise TopicsError("unauthorized", "this needs a key: send Authorization: Bearer <key>")
        key = keys.find(presented)
        if key is None:
            raise TopicsError("unauthorized", "the key is not one that is valid here")
        return key

    def admit(self, scope: Scope, needed: KeyScope, names: Iterable[str] = ()) -> None:
        """Check that the request's key has these scopes and covers these names, and count the request. `caller_of` then
        returns the key. Raise `401 unauthorized`, `403 forbidden`, `429 throttled` or `503 not_leader`.
        """
        key = self.authenticate(scope)
        key.require(needed, names)
        self.require_leader(needed, scope["headers"])
        if _CALLER not in scope:
            self.limits.acquire(key, Counted.REQUESTS)
            if ADMITTED in scope:
                scope[ADMITTED]()
        scope[_CALLER] = key

    def require_leader(self, needed: KeyScope, headers: Collection[tuple[bytes, bytes]] = ()) -> None:
        """In a service that only reads, raise `503 not_leader` for requests that change anything, and for those whose
        header asks for a leader.
        """
        error = self._why_not_leader()
        if error is not None and (needed not in KeyScope.READ or LEADER_REQUIRED in headers):
            raise error

    def release(self, scope: Scope) -> None:
        """End a request, whether or not it was admitted."""
        key = scope.get(_CALLER)
        if key is not None:
            self.limits.release(key, Counted.REQUESTS)

    def find_key(self, digest: bytes) -> ApiKey | None:
        """Return the accepted key with this digest; None if it is no longer valid."""
        return self._ring.with_digest(digest) if self._ring.keys else ANYONE

    def why_not(self, digest: bytes, needed: KeyScope, names: Iterable[str], of_leader: bool) -> TopicsError | None:
        """Return why a stream must end whose key has this digest. None while the key is valid, has these scopes and
        covers these names, and (for a stream `of_leader`) this service leads.
        """
        key = self.find_key(digest)
        if key is None or not key.has(needed) or not all(map(key.covers, names)):
            return forbidden("the key of this stream is no longer valid for it")
        return self._why_not_leader() if of_leader else None


def caller_of(scope: Scope) -> ApiKey:
    """Return the key of an admitted request."""
    key: ApiKey = scope[_CALLER]
    return key


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key in `Authorization: Bearer`, which has one value (`check_repeated`); None without one."""
    scheme, _, key = dict(headers).get(b"authorization", b"").partition(b" ")
    return key.strip(b" ") if scheme.lower() == b"bearer" else None


class KeyReload:
    """Reads the keys again at SIGHUP. `header` has the newest serial; `cell` tells which one this frontend accepts."""

    def __init__(self, settings: Settings, access: Access, header: Cell, cell: ProcessCell) -> None:
        self._settings = settings
        self._access = access
        self._header = header
        self._cell = cell
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._logged_problems: list[str] = []
        cell.set("keys_serial", access.serial)

    def request(self) -> None:
        """Read the keys soon, and again until this frontend accepts the newest ones. Can be repeated."""
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
        # Taken before the file is read, so the keys are at least as new as this serial says.
        serial = self._header.get("keys_serial")
        try:
            ring = await asyncio.to_thread(read_keys, self._settings, serial)
        except SettingsError as error:
            if error.problems != self._logged_problems:
                log.error("keys not reloaded, the former ones stay", problems=error.problems)
            self._logged_problems = error.problems
            return False
        if self._logged_problems:
            log.info("keys reloaded after a failure")
            self._logged_problems = []
        self._access.replace(ring)
        self._cell.set("keys_serial", serial)
        return True


class Cors(CORSMiddleware):
    """Lets web pages of `origins` call `app`. They send keys in a header, never credentials, so `*` is safe."""

    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=_REQUEST_HEADERS,
            expose_headers=("Retry-After",),
            max_age=600,
        )

    def lines_for(self, origin: bytes) -> bytes:
        """Return the header lines by which a page of `origin` may read an answer that is not the app's."""
        headers = MutableHeaders({"vary": "Origin"} | (self.simple_headers if origin else {}))
        if origin.decode("latin-1") in self.allow_origins:
            headers["access-control-allow-origin"] = origin.decode("latin-1")
        return b"".join(b"%b: %b\r\n" % line for line in headers.raw)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return 204, or the refusal in the envelope of api §0.6."""
        answer = super().preflight_response(request_headers)
        headers = {name: answer.headers[name] for name in answer.headers if not name.startswith("content-")}
        if answer.status_code == 200:
            return Response(status_code=204, headers=headers)
        refusal = invalid(bytes(answer.body).decode())
        return Response(error_body(refusal), refusal.status, headers, media_type="application/json")


_SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
PROBES: Final = frozenset(("/v0/health", "/healthz", "/v0/ready", "/readyz"))
_OWN_PAGES: Final = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for a page of this service, and for a typed address."""
_HOSTS_KEPT_MAX: Final = 64


class Pages:
    """Checks the hosts and origins of requests. It owns the lists of those that may call this frontend.

    A browser lets any page send requests to any address, also to this machine. Refused with 403 are:

        anything but a safe GET; WebSockets; /work;    from a page of another origin that is not in TOPICS_CORS_ORIGINS
        /segments, which may make a pin
        anything but a probe, while no keys are set    under a host name that is not this machine's: a page may give
                                                       its own name this machine's address (DNS rebinding)

    The first row does not concern programs other than browsers: they do not send these headers.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self._access = access
        self._origins = frozenset(origin.lower().encode("latin-1") for origin in settings.cors_origins or ())
        self._names = frozenset(name.lower() for name in settings.allowed_hosts or ())
        self._any_address = not is_loopback(settings.host)
        self._hosts: set[bytes] = set()  # host headers that have passed the check

    def check(self, scope: Scope) -> None:
        """Raise `403 forbidden` for a request that another site's page may have sent."""
        host: bytes | None = None
        site: bytes | None = None
        origins: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"host" or name == b":authority":
                host = value
            elif name == b"origin":
                origins.append(value)
            elif name == b"sec-fetch-site":
                site = value
        if host is not None and host not in self._hosts and not self._access.on and scope["path"] not in PROBES:
            self._check_host(host)
        if (origins or site is not None) and _acts(scope) and not self._is_own_page(host, origins, site):
            shown = origins[0][:200].decode("latin-1") if origins else "another site"
            raise forbidden(f"pages of {shown!r} may not do this: add their origin to TOPICS_CORS_ORIGINS")

    def _check_host(self, host: bytes) -> None:
        text = host.decode("latin-1").lower()
        name = host_name(text)
        if not self._is_own(name):
            raise forbidden(
                f"host {text[:200]!r} is not served without API keys: add it to TOPICS_ALLOWED_HOSTS, or set keys",
                host=text[:200],
            )
        if len(self._hosts) < _HOSTS_KEPT_MAX:
            self._hosts.add(host)

    def _is_own(self, name: str) -> bool:
        if name == "localhost" or name.endswith(".localhost") or "*" in self._names or name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # An address in digits needs no name lookup, so it cannot be rebound.
        return address.is_loopback or self._any_address

    def _is_own_page(self, host: bytes | None, origins: list[bytes], site: bytes | None) -> bool:
        if b"*" in self._origins:
            return True
        if not origins:
            return site in _OWN_PAGES
        origin = origins[0].lower()
        is_own = host is not None and origin.partition(b"://")[2] == host.lower()
        return len(origins) == 1 and (is_own or origin in self._origins)


def _acts(scope: Scope) -> bool:
    """Return True if a request may change anything. A look at segments may make a pin."""
    is_safe = scope["type"] != "websocket" and scope["method"] in _SAFE_METHODS
    return not is_safe or scope["path"].endswith(("/work", "/segments"))


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
