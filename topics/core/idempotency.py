"""The outcomes of keyed writes, so that a retry gets the first answer (api §0.9), and the fencing of producers. Pure.

There are three kinds of keys:

- A client's key is UTF-8 and expires with the topic's window.
- A *stage key* marks a stage that a transaction has published (api §6). The service must know it as long as the
transaction may be carried out again, and no clock can tell that. The topic forgets it when the sink's next batch
comes, or when the transaction is over.
- A producer's key expires like a client's, except the last one: it says where the producer is (api §2). A producer
numbers its writes, and each instance of it has a higher epoch than the one before. Epoch and number are the key, so
they are logged with the write, and are wherever keys are:

      | 0xFD | id | epoch u64 big-endian | n u64 big-endian |
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, unique
from struct import Struct
from typing import Final, NamedTuple

from topics.core.errors import TopicsError


@unique
class KeyMark(bytes, Enum):
    """First bytes of keys that the service itself gives to writes. No UTF-8 text begins with one, so no client's key
    does.

    Logs contain them, so never give a former mark another meaning.
    """

    STAGE = b"\xff"
    """A transaction gives it to a stage that it publishes."""
    CARRIED = b"\xfe"
    """A frontend gives it to a record that it brings to the dead letters, or back (`dead_letter_moves.py`)."""
    PRODUCER = b"\xfd"
    """A producer numbers its writes with it."""


FORGOTTEN_AFTER_MS: Final = 7 * 24 * 3_600_000
"""A producer that has written nothing for so long counts as one that never wrote."""
_TURN: Final = Struct(">QQ")


class ProducerTurn(NamedTuple):
    """The place of a producer: its highest epoch, and the number of the last write in it."""

    epoch: int
    n: int


def producer_key(id: bytes, turn: ProducerTurn) -> bytes:
    return KeyMark.PRODUCER + id + _TURN.pack(*turn)


def is_producer_key(key: bytes) -> bool:
    return key.startswith(KeyMark.PRODUCER)


def parse_key(key: bytes) -> tuple[bytes, ProducerTurn]:
    """Return (id, turn)."""
    return key[1 : -_TURN.size], ProducerTurn(*_TURN.unpack_from(key, len(key) - _TURN.size))


def check_turn(
    id: bytes,
    last: ProducerTurn | None,
    given: ProducerTurn,
    *,
    is_known: bool,
    has_begun: bool = False,
    may_skip: bool = False,
) -> None:
    """Raise `409 fenced` for an instance that another one of a higher epoch has replaced, `409 out_of_order` for a
    write that is not the next one. Allow a retry whose outcome `is_known`, and any number for the first write of an
    epoch, unless the instance `has_begun`. With `may_skip` allow a gap, because the log may have lost writes behind
    the last one.
    """
    if last is None or last.epoch < given.epoch:
        if has_begun and not (is_known or may_skip):
            raise TopicsError(
                "out_of_order",
                f"producer {id.decode()!r} has had an answer in epoch {given.epoch}, of which no write is known here:"
                " its writes were lost; look which of its records are there, then go on in a higher epoch",
                {"producer": id.decode(), "epoch": given.epoch, "n": 0},
            )
        return
    detail = {"producer": id.decode(), "epoch": last.epoch, "n": last.n}
    if given.epoch < last.epoch:
        raise TopicsError(
            "fenced",
            f"producer {id.decode()!r} goes on in epoch {last.epoch}, so epoch {given.epoch} may not write any more",
            detail,
        )
    missing = given.n > last.n
    if not is_known and given.n != last.n + 1 and not (may_skip and missing):
        raise TopicsError(
            "out_of_order",
            f"producer {id.decode()!r} has written up to {last.n}, so {last.n + 1} is next and not {given.n}"
            + ("" if missing else "; whether that one was written is not known any more"),
            detail,
        )


_BATCH_LEN: Final = 8


class WriteOutcome(NamedTuple):
    """The result of a keyed write."""

    first_seq: int
    records: int
    ts: int


def stage_key(sink: str, batch: int, stage: str) -> bytes:
    """The key of a stage that a batch of a sink publishes.

    | 0xFF | sink | 0x00 | batch u64 big-endian | stage |
    """
    return stage_keys_of(sink) + batch.to_bytes(_BATCH_LEN, "big") + stage.encode()


def stage_keys_of(sink: str) -> bytes:
    """Return the beginning of all stage keys of a sink."""
    return KeyMark.STAGE + sink.encode() + b"\x00"


def is_stage_key(key: bytes) -> bool:
    return key.startswith(KeyMark.STAGE)


def is_move_key(key: bytes) -> bool:
    """Return whether a write with this key replaces a stage or a record of another topic, which is removed after it."""
    return key.startswith((KeyMark.STAGE, KeyMark.CARRIED))


class IdempotencyWindow:
    """The keyed writes of one topic.

    It keeps clients' keys of the last `window_ms`, oldest first; commit times never decrease, so keys expire at the
    front. It keeps stage keys by sink, for one batch of each sink. It keeps producers' turns by id, the last writer at
    the end.
    """

    __slots__ = ("_outcomes", "_producers", "_stage_keys")

    def __init__(self) -> None:
        self._outcomes: dict[bytes, WriteOutcome] = {}
        self._stage_keys: dict[bytes, dict[bytes, WriteOutcome]] = {}
        self._producers: OrderedDict[bytes, tuple[ProducerTurn, WriteOutcome]] = OrderedDict()

    def find(self, key: bytes, now_ms: int, window_ms: int) -> WriteOutcome | None:
        """Return the outcome of this key, if it is a stage key or not older than the window."""
        if is_stage_key(key):
            return self._stage_keys.get(_sink_of(key), {}).get(key)
        self._expire(now_ms, window_ms)
        found = self._outcomes.get(key)
        if found is None and is_producer_key(key):
            id, turn = parse_key(key)
            known = self._producers.get(id)
            if known is not None and known[0] == turn and now_ms - known[1].ts <= FORGOTTEN_AFTER_MS:
                found = known[1]
        return found

    def turn_of(self, producer: bytes, now_ms: int) -> ProducerTurn | None:
        """Return the turn of this producer, None if it is not known, or not any more."""
        known = self._producers.get(producer)
        return known[0] if known is not None and now_ms - known[1].ts <= FORGOTTEN_AFTER_MS else None

    def last_seq_of(self, producer: bytes) -> int | None:
        """Return the first seq of the last write of this producer, None if none is known."""
        known = self._producers.get(producer)
        return None if known is None else known[1].first_seq

    def remember(self, key: bytes, outcome: WriteOutcome) -> None:
        """Keep the outcome of a committed write. A key that expired and came again moves to the end."""
        if is_stage_key(key):
            sink = _sink_of(key)
            published = self._stage_keys.setdefault(sink, {})
            if published and _batch_of(next(iter(published)), sink) != _batch_of(key, sink):
                published.clear()
            published[key] = outcome
            return
        self._outcomes.pop(key, None)
        self._outcomes[key] = outcome
        if is_producer_key(key):
            id, turn = parse_key(key)
            known = self._producers.get(id)
            if known is None or _goes_on(known, turn, outcome.ts):
                self._producers[id] = (turn, outcome)
                self._producers.move_to_end(id)
        self._forget(outcome.ts)

    def forget_stages(self, sink: str, batch: int) -> None:
        """Forget the stage keys of a batch that is over: nothing of it will be published again."""
        prefix = stage_keys_of(sink)
        known = self._stage_keys.get(prefix)
        if known and _batch_of(next(iter(known)), prefix) == batch.to_bytes(_BATCH_LEN, "big"):
            del self._stage_keys[prefix]

    def published_stages(self) -> list[tuple[str, int, list[str]]]:
        """Return (sink, batch, stages) of each sink that has stage keys."""
        found = []
        for prefix, known in self._stage_keys.items():
            stage_at = len(prefix) + _BATCH_LEN
            batch = int.from_bytes(_batch_of(next(iter(known)), prefix), "big")
            sink = prefix[len(KeyMark.STAGE) : -1].decode()
            found.append((sink, batch, [key[stage_at:].decode() for key in known]))
        return found

    def unexpired(self, now_ms: int, window_ms: int) -> list[tuple[bytes, int, int, int]]:
        """Return (key, first_seq, records, ts) of every write that a retry may still ask for, oldest first."""
        self._expire(now_ms, window_ms)
        kept = [(key, *outcome) for known in self._stage_keys.values() for key, outcome in known.items()]
        self._forget(now_ms)
        for id, (turn, outcome) in self._producers.items():
            key = producer_key(id, turn)
            # A log may have a write late: then its producer stands behind others, so check the age of each.
            if key not in self._outcomes and now_ms - outcome.ts <= FORGOTTEN_AFTER_MS:
                kept.append((key, *outcome))
        return kept + [(key, *outcome) for key, outcome in self._outcomes.items()]

    def _expire(self, now_ms: int, window_ms: int) -> None:
        outcomes = self._outcomes
        expired = []
        for key, outcome in outcomes.items():
            if now_ms - outcome.ts <= window_ms:
                break
            expired.append(key)
        for key in expired:
            del outcomes[key]

    def _forget(self, now_ms: int) -> None:
        """Forget idle producers by commit times: so a reader of the log forgets the same producers as its shard."""
        producers = self._producers
        while producers:
            _turn, oldest = next(iter(producers.values()))
            if now_ms - oldest.ts <= FORGOTTEN_AFTER_MS:
                break
            producers.popitem(last=False)

    def __len__(self) -> int:
        return len(self._outcomes) + sum(map(len, self._stage_keys.values())) + len(self._producers)


def _goes_on(known: tuple[ProducerTurn, WriteOutcome], turn: ProducerTurn, ts: int) -> bool:
    """True if this write of a producer is later than its known one. A fold may meet an earlier write later, because a
    log may have a write twice, and two logs come one after the other. The turn tells which is later, unless the
    producer was forgotten between the two and began again: then the commit time tells.
    """
    last_turn, last = known
    later_ms = ts - last.ts
    return turn >= last_turn if abs(later_ms) <= FORGOTTEN_AFTER_MS else later_ms > 0


def _sink_of(key: bytes) -> bytes:
    return key[: key.index(b"\x00") + 1]


def _batch_of(key: bytes, sink: bytes) -> bytes:
    return key[len(sink) : len(sink) + _BATCH_LEN]
