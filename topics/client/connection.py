"""The parts of both clients that concern the HTTP library."""

from __future__ import annotations

from typing import Any

import httpx

from topics.client.attempts import Attempts, Retry, error_of
from topics.client.calls import Call
from topics.client.commands import Commands
from topics.client.errors import ClientError, ServiceBusyError

ANSWER_MAX_S = 45.0
"""Time-out of an answer: the longest long poll, and a margin."""
CONNECT_MAX_S = 5.0


class Connection(Commands):
    """The service that a client talks to, and how its requests are sent and repeated. ClientError for a bad `url`."""

    def __init__(self, url: str, token: str | None, retry: Retry) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ClientError(f"url {url!r} is not valid: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ClientError(f"url {url!r} does not name a service: give one like http://127.0.0.1:4000")
        self._url = url.rstrip("/")
        self._retry = retry
        authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": {"Accept-Encoding": "identity"} | authorization,
            "timeout": httpx.Timeout(ANSWER_MAX_S, connect=CONNECT_MAX_S),
            # A proxy from the environment has no business between a program and its log.
            "trust_env": False,
            # Reading the authorities' certificates takes each client 14 ms, and plain HTTP does not use them.
            "verify": parsed.scheme == "https",
        }

    def _attempts(self, method: str, path: str, repeatable: bool = True) -> Attempts:
        return Attempts(self._retry, repeatable, f"{method} {self._url}{path}")


def request_of(call: Call[Any]) -> dict[str, Any]:
    """Return a call as the arguments of a request."""
    headers = {} if call.body is None else {"Content-Type": "application/json"}
    return {"method": call.method, "url": call.path, "content": call.body, "params": call.query, "headers": headers}


def stream_timeout(silence_max_s: float) -> httpx.Timeout:
    """Return the time-outs of an event stream that is taken for dead after this silence."""
    return httpx.Timeout(CONNECT_MAX_S, read=silence_max_s)


def refused_stream(status: int, body: bytes) -> Exception:
    """Return the error of an event stream that was not opened. A busy service counts as one that was not reached."""
    refusal = error_of(status, body)
    return httpx.RemoteProtocolError(str(refusal)) if isinstance(refusal, ServiceBusyError) else refusal
