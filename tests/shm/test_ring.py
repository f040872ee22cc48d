"""The ring against a plain queue, and against a producer that is killed anywhere."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from topics.shm.ring import HEADER_BYTES, Ring


def make_ring(capacity_bytes: int) -> Ring:
    return Ring(memoryview(bytearray(HEADER_BYTES + capacity_bytes)))


def drain(ring: Ring) -> list[bytes]:
    messages = []
    for message, position in ring.peek():
        messages.append(bytes(message))
        ring.consume(position)
    return messages


@settings(max_examples=200, deadline=None)
@given(
    capacity_bytes=st.sampled_from([1024, 1032, 2048]),
    steps=st.lists(st.one_of(st.integers(1, 256), st.just(0)), max_size=120),
)
def test_it_is_a_bounded_fifo(capacity_bytes: int, steps: list[int]) -> None:
    ring = make_ring(capacity_bytes)
    model: deque[bytes] = deque()
    for number, size in enumerate(steps):
        if size:
            message = bytes([number % 256]) * size
            if ring.push(message[: size // 2], message[size // 2 :]):
                model.append(message)
            else:
                assert model, "an empty ring takes any message up to its limit"
        elif model:
            message_view, position = next(ring.peek())
            assert bytes(message_view) == model.popleft()
            ring.consume(position)
    assert drain(ring) == list(model)
    assert ring.empty


def test_an_unconsumed_message_is_seen_again_by_the_next_reader() -> None:
    ring = make_ring(1024)
    assert ring.push(b"a")
    assert ring.push(b"b")
    first = [bytes(message) for message, _ in ring.peek()]
    assert first == [bytes(message) for message, _ in ring.peek()] == [b"a", b"b"]


def test_peek_goes_on_behind_a_position() -> None:
    ring = make_ring(1024)
    ring.push(b"a")
    ((_, behind_a),) = list(ring.peek())
    ring.push(b"b")
    assert [bytes(message) for message, _ in ring.peek(behind_a)] == [b"b"]
    assert not ring.empty
    assert ring.consumed == 0


def test_a_full_ring_takes_nothing_and_keeps_what_it_has() -> None:
    ring = make_ring(1024)
    pushed = 0
    while ring.push(b"x" * 200):
        pushed += 1
    assert pushed == 4
    assert drain(ring) == [b"x" * 200] * 4
    assert ring.push(b"y")
    assert drain(ring) == [b"y"]
