"""`/v0/stage` and `/v0/txn`: atomic commits over topics, for sinks that may send a batch again (api §6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from topics.api import answers
from topics.api.requests import AppendBody, CommitBody, DropBody, StageBody
from topics.core.config import check_room
from topics.core.errors import TopicsError, invalid
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name
from topics.frontend.entry import wire
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.routes import operations as api
from topics.frontend.routes.append import AppendRoute
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.shards.arenas import Slices
from topics.frontend.txn.coordinator import TxnCoordinator
from topics.settings import Settings
from topics.shm.durations import Route
from topics.shm.quotas import Quota
from topics.storage.frame import LaidOut

STAGES_MAX: Final = 10_000
"""Stages that one commit may have at most."""
TXN_MAX_CHARS: Final = 256
_STAGE_PATH: Final = "/v0/stage/{topic}"
_SINK_PATH: Final = "/v0/txn/{sink}"
_STAGED: Final = api.ok("They are on the disk, and invisible", answers.StageAnswer)
_STAGE_CODES: Final = ("batch_too_large", "record_too_large", "topic_full", *api.LOST)
_COMMITTED: Final = api.ok("All of it is visible, now or from an earlier commit", answers.CommitAnswer)
_COMMIT_CODES: Final = ("batch_too_large", "record_too_large", "not_found", "topic_full", *api.LOST)
_FORGOTTEN: Final = api.ok("It is forgotten", answers.ForgetSinkAnswer)


@dataclass(eq=False)
class TxnRoutes:
    """The requests about stages and sinks, a method for each."""

    append: AppendRoute
    coordinator: TxnCoordinator
    reader: TopicReader
    evicted: Callable[[TopicRef], Awaitable[TopicRef]]
    """Returns a topic with exact floors, count and bytes."""
    settings: Settings
    topics: Quota
    total_bytes: Quota
    require_leader: Callable[[KeyScope], None]

    @api.json_route("POST", _STAGE_PATH, Route.OTHER, KeyScope.WRITE, "transactions")
    @api.describe("Keep records back until their transaction is committed", _STAGED, *_STAGE_CODES)
    @api.takes(body=StageBody)
    async def stage(self, request: ApiRequest) -> JsonReply:
        """Keep the records of one write back, on the disk and invisible. Every call makes another stage."""
        topic = request.topic
        body = await request.body(self.settings.max_body_bytes)
        txn, records = await asyncio.to_thread(self._read, body)
        topic_id = self._check_topic(topic)
        self.topics.require(not topic_id)
        self.total_bytes.require(await self._check_room(topic, records.count, len(records.buffer)))
        stage = await asyncio.to_thread(self.coordinator.stages.make, topic, txn, records, topic_id)
        size = {"count": records.count, "bytes": len(records.buffer)}
        ttl_ms = self.coordinator.stages.ttl_ms
        return JsonReply({"topic": topic, "txn": txn, "stage": stage, **size, "expires_in_ms": ttl_ms})

    @api.json_route("DELETE", _STAGE_PATH, Route.OTHER, KeyScope.WRITE, "transactions")
    @api.describe(
        "Drop what a transaction keeps back in a topic", api.ok("They are gone", answers.DropStagesAnswer), *api.LOST
    )
    @api.takes(
        api.Query("txn", {"type": "string", "minLength": 1, "maxLength": TXN_MAX_CHARS}, "the transaction"),
        body=DropBody,
        body_required=False,
    )
    async def drop(self, request: ApiRequest) -> JsonReply:
        """Drop a transaction's stages in one topic, but not those of a decided batch. `txn` is in query or body."""
        topic = request.topic
        body = await request.body(self.settings.max_command_bytes)
        asked = wire.parameter(request.query, "txn")
        txn = _checked_txn(wire.decode_as(DropBody, body).txn if body else asked or "")
        if asked not in (None, txn):
            raise invalid("?txn is not the txn of the body: give one of the two", field="txn")
        dropped = await self.coordinator.drop(await asyncio.to_thread(self.coordinator.stages.of_txn, topic, txn))
        return JsonReply({"topic": topic, "txn": txn, "dropped": dropped})

    @api.json_route("POST", f"{_SINK_PATH}/commit", Route.OTHER, KeyScope.WRITE, "transactions")
    @api.describe("Publish all stages of a batch, once for each batch of the sink", _COMMITTED, *_COMMIT_CODES)
    @api.takes(body=CommitBody)
    async def commit(self, request: ApiRequest) -> JsonReply:
        """Publish all stages and remember the batch, or do neither. A batch that was committed is a duplicate."""
        sink = _sink(request)
        given = await request.decoded(CommitBody, self.settings.max_command_bytes)
        if len(given.stages) > STAGES_MAX:
            raise TopicsError("batch_too_large", f"a commit has at most {STAGES_MAX} stages, not {len(given.stages)}")
        if len(set(given.stages)) < len(given.stages):
            raise invalid("stages names one stage twice", field="stages")
        last_batch = await self.coordinator.last_batch(sink)
        # The stages of a committed batch are removed, so they are not looked for.
        duplicate, records = True, 0
        if last_batch is None or last_batch < given.batch:
            heads = await asyncio.to_thread(self.coordinator.stages.heads, given.stages, sink, given.batch)
            sums: dict[str, tuple[int, int]] = {}
            meant_for: dict[str, set[int]] = {}
            for topic, count, size_bytes, topic_id in heads.values():
                meant_for.setdefault(topic, set()).add(topic_id)
                counted, counted_bytes = sums.get(topic, (0, 0))
                sums[topic] = counted + count, counted_bytes + size_bytes
            request.caller.require(KeyScope.WRITE, sums)
            slices, new, growth_bytes = Slices(), 0, 0
            for topic, (count, size_bytes) in sums.items():
                topic_id = self._check_topic(topic)
                if meant_for[topic] - {0, topic_id}:
                    why = f"there is no stage of topic {topic!r} as it is: it was deleted after a stage was made"
                    raise TopicsError("not_found", why, {"topic": topic})
                new += not topic_id
                growth_bytes += await self._check_room(topic, count, size_bytes)
                await slices.yield_if_over()
            self.topics.require(new)
            self.total_bytes.require(growth_bytes)
            claimed = await asyncio.to_thread(self.coordinator.stages.claim, heads, sink, given.batch)
            stages = [(stage, head.topic) for stage, head in zip(claimed, heads.values(), strict=True)]
            duplicate, last_batch, records = await self.coordinator.commit(sink, given.batch, stages)
            archived = []
            for topic in sums:
                if (ref := self.reader.find(topic)) and ref.config.durability == "archived":
                    archived.append(ref.shard)
                await slices.yield_if_over()
        else:
            archived = self.append.archive_acks.of_topics()  # the topics of a batch that has ended are not known
        await self.append.archive_acks.wait_for(archived)
        return JsonReply(
            {"sink": sink, "batch": given.batch, "last_batch": last_batch, "duplicate": duplicate, "count": records}
        )

    @api.json_route("GET", _SINK_PATH, Route.OTHER, KeyScope.READ, "transactions")
    @api.describe(
        "The latest batch of a sink",
        api.ok("The sink; null when it never committed", answers.SinkAnswer),
        "not_leader",
        *api.LOST,
    )
    async def get(self, request: ApiRequest) -> JsonReply:
        """Return the latest batch, once it is published. Only the leader knows it: a follower has the files of sinks
        from the archive, which may be older than the records that it shows.
        """
        sink = _sink(request)
        self.require_leader(KeyScope.WRITE)
        return JsonReply({"sink": sink, "last_batch": await self.coordinator.last_batch(sink)})

    @api.json_route("DELETE", _SINK_PATH, Route.OTHER, KeyScope.DELETE, "transactions")
    @api.describe("Forget a sink: its next batch may have any number", _FORGOTTEN, "out_of_order", *api.LOST)
    async def forget(self, request: ApiRequest) -> JsonReply:
        sink = _sink(request)
        return JsonReply({"sink": sink, "deleted": await self.coordinator.forget(sink)})

    def _read(self, body: bytes) -> tuple[str, LaidOut]:
        request = self.append.decode(wire.stage_decoder, body)
        if any(wire.has_job_attributes(record) for record in request.records):
            raise invalid("a stage keeps no deliver_at, delay_ms or order_key: append such jobs", field="records")
        return _checked_txn(request.txn), self.append.lay_out(AppendBody(request.records, request.node), len(body))

    def _check_topic(self, topic: str) -> int:
        """Before the decision, refuse a topic in which publishing would fail. Return its id, 0 if it is not there."""
        ref = self.reader.find(topic)
        if ref is not None and ref.config.durability == "ephemeral":
            raise invalid(
                f"topic {topic!r} is ephemeral, so it cannot keep the promise of a transaction", field="topic"
            )
        return 0 if ref is None else ref.view.topic_id

    async def _check_room(self, topic: str, records: int, size_bytes: int) -> int:
        """Refuse records that the topic could not take: after the decision nobody checks that. Return the bytes by
        which the topic grows, less the records that its caps evict.
        """
        ref = self.reader.find(topic)
        if ref is None:
            return size_bytes
        try:
            _check_room(ref, records, size_bytes)
        except TopicsError:
            # Some of the topic's records may have expired, which leaves more room.
            ref = await self.evicted(ref)
            _check_room(ref, records, size_bytes)
        return _growth(ref, records, size_bytes)


def _check_room(ref: TopicRef, records: int, size_bytes: int) -> None:
    if ref.config.discard == "reject":
        check_room(ref.name, ref.config, records, size_bytes, ref.view.records, ref.view.live_bytes)


def _growth(ref: TopicRef, records: int, size_bytes: int) -> int:
    """Return by how many bytes the topic grows, if the records that its caps evict are of mean size."""
    view, config = ref.view, ref.config
    if config.discard == "reject":
        return size_bytes
    if config.cap_records and view.records:
        evicted = min(view.records, max(0, view.records + records - config.cap_records))
        size_bytes = max(0, size_bytes - view.live_bytes * evicted // view.records)
    return min(size_bytes, max(0, config.cap_bytes - view.live_bytes)) if config.cap_bytes else size_bytes


def _sink(request: ApiRequest) -> str:
    return check_topic_name(request.scope["path_params"]["sink"], "sink")


def _checked_txn(txn: str) -> str:
    if not 1 <= len(txn) <= TXN_MAX_CHARS:
        raise invalid(f"txn has 1 to {TXN_MAX_CHARS} characters, not {len(txn)}", field="txn")
    return txn
