"""`/v0/stage` and `/v0/txn`: atomic commits over topics, for sinks that repeat themselves (api §6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.datastructures import QueryParams

from topics.api import answers as answer
from topics.api.requests import AppendBody, CommitBody, DropBody, StageBody
from topics.core.errors import TopicsError, invalid
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import read_body
from topics.frontend.entry.responses import send_object
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.routes.append import AppendRoute
from topics.frontend.routes.operations import LOST, ApiOperation, Binding, Query, json_answer
from topics.frontend.txn.commit_driver import CommitDriver
from topics.settings import Settings
from topics.shm.durations import Route
from topics.storage.frame import LaidOut

STAGES_MAX: Final = 10_000
"""Stages of one commit."""
TXN_MAX_CHARS: Final = 256


class TxnRoutes:
    """The requests about stages and sinks, a method for each."""

    def __init__(
        self,
        append: AppendRoute,
        commits: CommitDriver,
        reader: TopicReader,
        settled: Callable[[TopicRef], Awaitable[TopicRef]],
        settings: Settings,
    ) -> None:
        """`settled(topic)` returns it with exact floors, count and bytes."""
        self._append = append
        self._commits = commits
        self._stages = commits.stages
        self._reader = reader
        self._settled = settled
        self._settings = settings

    async def stage(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Keeps records of one write back, on the disk, invisible; another stage at every call."""
        started_ns = time.perf_counter_ns()
        topic, headers = check_topic_name(scope["path_params"]["topic"]), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        txn, records = await asyncio.to_thread(self._read, body)
        self._check_topic(topic)
        await self._check_room(topic, records.count, len(records.buffer))
        stage = await asyncio.to_thread(self._stages.make, topic, txn, records)
        answer: dict[str, Any] = {
            "topic": topic,
            "txn": txn,
            "stage": stage,
            "count": records.count,
            "bytes": len(records.buffer),
            "expires_in_ms": self._stages.ttl_ms,
        }
        await send_object(send, headers, 200, answer, started_ns)

    async def drop(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Drops the stages of a transaction in one topic; those of a decided batch stay. `txn` is in the query or, as
        clients that send a body with DELETE like it, there.
        """
        started_ns = time.perf_counter_ns()
        topic, headers = check_topic_name(scope["path_params"]["topic"]), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        given = wire.decode_as(DropBody, body).txn if body else QueryParams(scope["query_string"]).get("txn", "")
        txn = _txn(given)
        decided = {stage for _, _, stages in await self._commits.pending() for stage, _topic in stages}
        dropped = await asyncio.to_thread(self._stages.drop_txn, topic, txn, decided)
        answer: dict[str, Any] = {"topic": topic, "txn": txn, "dropped": dropped}
        await send_object(send, headers, 200, answer, started_ns)

    async def commit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Publishes all stages and remembers the batch, or nothing; a batch again is a duplicate."""
        started_ns = time.perf_counter_ns()
        sink, headers = check_topic_name(scope["path_params"]["sink"], "sink"), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = wire.decode_as(CommitBody, body)
        if len(request.stages) > STAGES_MAX:
            raise TopicsError("batch_too_large", f"a commit has at most {STAGES_MAX} stages, not {len(request.stages)}")
        if len(set(request.stages)) < len(request.stages):
            raise invalid("stages names one stage twice", field="stages")
        told = await self._commits.look(sink)
        # Of a batch that was committed the stages are gone: that it was is the answer.
        duplicate, batch, records = True, told, 0
        if told is None or told < request.batch:
            heads = await asyncio.to_thread(self._stages.heads, request.stages)
            sums: dict[str, tuple[int, int]] = {}
            for topic, count, size_bytes in heads.values():
                counted, counted_bytes = sums.get(topic, (0, 0))
                sums[topic] = counted + count, counted_bytes + size_bytes
            caller_of(scope).require(KeyScope.WRITE, sums)
            for topic, (count, size_bytes) in sums.items():
                self._check_topic(topic)
                await self._check_room(topic, count, size_bytes)
            stages = [(stage, head.topic) for stage, head in heads.items()]
            duplicate, batch, records = await self._commits.commit(sink, request.batch, stages)
        answer: dict[str, Any] = {
            "sink": sink,
            "batch": request.batch,
            "last_batch": batch,
            "duplicate": duplicate,
            "count": records,
        }
        await send_object(send, headers, 200, answer, started_ns)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The latest batch of a sink, null for one that never committed."""
        started_ns = time.perf_counter_ns()
        sink = check_topic_name(scope["path_params"]["sink"], "sink")
        answer: dict[str, Any] = {"sink": sink, "last_batch": await self._commits.look(sink)}
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns)

    async def forget(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forgets a sink: its next batch may have any number."""
        started_ns = time.perf_counter_ns()
        sink = check_topic_name(scope["path_params"]["sink"], "sink")
        answer: dict[str, Any] = {"sink": sink, "deleted": await self._commits.forget(sink)}
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns)

    def _read(self, body: bytes) -> tuple[str, LaidOut]:
        request = self._append.decode(wire.stage_decoder, body)
        if any(wire.has_job_attributes(record) for record in request.records):
            raise invalid("a stage keeps no deliver_at, delay_ms or order_key: append such jobs", field="records")
        return _txn(request.txn), self._append.lay_out(AppendBody(request.records, request.node), len(body))

    def _check_topic(self, topic: str) -> None:
        """Refuse what would make publishing fail, before anything is decided."""
        ref = self._reader.find(topic)
        if ref is not None and ref.config.durability == "ephemeral":
            raise invalid(
                f"topic {topic!r} is ephemeral: it has nothing that a transaction could promise", field="topic"
            )

    async def _check_room(self, topic: str, records: int, size_bytes: int) -> None:
        ref = self._reader.find(topic)
        if ref is None or not _is_full(ref, records, size_bytes):
            return
        # Some of what it holds may have expired.
        if _is_full(await self._settled(ref), records, size_bytes):
            raise TopicsError("topic_full", f"topic {topic!r} has no room for {records} records more")


def _is_full(ref: TopicRef, records: int, size_bytes: int) -> bool:
    """Tell whether the topic would refuse so many more."""
    view, config = ref.view, ref.config
    over = config.cap_records and view.records + records > config.cap_records
    over = over or (config.cap_bytes and view.live_bytes + size_bytes > config.cap_bytes)
    return config.discard == "reject" and bool(over)


def _txn(txn: str) -> str:
    if not 1 <= len(txn) <= TXN_MAX_CHARS:
        raise invalid(f"txn has 1 to {TXN_MAX_CHARS} characters, not {len(txn)}", field="txn")
    return txn


_STAGE: Final = "/v0/stage/{topic}"
_SINK: Final = "/v0/txn/{sink}"


def txn_operations(txn: TxnRoutes) -> list[ApiOperation]:
    """Operations on stages and sinks (api §6)."""
    return [
        ApiOperation(
            Binding("POST", _STAGE, txn.stage, Route.OTHER, KeyScope.WRITE, "transactions"),
            "Keep records back until their transaction is committed",
            {200: json_answer("They are on the disk, and invisible", answer.StageAnswer)},
            ("batch_too_large", "record_too_large", "topic_full", *LOST),
            body=StageBody,
        ),
        ApiOperation(
            Binding("DELETE", _STAGE, txn.drop, Route.OTHER, KeyScope.WRITE, "transactions"),
            "Drop what a transaction keeps back in a topic",
            {200: json_answer("They are gone", answer.DropStagesAnswer)},
            LOST,
            body=DropBody,
            body_required=False,
            query=(Query("txn", {"type": "string", "minLength": 1, "maxLength": 256}, "the transaction"),),
        ),
        ApiOperation(
            Binding("POST", f"{_SINK}/commit", txn.commit, Route.OTHER, KeyScope.WRITE, "transactions"),
            "Publish all stages of a batch, once for each batch of the sink",
            {200: json_answer("All of it is visible, now or from an earlier commit", answer.CommitAnswer)},
            ("batch_too_large", "not_found", "topic_full", *LOST),
            body=CommitBody,
        ),
        ApiOperation(
            Binding("GET", _SINK, txn.get, Route.OTHER, KeyScope.READ, "transactions"),
            "The latest batch of a sink",
            {200: json_answer("The sink; null when it never committed", answer.SinkAnswer)},
            LOST,
        ),
        ApiOperation(
            Binding("DELETE", _SINK, txn.forget, Route.OTHER, KeyScope.DELETE, "transactions"),
            "Forget a sink: its next batch may have any number",
            {200: json_answer("It is forgotten", answer.ForgetSinkAnswer)},
            ("out_of_order", *LOST),
        ),
    ]
