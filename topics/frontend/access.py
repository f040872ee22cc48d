"""Who asks, and whether they may (api §0.10).

What a key is and allows says `core/keys.py`; this is where requests carry one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from starlette.datastructures import QueryParams

from topics.core.errors import TopicsError
from topics.core.keys import ANYONE, ApiKey, KeyRing, KeyScope
from topics.frontend.asgi import Scope
from topics.frontend.key_limits import KeyLimits
from topics.shm.cap import Counted

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
        """Whether requests need a key."""
        return bool(self._ring.keys)

    @property
    def serial(self) -> int:
        """Of the ring that counts."""
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
        """Lets a request pass whose key has these scopes and covers these names; `caller_of` tells of it after."""
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
        """What counts now for who was admitted with the key of this digest; None when that is no longer valid."""
        return self._ring.with_digest(digest) if self._ring.keys else ANYONE

    def still_allows(self, digest: bytes, needed: KeyScope, names: Iterable[str]) -> bool:
        """Whether the key of this digest is valid now, with these scopes and over these names."""
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
