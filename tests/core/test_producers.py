"""Positions of producers: keys of a third kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kept import items_kept
from topics.core.errors import TopicsError
from topics.core.idempotency import (
    FORGOTTEN_AFTER_MS,
    IdempotencyWindow,
    ProducerTurn,
    WriteOutcome,
    check_turn,
    parse_key,
    producer_key,
)

U64 = st.integers(0, 2**64 - 1)


@given(st.text(min_size=1, max_size=128), U64, U64)
def test_a_key_says_what_it_was_made_of_and_is_no_clients(id: str, epoch: int, n: int) -> None:
    key = producer_key(id.encode(), ProducerTurn(epoch, n))
    assert parse_key(key) == (id.encode(), ProducerTurn(epoch, n))
    with pytest.raises(UnicodeDecodeError):
        key.decode()


def key(n: int, epoch: int = 1) -> bytes:
    return producer_key(b"p", ProducerTurn(epoch, n))


def test_the_last_write_is_known_beyond_the_window_and_others_within_it() -> None:
    window = IdempotencyWindow()
    for n in (1, 2):
        window.remember(key(n), WriteOutcome(n, 1, 1000 + n))
    assert window.find(key(1), 1050, 100) == WriteOutcome(1, 1, 1001)
    assert window.find(key(1), 1102, 100) is None
    assert window.find(key(2), 1_000_000, 100) == WriteOutcome(2, 1, 1002)
    assert window.turn_of(b"p", 1_000_000) == ProducerTurn(1, 2)


def test_an_idle_producer_is_forgotten_in_the_end() -> None:
    window = IdempotencyWindow()
    window.remember(key(1), WriteOutcome(1, 1, 1000))
    last_ms = 1000 + FORGOTTEN_AFTER_MS
    assert window.turn_of(b"p", last_ms) == ProducerTurn(1, 1)
    assert window.find(key(1), last_ms, 0) is not None
    assert window.turn_of(b"p", last_ms + 1) is None
    assert window.find(key(1), last_ms + 1, 0) is None
    assert window.unexpired(last_ms + 1, 0) == []
    assert len(window) == 0


def test_idle_producers_are_let_go_while_others_write() -> None:
    window = IdempotencyWindow()
    day_ms = 86_400_000
    window.remember(producer_key(b"busy", ProducerTurn(1, 0)), WriteOutcome(1, 1, 0))
    for n in range(100):
        window.remember(producer_key(b"idle%d" % n, ProducerTurn(1, 0)), WriteOutcome(2 + n, 1, n))
    for day in range(1, 31):
        window.find(b"client", day * day_ms, 0)
        window.remember(b"client", WriteOutcome(200 + day, 1, day * day_ms))
        if day % 6 == 0:
            window.remember(producer_key(b"busy", ProducerTurn(1, day)), WriteOutcome(300 + day, 1, day * day_ms))
        if day == 7:
            assert len(window) > 100
    assert items_kept(window) - items_kept(IdempotencyWindow()) < 20
    assert window.turn_of(b"busy", 30 * day_ms) == ProducerTurn(1, 30)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 0), (0, 1, 0, 1), (1, 0)])
def test_who_was_forgotten_begins_anew_also_for_those_who_read_the_log(order: tuple[int, ...]) -> None:
    """Twice, from a file that was salvaged, or the later part first, from the RAM log."""
    later_ms = 1000 + FORGOTTEN_AFTER_MS + 1
    writes = [(key(5, epoch=5), WriteOutcome(1, 1, 1000)), (key(0), WriteOutcome(2, 1, later_ms))]
    window = IdempotencyWindow()
    for at in order:
        window.remember(*writes[at])
    assert window.turn_of(b"p", later_ms) == ProducerTurn(1, 0)
    assert window.find(key(0), later_ms + 1, 0) == WriteOutcome(2, 1, later_ms)
    assert window.unexpired(later_ms, 0)[0] == (key(0), 2, 1, later_ms)


def test_what_is_kept_restores_it() -> None:
    window = IdempotencyWindow()
    window.remember(key(7), WriteOutcome(1, 1, 1000))
    window.remember(producer_key(b"other", ProducerTurn(9, 0)), WriteOutcome(2, 3, 5000))
    window.remember(b"client", WriteOutcome(5, 1, 5001))
    window.remember(key(1, epoch=2), WriteOutcome(6, 1, 5002))
    for now_ms, known in ((5002, 3), (5102, 2), (90_000, 2)):
        again = IdempotencyWindow()
        kept = window.unexpired(now_ms, 100)
        assert len(kept) == known
        for one, *outcome in kept:
            again.remember(one, WriteOutcome(*outcome))
        assert again.turn_of(b"p", now_ms) == ProducerTurn(2, 1)
        assert again.turn_of(b"other", now_ms) == ProducerTurn(9, 0)
        assert again.find(key(1, epoch=2), now_ms, 100) == WriteOutcome(6, 1, 5002)
        assert sorted(again.unexpired(now_ms, 100)) == sorted(kept)


def test_an_older_key_that_is_read_again_takes_nobody_back() -> None:
    """A log may say a write twice; so may a snapshot and the log behind it."""
    window = IdempotencyWindow()
    for n in (1, 2, 3, 1, 2):
        window.remember(key(n), WriteOutcome(n, 1, 1000 + n))
    assert window.turn_of(b"p", 1003) == ProducerTurn(1, 3)


@pytest.mark.parametrize(
    ("given_", "code"),
    [
        (ProducerTurn(4, 9), "fenced"),
        (ProducerTurn(0, 6), "fenced"),
        (ProducerTurn(5, 6), None),
        (ProducerTurn(5, 7), "out_of_order"),
        (ProducerTurn(5, 5), "out_of_order"),
        (ProducerTurn(5, 0), "out_of_order"),
        (ProducerTurn(6, 0), None),
        (ProducerTurn(6, 77), None),
    ],
)
def test_who_may_write_what(given_: ProducerTurn, code: str | None) -> None:
    last = ProducerTurn(5, 5)

    def check() -> None:
        check_turn(b"p", last, given_, is_known=False)

    if code is None:
        check()
    else:
        with pytest.raises(TopicsError) as refused:
            check()
        assert (refused.value.code, refused.value.detail) == (code, {"producer": "p", "epoch": 5, "n": 5})
        assert "was committed" not in refused.value.message, "perhaps the first number of the epoch was a higher one"
