"""Each call of the API as a value: what to send and how to read the answer. No connection, no clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from topics.api import answers, requests
from topics.api.requests import Consistency, NewRecord, ProducerBody, State
from topics.client.errors import ServiceFaultError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PAGE_SIZE: Final = 1000
"""The most that one list may hold (api §0.8)."""
DIFF_MAX_BYTES: Final = 8 << 20

_encode = msgspec.json.Encoder().encode


class Call(msgspec.Struct, Generic[T_co], frozen=True):
    """`repeatable`: sending it twice does no more than sending it once."""

    method: str
    path: str
    decode: Callable[[bytes], T_co]
    body: bytes | None = None
    query: dict[str, str] = {}
    repeatable: bool = True

    def read(self, answer: bytes) -> T_co:
        """The answer as its type; ServiceFaultError when it does not come from this service."""
        try:
            return self.decode(answer)
        except msgspec.DecodeError as error:
            text = answer[:200].decode(errors="replace")
            message = f"{self.method} {self.path}: the answer is not of this service: {error}: {text!r}"
            raise ServiceFaultError(200, "unknown", message, {}) from None


class LeasedJob(Protocol):
    """A job that can be settled: by its seq and, as the fence, the lease it was claimed under."""

    @property
    def seq(self) -> int: ...

    @property
    def lease_id(self) -> str: ...


def path_of(kind: str, name: str, *more: str) -> str:
    """`/v0/kind/name…`, the names quoted."""
    return "/".join(["/v0", kind, *(quote(part, safe="") for part in (name, *more))])


def new_key() -> str:
    """An idempotency key that nobody else has."""
    return secrets.token_urlsafe(16)


def _call(
    method: str,
    path: str,
    answer: type[T],
    body: object = None,
    query: dict[str, str] | None = None,
    *,
    repeatable: bool = True,
) -> Call[T]:
    content = None if body is None else _encode(body)
    return Call(method, path, partial(msgspec.json.decode, type=answer), content, query or {}, repeatable)


def _records(records: Iterable[Any]) -> list[Any]:
    return [record if isinstance(record, NewRecord) else NewRecord(record) for record in records]


# -- topics


def put_topic(topic: str, **config: Any) -> Call[answers.PutTopicAnswer]:
    """Creates a topic or replaces its configuration; what is not given goes to its default."""
    return _call("PUT", path_of("topics", topic), answers.PutTopicAnswer, config)


def get_topic(topic: str, *, touch: bool = True) -> Call[answers.TopicState]:
    """The topic as it is now; with `touch` this counts as reading it."""
    return _call("GET", path_of("topics", topic), answers.TopicState, query={} if touch else {"touch": "false"})


def list_topics(prefix: str = "", *, cursor: str | None = None) -> Call[answers.TopicList]:
    """A page of the topics whose names begin with `prefix`; `cursor`: the `next_cursor` of the page before."""
    return _call("GET", "/v0/topics", answers.TopicList, query={"prefix": prefix} | _page(cursor))


def delete_topic(topic: str, *, if_empty: bool = False) -> Call[answers.DeleteTopicAnswer]:
    """Deletes the topic and its records; `if_empty`: only when it has none."""
    query = {"if_empty": "true"} if if_empty else {}
    return _call("DELETE", path_of("topics", topic), answers.DeleteTopicAnswer, query=query)


def _page(cursor: str | None) -> dict[str, str]:
    query = {"page_size": str(PAGE_SIZE)}
    return query if cursor is None else query | {"cursor": cursor}


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
    """Writes all records or none. A record is a NewRecord, or just its `data`.

    It is repeated until it is answered, under one idempotency key, so it is committed once. A key of your own makes
    repeats of yours safe as well, over restarts of your program. A `producer` also keeps its writes in their order and
    former lives of itself out: ConflictError `fenced` or `out_of_order`, whose `detail` says where it is.
    """
    if idempotency_key is None and producer is None:
        idempotency_key = new_key()
    body = requests.AppendBody(
        records=_records(records),
        node=node,
        idempotency_key=idempotency_key,
        create=create,
        config=msgspec.UNSET if config is None else msgspec.Raw(_encode(config)),
        if_head_seq=if_head_seq,
        producer=producer,
    )
    return _call("POST", path_of("topics", topic), answers.AppendAnswer, body, {"return_seqs": "false"})


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
    """One page of what follows `from_seq` (api §3)."""
    body = requests.DiffBody(
        from_seq=from_seq if from_ts is None else 0,
        limit=limit,
        node=node,
        include_tags=include_tags,
        include_meta=include_meta,
        wait_ms=wait_ms,
        max_batch_bytes=max_batch_bytes,
        from_ts=from_ts,
    )
    return _call("POST", path_of("topics", topic, "diff"), answers.DiffAnswer, body)


def delete_records(
    topic: str, *, before_seq: int | None = None, match: str | list[str] | None = None
) -> Call[answers.DeleteRecordsAnswer]:
    """Deletes below a seq, by tag (`"x"`, `"x*"`, `["tag", "Eq", "x*"]`), or what is both."""
    path, body = path_of("topics", topic, "delete"), requests.DeleteBody(before_seq, match)
    # A repeat would take what was written since.
    return _call("POST", path, answers.DeleteRecordsAnswer, body, repeatable=match is None)


def watch(
    positions: Mapping[str, int], options: Mapping[str, Any], *, lenient: bool = False
) -> Call[answers.WatchAnswer]:
    """Makes a watch session over these topics, each from behind its seq (api §7); `lenient`: over those that exist."""
    body = {"topics": {name: {"from_seq": seq} for name, seq in positions.items()}, **options}
    return _call("POST", "/v0/watch", answers.WatchAnswer, body, {"lenient": "true"} if lenient else {})


# -- queues (api §9)


def claim(topic: str, node: str, max_jobs: int = 1, lease_ms: int | None = None) -> Call[answers.ClaimAnswer]:
    """Leases up to so many jobs, at once: none when none is ready. Leases are the caller's affair (`work` keeps them).
    An answer that is lost leaves its jobs leased.
    """
    body = requests.ClaimBody(node, max_jobs, lease_ms)
    return _call("POST", path_of("topics", topic, "claim"), answers.ClaimAnswer, body, repeatable=False)


def ack(topic: str, node: str, jobs: Sequence[LeasedJob], *, repeatable: bool = False) -> Call[list[int]]:
    """Claimed jobs are done; returns the seqs that were no longer leased. To a repeat those are missing that the first
    attempt settled.
    """
    return _settle("ack", topic, requests.JobsBody(node, *_fenced(jobs)), repeatable)


def nack(
    topic: str, node: str, jobs: Sequence[LeasedJob], delay_ms: int = 0, *, repeatable: bool = False
) -> Call[list[int]]:
    """Gives claimed jobs back, to be delivered again after `delay_ms`; returns the seqs that were no longer leased."""
    return _settle("nack", topic, requests.NackBody(node, *_fenced(jobs), delay_ms), repeatable)


def extend(topic: str, node: str, jobs: Sequence[LeasedJob], *, lease_ms: int) -> Call[list[int]]:
    """Leases last until now + `lease_ms`; returns the seqs that were no longer leased."""
    return _settle("extend", topic, requests.ExtendBody(node, *_fenced(jobs), lease_ms=lease_ms), True)


def peek(topic: str, state: State | None = None, max_jobs: int = 100, from_seq: int = 0) -> Call[answers.PeekAnswer]:
    """Shows jobs behind `from_seq`, and where each of them stands; touches no lease. Without a `state`: in any but
    `done`.
    """
    return _call(
        "POST", path_of("topics", topic, "peek"), answers.PeekAnswer, requests.PeekBody(state, from_seq, max_jobs)
    )


def redrive(topic: str, dead_letter: str, max_jobs: int = 1000, from_seq: int = 0) -> Call[answers.RedriveAnswer]:
    """Makes dead letters jobs again. Where the answer has a `next_from_seq` there may be more, behind that."""
    body = requests.RedriveBody(dead_letter, max_jobs, from_seq)
    return _call("POST", path_of("topics", topic, "redrive"), answers.RedriveAnswer, body, repeatable=False)


def _fenced(jobs: Sequence[LeasedJob]) -> tuple[list[int], list[str]]:
    return [job.seq for job in jobs], [job.lease_id for job in jobs]


def _settle(verb: str, topic: str, body: requests.JobsBody, repeatable: bool) -> Call[list[int]]:
    return Call("POST", path_of("topics", topic, verb), _skipped, _encode(body), repeatable=repeatable)


def _skipped(answer: bytes) -> list[int]:
    return msgspec.json.decode(answer, type=answers.SettledAnswer).skipped


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
    """Makes it (`at_least_once`, 1), or changes what is given; `from_seq` or `tail` moves it, else it stays."""
    path, body = (
        path_of("topics", topic, "cursors", cursor),
        requests.CursorBody(consistency, persist_every, from_seq, tail),
    )
    # A second move would undo what others have read since the first.
    return _call("PUT", path, answers.PutCursorAnswer, body, repeatable=not tail and from_seq is None)


def get_cursor(topic: str, cursor: str) -> Call[answers.CursorAnswer]:
    """Where it stands."""
    return _call("GET", path_of("topics", topic, "cursors", cursor), answers.CursorAnswer)


def list_cursors(topic: str, cursor: str | None = None) -> Call[answers.CursorListAnswer]:
    """A page of the cursors of a topic; `cursor`: the `next_cursor` of the page before."""
    return _call("GET", path_of("topics", topic, "cursors"), answers.CursorListAnswer, query=_page(cursor))


def delete_cursor(topic: str, cursor: str) -> Call[answers.DeleteCursorAnswer]:
    """Deletes it, if it is there."""
    return _call("DELETE", path_of("topics", topic, "cursors", cursor), answers.DeleteCursorAnswer)


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
    """The next page, which is this reader's alone; with `checkpoint=False` a look at it. The page's `tombstone` says
    what was lost to cap or ttl.

    A read that moves the cursor is not repeated when its answer is lost (UnreachableError, or ServiceBusyError with the
    code `shard_unavailable`): with `at_least_once` those records come again unless they had left the service whole,
    with `strictly_at_once` never.
    """
    path = path_of("topics", topic, "cursors", cursor, "read")
    body = requests.ReadBody(max_bytes or 0, limit or 0, checkpoint, node, include_tags, include_meta)
    return _call("POST", path, answers.ReadCursorAnswer, body, repeatable=not checkpoint)


# -- transactions (api §6)


def stage(topic: str, txn: str, records: Iterable[Any]) -> Call[answers.StageAnswer]:
    """Keeps records back under a transaction. A repeat makes a second stage, which nobody commits."""
    return _call("POST", path_of("stage", topic), answers.StageAnswer, requests.StageBody(txn, _records(records)))


def commit(sink: str, batch: int, stages: list[str]) -> Call[answers.CommitAnswer]:
    """Publishes all stages, once for each batch of the sink."""
    return _call("POST", path_of("txn", sink, "commit"), answers.CommitAnswer, requests.CommitBody(batch, stages))


def drop_stages(topic: str, txn: str) -> Call[answers.DropStagesAnswer]:
    """Drops what a transaction keeps back in a topic."""
    return _call("DELETE", path_of("stage", topic), answers.DropStagesAnswer, query={"txn": txn})


def forget_sink(sink: str) -> Call[answers.ForgetSinkAnswer]:
    """Forgets a sink: its next batch may have any number."""
    return _call("DELETE", path_of("txn", sink), answers.ForgetSinkAnswer)


# -- sealed segments (docs/spark.md)


def segments(
    topic: str, from_seq: int = 0, to_seq: int | None = None, *, pin_ttl_ms: int = 0
) -> Call[answers.Manifest]:
    """Lists the segments with records from_seq + 1..to_seq; with `pin_ttl_ms` the files stay for so long."""
    query = {"from_seq": str(from_seq), "pin_ttl_ms": str(pin_ttl_ms)}
    if to_seq is not None:
        query["to_seq"] = str(to_seq)
    # A repeat makes another pin, which ends by itself.
    return _call("GET", path_of("topics", topic, "segments"), answers.Manifest, query=query)


def renew_pin(topic: str, pin: str, pin_ttl_ms: int) -> Call[answers.PinRenewed]:
    """Keeps the files for so long from now on, if the pin still holds."""
    return _call(
        "PUT", path_of("topics", topic, "pins", pin), answers.PinRenewed, query={"pin_ttl_ms": str(pin_ttl_ms)}
    )


def end_pin(topic: str, pin: str) -> Call[answers.PinEnded]:
    """Ends a pin before its time."""
    return _call("DELETE", path_of("topics", topic, "pins", pin), answers.PinEnded)
