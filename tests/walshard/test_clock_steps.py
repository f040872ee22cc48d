"""A wall clock that jumps under a shard: no mass expiry, and `$ts` never decreases."""

from __future__ import annotations

import pytest

from tests.walshard.rig import Rig
from topics.core.clock import SETTLE_MS
from topics.core.config import TopicConfig
from topics.shm.queue_messages import Claim, WorkOpen
from topics.shm.topic_messages import DeleteRecords, Expire, PutTopic

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
TTL_MS = 3 * SETTLE_MS


def fill(rig: Rig) -> None:
    for name, config in (("t", TopicConfig(ttl_ms=TTL_MS)), ("q", TopicConfig(ttl_ms=TTL_MS, type="queue"))):
        rig.call(PutTopic(name, config, True))
        rig.append(name, b"1", b"2")
    rig.clock.skew_ms += 5  # a correction as they come all the time
    rig.shard.sweep()


def left(rig: Rig, name: str = "t") -> int:
    view = rig.view(name)
    return view.records


def last_ts(rig: Rig) -> int:
    view = rig.view("t")
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
    """Records that have outlived their ttl by the monotonic clock expire all the same."""
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


@pytest.mark.parametrize("step_ms", [2 * HOUR_MS, -2 * HOUR_MS])
@pytest.mark.parametrize("order_key", ["", "k"])
def test_a_delay_takes_its_time_whatever_the_wall_clock_does(rig: Rig, step_ms: int, order_key: str) -> None:
    rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.append("q", b"later", jobs=[(0, 0, HOUR_MS, order_key)])
    rig.clock.skew_ms += step_ms
    for _ in range(4):
        rig.clock.ms += HOUR_MS // 4 - 1
        assert rig.call(Claim("q", "w", 1, 1000, 1)).seqs == []
    rig.clock.ms += 4
    assert rig.call(Claim("q", "w", 1, 1000, 1)).seqs == [1]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_delay_begins_with_the_write_and_not_with_a_ts_that_is_ahead(rig: Rig, restarts: bool) -> None:
    rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.append("q", b"at once")
    rig.clock.skew_ms -= 2 * HOUR_MS
    rig.append("q", b"soon", jobs=[(0, 0, 1000, "")])
    rig.clock.ms += 999
    assert rig.call(Claim("q", "w", 9, MINUTE_MS, 1)).seqs == [1]
    if restarts:
        rig.restart_service()
    rig.clock.ms += 1
    assert rig.call(Claim("q", "w", 9, MINUTE_MS, 1)).seqs == ([1, 2] if restarts else [2])


def test_who_waits_for_a_delayed_job_is_dealt_it_at_its_time(rig: Rig) -> None:
    rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.call(WorkOpen("q", 1, "w", 1, MINUTE_MS))
    rig.append("q", b"soon", jobs=[(0, 0, 5000, "")])
    rig.clock.skew_ms -= 2 * HOUR_MS
    assert rig.shard.next_tick_ms == rig.clock.monotonic_ms() + 5000
    rig.clock.ms += 5000
    rig.run()
    assert [dealt.seqs for dealt in rig.dealt] == [[1]]
