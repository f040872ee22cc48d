"""Each call of the API as a value: what to send and how to read the answer. No connection, no clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from topics.client.errors import ServiceFaultError
from topics.client.records import (
    Appended,
    Committed,
    Configured,
    NewRecord,
    Page,
    Producer,
    RecordsDeleted,
    SinkForgotten,
    SinkState,
    Staged,
    StagesDropped,
    TopicDeleted,
    TopicPage,
    TopicState,
)

T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True):
    """`repeatable`: sending it twice does no more than sending it once."""

    method: str
    path: str
    decode: Callable[[bytes], T]
    body: bytes | None = None
    query: dict[str, str] = {}
    repeatable: bool = True

    def read(self, answer: bytes) -> T:
        """The answer as its type; ServiceFaultError when it is none of this service."""
        try:
            return self.decode(answer)
        except msgspec.DecodeError as error:
            text = answer[:200].decode(errors="replace")
            message = f"{self.method} {self.path}: the answer is not of this service: {error}: {text!r}"
            raise ServiceFaultError(200, "unknown", message, {}) from None


class WatchMade(msgspec.Struct, frozen=True):
    """A watch session; `topics` has where each one begins."""

    wid: str
    topics: dict[str, dict[str, int]]


_encode = msgspec.json.Encoder().encode
_appended = msgspec.json.Decoder(Appended).decode
_page = msgspec.json.Decoder(Page).decode
_state = msgspec.json.Decoder(TopicState).decode
_topics = msgspec.json.Decoder(TopicPage).decode
_configured = msgspec.json.Decoder(Configured).decode
_topic_deleted = msgspec.json.Decoder(TopicDeleted).decode
_records_deleted = msgspec.json.Decoder(RecordsDeleted).decode
_staged = msgspec.json.Decoder(Staged).decode
_committed = msgspec.json.Decoder(Committed).decode
_dropped = msgspec.json.Decoder(StagesDropped).decode
_sink = msgspec.json.Decoder(SinkState).decode
_sink_forgotten = msgspec.json.Decoder(SinkForgotten).decode
_watch = msgspec.json.Decoder(WatchMade).decode


def topic_path(topic: str) -> str:
    return f"/v0/topics/{quote(topic, safe='')}"


def new_key() -> str:
    """An idempotency key that nobody else has."""
    return secrets.token_urlsafe(16)


def append(
    topic: str,
    records: Iterable[Any],
    *,
    node: str | None = None,
    idempotency_key: str | None = None,
    create: bool = True,
    config: Mapping[str, Any] | None = None,
    if_head_seq: int | None = None,
    producer: Producer | None = None,
) -> Call[Appended]:
    """One atomic write (api §2). A record is a NewRecord, or the `data` of one that has nothing else."""
    if idempotency_key is None and producer is None:
        idempotency_key = new_key()
    body: dict[str, Any] = {
        "records": [record if isinstance(record, NewRecord) else NewRecord(record) for record in records],
        "create": create,
    }
    optional = {
        "idempotency_key": idempotency_key,
        "producer": producer,
        "node": node,
        "config": config,
        "if_head_seq": if_head_seq,
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    return Call("POST", topic_path(topic), _appended, _encode(body), {"return_seqs": "false"})


def diff(
    topic: str,
    from_seq: int = 0,
    *,
    limit: int = 1000,
    from_ts: int | None = None,
    node: str | list[str] | None = None,
    include_tags: bool = True,
    include_meta: bool = True,
    wait_ms: int = 0,
    max_batch_bytes: int = 8 << 20,
) -> Call[Page]:
    """One page behind a cursor (api §3)."""
    body: dict[str, Any] = {
        "limit": limit,
        "include_tags": include_tags,
        "include_meta": include_meta,
        "wait_ms": wait_ms,
        "max_batch_bytes": max_batch_bytes,
    }
    body |= {"from_seq": from_seq} if from_ts is None else {"from_ts": from_ts}
    if node is not None:
        body["node"] = node
    return Call("POST", f"{topic_path(topic)}/diff", _page, _encode(body))


def put_topic(topic: str, config: Mapping[str, Any]) -> Call[Configured]:
    """Create a topic or replace its whole configuration (api §1)."""
    return Call("PUT", topic_path(topic), _configured, _encode(config))


def get_topic(topic: str, *, touch: bool = True) -> Call[TopicState]:
    return Call("GET", topic_path(topic), _state, query={} if touch else {"touch": "false"})


def list_topics(prefix: str = "", *, cursor: str | None = None, page_size: int = 1000) -> Call[TopicPage]:
    query = {"prefix": prefix, "page_size": str(page_size)}
    return Call("GET", "/v0/topics", _topics, query=query if cursor is None else query | {"cursor": cursor})


def delete_topic(topic: str, *, if_empty: bool = False) -> Call[TopicDeleted]:
    return Call("DELETE", topic_path(topic), _topic_deleted, query={"if_empty": "true"} if if_empty else {})


def delete_records(
    topic: str, *, before_seq: int | None = None, match: str | list[str] | None = None
) -> Call[RecordsDeleted]:
    """Delete below a seq, by tag, or both together (api §5)."""
    body = {name: value for name, value in (("before_seq", before_seq), ("match", match)) if value is not None}
    # A repeat would take what was written since.
    return Call("POST", f"{topic_path(topic)}/delete", _records_deleted, _encode(body), repeatable=match is None)


def watch(positions: Mapping[str, int], options: Mapping[str, Any], *, lenient: bool = False) -> Call[WatchMade]:
    """A watch session over these topics, each from behind its seq (api §7). `lenient`: over those that exist."""
    body = {"topics": {name: {"from_seq": seq} for name, seq in positions.items()}} | dict(options)
    return Call("POST", "/v0/watch", _watch, _encode(body), {"lenient": "true"} if lenient else {})


def stage(topic: str, txn: str, records: Iterable[Any]) -> Call[Staged]:
    """Keep records back under a transaction (api §6). A repeat makes a second stage, which nobody commits."""
    body = {"txn": txn, "records": [one if isinstance(one, NewRecord) else NewRecord(one) for one in records]}
    return Call("POST", f"/v0/stage/{quote(topic, safe='')}", _staged, _encode(body))


def commit(sink: str, batch: int, stages: list[str]) -> Call[Committed]:
    """Publish all stages, once for each batch of the sink (api §6)."""
    return Call("POST", f"{_sink_path(sink)}/commit", _committed, _encode({"batch": batch, "stages": stages}))


def drop_stages(topic: str, txn: str) -> Call[StagesDropped]:
    """Drop what a transaction keeps back in a topic."""
    return Call("DELETE", f"/v0/stage/{quote(topic, safe='')}", _dropped, query={"txn": txn})


def get_sink(sink: str) -> Call[SinkState]:
    return Call("GET", _sink_path(sink), _sink)


def forget_sink(sink: str) -> Call[SinkForgotten]:
    """Its next batch may have any number."""
    return Call("DELETE", _sink_path(sink), _sink_forgotten)


def _sink_path(sink: str) -> str:
    return f"/v0/txn/{quote(sink, safe='')}"
