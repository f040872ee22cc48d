"""A shard killed at every line of its own code answers each request exactly once, and appends it exactly once.

The kill is a SIGKILL at the n-th line that the shard's modules execute, for every n there is (`make crash`) or every
seventh. What a process leaves behind is what counts: the files and the shared memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.walshard.killing import at_every_line, is_killed_at_line, serve
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.shm.append_messages import AppendReply
from topics.shm.topic_messages import DeleteRecords, DeleteTopic, PutTopic, SessionPut


def post_everything(rig: Rig) -> dict[int, bytes]:
    """Requests of every kind that writes; request id → the data it appends."""
    appends = {
        rig.post_append("old", [b"1"]): b"1",
        rig.post_append("new", [b"2", b"2"]): b"2",
        rig.post_append("old", [b"3"], key=b"k"): b"3",
    }
    rig.post_call(PutTopic("put", TopicConfig(cap_records=2), False))
    appends[rig.post_append("ram", [b"4"], config=TopicConfig(durability="ephemeral"))] = b"4"
    appends[rig.post_append("fsync", [b"5"], config=TopicConfig(durability="fsync"))] = b"5"
    rig.post_call(SessionPut("w", b"body"))
    rig.post_call(DeleteTopic("gone", False))
    rig.post_call(DeleteRecords("pruned", 2, None, b""))
    appends[rig.post_append("ram", [b"6"])] = b"6"
    return appends


def check_kill_at(n: int, data_dir: str) -> bool:
    """Return False when the work has fewer lines than n."""
    rig = Rig(data_dir)
    try:
        rig.append("old", b"0")
        rig.append("gone", b"0")
        rig.append("pruned", b"0", b"1")
        appends = post_everything(rig)
        ids = set(range(4, 4 + 10))
        is_killed = is_killed_at_line(n, lambda: serve(rig))
        rig.take_replies()
        rig.boot()
        rig.run()
        assert set(rig.replies) >= ids, "every request is answered"
        for id in ids & set(appends):
            assert isinstance(rig.replies[id], AppendReply), rig.replies[id]
        stored = {name: [data for _, data in rig.read(name)] for name in ("old", "new", "ram", "fsync")}
        assert sorted(stored["old"]) == [b"0", b"1", b"3"]
        assert (stored["new"], sorted(stored["ram"]), stored["fsync"]) == ([b"2", b"2"], [b"4", b"6"], [b"5"])
        for id, data in appends.items():
            name = {b"1": "old", b"3": "old", b"2": "new", b"4": "ram", b"6": "ram", b"5": "fsync"}[data]
            assert (rig.replies[id].first_seq, data) in rig.read(name)
        assert not rig.exists("gone")
        assert rig.read("pruned") == [(2, b"1")]
        assert rig.exists("put")
    finally:
        rig.close()
    return is_killed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_line(tmp_path: Path) -> None:
    at_every_line(tmp_path, 61, 1000, check_kill_at)
