"""How a request of the client can fail, as types: one class for each thing a caller does about it."""

from __future__ import annotations

from typing import Any

from topics.api.answers import TombstoneAnswer


class ClientError(Exception):
    """Whatever this client raises."""


class ApiError(ClientError):
    """The service refused: `code` to branch on, `message` to read, `detail` to compute with (api §0.6)."""

    def __init__(self, status: int, code: str, message: str, detail: dict[str, Any]) -> None:
        super().__init__(f"{message} ({status} {code})")
        self.status = status
        self.code = code
        self.message = message
        self.detail = detail


class InvalidRequestError(ApiError):
    """400, 405, 406, 413, 415: the request can never succeed as it is."""


class NotAllowedError(ApiError):
    """401, 403: no key, a wrong one, or one that does not cover this."""


class NotFoundError(ApiError):
    """404: no such topic, session, cursor or path."""


class ConflictError(ApiError):
    """409: the state of things is not what the request takes it to be."""


class TopicFullError(ApiError):
    """422: a topic that discards nothing has no room."""


class ServiceBusyError(ApiError):
    """429 or 503, and still so when the time for repeats was over."""


class ServiceFaultError(ApiError):
    """500 and whatever else the service has no name for."""


class UnreachableError(ClientError):
    """No answer within the time for repeats. What was not repeatable may have been carried out."""


class GapError(ClientError):
    """Records between cursor and answer are gone and nobody asked for that; `tombstone` says which and why."""

    def __init__(self, topic: str, tombstone: TombstoneAnswer) -> None:
        super().__init__(
            f"topic {topic!r}: records {tombstone.gap_from} to {tombstone.gap_to} are gone (reason: "
            f"{tombstone.reason}); read on from {tombstone.earliest_seq}, or ask for tombstones as values"
        )
        self.topic = topic
        self.tombstone = tombstone


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequestError,
    401: NotAllowedError,
    403: NotAllowedError,
    404: NotFoundError,
    405: InvalidRequestError,
    406: InvalidRequestError,
    409: ConflictError,
    413: InvalidRequestError,
    414: InvalidRequestError,
    415: InvalidRequestError,
    417: InvalidRequestError,
    422: TopicFullError,
    429: ServiceBusyError,
    431: InvalidRequestError,
    503: ServiceBusyError,
}


def api_error(status: int, code: str, message: str, detail: dict[str, Any]) -> ApiError:
    """The error of this status as its class."""
    return _BY_STATUS.get(status, ServiceFaultError)(status, code, message, detail)


class LeaseLostError(ClientError):
    """A job was settled too late: its lease had ended or its stream had broken, and it may be done once more."""

    def __init__(self, topic: str, seq: int) -> None:
        super().__init__(
            f"job {seq} of {topic!r} is no longer leased to this worker and may be done again; "
            f"make its effect idempotent, or its lease_ms longer"
        )
        self.topic = topic
        self.seq = seq
