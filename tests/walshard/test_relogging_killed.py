"""A shard killed at every line of a change of class, alone or with the whole service, loses what the class allows."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_killed_anywhere import NOT_REACHED, in_a_process, kill_at_line, serve
from topics.core.config import TopicConfig
from topics.core.floors import EvictReason
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.walshard.handlers import relogging

LIVE = {seq: b"%d" % seq for seq in (3, 4, 6, 7, 8, 9)}
"""1 and 2 are evicted, 5 is deleted; 3 and 4 are durable from the first."""


def check_kill_at(n: int, data_dir: str, whole: bool) -> None:
    """Exits with NOT_REACHED when the work has fewer lines than n. `whole`: the service dies, not the shard alone."""
    relogging.TURN_SEQS = 2  # type: ignore[misc]
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

        ending = in_a_process(lambda: kill_at_line(n, work))
        assert ending in (0, -signal.SIGKILL)
        rig._next_id += 100  # that process has used some
        if whole:
            rig.restart_service()
        else:
            rig.boot()
            rig.run()
        compaction.begin_again()
        found = dict(compaction.read("t"))
        if not whole or ending == 0:
            assert found == LIVE
        view = rig.view("t")
        assert view is not None
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
    if ending == 0:
        os._exit(NOT_REACHED)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole", [False, True], ids=["shard", "service"])
def test_every_line(tmp_path: Path, whole: bool) -> None:
    stride = int(os.environ.get("TOPICS_KILL_STRIDE", "61"))
    n, ending = 1 + random.Random(stride).randrange(stride), 0
    while ending == 0:
        data_dir = str(tmp_path / str(n))
        ending = in_a_process(lambda n=n, data_dir=data_dir: check_kill_at(n, data_dir, whole))  # type: ignore[misc]
        assert ending in (0, NOT_REACHED), f"killed at line event {n}"
        shutil.rmtree(data_dir)
        n += stride
    assert n > 500, f"only {n} line events: has the work shrunk?"
