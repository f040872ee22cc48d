"""A shard killed at every line of its own code while routers copy: each record is copied once, in order, and what a
client has read of a dest stays as it was. Then the shard starts again, or the whole service does.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.walshard.rig import Rig
from tests.walshard.test_killed_anywhere import NOT_REACHED, in_a_process, kill_at_line, serve
from tests.walshard.test_routing import append_tagged, put, route
from topics.core.routers import RouterSpec
from topics.shm.router_messages import CatchUp, PutRouter
from topics.shm.topic_messages import DeleteRecords

DESTS = ("b", "c", "wide")


def check_kill_at(n: int, data_dir: str, whole_service: bool) -> None:
    """Exits with NOT_REACHED when the work has fewer lines than n."""
    rig = Rig(data_dir)
    try:
        put(rig, "wide", durability="fsync")
        route(rig, "r", "a", "b")
        route(rig, "q", "b", "c")
        route(rig, "p", "a", "wide", guarantee="exactly_once")
        rig.append("a", b"0", b"1", b"2")
        rig.append("b", b'"own 0"')
        rig.append("a", b"3")
        before = {dest: rig.read(dest) for dest in DESTS}
        assert [data for _, data in before["c"]] == [b"0", b"1", b"2", b'"own 0"', b"3"]

        rig.post_append("a", [b"4", b"5"])
        rig.post_append("b", [b'"own 1"'])
        rig.post_call(PutRouter("s", RouterSpec("a", "new")))
        rig.post_append("a", [b"6"])
        rig.post_call(DeleteRecords("a", 4, None, b""))
        rig.post_call(PutRouter("r", RouterSpec("a", "b", preserve_node=False)))
        rig.post_append("a", [b"7"])
        ending = in_a_process(lambda: kill_at_line(n, lambda: serve_and_sweep(rig)))
        assert ending in (0, -signal.SIGKILL)
        if not whole_service or ending == 0:
            rig.take_replies()
            rig.boot()
            rig.run()
        if whole_service:
            rig.restart_service()
            rig.run()
        for dest in DESTS:
            rig.call(CatchUp(dest))
        for dest in DESTS:
            assert rig.read(dest)[: len(before[dest])] == before[dest]
        source = [b"%d" % at for at in range(rig.parts.catalog.find("a").topic.head_seq)]  # type: ignore[union-attr]
        assert len(source) == 8 if not whole_service else len(source) >= 4
        for dest in ("b", "c"):
            copied = [data for _, data in rig.read(dest) if b"own" not in data]
            assert copied == source, f"{dest} after {ending}"
        assert rig.read("b") == rig.read("c")
        payloads = [data.partition(b',"meta"')[0] for _, data in rig.read("wide")]
        assert payloads == source
    finally:
        rig.close()
    if ending == 0:
        os._exit(NOT_REACHED)


def check_full_kill_at(n: int, data_dir: str, whole_service: bool) -> None:
    """The same of a dest that is full: what was deleted while it waited never comes, and what is read keeps its seq."""
    rig = Rig(data_dir)
    try:
        put(rig, "b", cap_records=2, discard="reject")
        route(rig, "r", "a", "b")
        append_tagged(rig, "a", *[(b"x" if at in (3, 5) else b"y", b"%d" % at) for at in range(8)])
        assert rig.read("b") == [(1, b"0"), (2, b"1")]
        rig.call(DeleteRecords("a", None, "eq", b"x"))

        rig.post_call(DeleteRecords("b", 3, None, b""))
        rig.post_append("a", [b"8"])
        rig.post_call(DeleteRecords("a", 4, None, b""))
        rig.post_call(DeleteRecords("b", 4, None, b""))
        ending = in_a_process(lambda: kill_at_line(n, lambda: serve_and_sweep(rig)))
        assert ending in (0, -signal.SIGKILL)
        seen = dict(rig.read("b"))
        if not whole_service or ending == 0:
            rig.take_replies()
            rig.boot()
            rig.run()
            seen |= dict(rig.read("b"))
        if whole_service:
            rig.restart_service()
            rig.run()
        while True:
            rig.call(CatchUp("b"))
            page = rig.read("b")
            for seq, data in page:
                assert seen.setdefault(seq, data) == data, f"seq {seq} after {ending}"
            view = rig.view("b")
            assert view is not None
            assert view.evict_floor == 1
            if not page:
                break
            rig.call(DeleteRecords("b", view.head_seq + 1, None, b""))
        head_seq = rig.parts.catalog.find("a").topic.head_seq  # type: ignore[union-attr]
        copied = {1: b"0", 2: b"1"} | seen
        kept = [b"%d" % at for at in range(head_seq) if at not in (3, 5)]
        # The work deleted 2, before or after it was copied; and what was the third copy, perhaps before we looked.
        possible = [dict(enumerate(one, 1)) for one in (kept, [data for data in kept if data != b"2"])]
        assert any({3: one[3]} | copied == one for one in possible), f"{copied} after {ending}"
    finally:
        rig.close()
    if ending == 0:
        os._exit(NOT_REACHED)


def serve_and_sweep(rig: Rig) -> None:
    serve(rig)
    rig.shard.sweep()
    serve(rig)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole_service", [False, True])
@pytest.mark.parametrize(("check", "lines_min"), [(check_kill_at, 3000), (check_full_kill_at, 1500)])
def test_every_line(
    tmp_path: Path, check: Callable[[int, str, bool], None], lines_min: int, whole_service: bool
) -> None:
    stride = int(os.environ.get("TOPICS_KILL_STRIDE", "197"))
    n, ending = 1 + random.Random(stride).randrange(stride), 0
    while ending == 0:
        data_dir = str(tmp_path / str(n))
        ending = in_a_process(lambda n=n, data_dir=data_dir: check(n, data_dir, whole_service))  # type: ignore[misc]
        assert ending in (0, NOT_REACHED), f"killed at line event {n}"
        shutil.rmtree(data_dir)
        n += stride
    assert n > lines_min, f"only {n} line events: has the work shrunk?"
