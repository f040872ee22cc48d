"""All error codes of requests, each with its HTTP status (api §0.6). No other code exists."""

from __future__ import annotations

from typing import Any

STATUS_BY_CODE: dict[str, int] = {
    "invalid_request": 400,
    "batch_too_large": 400,
    "record_too_large": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "topic_not_found": 404,
    "router_not_found": 404,
    "cursor_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "request_timeout": 408,
    "topic_exists_incompatible": 409,
    "topic_not_empty": 409,
    "router_cycle": 409,
    "not_a_queue": 409,
    "head_mismatch": 409,
    "fenced": 409,
    "out_of_order": 409,
    "payload_too_large": 413,
    "uri_too_long": 414,
    "unsupported_media_type": 415,
    "expectation_failed": 417,
    "topic_full": 422,
    "upgrade_required": 426,
    "throttled": 429,
    "headers_too_large": 431,
    "internal": 500,
    "not_ready": 503,
    "shutting_down": 503,
    "shard_unavailable": 503,
    "storage_unavailable": 503,
    "not_leader": 503,
    "http_version_not_supported": 505,
}

RETRY_AFTER_S = {
    "throttled": 1,
    "not_ready": 1,
    "shutting_down": 1,
    "shard_unavailable": 1,
    "storage_unavailable": 1,
    "not_leader": 60,
}
"""`Retry-After`, in seconds, of the codes whose answers carry it."""


class TopicsError(Exception):
    """One failed request: a client branches on `code`, shows `message` and computes with `detail`."""

    def __init__(self, code: str, message: str, detail: dict[str, Any] | None = None) -> None:
        assert code in STATUS_BY_CODE, code
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail

    @property
    def status(self) -> int:
        """HTTP status of this error."""
        return STATUS_BY_CODE[self.code]


def invalid(message: str, **detail: Any) -> TopicsError:
    """Return the error of a request that fails however often the client repeats it unchanged."""
    return TopicsError("invalid_request", message, detail or None)


def forbidden(message: str, **detail: Any) -> TopicsError:
    """Return the error of a request that its key, or the page that it comes from, may not make."""
    return TopicsError("forbidden", message, detail or None)


def throttled(message: str, **detail: Any) -> TopicsError:
    """Return the error of a request at a bound (`limit`, `max`), or that finds no room now (`retry_after_ms`)."""
    return TopicsError("throttled", message, detail or None)


def storage_unavailable(message: str, **detail: Any) -> TopicsError:
    """Return the error of a request whose files cannot be read or written now."""
    return TopicsError("storage_unavailable", message, detail or None)


def topic_not_found(name: str) -> TopicsError:
    """Return the error of a request for a topic that does not exist."""
    return TopicsError("topic_not_found", f"topic {name!r} does not exist", {"topic": name})


def not_a_queue(name: str, *, is_new: bool = False) -> TopicsError:
    """Return the error of a queue request for a log, or of a write of jobs that would make a log."""
    message = f"topic {name!r} is a log: only a topic that was created with type 'queue' has jobs"
    if is_new:
        way_out = 'give the config {"type": "queue"}, or make the queue first'
        message = f"topic {name!r} does not exist, and as a log it would have no jobs: {way_out}"
    return TopicsError("not_a_queue", message, {"topic": name})
