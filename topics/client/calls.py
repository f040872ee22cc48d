"""Each call of the API as a value: what to send and how to read the answer. No connection, no clock."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from threading import Lock
from typing import Any, Final, Generic, Protocol, TypeVar, cast
from urllib.parse import quote, urlencode

import msgspec

from topics.api import answers, requests, segment_answers
from topics.api.requests import Consistency, NewRecord, ProducerBody, State
from topics.client.arguments import require_known
from topics.client.errors import ClientError, NotFiniteError, ServiceFaultError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PAGE_SIZE: Final = 1000
"""The most entries that a page of a list may have (api §0.8)."""
DIFF_MAX_BYTES: Final = 8 << 20
CONFIG_FIELDS: Final = requests.GivenConfig.__struct_fields__
_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""A number that is not finite, in MessagePack; other bytes may look like one."""


class Call(msgspec.Struct, Generic[T_co], frozen=True):
    """A request, and how its answer is decoded. `repeatable`: sending it twice has the effect of sending it once."""

    method: str
    path: str
    decode: Callable[[bytes], T_co]
    body: bytes | None = None
    query: str = ""
    repeatable: bool = True
    accept: str = ""
    of_leader: bool = False
    """True for a read that needs what was just written: no follower may answer it."""
    waits: bool = False
    """True for a long poll. Like event streams, these do not count in an AsyncClient's REQUESTS_MAX."""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def only_reads(self) -> bool:
        """True if any server may carry the call out: it changes nothing, and moves no cursor."""
        reads = self.method == "GET" or (self.path.endswith(("/diff", "/watch")) and "/cursors/" not in self.path)
        return reads and not self.of_leader

    def read(self, answer: bytes) -> T_co:
        """Return the answer as its type; ServiceFaultError when it did not come from a topics service."""
        try:
            return self.decode(answer)
        except msgspec.DecodeError as error:
            text = answer[:200].decode(errors="replace")
            message = f"{self.method} {self.path}: the answer did not come from a topics service: {error}: {text!r}"
            raise ServiceFaultError(200, "unknown", message, {}) from None


def of_leader(call: Call[T]) -> Call[T]:
    """Return the same call for the leader alone."""
    return msgspec.structs.replace(call, of_leader=True)


class LeasedJob(Protocol):
    """A claimed job. `lease_id` fences it: once that lease has ended, the job cannot be settled with it."""

    @property
    def seq(self) -> int: ...

    @property
    def lease_id(self) -> str: ...


def path_of(*parts: str) -> str:
    """Return the path `/v0/…` of these parts, quoted. ClientError for a name that is empty or no text."""
    if not all(isinstance(part, str) and part for part in parts):
        path = "/".join(part if isinstance(part, str) else repr(part) for part in parts)
        raise ClientError(f"/v0/{path}: a name in this path is empty or no text: give one like 'orders'")
    return _quoted(*parts)


@lru_cache(maxsize=1024)
def _quoted(*parts: str) -> str:
    return "/".join(["/v0", *(quote(part, safe="") for part in parts)])


def new_key() -> str:
    """Return an idempotency key that nobody else has."""
    return secrets.token_urlsafe(16)


def _call(
    method: str,
    answer: type[T],
    *path: str,
    body: object = None,
    query: dict[str, str] | str = "",
    repeatable: bool = True,
    waits: bool = False,
) -> Call[T]:
    content = None if body is None else encode_body(body)
    query = query if isinstance(query, str) else urlencode(query)
    return Call(method, path_of(*path), _decoder(cast("Any", answer)), content, query, repeatable, waits=waits)


_BUILDING: Final = Lock()
"""Held while a decoder is made: msgspec completes types then, and a second thread that meets a type that is not
complete crashes the process.
"""


@cache
def _decoder(answer: Any) -> Callable[[bytes], Any]:
    with _BUILDING:
        return msgspec.json.Decoder(answer).decode


def _records(records: Iterable[Any]) -> list[Any]:
    if isinstance(records, (Mapping, str, bytes)):  # iterable, but a single record: its parts would be written
        raise TypeError(f"records are a list, not one {type(records).__name__}: put it into [ ]")
    return [record if isinstance(record, NewRecord) else NewRecord(record) for record in records]


# -- bodies: JSON without NaN and infinities, for which the encoder would write `null`


def encode_body(body: object, name: str = "") -> bytes:
    """Return a value as JSON; `name` begins the paths in errors. NotFiniteError for NaN and infinities in it.

    Without a `null` in the JSON this costs a search for it: 100 records of 130 bytes take 23 µs instead of 19 µs. With
    one they are also encoded as MessagePack (35 µs), and only if that has such a number are values searched one by one.
    """
    content = _encode_json(body)
    # `rfind` takes half of the time that `in` takes.
    if content.rfind(b"null") >= 0 and _may_be_infinite(body):
        # Raw, which is JSON text, is the only type that needs the hook.
        for path, value in _numbers(msgspec.to_builtins(body, enc_hook=lambda _raw: None), name):
            if not math.isfinite(value):
                raise NotFiniteError(path.removeprefix("."), value)
    return content


def _may_be_infinite(body: object) -> bool:
    try:
        return _NOT_FINITE.search(_encode_msgpack(body)) is not None
    except (OverflowError, TypeError, ValueError):  # it has no integers of more than 64 bits
        return True


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _numbers(one, f"{path}[{number}]")


# -- topics


def put_topic(topic: str, **config: Any) -> Call[answers.PutTopicAnswer]:
    """Create a topic or replace its configuration; fields that are not given go to their defaults."""
    require_known("a topic's configuration", config, CONFIG_FIELDS)
    return _call("PUT", answers.PutTopicAnswer, "topics", topic, body=config)


def get_topic(topic: str, *, touch: bool = True) -> Call[answers.TopicState]:
    """Return the topic as it is now; with `touch` this counts as a read of it."""
    return _call("GET", answers.TopicState, "topics", topic, query={} if touch else {"touch": "false"})


def list_topics(prefix: str = "", *, cursor: str | None = None, **order: str) -> Call[answers.TopicList]:
    """Return a page of the topics whose names begin with `prefix`; `cursor` is the last page's `next_cursor`. With a
    `sort` in `order` the entries have rates, lags and cursors (api §1).
    """
    return _call("GET", answers.TopicList, "topics", query={"prefix": prefix} | _page(cursor) | order)


def delete_topic(topic: str, *, if_empty: bool = False) -> Call[answers.DeleteTopicAnswer]:
    """Delete the topic and its records; with `if_empty` only if it has none."""
    return _call("DELETE", answers.DeleteTopicAnswer, "topics", topic, query={"if_empty": "true"} if if_empty else {})


def _page(cursor: str | None) -> dict[str, str]:
    query = {"page_size": str(PAGE_SIZE)}
    return query if cursor is None else query | {"cursor": cursor}


# -- the service


def ready() -> Call[answers.Ready]:
    """Return the service's state; ServiceBusyError until it can serve all topics."""
    return _call("GET", answers.Ready, "ready")


def health() -> Call[answers.Health]:
    """Return version and uptime of the process that answers."""
    return _call("GET", answers.Health, "health")


def key_rights() -> Call[answers.KeyRights]:
    """Return the rights of this client's key."""
    return _call("GET", answers.KeyRights, "key")


def metrics() -> Call[dict[str, Any]]:
    """Return the figures of the whole service, without those of single topics (docs/operations.md, Metrics)."""
    decode = _decoder(dict[str, Any])
    return Call("GET", path_of("metrics"), decode, query="topic_series=false", accept="application/json")


# -- routers (api §6)


def put_router(router: str, source: str, dest: str, **options: Any) -> Call[answers.PutRouterAnswer]:
    """Make the router or replace it; options that are not given go to their defaults."""
    require_known("a router", options, requests.GivenRouter.__struct_fields__)
    body = requests.GivenRouter(source, dest, **options)
    return _call("PUT", answers.PutRouterAnswer, "routers", router, body=body)


def get_router(router: str) -> Call[answers.RouterState]:
    """Return the router, how many copies it has made, and its lag."""
    return _call("GET", answers.RouterState, "routers", router)


def list_routers(
    prefix: str = "", *, source: str | None = None, dest: str | None = None, cursor: str | None = None
) -> Call[answers.RouterList]:
    """Return a page of the routers whose names begin with `prefix`: all, or those from `source`, or into `dest`."""
    ends = {end: topic for end, topic in (("source", source), ("dest", dest)) if topic is not None}
    return _call("GET", answers.RouterList, "routers", query={"prefix": prefix} | ends | _page(cursor))


def delete_router(router: str) -> Call[answers.DeleteRouterAnswer]:
    """Delete the router, if it is there; its copies stay."""
    return _call("DELETE", answers.DeleteRouterAnswer, "routers", router)


# -- records


def append(
    topic: str,
    records: Iterable[Any],
    *,
    node: str | None = None,
    idempotency_key: str | None = None,
    create: bool = True,
    config: Mapping[str, Any] | None = None,
    if_head_seq: int | None = None,
    producer: ProducerBody | None = None,
) -> Call[answers.AppendAnswer]:
    """Write all records of a list or none. A record is a NewRecord, or just its `data`: anything that `msgspec.json`
    encodes. NaN and infinities raise NotFiniteError. JSON text is given as `msgspec.Raw` and kept as it is.

    The write is repeated under one idempotency key until it is answered, so it is committed once. A key of your own
    makes your repeats safe as well, also after a restart of your program. A `producer` also keeps its writes in order
    and shuts out its former lives: ConflictError `fenced` or `out_of_order`, with the service's count in `detail`.
    """
    if idempotency_key is None and producer is None:
        idempotency_key = new_key()
    body = requests.AppendBody(
        records=_records(records),
        node=node,
        idempotency_key=idempotency_key,
        create=create,
        config=encode_config(config),
        if_head_seq=if_head_seq,
        producer=producer,
    )
    return _call("POST", answers.AppendAnswer, "topics", topic, body=body, query="return_seqs=false")


def encode_config(config: Mapping[str, Any] | None) -> requests.Optional:
    """Return the configuration that a write brings for the topic which it may create."""
    require_known("a topic's configuration", config or {}, CONFIG_FIELDS)
    return msgspec.UNSET if config is None else msgspec.Raw(encode_body(config))


def append_encoded(topic: str, records: bytes, body: requests.AppendBody) -> Call[answers.AppendAnswer]:
    """Write records that are encoded as a JSON list already. `body` has the other fields, such as producer or key."""
    call = _call("POST", answers.AppendAnswer, "topics", topic, body=body, query="return_seqs=false")
    assert call.body is not None
    before, behind = call.body.split(b"[]", 1)
    return msgspec.structs.replace(call, body=b"".join((before, records, behind)))


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
    max_batch_bytes: int = DIFF_MAX_BYTES,
) -> Call[answers.DiffAnswer]:
    """Return one page of the records behind `from_seq` (api §3)."""
    start = from_seq if from_ts is None else 0
    body = requests.DiffBody(start, limit, node, include_tags, include_meta, wait_ms, max_batch_bytes, from_ts)
    return _call("POST", answers.DiffAnswer, "topics", topic, "diff", body=body, waits=wait_ms > 0)


def delete_records(
    topic: str, *, before_seq: int | None = None, match: str | list[str] | None = None
) -> Call[answers.DeleteRecordsAnswer]:
    """Delete records below `before_seq`, records whose tag matches (`"x"`, `"x*"`, `["tag", "Eq", "x*"]`), or, with
    both arguments, records that fit both.
    """
    body = requests.DeleteBody(before_seq, match)
    # A repeat would also delete what was written since.
    return _call("POST", answers.DeleteRecordsAnswer, "topics", topic, "delete", body=body, repeatable=match is None)


def watch(
    positions: Mapping[str, int], options: Mapping[str, Any], *, lenient: bool = False
) -> Call[answers.WatchAnswer]:
    """Make a watch session over topics, each from behind its seq (api §7); `lenient` leaves out those that are gone."""
    require_known("a watch session", options, {*requests.WatchBody.__struct_fields__} - {"topics"})
    body = {"topics": {name: {"from_seq": seq} for name, seq in positions.items()}, **options}
    return _call("POST", answers.WatchAnswer, "watch", body=body, query={"lenient": "true"} if lenient else {})


# -- queues (api §9)


def claim(topic: str, node: str, max_jobs: int = 1, lease_ms: int | None = None) -> Call[answers.ClaimAnswer]:
    """Lease up to `max_jobs` ready jobs; the answer may have none. The caller has to extend the leases (`work`
    does that itself). If the answer is lost its jobs stay leased until their deadline.
    """
    body = requests.ClaimBody(node, max_jobs, lease_ms)
    return _call("POST", answers.ClaimAnswer, "topics", topic, "claim", body=body, repeatable=False)


def ack(topic: str, node: str, jobs: Sequence[LeasedJob], *, repeatable: bool = False) -> Call[list[int]]:
    """Acknowledge claimed jobs; return the seqs that were no longer leased. After a repeat these include the jobs that
    the first attempt settled.
    """
    return _settle("ack", topic, requests.JobsBody(node, *_fenced(jobs)), repeatable)


def nack(
    topic: str, node: str, jobs: Sequence[LeasedJob], delay_ms: int = 0, *, repeatable: bool = False
) -> Call[list[int]]:
    """Give claimed jobs back, to be delivered again after `delay_ms`; return the seqs that were no longer leased."""
    return _settle("nack", topic, requests.NackBody(node, *_fenced(jobs), delay_ms), repeatable)


def extend(topic: str, node: str, jobs: Sequence[LeasedJob], *, lease_ms: int) -> Call[list[int]]:
    """Extend leases to now + `lease_ms`; return the seqs that were no longer leased."""
    return _settle("extend", topic, requests.ExtendBody(node, *_fenced(jobs), lease_ms=lease_ms), True)


def peek(topic: str, state: State | None = None, max_jobs: int = 100, from_seq: int = 0) -> Call[answers.PeekAnswer]:
    """Return jobs behind `from_seq` and their states, without touching leases. Without `state`: all but `done` jobs."""
    return _call("POST", answers.PeekAnswer, "topics", topic, "peek", body=requests.PeekBody(state, from_seq, max_jobs))


def redrive(topic: str, dead_letter: str, max_jobs: int = 1000, from_seq: int = 0) -> Call[answers.RedriveAnswer]:
    """Make dead letters jobs again. `next_from_seq` in the answer says that there may be more behind that seq."""
    body = requests.RedriveBody(dead_letter, max_jobs, from_seq)
    return _call("POST", answers.RedriveAnswer, "topics", topic, "redrive", body=body, repeatable=False)


def _fenced(jobs: Sequence[LeasedJob]) -> tuple[list[int], list[str]]:
    return [job.seq for job in jobs], [job.lease_id for job in jobs]


def _settle(verb: str, topic: str, body: requests.JobsBody, repeatable: bool) -> Call[list[int]]:
    return Call("POST", path_of("topics", topic, verb), _skipped, encode_body(body), repeatable=repeatable)


def _skipped(answer: bytes) -> list[int]:
    found: answers.SettledAnswer = _decoder(answers.SettledAnswer)(answer)
    return found.skipped


# -- named cursors (api §10)


def put_cursor(
    topic: str,
    cursor: str,
    *,
    consistency: Consistency | None = None,
    persist_every: int | None = None,
    from_seq: int | None = None,
    tail: bool = False,
) -> Call[answers.PutCursorAnswer]:
    """Make the cursor (`at_least_once`, 1), or change what is given. Only `from_seq` and `tail` move it."""
    body = requests.CursorBody(consistency, persist_every, from_seq, tail)
    # A repeated move would undo what others have read since the first.
    repeatable = not tail and from_seq is None
    return _call("PUT", answers.PutCursorAnswer, "topics", topic, "cursors", cursor, body=body, repeatable=repeatable)


def get_cursor(topic: str, cursor: str) -> Call[answers.CursorAnswer]:
    """Return the cursor's position."""
    return _call("GET", answers.CursorAnswer, "topics", topic, "cursors", cursor)


def list_cursors(topic: str, cursor: str | None = None) -> Call[answers.CursorListAnswer]:
    """Return a page of the cursors of a topic; `cursor` is the last page's `next_cursor`."""
    return _call("GET", answers.CursorListAnswer, "topics", topic, "cursors", query=_page(cursor))


def delete_cursor(topic: str, cursor: str) -> Call[answers.DeleteCursorAnswer]:
    """Delete the cursor, if it is there."""
    return _call("DELETE", answers.DeleteCursorAnswer, "topics", topic, "cursors", cursor)


def read_cursor(
    topic: str,
    cursor: str,
    *,
    checkpoint: bool = True,
    limit: int | None = None,
    max_bytes: int | None = None,
    node: str | list[str] | None = None,
    include_tags: bool = True,
    include_meta: bool = True,
) -> Call[answers.ReadCursorAnswer]:
    """Return the next page and move the cursor behind it; `checkpoint=False` does not move it. The page's `tombstone`
    says what was lost to cap or ttl.

    A read that moves the cursor is not repeated when its answer is lost (UnreachableError, or ServiceBusyError with the
    code `shard_unavailable`). With `at_least_once` its records come again unless the whole answer had left the service,
    with `strictly_at_once` never.
    """
    body = requests.ReadBody(max_bytes or 0, limit or 0, checkpoint, node, include_tags, include_meta)
    path = ("topics", topic, "cursors", cursor, "read")
    return _call("POST", answers.ReadCursorAnswer, *path, body=body, repeatable=not checkpoint)


# -- transactions (api §6)


def stage(topic: str, txn: str, records: Iterable[Any]) -> Call[answers.StageAnswer]:
    """Stage records under a transaction, unseen until it commits. A repeated call leaves a stage that just expires."""
    return _call("POST", answers.StageAnswer, "stage", topic, body=requests.StageBody(txn, _records(records)))


def commit(sink: str, batch: int, stages: list[str]) -> Call[answers.CommitAnswer]:
    """Publish all stages, once for each batch of the sink."""
    return _call("POST", answers.CommitAnswer, "txn", sink, "commit", body=requests.CommitBody(batch, stages))


def drop_stages(topic: str, txn: str) -> Call[answers.DropStagesAnswer]:
    """Drop the stages of a transaction in a topic."""
    return _call("DELETE", answers.DropStagesAnswer, "stage", topic, query={"txn": txn})


def forget_sink(sink: str) -> Call[answers.ForgetSinkAnswer]:
    """Forget a sink: its next batch may have any number."""
    return _call("DELETE", answers.ForgetSinkAnswer, "txn", sink)


# -- sealed segments (docs/spark.md)


def segments(
    topic: str, from_seq: int = 0, to_seq: int | None = None, *, pin_ttl_ms: int = 0
) -> Call[segment_answers.Manifest]:
    """List the segments with records from_seq + 1..to_seq; with `pin_ttl_ms` the files stay for so long."""
    query = {"from_seq": str(from_seq), "pin_ttl_ms": str(pin_ttl_ms)}
    if to_seq is not None:
        query["to_seq"] = str(to_seq)
    # A repeat makes another pin, which ends by itself.
    return _call("GET", segment_answers.Manifest, "topics", topic, "segments", query=query)


def renew_pin(topic: str, pin: str, pin_ttl_ms: int) -> Call[segment_answers.PinRenewed]:
    """Keep the pinned files for so long from now on, if the pin still holds."""
    return _call("PUT", segment_answers.PinRenewed, "topics", topic, "pins", pin, query={"pin_ttl_ms": str(pin_ttl_ms)})


def end_pin(topic: str, pin: str) -> Call[segment_answers.PinEnded]:
    """End a pin before its time."""
    return _call("DELETE", segment_answers.PinEnded, "topics", topic, "pins", pin)
