"""Keys that expire, and pins that do not."""

from __future__ import annotations

import pytest

from topics.core.idempotency import IdempotencyWindow, KeyMark, WriteOutcome, is_pin, is_producer_key, pin

DAY_MS = 86_400_000


def test_a_key_expires_and_a_pin_does_not() -> None:
    window = IdempotencyWindow()
    window.remember(b"key", WriteOutcome(1, 1, 1000))
    window.remember(pin("sink", 7, "stage"), WriteOutcome(2, 3, 1000))
    assert window.find(b"key", 1100, 100) == WriteOutcome(1, 1, 1000)
    assert window.find(b"key", 1101, 100) is None
    assert window.find(pin("sink", 7, "stage"), 1000 + 365 * DAY_MS, 0) == WriteOutcome(2, 3, 1000)


def test_the_next_batch_of_a_sink_takes_the_place_of_the_last() -> None:
    window = IdempotencyWindow()
    for sink in ("a", "b"):
        for stage in ("x", "y"):
            window.remember(pin(sink, 7, stage), WriteOutcome(1, 1, 1))
    window.remember(pin("a", 8, "z"), WriteOutcome(5, 1, 1))
    assert window.find(pin("a", 7, "x"), 1, 0) is None
    assert window.find(pin("a", 8, "z"), 1, 0) is not None
    assert window.find(pin("b", 7, "y"), 1, 0) is not None
    assert len(window) == 3


def test_a_batch_that_is_over_is_forgotten_and_no_other() -> None:
    window = IdempotencyWindow()
    window.remember(pin("a", 8, "z"), WriteOutcome(5, 1, 1))
    window.unpin("a", 7)
    window.unpin("b", 8)
    assert len(window) == 1
    window.unpin("a", 8)
    window.unpin("a", 8)
    assert len(window) == 0


def test_pins_say_what_they_are_of() -> None:
    window = IdempotencyWindow()
    assert window.pinned() == []
    for stage in ("x-1", "y-2"):
        window.remember(pin("spark-job.é", 2**63, stage), WriteOutcome(1, 1, 1))
    window.remember(pin("b", 0, ""), WriteOutcome(2, 1, 1))
    assert window.pinned() == [("spark-job.é", 2**63, ["x-1", "y-2"]), ("b", 0, [""])]


def test_what_is_kept_over_a_trim_or_in_a_snapshot_has_the_pins() -> None:
    window = IdempotencyWindow()
    window.remember(b"old", WriteOutcome(1, 1, 1))
    window.remember(b"key", WriteOutcome(2, 1, 1000))
    window.remember(pin("a", 8, "z"), WriteOutcome(5, 1, 1))
    kept = IdempotencyWindow()
    for key, *outcome in window.unexpired(1000, 100):
        kept.remember(key, WriteOutcome(*outcome))
    assert kept.find(b"key", 1000, 100) == WriteOutcome(2, 1, 1000)
    assert kept.find(pin("a", 8, "z"), 1000, 100) == WriteOutcome(5, 1, 1)
    assert len(kept) == 2


def test_no_client_can_send_a_pin() -> None:
    assert is_pin(pin("s", 0, "x"))
    assert not any(is_pin(chr(point).encode()) for point in range(0x110000) if not 0xD800 <= point < 0xE000)


def test_the_services_own_keys_are_told_apart_and_are_no_clients() -> None:
    for mark in KeyMark:
        key = mark + b"dead-letter:12:34567890"
        assert (is_pin(key), is_producer_key(key)) == (mark is KeyMark.PIN, mark is KeyMark.PRODUCER)
        with pytest.raises(UnicodeDecodeError):
            key.decode()
