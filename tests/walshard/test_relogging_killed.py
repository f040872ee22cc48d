"""A shard killed at every line of a change of class, alone or with the whole service, loses what the class allows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.walshard.compaction import Compaction
from tests.walshard.killing import at_every_line, is_killed_at_line, serve
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.floors import EvictReason
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.walshard.handlers import relogging

pytestmark = pytest.mark.long

LIVE = {seq: b"%d" % seq for seq in (3, 4, 6, 7, 8, 9)}
"""1 and 2 are evicted, 5 is deleted; 3 and 4 are durable from the first."""


def check_kill_at(n: int, data_dir: str, whole: bool) -> bool:
    """Return False when the work has fewer lines than n. `whole`: the service dies, not the shard alone."""
    rig = Rig(data_dir, segment_max_events="6")
    compaction = Compaction(rig)
    try:
        rig.append("t", *(b"%d" % seq for seq in range(1, 5)))
        rig.call(PutTopic("t", TopicConfig(durability="ephemeral", cap_records=6), True))
        rig.append("t", b"5", tag=b"x")
        rig.append("t", b"6", b"7", b"8", key=b"k")
        rig.call(DeleteRecords("t", None, "eq", b"x"))
        rig.append("t", b"9")
        call = PutTopic("t", TopicConfig(durability="fsync", cap_records=7), True)
        id = rig.post_call(call)

        def work() -> None:
            serve(rig)
            rig.take_replies()
            rest = rig.replies[id].rest
            while rest is not None:
                next_id = rig.post_call(rest)
                serve(rig)
                rig.take_replies()
                rest = rig.replies[next_id].rest

        is_killed = is_killed_at_line(n, work)
        rig.next_id += 100  # that process has used some
        if whole:
            rig.restart_service()
        else:
            rig.boot()
            rig.run()
        compaction.begin_again()
        found = dict(compaction.read("t"))
        if not (whole and is_killed):
            assert found == LIVE
        view = rig.view("t")
        assert list(found.items()) == list(LIVE.items())[: len(found)], "the first of them"
        assert {3, 4} <= found.keys()
        assert (view.records, view.earliest_seq, view.evict_floor) == (len(found), 3, 3)
        assert view.evict_reason == EvictReason.CAP
        assert view.head_seq == 9 if len(found) == len(LIVE) else view.head_seq >= 9
        rig.call(call)
        if n % 2:
            compaction.cut()
        rig.restart_service()
        compaction.begin_again()
        assert dict(compaction.read("t")) == found, "now it is durable"
        assert rig.append("t", b"more").first_seq == view.head_seq + 1
        if len(found) == len(LIVE):
            assert rig.append("t", b"6", b"7", b"8", key=b"k").deduped or whole
    finally:
        rig.close()
    return is_killed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole", [False, True], ids=["shard", "service"])
def test_every_line(tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relogging, "TURN_SEQS", 2)
    at_every_line(tmp_path, 61, 500, partial(check_kill_at, whole=whole))
