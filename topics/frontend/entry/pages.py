"""Protection against web pages of others: a browser lets any page send requests to any address, also to this machine.

    request                                        refused with 403
    anything but a safe GET; /work; WebSocket      from a page of another origin that is not in TOPICS_CORS_ORIGINS
    anything but a probe, while no keys are set    under a host name that is not this machine's: a page may give its
                                                   own name this machine's address (DNS rebinding)

The first row does not concern programs other than browsers: they do not send these headers.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from topics.core.errors import TopicsError
from topics.frontend.asgi import Scope
from topics.frontend.entry.access import Access
from topics.settings import Settings, is_loopback

_SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_WORK: Final = "/work"
"""End of the path of a GET that takes jobs."""
PROBES: Final = frozenset(("/v0/health", "/healthz", "/v0/ready", "/readyz"))
_OWN_PAGES: Final = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for a page of this service, and for a typed address."""
_HOSTS_KEPT_MAX: Final = 64


class Pages:
    """Checks the hosts and origins of requests. It owns the lists of those that may call this frontend."""

    def __init__(self, settings: Settings, access: Access) -> None:
        self._access = access
        self._origins = frozenset(origin.lower().encode("latin-1") for origin in settings.cors_origins or ())
        self._names = frozenset(name.lower() for name in settings.allowed_hosts or ())
        self._any_address = not is_loopback(settings.host)
        self._hosts: set[bytes] = set()
        """Host headers that have passed the check."""

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
            raise TopicsError(
                "forbidden", f"pages of {shown!r} may not do this: add their origin to TOPICS_CORS_ORIGINS"
            )

    def _check_host(self, host: bytes) -> None:
        text = host.decode("latin-1").lower()
        name = host_name(text)
        if not self._is_own(name):
            raise TopicsError(
                "forbidden",
                f"host {text[:200]!r} is not served without API keys: add it to TOPICS_ALLOWED_HOSTS, or set keys",
                {"host": text[:200]},
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
    """Return True if a request may change anything."""
    return scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS or scope["path"].endswith(_WORK)


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
