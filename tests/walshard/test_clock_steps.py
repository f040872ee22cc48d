"""A wall clock that jumps under a shard: no mass expiry, and `$ts` never decreases."""

from __future__ import annotations

import pytest

from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.expiry_clock import SETTLE_MS
from topics.shm.queue_messages import Claim
from topics.shm.topic_messages import DeleteRecords, Expire, PutTopic

DAY_MS = 86_400_000
TTL_MS = 3 * SETTLE_MS


def fill(rig: Rig) -> None:
    for name, kind in (("t", "log"), ("q", "queue")):
        rig.call(PutTopic(name, TopicConfig(ttl_ms=TTL_MS, type=kind), True))  # type: ignore[arg-type]
        rig.append(name, b"1", b"2")
    rig.clock.skew_ms += 5  # a correction as they come all the time
    rig.shard.sweep()


def left(rig: Rig, name: str = "t") -> int:
    view = rig.view(name)
    assert view is not None
    return view.records


def last_ts(rig: Rig) -> int:
    view = rig.view("t")
    assert view is not None
    return view.last_write_ts


def everything_that_expires(rig: Rig) -> None:
    rig.shard.sweep()
    rig.call(Expire("t"))
    rig.call(DeleteRecords("t", 1, None, b""))
    rig.call(Claim("q", "w", 0, 1000, 1))


@pytest.mark.parametrize("restarts", [False, True])
def test_forward_and_back_loses_nothing(rig: Rig, restarts: bool) -> None:
    fill(rig)
    rig.clock.skew_ms += DAY_MS
    for _ in range(3):
        everything_that_expires(rig)
        if restarts:
            rig.boot()
        rig.clock.ms += SETTLE_MS // 4
    rig.append("t", b"ahead")
    assert last_ts(rig) == rig.clock.now_ms()
    assert (left(rig), left(rig, "q")) == (3, 2)
    rig.clock.skew_ms -= DAY_MS
    everything_that_expires(rig)
    assert (left(rig), left(rig, "q")) == (3, 2)
    rig.append("t", b"behind")
    assert last_ts(rig) > rig.clock.now_ms(), "that of the record before"
    rig.boot()
    rig.shard.sweep()
    assert (left(rig), left(rig, "q")) == (4, 2)


def test_forward_for_good_expires_once_it_has_settled(rig: Rig) -> None:
    fill(rig)
    rig.clock.skew_ms += DAY_MS
    rig.shard.sweep()
    rig.append("t", b"3")
    rig.clock.ms += SETTLE_MS - 1
    rig.shard.sweep()
    assert (left(rig), left(rig, "q")) == (3, 2)
    rig.clock.ms += 1
    rig.shard.sweep()
    assert (left(rig), left(rig, "q")) == (1, 0)
    rig.restart_service()
    assert (left(rig), left(rig, "q")) == (1, 0)


def test_while_it_settles_time_goes_on(rig: Rig) -> None:
    """What has outlived its ttl by the monotonic clock expires all the same."""
    fill(rig)
    rig.clock.skew_ms += DAY_MS
    rig.shard.sweep()
    rig.clock.ms += SETTLE_MS // 2
    rig.append("q", b"3")
    rig.clock.skew_ms += DAY_MS
    for _ in range(5):
        assert (left(rig), left(rig, "q")) == (2, 3)
        rig.clock.ms += SETTLE_MS // 2
        rig.clock.skew_ms += DAY_MS
        rig.shard.sweep()
    assert (left(rig), left(rig, "q")) == (0, 1)


def test_a_clock_behind_the_uptime_is_a_clock(rig: Rig) -> None:
    """A machine whose clock was never set: wall minus monotonic time is below zero."""
    rig.clock.skew_ms = -rig.clock.ms + DAY_MS
    for _ in range(2):
        rig.append("t", b"1")
        rig.shard.sweep()
        assert rig.cell.clock_offset_ms == rig.clock.skew_ms
        rig.boot()
    assert left(rig) == 2
    rig.clock.skew_ms = 0
    fill(rig)
    assert (left(rig), left(rig, "q")) == (4, 2), "set to the right time: a step forward as any other"
