"""When a request is sent again. Pure: answers and times come in, waits go out.

What may be repeated: everything whose repetition has no further effect (reads, PUT, DELETE, writes with an idempotency
key), and anything that was certainly not carried out: no connection was made, or the service says that it did nothing
(429, `not_ready`, `shutting_down`, `storage_unavailable`). `shard_unavailable` and a broken connection leave it open.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from topics.api.answers import Error
from topics.client.errors import ApiError, ClientError, UnreachableError, api_error

NOT_CARRIED_OUT = frozenset({"throttled", "not_ready", "shutting_down", "storage_unavailable"})
PASSES_BY_WAITING = frozenset(
    ("inflight_per_key", "connections", "body_bytes", "node_bytes", "scrapes", "long_polls", "cursor_reads")
)
"""What is under way, which ends by itself."""


class Retry(msgspec.Struct, frozen=True):
    """For how long a request is repeated, and how long the pauses are: doubled from the first to the longest, each
    drawn from its upper half, but never shorter than `Retry-After`.

    `total_s` has to stay below the topics' `idempotency_window_ms` (120 s unless configured): a repeat after that
    would be a second write.
    """

    total_s: float = 60.0
    pause_first_s: float = 0.05
    pause_max_s: float = 2.0


_decode_error = msgspec.json.Decoder(Error).decode


class Attempts:
    """One request's attempts. `random` gives 0 ≤ x < 1."""

    def __init__(self, retry: Retry, repeatable: bool, what: str, now_s: float) -> None:
        self._retry = retry
        self._repeatable = repeatable
        self._what = what
        self._until_s = now_s + retry.total_s
        self._pause_s = retry.pause_first_s

    def no_answer(self, error: Exception, sent: bool, now_s: float, random: float) -> float:
        """The connection failed, before (`sent` False) or after the request may have left: the pause before the next
        attempt. UnreachableError when there is to be none.
        """
        if sent and not self._repeatable:
            raise UnreachableError(f"{self._what}: {describe(error)}; it may have been carried out") from error
        return self._pause(UnreachableError(f"{self._what}: {describe(error)}"), 0.0, now_s, random)

    def refused(self, status: int, headers: Mapping[str, str], body: bytes, now_s: float, random: float) -> float:
        """An answer outside of 2xx: the pause before the next attempt. ApiError when there is to be none."""
        error = error_of(status, body)
        if status not in (429, 503) or not (self._repeatable or error.code in NOT_CARRIED_OUT):
            raise error
        limit = error.detail.get("limit")
        if limit is not None and limit not in PASSES_BY_WAITING:
            # The other caps on resources (api §11) are not below their limit again for having waited.
            raise error
        return self._pause(error, _asked_for_s(headers, error), now_s, random)

    def _pause(self, error: ClientError, at_least_s: float, now_s: float, random: float) -> float:
        pause_s = max(self._pause_s * (0.5 + random / 2), at_least_s)
        if now_s + pause_s > self._until_s:
            raise error
        self._pause_s = min(self._pause_s * 2, self._retry.pause_max_s)
        return pause_s


def error_of(status: int, body: bytes) -> ApiError:
    """The error of an answer; one that is not in the envelope did not come from the service."""
    try:
        content = _decode_error(body).error
    except msgspec.DecodeError:
        text = body[:200].decode(errors="replace")
        return api_error(status, "unknown", f"an answer that is not of this service: {text!r}", {})
    return api_error(status, content.code, content.message, content.detail or {})


def describe(error: Exception) -> str:
    """An exception of the HTTP library, which may have no text of its own."""
    return str(error) or type(error).__name__


def _asked_for_s(headers: Mapping[str, str], error: ApiError) -> float:
    """What the service asks to wait: the finer of `detail.retry_after_ms` and the header."""
    retry_after_ms = error.detail.get("retry_after_ms")
    if isinstance(retry_after_ms, int):
        return retry_after_ms / 1000
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
