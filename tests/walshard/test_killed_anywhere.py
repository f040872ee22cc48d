"""A shard killed at every line of its own code answers each request exactly once, and appends it exactly once.

The kill is a SIGKILL at the n-th line that the shard's modules execute, for every n there is (`make crash`) or every
seventh. What a process leaves behind is what counts: the files and the shared memory.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.shm.append_messages import AppendReply
from topics.shm.topic_messages import DeleteRecords, DeleteTopic, PutTopic, SessionPut

NOT_REACHED = 3
MODULES = ("/topics/walshard/", "/topics/shm/", "/topics/storage/wal.py", "/topics/core/topic.py")


def kill_at_line(n: int, work: Callable[[], None], modules: tuple[str, ...] = MODULES) -> None:
    """Runs `work`, which ends this process with SIGKILL at the n-th line of these modules, if it gets that far."""
    left = n

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        if event == "call" and not any(module in frame.f_code.co_filename for module in modules):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)


def in_a_process(work: Callable[[], None]) -> int:
    """How the process that did the work ended: 0, 1 if it raised, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 — the process ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


def check_kill_at(n: int, data_dir: str) -> None:
    """Exits with NOT_REACHED when the work has fewer lines than n."""
    rig = Rig(data_dir)
    try:
        rig.append("old", b"0")
        rig.append("gone", b"0")
        rig.append("pruned", b"0", b"1")
        appends = post_everything(rig)
        ids = set(range(4, 4 + 10))
        ending = in_a_process(lambda: kill_at_line(n, lambda: serve(rig)))
        assert ending in (0, -signal.SIGKILL)
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
        assert rig.view("gone") is None
        assert rig.read("pruned") == [(2, b"1")]
        assert rig.view("put") is not None
    finally:
        rig.close()
    if ending == 0:
        os._exit(NOT_REACHED)


@pytest.mark.timeout(600)
def test_every_line(tmp_path: Path) -> None:
    stride = int(os.environ.get("TOPICS_KILL_STRIDE", "61"))
    n, ending = 1 + random.Random(stride).randrange(stride), 0
    points = 0
    while ending == 0:
        data_dir = str(tmp_path / str(n))
        ending = in_a_process(lambda n=n, data_dir=data_dir: check_kill_at(n, data_dir))  # type: ignore[misc]
        assert ending in (0, NOT_REACHED), f"killed at line event {n}"
        shutil.rmtree(data_dir)
        points += 1
        n += stride
    assert n > 1000, f"only {n} line events: has the work shrunk?"


def serve(rig: Rig) -> None:
    while rig.shard.step():
        pass
