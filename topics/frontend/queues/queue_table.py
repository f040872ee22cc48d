"""The operations on queues and named cursors (api §9, §10)."""

from __future__ import annotations

from typing import Final

from topics.api import answers as answer
from topics.api.requests import (
    ClaimBody,
    CursorBody,
    ExtendBody,
    JobsBody,
    NackBody,
    PeekBody,
    ReadBody,
    RedriveBody,
)
from topics.core.keys import KeyScope
from topics.frontend.operations import EVENTS, LOST, Answer, Operation, Query, json_answer
from topics.frontend.queues.cursor_routes import CursorRoutes
from topics.frontend.queues.peek import PeekRoute
from topics.frontend.queues.queue import QueueRoutes
from topics.frontend.queues.work import WorkRoutes
from topics.shm.durations import Route

_TOPIC: Final = "/v0/topics/{topic}"
_CURSOR: Final = "/v0/topics/{topic}/cursors/{cursor}"
_JOBS: Final = ("topic_not_found", "not_a_queue", *LOST)
_COUNT: Final = {"type": "integer", "minimum": 0}


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
            {200: json_answer("Jobs, or none", answer.ClaimAnswer)},
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
            {200: json_answer("Which of them", answer.AckAnswer)},
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
            {200: json_answer("Which of them", answer.NackAnswer)},
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
            {200: json_answer("Until when", answer.ExtendAnswer)},
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
            {200: json_answer("How many", answer.RedriveAnswer)},
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
            {200: json_answer("Jobs, and where each stands", answer.PeekAnswer)},
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
    missing = ("topic_not_found", "cursor_not_found", *LOST)
    return [
        Operation(
            "GET",
            f"{_TOPIC}/cursors",
            cursors.list_all,
            Route.OTHER_CURSOR,
            KeyScope.READ,
            "cursors",
            "List the cursors of a topic by name",
            {200: json_answer("A page of cursors", answer.CursorListAnswer)},
            ("topic_not_found", *LOST),
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
            {200: json_answer("The cursor", answer.CursorAnswer)},
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
            {
                200: json_answer("It was there", answer.PutCursorAnswer),
                201: json_answer("It was made", answer.PutCursorAnswer),
            },
            ("topic_not_found", *LOST),
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
            {200: json_answer("It is gone, or never was", answer.DeleteCursorAnswer)},
            LOST,
        ),
        Operation(
            "POST",
            f"{_CURSOR}/read",
            cursors.read,
            Route.READ_CURSOR,
            KeyScope.READ,
            "cursors",
            "Read on, and move the cursor",
            {200: json_answer("A page of records", answer.ReadCursorAnswer)},
            missing,
            body=ReadBody,
            body_required=False,
        ),
    ]
