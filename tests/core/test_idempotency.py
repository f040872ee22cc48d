"""Keys that expire, and stage keys that do not."""

from __future__ import annotations

import pytest

from topics.core.idempotency import IdempotencyWindow, KeyMark, WriteOutcome, is_producer_key, is_stage_key, stage_key

DAY_MS = 86_400_000


def test_a_key_expires_and_a_pin_does_not() -> None:
    window = IdempotencyWindow()
    window.remember(b"key", WriteOutcome(1, 1, 1000))
    window.remember(stage_key("sink", 7, "stage"), WriteOutcome(2, 3, 1000))
    assert window.find(b"key", 1100, 100) == WriteOutcome(1, 1, 1000)
    assert window.find(b"key", 1101, 100) is None
    assert window.find(stage_key("sink", 7, "stage"), 1000 + 365 * DAY_MS, 0) == WriteOutcome(2, 3, 1000)


def test_the_next_batch_of_a_sink_takes_the_place_of_the_last() -> None:
    window = IdempotencyWindow()
    for sink in ("a", "b"):
        for stage in ("x", "y"):
            window.remember(stage_key(sink, 7, stage), WriteOutcome(1, 1, 1))
    window.remember(stage_key("a", 8, "z"), WriteOutcome(5, 1, 1))
    assert window.find(stage_key("a", 7, "x"), 1, 0) is None
    assert window.find(stage_key("a", 8, "z"), 1, 0) is not None
    assert window.find(stage_key("b", 7, "y"), 1, 0) is not None
    assert len(window) == 3


def test_a_batch_that_is_over_is_forgotten_and_no_other() -> None:
    window = IdempotencyWindow()
    window.remember(stage_key("a", 8, "z"), WriteOutcome(5, 1, 1))
    window.forget_stages("a", 7)
    window.forget_stages("b", 8)
    assert len(window) == 1
    window.forget_stages("a", 8)
    window.forget_stages("a", 8)
    assert len(window) == 0


def test_pins_say_what_they_are_of() -> None:
    window = IdempotencyWindow()
    assert window.published_stages() == []
    for stage in ("x-1", "y-2"):
        window.remember(stage_key("spark-job.é", 2**63, stage), WriteOutcome(1, 1, 1))
    window.remember(stage_key("b", 0, ""), WriteOutcome(2, 1, 1))
    assert window.published_stages() == [("spark-job.é", 2**63, ["x-1", "y-2"]), ("b", 0, [""])]


def test_what_is_kept_over_a_trim_or_in_a_snapshot_has_the_pins() -> None:
    window = IdempotencyWindow()
    window.remember(b"old", WriteOutcome(1, 1, 1))
    window.remember(b"key", WriteOutcome(2, 1, 1000))
    window.remember(stage_key("a", 8, "z"), WriteOutcome(5, 1, 1))
    kept = IdempotencyWindow()
    for key, *outcome in window.unexpired(1000, 100):
        kept.remember(key, WriteOutcome(*outcome))
    assert kept.find(b"key", 1000, 100) == WriteOutcome(2, 1, 1000)
    assert kept.find(stage_key("a", 8, "z"), 1000, 100) == WriteOutcome(5, 1, 1)
    assert len(kept) == 2


def test_no_client_can_send_a_pin() -> None:
    assert is_stage_key(stage_key("s", 0, "x"))
    assert not any(is_stage_key(chr(point).encode()) for point in range(0x110000) if not 0xD800 <= point < 0xE000)


def test_the_services_own_keys_are_told_apart_and_are_no_clients() -> None:
    for mark in KeyMark:
        key = mark + b"dead-letter:12:34567890"
        assert (is_stage_key(key), is_producer_key(key)) == (mark is KeyMark.STAGE, mark is KeyMark.PRODUCER)
        with pytest.raises(UnicodeDecodeError):
            key.decode()
