"""Rules for repeats: which requests are sent again, and after which pause.

A request is repeated in two cases. Either a repeat has no further effect (reads, PUT, DELETE, writes with an
idempotency key), or it was certainly not carried out: no connection was made, or the service says that it did nothing
(408, 429, `not_ready`, `shutting_down`, `storage_unavailable` except with cause `archive`). In all other cases it may
have been carried out, also after 502 or 504 from a proxy, which has lost the answer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from topics.api.answers import Error
from topics.client.arguments import Numbers
from topics.client.errors import ApiError, ClientError, ServiceBusyError, ServiceFaultError, UnreachableError, api_error
from topics.client.http import NotSentError

NOT_LEADER: Final = "not_leader"
THROTTLED: Final = "throttled"
NOT_CARRIED_OUT: Final = frozenset(
    ("request_timeout", THROTTLED, "not_ready", "shutting_down", "storage_unavailable", NOT_LEADER)
)
PASSES_BY_WAITING = frozenset(
    ("max_inflight_per_key", "max_connections", "body_bytes", "node_bytes", "scrapes", "long_polls", "cursor_reads")
)
"""Limits on requests and connections in progress. These end by themselves, so waiting helps."""


class Retry(Numbers, frozen=True):
    """The time for repeats of a request, and the pauses between them: doubled from the first to the longest, each drawn
    from its upper half, but never shorter than `Retry-After`.

    `total_s` has to stay below the topics' `idempotency_window_ms` (120 s unless configured): a later repeat would be a
    second write.
    """

    total_s: float = 60.0
    pause_first_s: float = 0.05
    pause_max_s: float = 2.0

    def for_ever(self) -> Retry:
        """Return the same pauses without an end."""
        return msgspec.structs.replace(self, total_s=math.inf)


RETRY: Final = Retry()
UNKNOWN: Final = "unknown"
"""The code of an answer that did not come from a service, but from a proxy, for example."""
STOPPING: Final = "server_shutting_down"
"""The code of the last event of a stream that ends because its service stops."""

_decode_error = msgspec.json.Decoder(Error).decode


class Attempts:
    """The attempts at one request, called `what` in errors. `draw` returns 0 ≤ x < 1."""

    def __init__(
        self,
        retry: Retry,
        repeatable: bool,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._retry = retry
        self._repeatable = repeatable
        self._what = what
        self._clock = clock
        self._draw = draw
        self._until_s = clock() + retry.total_s
        self._pause_s = retry.pause_first_s
        self._may_be_done = False

    def pause_after_announced_end(self) -> float:
        """Return the pause after a stream whose service said that it stops: that is no failure."""
        return self._retry.pause_first_s * (0.5 + self._draw() / 2)

    def pause_after_failure(self, error: Exception) -> float:
        """Return the pause before the next attempt when there was no answer; UnreachableError when there is none."""
        unsent = isinstance(error, NotSentError)
        self._may_be_done |= not unsent
        failure = f"{self._what}: {describe(error)}"
        if self._repeatable or unsent:
            return self._pause(UnreachableError(failure), 0.0)
        return self._pause(UnreachableError(f"{failure}; it may have been carried out"), math.inf)

    def pause_after_refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> float:
        """Return the pause before the next attempt after an answer outside of 2xx; ApiError when there is none."""
        error = error_of(status, body)
        # With cause `archive` the write is in the log; only the archive did not get it in time.
        not_carried_out = error.code in NOT_CARRIED_OUT and error.detail.get("cause") != "archive"
        self._may_be_done |= isinstance(error, ServiceBusyError | ServiceFaultError) and not not_carried_out
        limit = error.detail.get("limit")
        # Waiting does not help against a follower, nor against limits (api §11) on what is stored.
        passes = error.code != NOT_LEADER and (limit is None or limit in PASSES_BY_WAITING)
        again = isinstance(error, ServiceBusyError) and passes and (self._repeatable or not_carried_out)
        return self._pause(error, _asked_for_s(headers, error) if again else math.inf)

    def pause_after_move(self, error: ClientError) -> float:
        """Return the pause before the next attempt once every address of the service was tried."""
        return self._pause(error, 0.0)

    def _pause(self, error: ClientError, at_least_s: float) -> float:
        pause_s = max(self._pause_s * (0.5 + self._draw() / 2), at_least_s)
        if self._clock() + pause_s > self._until_s or pause_s == math.inf:
            error.may_be_done = self._may_be_done
            raise error
        self._pause_s = min(self._pause_s * 2, self._retry.pause_max_s)
        return pause_s


def error_of(status: int, body: bytes) -> ApiError:
    """Return the error of an answer. One without the service's envelope came from something else, a proxy perhaps."""
    try:
        content = _decode_error(body).error
    except msgspec.DecodeError:
        text = body[:200].decode(errors="replace")
        return api_error(status, UNKNOWN, f"the answer did not come from a topics service: {text!r}", {})
    return api_error(status, content.code, content.message, content.detail or {})


def describe(error: Exception) -> str:
    """Return the text of an exception, or the name of its class if it has no text."""
    return str(error) or type(error).__name__


def _asked_for_s(headers: Mapping[str, str], error: ApiError) -> float:
    """Return the pause that the service asks for: `detail.retry_after_ms`, or else the coarser header."""
    retry_after_ms = error.detail.get("retry_after_ms")
    if isinstance(retry_after_ms, int):
        return retry_after_ms / 1000
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
