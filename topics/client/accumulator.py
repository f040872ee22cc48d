"""The records that a producer has to send: which batch goes next, and the outcome of each record. Pure.

    add ──▶ open batch ──full, old enough or flushed──▶ sealed parts ──▶ one part at a time under way ──▶ settled

A part is sent with the producer's next number `n`, and again with the same `n` until there is an answer, so the service
appends it once. If the service refuses a part for a bad record, the number is still free: the halves of the part follow
in its place, until the bad record is alone and only it is rejected. Any other failure ends the producer, since nothing
behind an unwritten part may be written. So records are in the topic in the order of `add`, each once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from topics.api.requests import NewRecord
from topics.client.arguments import Numbers
from topics.client.calls import encode_body

RECORD_OVERHEAD_BYTES: Final = 96
"""Memory of a waiting record beside its JSON: the object that holds it, its place in a list, its handle."""
_UNSEEN_MAX: Final = 1000
_DATA_AT: Final = len(b'{"data":')

_encode = msgspec.json.Encoder().encode


class ProducerLimits(Numbers, frozen=True):
    """A batch is sent when it has so many records or bytes, or when its first record is `linger_ms` old. `send` waits
    while records without an answer hold more than `memory_bytes`.

    The service takes 10,000 records in one write unless configured, and long bodies wait for each other above 1 MiB.
    """

    batch_records: int = 10_000
    batch_bytes: int = 1_000_000
    linger_ms: float = 5.0
    memory_bytes: int = 32 << 20


class Batch:
    """Records that were added one after another, and their outcomes once the future `settled` is done."""

    __slots__ = (
        "_unseen",
        "begun_s",
        "data",
        "failure",
        "first_seqs",
        "rejected",
        "settled",
        "size_bytes",
        "unsettled",
    )

    def __init__(self, settled: Any, begun_s: float, unseen: deque[Exception]) -> None:
        self.settled = settled
        self.begun_s = begun_s
        self.data: list[bytes] = []
        """The JSON of each record behind `{"data":`, without the last brace. Empty once all are settled."""
        self.size_bytes = 0
        self.unsettled = 0
        """Records without an outcome; 0 while the batch is open."""
        self.rejected: dict[int, Exception] = {}
        self.failure: Exception | None = None
        self.first_seqs: list[tuple[int, int, int]] = []
        """Each part that the service has written: its start, its stop, the seq of its first record."""
        self._unseen = unseen

    def seq_of(self, index: int) -> int:
        """Return the seq of a settled record, or raise its error."""
        for start, stop, first_seq in self.first_seqs:
            if start <= index < stop:
                return first_seq + index - start
        error = self.rejected.get(index) or self.failure
        assert error is not None, "the record is settled"
        with suppress(ValueError):
            self._unseen.remove(error)
        raise error.with_traceback(None)  # a kept traceback would keep the frames of all callers


class BatchPart(NamedTuple):
    """The records `start` to `stop` of a batch, which one request carries."""

    batch: Batch
    start: int
    stop: int

    def records(self) -> bytes:
        """Return the records as a JSON list."""
        return b'[{"data":' + b'},{"data":'.join(self.batch.data[self.start : self.stop]) + b"}]"


class Accumulator:
    """The records of a producer that wait for their answers, in order. `new_future` makes a batch's future."""

    def __init__(self, limits: ProducerLimits, new_future: Callable[[], Any], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._new_future = new_future
        self._clock = clock
        self._open: Batch | None = None
        self._parts: deque[BatchPart] = deque()
        self.unseen: deque[Exception] = deque(maxlen=_UNSEEN_MAX)
        """The last errors of rejected records that nobody has asked for."""
        self._held_bytes = 0
        self.last: Batch | None = None
        """The batch that was sealed last: when it is settled, all are."""
        self.n = 1
        """The number of the next part that is written."""
        self.failure: Exception | None = None
        """The reason why nothing is sent any more."""

    @property
    def is_full(self) -> bool:
        """True while the next record has to wait for memory."""
        return self._held_bytes > self._limits.memory_bytes

    def add(self, record: Any) -> tuple[Batch, int]:
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
            batch = self._open = Batch(self._new_future(), self._clock(), self.unseen)
        index = len(batch.data)
        batch.data.append(data)
        size_bytes = len(data) + RECORD_OVERHEAD_BYTES
        self._held_bytes += size_bytes
        batch.size_bytes += size_bytes
        limits = self._limits
        if index + 1 >= limits.batch_records or batch.size_bytes >= limits.batch_bytes:
            self.seal()
        return batch, index

    def seal(self) -> None:
        """Send what there is without waiting for more."""
        batch = self._open
        if batch is not None and batch.data:
            batch.unsettled = len(batch.data)
            part, self.last = BatchPart(batch, 0, batch.unsettled), batch
            # In one step: the handler of a signal runs behind a call, not before it.
            self._open = None
            self._parts.append(part)

    def pause_s(self) -> float | None:
        """Return the seconds until something is to be sent: 0 for now, None if that needs another record first."""
        if self._parts or self._open is None:
            return 0.0 if self._parts else None
        return max(0.0, self._open.begun_s + self._limits.linger_ms / 1000 - self._clock())

    def take(self) -> BatchPart:
        """Return the part that goes next. Return the same one until `note` has its outcome."""
        if not self._parts:
            self.seal()
        return self._parts[0]

    def note(self, outcome: int | Exception) -> None:
        """Note the outcome of the part under way: its first seq, or the error for one of its records."""
        if not self._parts:
            return  # `fail` has settled all records meanwhile
        batch, start, stop = self._parts.popleft()
        if isinstance(outcome, int):
            self.n += 1
            batch.first_seqs.append((start, stop, outcome))
        elif stop - start > 1:
            middle = (start + stop) // 2
            self._parts.extendleft((BatchPart(batch, middle, stop), BatchPart(batch, start, middle)))
            return
        else:
            batch.rejected[start] = outcome
            self.unseen.append(outcome)
        self._settle(batch, stop - start)

    def fail(self, error: Exception) -> None:
        """End the producer: no record that waits is sent any more, and each gets this error."""
        self.seal()
        self.failure = self.failure or error
        for batch, _start, _stop in self._parts:
            batch.failure = self.failure
            self._settle(batch, batch.unsettled)
        self._parts.clear()

    def _settle(self, batch: Batch, records: int) -> None:
        batch.unsettled -= records
        if not batch.unsettled and not batch.settled.done():
            self._held_bytes -= batch.size_bytes
            batch.data = []
            batch.settled.set_result(None)
