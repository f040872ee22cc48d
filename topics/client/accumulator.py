"""What a producer sends next, and what becomes of each record: batches, splits, the end. Pure.

    add ──▶ open batch ──full, old enough or flushed──▶ sealed parts ──▶ one part at a time under way ──▶ settled

A part is sent with the producer's next number `n`, and again with the same `n` until there is an answer, so the service
appends it once. A refused part has used up no number: its halves follow in its place until the bad record is alone, and
is rejected alone. Any other failure ends the producer: nothing behind a part may be written if the part was not. So
records are in the topic in the order of `add`, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from topics.api.requests import NewRecord
from topics.client.calls import encode_body

REJECTED_BATCHES_KEPT: Final = 100
"""Batches whose rejected records `close` still tells of."""
RECORD_OVERHEAD_BYTES: Final = 96
"""Memory of a waiting record beside its JSON: the object that holds it, its place in a list, its handle."""
_DATA_AT: Final = len(b'{"data":')

_encode = msgspec.json.Encoder().encode


class ProducerLimits(msgspec.Struct, frozen=True):
    """A batch is sent when it has so many records or bytes, or when its first record is `linger_ms` old. Records that
    wait for their answer hold `memory_bytes` at most, then `send` waits.

    The service takes 10,000 records in one write unless configured, and long bodies wait for each other above 1 MiB.
    """

    batch_records: int = 10_000
    batch_bytes: int = 1_000_000
    linger_ms: float = 5.0
    memory_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name in ("batch_records", "batch_bytes", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.linger_ms < 0:
            raise ValueError(f"linger_ms is {self.linger_ms}: give 0 to send at once, or more")


class Settled(Protocol):
    """A future of either kind that is done when a batch is: `concurrent.futures.Future` or `asyncio.Future`."""

    def set_result(self, result: Any, /) -> None: ...
    def done(self) -> bool: ...


F = TypeVar("F", bound=Settled)


class Batch(Generic[F]):
    """Records that were added one after another, and their outcomes once `settled` is done."""

    __slots__ = ("_first_seqs", "_seen", "begun_s", "data", "failure", "rejected", "settled", "size_bytes", "unsettled")

    def __init__(self, settled: F, begun_s: float) -> None:
        self.settled = settled
        self.begun_s = begun_s
        self.data: list[bytes] = []
        """Of each record the JSON behind `{"data":`, without the last brace. Let go when all are settled."""
        self.size_bytes = 0
        self.unsettled = 0
        self.rejected: dict[int, Exception] = {}
        """Records that the service refused, by their index."""
        self.failure: Exception | None = None
        """The end of the producer, for the records that were not settled by then."""
        self._seen: set[int] = set()
        self._first_seqs: list[tuple[int, int, int]] = []

    def note_written(self, start: int, stop: int, first_seq: int) -> None:
        """Note that the service has written the records `start` to `stop`."""
        self._first_seqs.append((start, stop, first_seq))

    def seq_of(self, index: int) -> int:
        """Return the seq of a settled record, or raise what became of it."""
        for start, stop, first_seq in self._first_seqs:
            if start <= index < stop:
                return first_seq + index - start
        self._seen.add(index)
        error = self.rejected.get(index) or self.failure
        assert error is not None, "the record is settled"
        raise error

    def unseen(self) -> list[Exception]:
        """Return the errors of rejected records that nobody has asked for."""
        return [error for index, error in self.rejected.items() if index not in self._seen]


class BatchPart(NamedTuple):
    """The records `start` to `stop` of a batch, which one request carries."""

    batch: Batch[Any]
    start: int
    stop: int

    def records(self) -> bytes:
        """Return the records as a JSON list."""
        data = self.batch.data
        return b'[{"data":' + b'},{"data":'.join(data[self.start : self.stop]) + b"}]"

    def halves(self) -> tuple[Self, Self]:
        middle = (self.start + self.stop) // 2
        return self._replace(stop=middle), self._replace(start=middle)


class Accumulator(Generic[F]):
    """The records of a producer that wait for their answers, in order. `new_future` makes a batch's future."""

    def __init__(self, limits: ProducerLimits, new_future: Callable[[], F], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._new_future = new_future
        self._clock = clock
        self._open: Batch[F] | None = None
        self._parts: deque[BatchPart] = deque()
        self._with_rejected: deque[Batch[F]] = deque(maxlen=REJECTED_BATCHES_KEPT)
        self._held_bytes = 0
        self.last: Batch[F] | None = None
        """The batch that was begun last: when it is settled, all are."""
        self.n = 1
        """The number of the next part that is written."""
        self.failure: Exception | None = None
        """The reason why nothing is sent any more."""

    # -- records come

    @property
    def is_full(self) -> bool:
        """True while the next record has to wait for memory."""
        return self._held_bytes >= self._limits.memory_bytes

    def add(self, record: Any) -> tuple[Batch[F], int]:
        """Take a record, a NewRecord or just its `data`; return its place. It is encoded now, so it may change later.

        NotFiniteError for NaN and infinities, TypeError for what JSON cannot hold: the record is not taken then.
        """
        data = _encode(record)
        if data.rfind(b"null") >= 0:
            encode_body(record, "record")
        if isinstance(record, NewRecord):
            data = data[_DATA_AT:-1]
        batch = self._open
        if batch is None:
            batch = self._open = self.last = Batch(self._new_future(), self._clock())
        waiting = batch.data
        index = len(waiting)
        waiting.append(data)
        size_bytes = len(data) + RECORD_OVERHEAD_BYTES
        self._held_bytes += size_bytes
        batch.size_bytes += size_bytes
        limits = self._limits
        if index + 1 >= limits.batch_records or batch.size_bytes >= limits.batch_bytes:
            self.seal()
        return batch, index

    def seal(self) -> None:
        """Send what there is without waiting for more."""
        batch, self._open = self._open, None
        if batch is not None:
            batch.unsettled = len(batch.data)
            self._parts.append(BatchPart(batch, 0, batch.unsettled))

    # -- parts go

    def pause_s(self) -> float | None:
        """Return how long nothing has to be sent: 0 when there is something, None until the next record."""
        if self._parts:
            return 0.0
        if self._open is None:
            return None
        return max(0.0, self._open.begun_s + self._limits.linger_ms / 1000 - self._clock())

    def take(self) -> BatchPart:
        """Return the part that goes next. It is the same one until it was written or refused."""
        if not self._parts:
            self.seal()
        return self._parts[0]

    def written(self, first_seq: int) -> None:
        """Note that the part under way is in the topic."""
        batch, start, stop = self._parts.popleft()
        self.n += 1
        batch.note_written(start, stop, first_seq)
        self._settle(batch, stop - start)

    def refused(self, error: Exception) -> None:
        """Note that a record of the part under way cannot be written, whichever it is."""
        part = self._parts.popleft()
        if part.stop - part.start > 1:
            self._parts.extendleft(reversed(part.halves()))
            return
        if not part.batch.rejected:
            self._with_rejected.append(part.batch)
        part.batch.rejected[part.start] = error
        self._settle(part.batch, 1)

    def leave(self, error: Exception) -> None:
        """Fail in a forked child: whatever the parent's threads hold is out of reach, the locks of its futures too."""
        self.seal()
        for part in self._parts:
            part.batch.settled = self._new_future()
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the producer: no record that waits is sent any more, and whoever waits gets this error."""
        self.seal()
        if self.failure is None:
            self.failure = error
        for part in self._parts:
            part.batch.failure = self.failure
            if part.batch.unsettled:
                self._settle(part.batch, part.batch.unsettled)
        self._parts.clear()

    def unseen(self) -> list[Exception]:
        """Return the errors of rejected records that nobody has asked for."""
        return [error for batch in self._with_rejected for error in batch.unseen()]

    def _settle(self, batch: Batch[F], records: int) -> None:
        batch.unsettled -= records
        if not batch.unsettled:
            self._held_bytes -= batch.size_bytes
            batch.data = []
            if not batch.settled.done():
                batch.settled.set_result(None)
