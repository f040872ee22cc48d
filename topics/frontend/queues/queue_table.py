"""The operations on queues and named cursors (api §9, §10), and what their answers look like."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from topics.core.job import State
from topics.core.keys import KeyScope
from topics.frontend.answer_types import DiffAnswer, Ms, Performance, Seq
from topics.frontend.operations import EVENTS, JSON, Answer, Operation, Query
from topics.frontend.queues.cursor_routes import CursorBody, CursorRoutes, ReadBody
from topics.frontend.queues.peek import PeekBody, PeekRoute
from topics.frontend.queues.queue import ClaimBody, ExtendBody, JobsBody, NackBody, QueueRoutes, RedriveBody
from topics.frontend.queues.work import WorkRoutes
from topics.shm.durations import Route

_TOPIC: Final = "/v0/topics/{topic}"
_CURSOR: Final = "/v0/topics/{topic}/cursors/{cursor}"
_LOST: Final = ("shard_unavailable", "storage_unavailable")
_JOBS: Final = ("topic_not_found", "not_a_queue", *_LOST)
_COUNT: Final = {"type": "integer", "minimum": 0}


class JobAnswer(msgspec.Struct):
    """A job, and the lease that its consumer has on it until `deadline`."""

    seq: Seq = msgspec.field(name="$seq")
    ts: Ms = msgspec.field(name="$ts")
    lease_id: str
    deadline: Ms
    deliveries: int
    data: Any
    node: str | msgspec.UnsetType = msgspec.field(name="$node", default=msgspec.UNSET)
    tag: str | msgspec.UnsetType = msgspec.field(name="$tag", default=msgspec.UNSET)
    meta: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ClaimAnswer(msgspec.Struct):
    """Ascending by seq; `ready` are left."""

    topic: str
    claimed: list[JobAnswer]
    count: int
    ready: int
    performance: Performance


class AckAnswer(msgspec.Struct):
    """`skipped` were not leased to this node, or not by these leases."""

    topic: str
    acked: int
    skipped: list[Seq]
    ready: int
    in_flight: int
    performance: Performance


class NackAnswer(msgspec.Struct):
    """As of an ack."""

    topic: str
    nacked: int
    skipped: list[Seq]
    ready: int
    in_flight: int
    performance: Performance


class ExtendAnswer(msgspec.Struct):
    """`deadlines` by seq."""

    topic: str
    extended: int
    skipped: list[Seq]
    deadlines: dict[str, Ms]
    performance: Performance


class RedriveAnswer(msgspec.Struct):
    """So many dead letters are jobs again; `next_from_seq` only where it stopped before the end."""

    topic: str
    source: str = msgspec.field(name="from")
    redriven: int
    performance: Performance
    next_from_seq: Seq | msgspec.UnsetType = msgspec.UNSET


class PeekedJob(msgspec.Struct):
    """A job and where it stands: `node` has it until `deadline`; it waits until `deliver_at`, or for others with its
    `order_key`.
    """

    seq: Seq = msgspec.field(name="$seq")
    ts: Ms = msgspec.field(name="$ts")
    state: State
    deliveries: int
    data: Any
    node: str | msgspec.UnsetType = msgspec.UNSET
    deadline: Ms | msgspec.UnsetType = msgspec.UNSET
    deliver_at: Ms | msgspec.UnsetType = msgspec.UNSET
    order_key: str | msgspec.UnsetType = msgspec.UNSET
    writer: str | msgspec.UnsetType = msgspec.field(name="$node", default=msgspec.UNSET)
    tag: str | msgspec.UnsetType = msgspec.field(name="$tag", default=msgspec.UNSET)
    meta: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class PeekAnswer(msgspec.Struct):
    """Ascending by seq; `next_from_seq` only where there may be more, behind that."""

    topic: str
    jobs: list[PeekedJob]
    count: int
    performance: Performance
    next_from_seq: Seq | msgspec.UnsetType = msgspec.UNSET


class CursorState(msgspec.Struct, kw_only=True):
    """`persisted_seq` is what a crash would leave of `cursor_seq`."""

    cursor: str
    consistency: Literal["strictly_at_once", "at_least_once"]
    persist_every: int
    cursor_seq: Seq
    persisted_seq: Seq


class CursorAnswer(CursorState, kw_only=True):
    """One cursor of a topic."""

    topic: str
    performance: Performance


class PutCursorAnswer(CursorAnswer, kw_only=True):
    """A cursor was made or changed."""

    created: bool


class CursorListAnswer(msgspec.Struct):
    """A page, ordered by name; `next_cursor` only when there are more."""

    topic: str
    cursors: list[CursorState]
    performance: Performance
    next_cursor: str | msgspec.UnsetType = msgspec.UNSET


class DeleteCursorAnswer(msgspec.Struct):
    """`deleted` is false when there was none."""

    topic: str
    cursor: str
    deleted: bool
    performance: Performance


class ReadCursorAnswer(DiffAnswer, kw_only=True):
    """As a diff; the cursor stands at `cursor_seq` now."""

    cursor: str
    cursor_seq: Seq


def queue_operations(queue: QueueRoutes, peek: PeekRoute, work: WorkRoutes) -> list[Operation]:
    """Jobs and their leases."""
    both, write = KeyScope.READ | KeyScope.WRITE, KeyScope.WRITE
    jobs = (*_JOBS, "batch_too_large")
    return [
        Operation(
            "POST",
            f"{_TOPIC}/claim",
            queue.claim,
            Route.CLAIM,
            both,
            "queues",
            "Lease jobs",
            {200: _json("Jobs, or none", ClaimAnswer)},
            _JOBS,
            body=ClaimBody,
        ),
        Operation(
            "POST",
            f"{_TOPIC}/ack",
            queue.ack,
            Route.ACK,
            write,
            "queues",
            "Jobs are done",
            {200: _json("Which of them", AckAnswer)},
            jobs,
            body=JobsBody,
        ),
        Operation(
            "POST",
            f"{_TOPIC}/nack",
            queue.nack,
            Route.NACK,
            write,
            "queues",
            "Give jobs back",
            {200: _json("Which of them", NackAnswer)},
            jobs,
            body=NackBody,
        ),
        Operation(
            "POST",
            f"{_TOPIC}/extend",
            queue.extend,
            Route.EXTEND,
            write,
            "queues",
            "Keep jobs for longer",
            {200: _json("Until when", ExtendAnswer)},
            jobs,
            body=ExtendBody,
        ),
        Operation(
            "POST",
            f"{_TOPIC}/redrive",
            queue.redrive,
            Route.REDRIVE,
            KeyScope.ADMIN,
            "queues",
            "Bring dead letters back",
            {200: _json("How many", RedriveAnswer)},
            (*_JOBS, "topic_full", "record_too_large"),
            body=RedriveBody,
        ),
        Operation(
            "POST",
            f"{_TOPIC}/peek",
            peek.peek,
            Route.PEEK,
            KeyScope.READ,
            "queues",
            "Look at jobs without claiming them",
            {200: _json("Jobs, and where each stands", PeekAnswer)},
            _JOBS,
            body=PeekBody,
            body_required=False,
        ),
        Operation(
            "GET",
            f"{_TOPIC}/work",
            work.work,
            None,
            # It takes its key from the query as well, so it looks for it itself.
            None,
            "queues",
            "A stream that keeps a worker in jobs",
            {200: Answer("Events: job, topic-deleted, error", {EVENTS: None})},
            (*_JOBS, "not_acceptable"),
            query=(
                Query("node", {"type": "string", "minLength": 1}, "who works; required"),
                Query("max", _COUNT | {"default": 1}, "jobs at any time"),
                Query("lease_ms", _COUNT, "instead of the queue's own"),
                Query("heartbeat_ms", _COUNT | {"default": 15_000}, "a comment when nothing else was sent for so long"),
                Query("token", {"type": "string"}, "the key, for who cannot send a header"),
            ),
        ),
    ]


def cursor_operations(cursors: CursorRoutes) -> list[Operation]:
    """Read positions that the server keeps."""
    missing = ("topic_not_found", "cursor_not_found", *_LOST)
    return [
        Operation(
            "GET",
            f"{_TOPIC}/cursors",
            cursors.list_all,
            Route.OTHER_CURSOR,
            KeyScope.READ,
            "cursors",
            "List the cursors of a topic by name",
            {200: _json("A page of cursors", CursorListAnswer)},
            ("topic_not_found", *_LOST),
            query=(
                Query("page_size", _COUNT | {"default": 100}, "at most 1000"),
                Query("cursor", {"type": "string"}, "next_cursor of the page before"),
            ),
        ),
        Operation(
            "GET",
            _CURSOR,
            cursors.get,
            Route.OTHER_CURSOR,
            KeyScope.READ,
            "cursors",
            "Where a cursor is",
            {200: _json("The cursor", CursorAnswer)},
            missing,
        ),
        Operation(
            "PUT",
            _CURSOR,
            cursors.put,
            Route.OTHER_CURSOR,
            KeyScope.WRITE,
            "cursors",
            "Make a cursor, or change or move it",
            {200: _json("It was there", PutCursorAnswer), 201: _json("It was made", PutCursorAnswer)},
            ("topic_not_found", *_LOST),
            body=CursorBody,
            body_required=False,
        ),
        Operation(
            "DELETE",
            _CURSOR,
            cursors.delete,
            Route.OTHER_CURSOR,
            KeyScope.DELETE,
            "cursors",
            "Delete a cursor",
            {200: _json("It is gone, or never was", DeleteCursorAnswer)},
            _LOST,
        ),
        Operation(
            "POST",
            f"{_CURSOR}/read",
            cursors.read,
            Route.READ_CURSOR,
            KeyScope.READ,
            "cursors",
            "Read on, and move the cursor",
            {200: _json("A page of records", ReadCursorAnswer)},
            missing,
            body=ReadBody,
            body_required=False,
        ),
    ]


def _json(about: str, body: Any) -> Answer:
    return Answer(about, {JSON: body})
