"""The pure part of a producer, against a service that refuses, and loses answers after it has written."""

from __future__ import annotations

import json
import sys
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.client import NewRecord, NotFiniteError, ProducerLimits
from topics.client.accumulator import Accumulator

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.booleans()),
        st.tuples(st.sampled_from(["answer", "lose", "flush", "wait"]), st.just(False)),
    ),
    max_size=60,
)


class ModelService:
    """A topic with one producer: a write with the last `n` is answered as before, one with a bad record is refused."""

    def __init__(self) -> None:
        self.topic: list[Any] = []
        self.n = 0
        self.first_seq = 0

    def write(self, n: int, records: list[Any]) -> int | None:
        """Return the first seq, None for a refusal."""
        if n == self.n:
            return self.first_seq
        assert n == self.n + 1, "numbers have no gaps"
        if any(record["data"]["bad"] for record in records):
            return None
        self.n, self.first_seq = n, len(self.topic) + 1
        self.topic += [record["data"]["number"] for record in records]
        return self.first_seq


class Run:
    """An accumulator, its clock and its service."""

    def __init__(self, limits: ProducerLimits) -> None:
        self.now_s = 0.0
        self.records: Accumulator = Accumulator(limits, Future, lambda: self.now_s)
        self.service = ModelService()
        self.places: list[tuple[Any, int]] = []
        self.bad: set[int] = set()

    def add(self, bad: bool) -> None:
        number = len(self.places)
        if bad:
            self.bad.add(number)
        self.places.append(self.records.add({"number": number, "bad": bad}))

    def send(self, *, answered: bool) -> None:
        if self.records.pause_s() != 0:
            return
        part = self.records.take()
        sent = json.loads(part.records())
        assert len(sent) == part.stop - part.start
        first_seq = self.service.write(self.records.n, sent)
        if not answered:
            assert self.records.take() == part, "what was not answered goes again"
        elif first_seq is None:
            self.records.note(ValueError("bad"))
        else:
            self.records.note(first_seq)

    def outcomes(self) -> list[int | None]:
        found: list[int | None] = []
        for batch, index in self.places:
            assert batch.settled.done()
            try:
                found.append(batch.seq_of(index))
            except ValueError:
                found.append(None)
        return found


@given(STEPS, st.integers(1, 7), st.integers(100, 1000))
def test_each_good_record_is_written_once_in_order_and_each_outcome_is_true(
    steps: list[tuple[str, bool]], batch_records: int, batch_bytes: int
) -> None:
    run = Run(ProducerLimits(batch_records=batch_records, batch_bytes=batch_bytes, linger_ms=10))
    for step, bad in steps:
        if step == "add":
            run.add(bad)
        elif step == "flush":
            run.records.seal()
        elif step == "wait":
            run.now_s += 0.006
        else:
            run.send(answered=step == "answer")
    run.records.seal()
    while run.records.pause_s() == 0:
        run.send(answered=True)
    good = [number for number in range(len(run.places)) if number not in run.bad]
    assert run.service.topic == good
    seqs = {number: seq for seq, number in enumerate(good, 1)}
    assert run.outcomes() == [seqs.get(number) for number in range(len(run.places))]
    assert not run.records.is_full


@given(STEPS, st.integers(1, 7))
def test_after_a_failure_all_waiting_records_fail_and_nothing_is_sent(
    steps: list[tuple[str, bool]], batch_records: int
) -> None:
    run = Run(ProducerLimits(batch_records=batch_records))
    for step, bad in steps:
        if step == "add":
            run.add(bad)
        elif step == "flush":
            run.records.seal()
        else:
            run.send(answered=step == "answer")
    run.records.fail(ValueError("the end"))
    assert run.records.pause_s() is None
    topic = run.service.topic
    for number, seq in enumerate(run.outcomes()):
        assert seq is None or topic[seq - 1] == number
    assert topic == sorted(set(topic)), "what is there is a prefix of the good records"
    assert topic == [number for number in range(len(run.places)) if number not in run.bad][: len(topic)]


def test_a_batch_goes_when_it_is_full_or_old_enough() -> None:
    run = Run(ProducerLimits(batch_records=3, linger_ms=10))
    assert run.records.pause_s() is None
    run.add(False)
    assert run.records.pause_s() == pytest.approx(0.01)
    run.now_s = 0.004
    run.add(False)
    assert run.records.pause_s() == pytest.approx(0.006), "the first record of the batch counts"
    run.add(False)
    assert run.records.pause_s() == 0
    assert len(json.loads(run.records.take().records())) == 3


def test_memory_is_full_until_an_answer_comes() -> None:
    run = Run(ProducerLimits(memory_bytes=500))
    while not run.records.is_full:
        run.add(False)
    assert 2 <= len(run.places) <= 5
    run.records.seal()
    run.send(answered=False)
    assert run.records.is_full
    run.send(answered=True)
    assert not run.records.is_full


def test_records_are_sent_as_they_are_encoded_now() -> None:
    records: Accumulator = Accumulator(ProducerLimits(), Future, lambda: 0.0)
    data = {"a": 1}
    records.add(data)
    data["a"] = 2
    records.add(NewRecord(None, tag="x", meta={"m": "1"}))
    for wrong in (float("nan"), NewRecord([float("inf")])):
        with pytest.raises(NotFiniteError, match="record"):
            records.add(wrong)
    with pytest.raises(TypeError):
        records.add(object())
    sent = json.loads(records.take().records())
    assert sent == [{"data": {"a": 1}}, {"data": None, "tag": "x", "meta": {"m": "1"}}]


def test_an_interrupt_at_any_call_loses_no_record_that_was_taken() -> None:
    """Python runs the handler of a signal where a function begins and behind calls, so there Ctrl-C may end `add`."""
    interrupts = 0
    for at_call in range(60):
        accumulator: Accumulator = Accumulator(ProducerLimits(batch_records=2), Future, lambda: 0.0)
        left = at_call

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left
            if event != "c_call" and frame.f_code.co_filename.endswith("client/accumulator.py"):
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

        taken: dict[int, Any] = {}
        for number in range(4):
            sys.setprofile(interrupt)
            try:
                taken[number] = accumulator.add(number)
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.setprofile(None)
        accumulator.seal()
        written: list[int] = []
        while accumulator.pause_s() is not None:
            records = [record["data"] for record in json.loads(accumulator.take().records())]
            assert records, "a write of nothing would be refused"
            accumulator.note(len(written) + 1)
            written += records
        assert accumulator.last is not None
        assert accumulator.last.settled.done(), "a flush ends"
        for number, (batch, index) in taken.items():
            assert batch.settled.done()
            assert written[batch.seq_of(index) - 1] == number
        assert len(set(written)) == len(written)
    assert interrupts > 20
