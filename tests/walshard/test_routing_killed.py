"""A shard killed at every line of its own code while routers copy: each record is copied once, in order, and what a
client has read of a dest stays as it was. Then the shard starts again, or the whole service does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.walshard.killing import at_every_line, is_killed_at_line, serve
from tests.walshard.rig import Rig
from tests.walshard.test_routing import append_tagged, put, route
from topics.core.routers import RouterSpec
from topics.shm.topic_messages import CatchUp, DeleteRecords, PutRouter

pytestmark = pytest.mark.long

DESTS = ("b", "c", "wide")


def check_kill_at(n: int, data_dir: str, whole_service: bool) -> bool:
    """Return False when the work has fewer lines than n."""
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
        is_killed = is_killed_at_line(n, lambda: serve_and_sweep(rig))
        if not (whole_service and is_killed):
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
        source = [b"%d" % at for at in range(rig.hosted("a").topic.head_seq)]
        assert len(source) == 8 if not whole_service else len(source) >= 4
        for dest in ("b", "c"):
            copied = [data for _, data in rig.read(dest) if b"own" not in data]
            assert copied == source, f"{dest} after the kill"
        assert rig.read("b") == rig.read("c")
        payloads = [data.partition(b',"meta"')[0] for _, data in rig.read("wide")]
        assert payloads == source
    finally:
        rig.close()
    return is_killed


def check_full_kill_at(n: int, data_dir: str, whole_service: bool) -> bool:
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
        is_killed = is_killed_at_line(n, lambda: serve_and_sweep(rig))
        seen = dict(rig.read("b"))
        if not (whole_service and is_killed):
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
                assert seen.setdefault(seq, data) == data, f"seq {seq} after the kill"
            view = rig.view("b")
            assert view.evict_floor == 1
            if not page:
                break
            rig.call(DeleteRecords("b", view.head_seq + 1, None, b""))
        head_seq = rig.hosted("a").topic.head_seq
        copied = {1: b"0", 2: b"1"} | seen
        kept = [b"%d" % at for at in range(head_seq) if at not in (3, 5)]
        # The work deleted 2, before or after it was copied; and what was the third copy, perhaps before we looked.
        possible = [dict(enumerate(one, 1)) for one in (kept, [data for data in kept if data != b"2"])]
        assert any({3: one[3]} | copied == one for one in possible), f"{copied} after the kill"
    finally:
        rig.close()
    return is_killed


def serve_and_sweep(rig: Rig) -> None:
    serve(rig)
    rig.shard.sweep()
    serve(rig)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole_service", [False, True])
@pytest.mark.parametrize(("check", "lines_min"), [(check_kill_at, 3000), (check_full_kill_at, 1500)])
def test_every_line(tmp_path: Path, check: Callable[..., bool], lines_min: int, whole_service: bool) -> None:
    at_every_line(tmp_path, 197, lines_min, partial(check, whole_service=whole_service))
