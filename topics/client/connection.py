"""How both clients reach a service."""

from __future__ import annotations

from typing import Any

import httpx

from topics.client.attempts import error_of
from topics.client.errors import ClientError, ServiceBusyError

ANSWER_MAX_S = 45.0
"""The longest a long poll may take, and room."""


def may_have_left(error: httpx.TransportError) -> bool:
    """Whether the request may have reached the service before this happened."""
    return not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def refused_stream(status: int, body: bytes) -> Exception:
    """What to raise for an event stream that was not opened: a busy service is as one that was not reached."""
    refusal = error_of(status, body)
    return httpx.RemoteProtocolError(str(refusal)) if isinstance(refusal, ServiceBusyError) else refusal


def http_options(url: str, token: str | None) -> dict[str, Any]:
    """What both clients tell the HTTP library. ClientError when `url` is none of a service."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ClientError(f"url {url!r} is not valid: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientError(f"url {url!r} is not that of a service: it is like http://127.0.0.1:4000")
    headers = {"Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    timeout = httpx.Timeout(ANSWER_MAX_S, connect=5.0)
    return {
        "base_url": url.rstrip("/"),
        "headers": headers,
        "timeout": timeout,
        # A proxy of the environment has no business between a program and its log.
        "trust_env": False,
        # Certificates of authorities take 14 ms to read, for each client, and plain HTTP has no use for them.
        "verify": parsed.scheme == "https",
    }
