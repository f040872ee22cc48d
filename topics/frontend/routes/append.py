"""`POST /v0/topics/:t`: the write (api §2). The hottest route has plain ASGI, one decode, one copy into the ring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import msgspec
from starlette.datastructures import QueryParams

from topics.api import answers
from topics.api.requests import AppendBody, RecordBody
from topics.core.config import U64_MAX, parse_config
from topics.core.dead_letters import RESERVED
from topics.core.errors import TopicsError, invalid
from topics.core.idempotency import ProducerTurn, producer_key
from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import read_body
from topics.frontend.entry.responses import elapsed_ms, encode_json, send_json
from topics.frontend.entry.wire import flag
from topics.frontend.routes import long_bodies
from topics.frontend.routes import operations as api
from topics.frontend.routes.long_bodies import BodyT
from topics.frontend.shards.gateway import Gateway
from topics.settings import Settings
from topics.shm.append_messages import AppendOptions, AppendReply, JobAttributes
from topics.shm.control import ProcessCell
from topics.shm.durations import Route
from topics.storage.frame import LaidOut, lay_out, lay_out_plain

KEY_MAX_CHARS: Final = 256
META_MAX_KEYS: Final = 64
ORDER_KEY_MAX_BYTES: Final = 256
TIME_MS_MAX: Final = 1 << 53
SEARCHED_RECORDS_MAX: Final = 64
DECODED_INLINE_BYTES_MAX: Final = 128 << 10
"""A thread decodes a longer write: the shortest records with a tag and meta take 6 ms at 128 KiB."""
ATTRIBUTED_INLINE_MAX: Final = 1000
"""Records with node, tag or meta that are laid out on the event loop; a thread lays out more."""

_APPENDED: Final = api.ok_or_created("Appended", "Appended, and the topic created", answers.AppendAnswer)
_REFUSED: Final = ("batch_too_large", "record_too_large", "topic_not_found", "not_a_queue", "head_mismatch")
_CODES: Final = (*_REFUSED, "fenced", "out_of_order", "topic_full", *api.LOST)

FrameParts = tuple[bytes, bytes, msgspec.Raw, msgspec.Raw | bytes]
"""(node, tag, data, meta) for `lay_out`."""


class AppendRoute:
    """The writes of this frontend: it validates them, lays out their frames, and has the shards commit them."""

    def __init__(self, gateway: Gateway, settings: Settings, cell: ProcessCell) -> None:
        self._gateway = gateway
        self.archive_acks = gateway.archive_acks
        self._settings = settings
        self._cell = cell

    @api.asgi_route("POST", api.TOPIC_PATH, Route.APPEND, KeyScope.WRITE, "records")
    @api.describe("Append records, all or none", _APPENDED, *_CODES)
    @api.takes(api.flag_query("return_seqs", True, "whether the answer lists the seqs"), body=AppendBody)
    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = check_topic_name(scope["path_params"]["topic"]), dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        if len(body) > DECODED_INLINE_BYTES_MAX:
            request, records = await asyncio.to_thread(self._read, body)
            # 64 MB take 5 ms to free. A long write is in memory three times, each of which goes in a turn of its own.
            del body
            await asyncio.sleep(0)
        elif is_long(request := self._decoded(body)):
            records = await asyncio.to_thread(self.lay_out, request, len(body))
        else:
            records = self.lay_out(request, len(body))
        with_seqs = _wants_seqs(scope["query_string"])
        submitted = self.submit(name, request, records, headers.get(b"idempotency-key"), caller_of(scope))
        del request, records
        reply = await submitted
        if reply.durability == "archived":
            await self.archive_acks.wait_for_topic(name)
        self._cell.add("records_in", reply.count)
        await send_json(
            send, headers, 201 if reply.created else 200, b"{%b}" % members(name, reply, with_seqs, started_ns)
        )

    def submit(
        self, name: str, request: AppendBody, records: LaidOut, key_header: bytes | None, caller: ApiKey
    ) -> asyncio.Future[AppendReply]:
        """Send a write (`records` of `lay_out`) behind earlier ones. Raise TopicsError, or fail as `submit_append`."""
        key = _key(request, key_header)
        config, create = None, request.create
        if wire.given(request.config):
            try:
                config = parse_config(wire.decode(wire.config_decoder, bytes(request.config), "config"), name)[0]
                self.archive_acks.check(config)
                if config.dead_letter is not None:
                    caller.require(KeyScope.WRITE, (config.dead_letter,))
            except TopicsError:
                # The config is ignored if the topic exists (api §2).
                if self._gateway.arenas.view(name) is None:
                    raise
                config, create = None, False
        jobs = self._job_attributes(name, request.records)
        has_begun = request.producer is not None and request.producer.begun
        options = AppendOptions(name, create, request.if_head_seq, key, config, jobs, has_begun)
        shard = self._gateway.owner(name)
        return self._gateway.submit_append(shard, options, records, request.disable_backpressure)

    def _read(self, body: bytes) -> tuple[AppendBody, LaidOut]:
        request = self._decoded(body)
        return request, self.lay_out(request, len(body))

    def _decoded(self, body: bytes) -> AppendBody:
        request = self.decode(wire.append_decoder, body)
        if request.if_head_seq is not None and request.if_head_seq > U64_MAX:
            wire.check_counts(request)
        return request

    def decode(self, decoder: msgspec.json.Decoder[BodyT], body: bytes) -> BodyT:
        """Decode a body of records. Call this in a thread for a long one."""
        settings = self._settings
        return long_bodies.decode(decoder, body, settings.max_batch_records, settings.max_record_bytes)

    def lay_out(self, request: AppendBody, body_bytes: int) -> LaidOut:
        """Return the frames of all records, after a check of their limits (api §2.3). The body had `body_bytes`."""
        settings = self._settings
        records = request.records
        if not records:
            raise invalid("records must hold at least one record", field="records")
        if len(records) > settings.max_batch_records:
            raise TopicsError(
                "batch_too_large",
                f"a write has at most {settings.max_batch_records} records, not {len(records)}",
                {"max_batch_records": settings.max_batch_records},
            )
        node = b"" if request.node is None else self._node(request.node, "node")
        # A shorter body has no record that is too long.
        if body_bytes > settings.max_record_bytes:
            self._check_sizes(records)
        if node or _attributed(records):
            return lay_out([self._with_attributes(record, node, at) for at, record in enumerate(records)])
        return lay_out_plain([record.data for record in records])

    def _with_attributes(self, record: RecordBody, batch_node: bytes, at: int) -> FrameParts:
        node = batch_node if record.node is None else self._node(record.node, f"records[{at}].node")
        tag = b""
        if record.tag is not None:
            tag = record.tag.encode()
            if len(tag) > self._settings.max_tag_bytes:
                raise _too_long(f"records[{at}].tag", len(tag), self._settings.max_tag_bytes)
        if not wire.given(record.meta):
            return node, tag, record.data, b""
        field = f"records[{at}].meta"
        meta = wire.decode_meta(record.meta, field)
        if not RESERVED.isdisjoint(meta):
            name = min(RESERVED & meta.keys())
            raise invalid(
                f"{field}.{name} is reserved for the server, which notes there where a record came from: leave it out",
                field=f"{field}.{name}",
            )
        if len(meta) > META_MAX_KEYS:
            raise invalid(f"{field} has {len(meta)} keys, at most {META_MAX_KEYS} are allowed", field=field)
        if len(record.meta) > self._settings.max_meta_bytes:
            raise _too_long(field, len(record.meta), self._settings.max_meta_bytes)
        return node, tag, record.data, record.meta

    def _job_attributes(self, name: str, records: list[RecordBody]) -> JobAttributes:
        """Return the attributes of jobs that are scheduled or ordered (api §9). Only the first and last record of a
        long write to a log are looked at, enough for the log to refuse it: a look at all costs a tenth of the write.
        """
        jobs: JobAttributes = []
        candidates: Iterable[tuple[int, RecordBody]] = enumerate(records)
        if len(records) > SEARCHED_RECORDS_MAX:
            view = self._gateway.arenas.view(name)
            if view is not None and not view.is_queue:
                candidates = ((0, records[0]), (len(records) - 1, records[-1]))
        for at, record in candidates:
            if not wire.has_job_attributes(record):
                continue
            if record.deliver_at is not None and record.delay_ms is not None:
                message = f"records[{at}]: deliver_at and delay_ms exclude each other: give one of them"
                raise invalid(message, field=f"records[{at}].delay_ms")
            deliver_at, delay_ms = record.deliver_at or 0, record.delay_ms or 0
            if (time_ms := max(deliver_at, delay_ms)) > TIME_MS_MAX:
                field = f"records[{at}].{'delay_ms' if delay_ms else 'deliver_at'}"
                raise invalid(f"{field} is at most {TIME_MS_MAX}, not {time_ms}", field=field)
            order_key = record.order_key or ""
            if len(order_key.encode()) > ORDER_KEY_MAX_BYTES:
                raise _too_long(f"records[{at}].order_key", len(order_key.encode()), ORDER_KEY_MAX_BYTES)
            if deliver_at or delay_ms or order_key:
                jobs.append((at, deliver_at, delay_ms, order_key))
        return jobs

    def _node(self, node: str, field: str) -> bytes:
        encoded = node.encode()
        if len(encoded) > self._settings.max_node_bytes:
            raise _too_long(field, len(encoded), self._settings.max_node_bytes)
        return encoded

    def _check_sizes(self, records: list[RecordBody]) -> None:
        max_bytes = self._settings.max_record_bytes
        for at, record in enumerate(records):
            size = len(record.data) + (len(record.meta) if record.meta else 0)
            if size > max_bytes:
                raise TopicsError(
                    "record_too_large",
                    f"records[{at}] has {size} bytes of data and meta, at most {max_bytes} are allowed",
                    {"max_record_bytes": max_bytes},
                )


def is_long(request: AppendBody) -> bool:
    """Return whether a thread lays out these records: each with attributes takes some µs, each of the others none."""
    records = request.records
    return len(records) > ATTRIBUTED_INLINE_MAX and (request.node is not None or bool(_attributed(records)))


def _attributed(records: list[RecordBody]) -> list[RecordBody]:
    return [record for record in records if record.tag is not None or record.node is not None or record.meta]


@lru_cache(maxsize=64)
def _wants_seqs(query: bytes) -> bool:
    """Return the value of `?return_seqs`. Cached, as a writer sends the same query each time."""
    return flag(QueryParams(query), "return_seqs", True)


def _key(request: AppendBody, header: bytes | None) -> bytes:
    """Return the idempotency key, b"" for none. That of the body wins over the header's (api §0.9)."""
    key = request.idempotency_key
    producer = request.producer
    if producer is not None:
        if key is not None or header is not None:
            raise invalid("the n of a producer identifies its write: send no idempotency key with it", field="producer")
        wire.check_counts(producer, "producer.")
        return producer_key(producer.id.encode(), ProducerTurn(producer.epoch, producer.n))
    if key is None:
        if header is None:
            return b""
        try:
            key = header.decode()
        except UnicodeDecodeError:
            raise invalid("the Idempotency-Key header is not UTF-8", field="Idempotency-Key") from None
    if not 1 <= len(key) <= KEY_MAX_CHARS:
        raise invalid(
            f"an idempotency key has 1 to {KEY_MAX_CHARS} characters, not {len(key)}", field="idempotency_key"
        )
    return key.encode()


def _too_long(field: str, length: int, max_bytes: int) -> TopicsError:
    return invalid(f"{field} has {length} bytes, at most {max_bytes} are allowed", field=field)


def members(name: str, reply: AppendReply, with_seqs: bool, started_ns: int) -> bytes:
    """Return the members of the answer to a write, without the braces around them."""
    first, count = reply.first_seq, reply.count
    seqs = f'"seqs":{encode_json(list(range(first, first + count))).decode()},' if with_seqs else ""
    return (
        f'"topic":"{name}","first_seq":{first},"last_seq":{first + count - 1},{seqs}"head_seq":{reply.head_seq},'
        f'"count":{count},"created":{_BOOL[reply.created]},"deduped":{_BOOL[reply.deduped]},'
        f'"durability":"{reply.durability}","performance":{{"server_total_ms":{elapsed_ms(started_ns)},'
        f'"wal_append_ms":{reply.wal_us / 1000},"fsync_ms":{reply.fsync_us / 1000},'
        f'"throttle_wait_ms":{reply.throttled_us / 1000}}}'
    ).encode()


_BOOL: Final = ("false", "true")
