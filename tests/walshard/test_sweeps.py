"""A shard looks at all of its topics once a second in turns, between which others are served."""

from __future__ import annotations

import pytest

from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.shm.topic_messages import SESSION_TTL_MS, DeleteTopic, PutTopic, SessionPut
from topics.walshard.handlers import deletes, watch_sessions
from topics.walshard.handlers.deletes import EXPIRED_COST, SWEPT_COST

TTL_MS = 1_000


def make_topics(rig: Rig, count: int) -> None:
    for number in range(count):
        rig.call(PutTopic(f"t{number}", TopicConfig(ttl_ms=TTL_MS), False))
        rig.append(f"t{number}", b"1")


def expired(rig: Rig) -> list[str]:
    """Return the topics that have no record any more."""
    return [hosted.topic.name for hosted in rig.parts.catalog if not hosted.topic.records]


def test_many_topics_expire_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletes, "SWEEP_STEP", 3 * EXPIRED_COST)
    make_topics(rig, 8)
    rig.clock.ms += TTL_MS + 1
    rig.shard.sweep()
    assert (len(expired(rig)), rig.shard.upkeep.busy) == (3, True)
    rig.call(DeleteTopic("t4", False))  # a request has its turn, and the sweep goes on in it
    assert len(expired(rig)) >= 4
    rig.shard.sweep()  # the next one is due before this one is over
    while rig.shard.upkeep.busy:
        before = len(expired(rig))
        rig.shard.serve()
        assert len(expired(rig)) <= before + 3
    assert expired(rig) == [f"t{number}" for number in range(8) if number != 4]


def test_topics_in_which_nothing_expires_are_looked_at_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletes, "SWEEP_STEP", 2 * SWEPT_COST)
    make_topics(rig, 6)
    turns = 0
    rig.shard.sweep()
    while rig.shard.upkeep.busy:
        rig.shard.serve()
        turns += 1
    assert (turns, expired(rig)) == (3, [])


def test_many_idle_sessions_are_collected_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_sessions, "COLLECTED_AT_ONCE", 3)
    for number in range(8):
        rig.call(SessionPut(f"w{number}", b"body"))
    known = rig.parts.sessions.by_wid
    rig.clock.ms += SESSION_TTL_MS + 1
    left = []
    for _ in range(3):
        rig.shard.sweep()
        left.append(len(known))
    assert left == [5, 2, 0]
    rig.boot()
    assert not rig.parts.sessions.by_wid, "their end is in the log"
