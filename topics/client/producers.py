"""Producers of both clients: `send` puts a record into a batch, and one thread or task sends the batches.

`accumulator.py` decides what goes next. The rules are coroutines, which never suspend in a `Producer` (`links.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypedDict, TypeVar
from weakref import WeakSet

import msgspec

from topics.api.answers import Record
from topics.api.requests import U64_MAX, AppendBody, ProducerBody
from topics.client import calls
from topics.client.accumulator import Accumulator, Batch, BatchPart, ProducerLimits
from topics.client.arguments import require, require_known
from topics.client.calls import Call
from topics.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    ServiceFaultError,
    UnreachableError,
    api_error,
)
from topics.client.links import THIS_PROCESS, finish

T = TypeVar("T")
log = logging.getLogger("topics.client")

CLOSE_MAX_S: Final = 60.0
STEP_RECORDS: Final = 256
"""Records after which `AsyncProducer.send` lets the event loop do other work."""
KNOWN_FOR_S: Final = 6 * 24 * 3600  # after an answer the service has to know the producer: it forgets it a day later
_EPOCH_RANDOM_BITS: Final = 20


class Carrier(Protocol):
    """A client, as its producers see it."""

    async def carry_out(self, call: Call[T], /) -> T: ...


class ProducerOptions(TypedDict, total=False):
    """Options of a producer. `node`, `create` and `config` are those of `append`; `close_max_s` is how long the end of
    a `with` block waits for answers.
    """

    limits: ProducerLimits
    node: str | None
    create: bool
    config: Mapping[str, Any] | None
    close_max_s: float


def new_epoch(now_ns: int, former_epoch: int) -> int:
    """Return an epoch above the former one that no other life draws: the time, with random bits below the ms."""
    time_ns = max(now_ns, former_epoch + (1 << _EPOCH_RANDOM_BITS))
    return time_ns >> _EPOCH_RANDOM_BITS << _EPOCH_RANDOM_BITS | secrets.randbits(_EPOCH_RANDOM_BITS)


class Placing:
    """The place of a producer in its topic: where its former life ended, and the epoch of this one.

    A named producer looks before it writes. Its first write demands the head that it saw, so a late request of the
    former life cannot slip in between. That write shuts the former life out.
    """

    def __init__(self, topic: str, name: str | None, options: ProducerOptions) -> None:
        self.what = f"producer of {topic!r}"
        self._topic = topic
        self._id = secrets.token_urlsafe(16) if name is None else name
        self._looks = name is not None
        self._epoch = 0
        self._head_seq: int | None = None
        """The head that the first write of a named producer demands."""
        self._former: ProducerBody | None = None
        """The last write of the former life."""
        self._last_seq: int | None = None
        self._known_until_s = 0.0
        self._body = AppendBody(
            records=[],
            node=options.get("node"),
            create=options.get("create", True),
            config=calls.encode_config(options.get("config")),
        )

    async def begin(self, carrier: Carrier) -> None:
        """Look where the former life ended, if the producer has a name, and draw an epoch above it."""
        if self._looks:
            self._former, self._head_seq = await self._look(carrier)
        if self._former is not None:
            self._last_seq = (await carrier.carry_out(self._unwritable(self._former))).last_seq
        self._epoch = new_epoch(time.time_ns(), self._former.epoch if self._former else 0)

    async def last(self, carrier: Carrier) -> Record | None:
        if self._last_seq is None:
            return None
        page = await carrier.carry_out(calls.of_leader(calls.diff(self._topic, self._last_seq - 1, limit=1)))
        if not page.records or page.records[0].seq != self._last_seq:
            what = f"the last record of producer {self._id!r}, seq {self._last_seq} of topic {self._topic!r}"
            raise ClientError(f"{what}, is gone: only the program can tell where to go on")
        return page.records[0]

    async def deliver(self, carrier: Carrier, part: BatchPart, n: int) -> int | ApiError:
        """Write a part and return its first seq, or the error for one of its records. Other errors are raised."""
        records, count = part.records(), part.stop - part.start
        while True:
            producer = ProducerBody(self._id, self._epoch, n, begun=time.time() < self._known_until_s)
            body = msgspec.structs.replace(self._body, producer=producer, if_head_seq=self._head_seq)
            try:
                answer = await carrier.carry_out(calls.append_encoded(self._topic, records, body))
            except InvalidRequestError as error:
                if not _names_a_record(error):
                    raise
                return error
            except ConflictError as error:
                if error.code != "head_mismatch":
                    raise
                former, self._head_seq = await self._look(carrier)
                if former != self._former:
                    message = f"another life of producer {self._id!r} wrote while this one began: begin again"
                    raise api_error(409, "fenced", message, {}) from None
                continue
            if answer.count != count:
                message = f"{answer.count} records were written, {count} sent: was one no whole JSON?"
                raise ServiceFaultError(200, "unknown", message, {})
            self._head_seq, self._known_until_s = None, time.time() + KNOWN_FOR_S
            return answer.first_seq

    async def _look(self, carrier: Carrier) -> tuple[ProducerBody | None, int]:
        """Return the last write of the former life, and a head of the topic that is not newer than this look."""
        head = await self._probe(carrier, secrets.token_urlsafe(16))
        known = await self._probe(carrier, self._id)
        wrote = known.code in ("fenced", "out_of_order")
        former = ProducerBody(self._id, known.detail["epoch"], known.detail["n"]) if wrote else None
        return former, int(head.detail.get("head_seq", 0))

    async def _probe(self, carrier: Carrier, id: str) -> ApiError:
        try:
            await carrier.carry_out(self._unwritable(ProducerBody(id, 0, U64_MAX)))
        except (ConflictError, NotFoundError) as refusal:
            return refusal
        raise ServiceFaultError(200, "unknown", f"a probe of topic {self._topic!r} was not refused", {})

    def _unwritable(self, producer: ProducerBody) -> Call[Any]:
        """Return a write that is never carried out: it demands a head that no topic reaches."""
        return calls.append(self._topic, [None], create=False, if_head_seq=U64_MAX, producer=producer)


def _names_a_record(error: InvalidRequestError) -> bool:
    """Return whether a write was refused for a record in it. What the whole write has wrong names another field."""
    if error.status == 413 or error.code in ("record_too_large", "batch_too_large"):
        return True
    field = error.detail.get("field", "records")
    return error.code == "invalid_request" and (field.startswith("records") or field == "delay_ms")


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """A record on its way, which shares the future of its batch."""

    batch: Batch
    index: int

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return bool(self.batch.settled.done())


class SentRecord(_Sent, frozen=True, gc=False):
    """A record on its way from a `Producer`."""

    def result(self, timeout_s: float | None = None) -> int:
        """Wait for the record's seq and return it, or raise the record's error; TimeoutError when it takes longer."""
        self.batch.settled.result(timeout_s)
        return self.batch.seq_of(self.index)


class AsyncSentRecord(_Sent, frozen=True, gc=False):
    """A record on its way from an `AsyncProducer`. `await` it for its seq; that may be cancelled and done again."""

    def __await__(self) -> Generator[Any, None, int]:
        if not self.batch.settled.done():
            yield from asyncio.shield(self.batch.settled).__await__()
        return self.batch.seq_of(self.index)


class _ThreadSignal(threading.Condition):
    """A condition on which a coroutine of a `Producer` waits: it blocks its thread."""

    async def pause(self, pause_s: float | None) -> None:
        """Wait for a notification, or for `pause_s` (None: without an end)."""
        self.wait(pause_s)


class _TaskSignal(asyncio.Event):
    """A signal for which a coroutine of an `AsyncProducer` waits: it suspends its task."""

    notify_all = asyncio.Event.set

    async def pause(self, pause_s: float | None) -> None:
        self.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.wait()


class _Production:
    """The body of both kinds of producer: the records that wait, the place in the topic, the end. `work` is notified
    when there is something to send, `room` when there is room for records.
    """

    def __init__(
        self,
        client: Carrier,
        topic: str,
        name: str | None,
        options: ProducerOptions,
        new_future: Callable[[], Any],
        signals: tuple[_ThreadSignal | _TaskSignal, _ThreadSignal | _TaskSignal],
    ) -> None:
        require_known("a producer", options, ProducerOptions.__annotations__)
        limits, self.close_max_s = options.get("limits", ProducerLimits()), options.get("close_max_s", CLOSE_MAX_S)
        require(isinstance(limits, ProducerLimits), "limits", limits, "some like ProducerLimits(linger_ms=5)")
        require(isinstance(self.close_max_s, int | float), "close_max_s", self.close_max_s, "a number of seconds")
        self._client = client
        self._placing = Placing(topic, name, options)
        self._records = Accumulator(limits, new_future, time.monotonic)
        self._work, self._room = signals
        self._lock: AbstractContextManager[Any] = nullcontext()
        self._closed = False
        self._asleep = False  # with nothing to send, until it is told that there is something
        self._pid = THIS_PROCESS[0]

    async def _settled(self, batch: Batch, timeout_s: float | None) -> None:
        """Wait until a batch is settled. Raise TimeoutError after `timeout_s`."""
        raise NotImplementedError

    def _check_usable(self) -> None:
        if self._pid != THIS_PROCESS[0]:
            raise ClientError(f"this {self._placing.what} is that of process {self._pid}: make one in this one")
        self._raise_failure()
        if self._closed:
            raise RuntimeError(f"this {self._placing.what} was closed, so it cannot send a record")

    def _raise_failure(self) -> None:
        if self._records.failure is not None:
            # A kept traceback would keep the frames of each `send` that raises it.
            raise self._records.failure.with_traceback(None)

    async def _make_room(self, timeout_s: float | None) -> None:
        """Wait, holding the lock, until a record may be added. Send even a batch that is not full, to make room."""
        until_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        self._check_usable()
        while self._records.is_full:
            pause_s = until_s - time.monotonic()
            if pause_s <= 0:
                raise TimeoutError(f"the memory of the {self._placing.what} was full for {timeout_s} s")
            self._records.seal()
            self._work.notify_all()
            await self._room.pause(None if timeout_s is None else pause_s)
            self._check_usable()

    async def _flush(self, timeout_s: float | None) -> None:
        with self._lock:
            self._records.seal()
            self._work.notify_all()
            last = self._records.last
        if last is not None:
            await self._settled(last, timeout_s)

    async def _flush_checked(self, timeout_s: float | None) -> None:
        self._check_usable()
        await self._flush(timeout_s)
        self._raise_failure()

    async def _close(self, timeout_s: float | None) -> None:
        """Take no more records, send those that wait, and fail those that are not answered in time."""
        with self._lock:
            # Seal and close in one step: the sender stops once the producer is closed and nothing is to be sent.
            self._records.seal()
            self._closed = True
            self._room.notify_all()
        try:
            with suppress(TimeoutError):
                await self._flush(self.close_max_s if timeout_s is None else timeout_s)
        finally:
            with self._lock:
                if self._records.pause_s() is not None:
                    self._records.fail(self._late())

    def _late(self) -> UnreachableError:
        message = f"the {self._placing.what} was closed before all records were answered"
        error = UnreachableError(f"{message}; those under way may have been written")
        error.may_be_done = True
        return error

    def _raise_unseen(self) -> None:
        """Raise the producer's failure, or the error of a rejected record that the program has not asked for."""
        self._raise_failure()
        unseen = self._records.unseen
        if unseen:
            unseen[0].add_note(f"{len(unseen)} records of the {self._placing.what} were rejected; this is one")
            raise unseen[0]

    async def _send_all(self, carrier: Carrier) -> None:
        """Send one part after another until the producer is closed. A failure goes to all who wait for records."""
        records, outcome = self._records, None
        try:
            while True:
                with self._lock:
                    if outcome is not None:
                        records.note(outcome)
                        self._room.notify_all()
                    while (pause_s := records.pause_s()) != 0:
                        if self._closed:
                            return
                        self._asleep = pause_s is None
                        await self._work.pause(pause_s)
                    part, n = records.take(), records.n
                outcome = await self._placing.deliver(carrier, part, n)
        except BaseException as error:
            with self._lock:
                if not self._closed or records.pause_s() is not None:
                    records.fail(error if isinstance(error, Exception) else self._late())
                self._room.notify_all()
            if isinstance(error, asyncio.CancelledError):
                raise


class Producer(_Production):
    """A producer for threads, which may share it. A thread of its own sends the batches.

    Whatever is killed, records are in the topic in the order of `send`, each once. At the end of a `with` block all are
    answered, or the block raises. Python's exit closes a producer that is still open. A forked child cannot use it.
    """

    def __init__(
        self, client: Carrier, connect: Callable[..., Any], topic: str, name: str | None, options: ProducerOptions
    ) -> None:
        lock = threading.RLock()
        super().__init__(client, topic, name, options, Future, (_ThreadSignal(lock), _ThreadSignal(lock)))
        self._lock = lock
        self._is_inside = lock._is_owned  # type: ignore[attr-defined]  # as `threading.Condition` asks its lock
        self._own = connect(sleep=self._pause)
        self._ended = threading.Event()
        finish(self._placing.begin(client))
        sending = self._send_all(self._own)
        self._thread = threading.Thread(target=lambda: finish(sending), name=self._placing.what, daemon=True)
        self._thread.start()
        _left.add(self)

    def last(self) -> Record | None:
        """Return the last record that a former life of this name wrote, None if none did. ClientError if it is gone."""
        return finish(self._placing.last(self._client))

    def send(self, record: Any, *, timeout_s: float | None = None) -> SentRecord:
        """Put a record, a NewRecord or just its `data`, into the next batch. Waits only while memory is full;
        TimeoutError when that takes longer than `timeout_s`: the record was not taken.
        """
        records = self._records
        if self._pid != THIS_PROCESS[0]:
            self._check_usable()
        if self._is_inside():
            self._check_outside(True)
        with self._lock:
            if self._closed or records.failure is not None or records.is_full:
                self._check_outside(False)
                finish(self._make_room(timeout_s))
            batch, index = records.add(record)
            if self._asleep or batch.unsettled:
                self._work.notify_all()
                self._asleep = False
        return SentRecord(batch, index)

    def _check_outside(self, is_inside: bool) -> None:
        """RuntimeError for a handler (of a signal, the log, the collector) that would wait for what it interrupts."""
        if is_inside or threading.current_thread() is self._thread:
            what = f"a handler cannot use the {self._placing.what} that it interrupts: it would wait for itself"
            raise RuntimeError(f"{what}; have it set a flag, or raise an exception")

    def flush(self, timeout_s: float | None = None) -> None:
        """Send what waits and wait until all records have their outcome; TimeoutError when that takes longer. Raise
        the producer's failure if it has one.
        """
        self._check_outside(self._is_inside())
        finish(self._flush_checked(timeout_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Send what waits, wait for the answers (`close_max_s` unless given), and end. Raise the producer's failure, or
        else the error of a rejected record that nobody has asked for.
        """
        if self._closed or self._pid != THIS_PROCESS[0]:
            return
        self._check_outside(self._is_inside())
        try:
            finish(self._close(timeout_s))
        finally:
            self._ended.set()
            self._own.close()
            _left.discard(self)
        self._raise_unseen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(Exception) if error is not None else nullcontext():
            self.close()
        if error is not None:
            error.__traceback__ = trace  # `close` raises the producer's failure again, which may be this one

    async def _settled(self, batch: Batch, timeout_s: float | None) -> None:
        batch.settled.result(timeout_s)

    def _pause(self, pause_s: float) -> None:
        if self._ended.wait(pause_s):
            raise self._late()


_left: Final[WeakSet[Producer]] = WeakSet()
"""Producers that are not closed. Python's exit closes them, or their waiting records would silently be lost."""


@atexit.register  # registered at import: functions that the program registers later run before it
def _close_left() -> None:
    until_s = time.monotonic() + CLOSE_MAX_S
    for producer in list(_left):
        try:
            producer.close(min(producer.close_max_s, max(0.0, until_s - time.monotonic())))
        except Exception:
            log.exception("a producer that was not closed could not write all of its records")


class AsyncProducer(_Production):
    """A producer for asyncio, begun by `async with`. A task of its own sends the batches; otherwise like `Producer`."""

    def __init__(
        self, client: Carrier, connect: Callable[..., Any], topic: str, name: str | None, options: ProducerOptions
    ) -> None:
        signals = _TaskSignal(), _TaskSignal()
        super().__init__(client, topic, name, options, lambda: asyncio.get_running_loop().create_future(), signals)
        self._own = connect()
        self._task: asyncio.Task[None] | None = None
        self._step_due = False

    async def last(self) -> Record | None:
        """Return the last record that a former life of this name wrote, None if none did. ClientError if it is gone."""
        self._check_begun()
        return await self._placing.last(self._client)

    async def send(self, record: Any) -> AsyncSentRecord:
        """Put a record, a NewRecord or just its `data`, into the next batch. Waits only while memory is full. If it is
        cancelled the record was not taken.
        """
        self._check_begun()
        if self._step_due:
            self._step_due = False
            await asyncio.sleep(0)
        records = self._records
        if self._closed or records.failure is not None or records.is_full or self._pid != THIS_PROCESS[0]:
            await self._make_room(None)
        batch, index = records.add(record)
        self._step_due = not index % STEP_RECORDS
        if self._asleep or batch.unsettled:
            self._work.notify_all()
        return AsyncSentRecord(batch, index)

    def _check_begun(self) -> None:
        if self._task is None:
            raise RuntimeError("an asynchronous producer begins with `async with`")

    async def flush(self) -> None:
        """Send what waits and wait until all records have their outcome. Raise the producer's failure if it has one."""
        await self._flush_checked(None)

    async def close(self, timeout_s: float | None = None) -> None:
        """End as `Producer.close` does."""
        if self._closed or self._pid != THIS_PROCESS[0]:
            return
        try:
            await self._close(timeout_s)
        finally:
            if self._task is not None:
                self._task.cancel()
            await self._own.close()
        self._raise_unseen()

    async def __aenter__(self) -> Self:
        await self._placing.begin(self._client)
        self._task = asyncio.create_task(self._send_all(self._own), name=self._placing.what)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(Exception) if error is not None else nullcontext():
            await self.close()
        if error is not None:
            error.__traceback__ = trace

    async def _settled(self, batch: Batch, timeout_s: float | None) -> None:
        await asyncio.wait([batch.settled], timeout=timeout_s)
