"""The meta of a job on its way to the dead letters and back (api §9)."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from topics.core.dead_letters import (
    BEFORE,
    DEAD_JOB_KEY,
    FROM,
    JOB_KEY,
    RESERVED,
    SRC_SEQ,
    dead_letter_meta,
    job_key,
    redriven_meta,
)

QUEUES = ("a", "a:b", "c", "d")
plain_meta = st.dictionaries(st.sampled_from(["k", "l", "$other"]), st.text(max_size=3))


def said(meta: dict[str, Any]) -> dict[str, Any]:
    """Without the key, which a job that was never dead does not bear."""
    return {key: value for key, value in meta.items() if key != JOB_KEY}


@given(plain_meta, st.lists(st.sampled_from(QUEUES), min_size=1, max_size=4, unique=True))
def test_a_way_through_many_queues_goes_back_step_by_step_and_every_key_is_that_of_the_first_time(
    meta: dict[str, Any], queues: list[str]
) -> None:
    stages = []
    for epoch, queue in enumerate(queues, 1):
        stages.append((queue, job_key(meta, queue, epoch, 10 + epoch), meta))
        meta = dead_letter_meta(meta, queue, epoch, 10 + epoch, 3, "")
        assert (meta[FROM], meta[SRC_SEQ], meta[DEAD_JOB_KEY]) == (queue, str(10 + epoch), stages[-1][1])
        assert all(isinstance(value, str) for value in meta.values())
    for queue, key, before in reversed(stages):
        assert meta[FROM] == queue
        meta = redriven_meta(meta)
        assert said(meta) == said(before)
        assert job_key(meta, queue, 99, 99) == key
        # Another time the same way: it is the same job.
        assert redriven_meta(dead_letter_meta(meta, queue, 98, 97, 1, "order")) == meta


@given(plain_meta, st.lists(st.sampled_from(QUEUES), max_size=12))
def test_whatever_way_it_goes_what_is_said_of_it_stays_bounded(meta: dict[str, Any], queues: list[str]) -> None:
    first = dict(meta)
    for queue in queues:
        meta = dead_letter_meta(meta, queue, 1, 1, 1, "o")
    assert len(meta.get(BEFORE, "")) < 200 * len(QUEUES)
    while FROM in meta:
        meta = redriven_meta(meta)
    assert said(meta) == first


def test_the_key_of_a_copy_in_another_queue_is_its_own() -> None:
    meta = {JOB_KEY: "a:b:0000000000000001:1"}
    assert job_key(meta, "a:b", 2, 2) == "a:b:0000000000000001:1"
    assert job_key(meta, "a", 2, 2) == "a:0000000000000002:2"


def test_what_was_dead_before_keys_were_carried_comes_back_without_one() -> None:
    assert redriven_meta({FROM: "a", SRC_SEQ: "1", "k": "v"}) == {"k": "v"}


def test_none_of_it_may_be_written() -> None:
    once = dead_letter_meta({}, "a", 1, 1, 1, "o")
    twice = dead_letter_meta(once, "c", 1, 1, 1, "o")
    assert set(once) | set(twice) | set(redriven_meta(once)) < RESERVED
