"""The client's exceptions: one class for each thing that a caller can do about a failure."""

from __future__ import annotations

from typing import Any

from topics.api.answers import TombstoneAnswer


class ClientError(Exception):
    """Base of everything that this client raises."""

    may_be_done = False
    """True if an attempt may have been carried out: it got no answer, or none that says that nothing was done."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Have exceptions pickled, as pools of processes do, without the constructor, which takes other arguments."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


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
    """409: the state on the server is not what the request assumes."""


class TopicFullError(ApiError):
    """422: a topic that discards nothing is full."""


class ServiceBusyError(ApiError):
    """408, 429 or 503, or the 502 or 504 of a proxy, still at the end of the time for repeats."""


class ServiceFaultError(ApiError):
    """500, or an answer that is none of the API's."""

    may_be_done = True


class NotFiniteError(ClientError, ValueError):
    """A value to be sent is NaN or infinite, which JSON cannot hold. Nothing was sent; `path` is the value's place."""

    def __init__(self, path: str, value: float) -> None:
        super().__init__(f"{path} is {value}, which JSON cannot express: use null, a text, or leave it out")
        self.path = path


class UnreachableError(ClientError):
    """No answer within the time for repeats. A request that cannot be repeated may have been carried out."""


class GapError(ClientError):
    """Records behind the cursor were lost to a cap, a ttl or damage; `tombstone` says which and why, and with which
    cursor to go on (`tombstone.next_from_seq`).
    """

    def __init__(self, topic: str, tombstone: TombstoneAnswer) -> None:
        what = f"records {tombstone.gap_from} to {tombstone.gap_to} are gone (reason: {tombstone.reason})"
        if tombstone.reason == "recreated":  # the gap is of the former topic; the records of this one are there
            what = "it was deleted and made again, and the cursor is of the former one (reason: recreated)"
        way_out = f"read on from {tombstone.next_from_seq}, or pass tombstones='yield'"
        super().__init__(f"topic {topic!r}: {what}; {way_out}")
        self.topic = topic
        self.tombstone = tombstone


_STATUSES: dict[type[ApiError], tuple[int, ...]] = {
    InvalidRequestError: (400, 405, 406, 413, 414, 415, 417, 431),
    NotAllowedError: (401, 403),
    NotFoundError: (404,),
    ConflictError: (409,),
    TopicFullError: (422,),
    ServiceBusyError: (408, 429, 502, 503, 504),
}
_BY_STATUS = {status: kind for kind, statuses in _STATUSES.items() for status in statuses}


def api_error(status: int, code: str, message: str, detail: dict[str, Any]) -> ApiError:
    """Return an error of the class for this status."""
    return _BY_STATUS.get(status, ServiceFaultError)(status, code, message, detail)


class LeaseLostError(ClientError):
    """A job was settled too late: its lease had ended or its stream had broken, so it may be done again."""

    def __init__(self, topic: str, seq: int) -> None:
        super().__init__(
            f"job {seq} of {topic!r} is no longer leased to this worker and may be done again; "
            "make its effect idempotent, or its lease_ms longer"
        )
        self.topic = topic
        self.seq = seq
