"""Progress of routers as their shard and others know it, and what keeps them from going on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.rig import Rig
from tests.walshard.test_routing import FullDisk, feeds, put, route
from topics.core.config import TopicConfig
from topics.core.routers import RouterSpec
from topics.shm.control import Role
from topics.shm.router_memory import RouterBoard, RouterBoardWriter
from topics.shm.topic_messages import (
    CatchUp,
    CaughtUp,
    DeleteRecords,
    DeleteRouter,
    EnsureTopic,
    PutRouter,
    PutTopic,
    SyncRouters,
)
from topics.storage.layout import group_dir


def test_a_router_is_shown_at_the_head_of_its_source_as_soon_as_that_is_made(rig: Rig) -> None:
    route(rig, "r", "a", "b")
    (feed,) = feeds(rig).by_dest.values()
    (router,) = feed.registered()
    board = RouterBoard(rig.shared.router_boards[0])
    shown = board.find(router.id)
    assert shown is not None
    assert shown.source_topic_id == 0, "the source does not exist yet"
    put(rig, "a")
    source, shown = rig.view("a"), board.find(router.id)
    assert shown is not None
    assert (shown.source_topic_id, shown.source_seq) == (source.topic_id, source.head_seq)


def test_a_router_that_cannot_be_shown_is_logged_until_it_can(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each page of copies would fill the log."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(rig, "a")
    route(rig, "r", "a", "b")
    with capture_logs() as lines:
        with monkeypatch.context() as full:
            full.setattr(RouterBoardWriter, "show", no_room)
            full.setattr(rig, "assert_shown", lambda: None)
            for _ in range(3):
                rig.append("a", b"1")
        rig.append("a", b"1")
    told = [(line["event"], line["router"]) for line in lines if "a router cannot be shown" in line.values()]
    assert told == [("a router cannot be shown", "r"), ("a failure is over", "r")]


@pytest.mark.parametrize("end", ["boot", "restart_service"])
def test_a_dest_that_was_ephemeral_gets_nothing_twice(rig: Rig, end: str) -> None:
    """Its cursor was in RAM alone, where nobody looks for that of a durable one."""
    put(rig, "a")
    put(rig, "b", durability="ephemeral")
    route(rig, "r", "a", "b")
    rig.append("a", b"1", b"2", b"3")
    put(rig, "b", durability="disk")
    getattr(rig, end)()
    rig.append("a", b"4")
    assert rig.read("b") == [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]


def test_copies_become_durable_with_their_originals_while_their_router_waits(tmp_path: Path) -> None:
    frame_bytes = 93
    rig = Rig(str(tmp_path), max_total_bytes=str(3 * frame_bytes + 20))
    try:
        put(rig, "a")
        route(rig, "r", "a", "b")
        rig.append("a", b"1" * 40)
        rig.append("a", b"2" * 40)
        assert rig.cell.get("bytes_live") == 3 * frame_bytes, "there is no room for the second copy"
        for _ in range(3):
            rig.clock.ms += 1_000
            rig.shard.sync_in_background()
            rig.shard.sweep()
            rig.run()
        source, dest = rig.view("a"), rig.view("b")
        assert (source.head_seq, source.durable_seq) == (2, 2)
        assert (dest.head_seq, dest.durable_seq) == (1, 1)
    finally:
        rig.close()


def catch_up(rig: Rig, dest: str = "b") -> CaughtUp:
    """Return the answer to a frontend that wants to read the dest."""
    reply = rig.call(CatchUp(dest))
    assert isinstance(reply, CaughtUp)
    return reply


ALL = CaughtUp(done=True, pending=False)
CANNOT_BE = CaughtUp(done=True, pending=True)
NOT_AT_HAND = CaughtUp(done=False, pending=True)


def test_who_reads_hears_of_copies_that_cannot_be_logged(tmp_path: Path) -> None:
    fs = FullDisk()
    rig = Rig(str(tmp_path), fs)
    try:
        put(rig, "a", durability="ephemeral")
        route(rig, "r", "a", "b")
        rig.append("a", b"1")
        assert catch_up(rig) == ALL
        fs.full_dir = group_dir(rig.settings.data_dir, 0, 1)
        rig.append("a", b"2")
        assert catch_up(rig) == CANNOT_BE
        assert rig.read("b") == [(1, b"1")]
        fs.full_dir = None
        assert catch_up(rig) == ALL
        assert rig.read("b") == [(1, b"1"), (2, b"2")]
    finally:
        rig.close()


@pytest.mark.shard(max_total_bytes="299")
def test_who_reads_hears_of_copies_for_which_the_service_has_no_room(rig: Rig) -> None:
    put(rig, "a")
    route(rig, "r", "a", "b")
    rig.append("a", b"1" * 40)
    assert catch_up(rig) == ALL
    rig.append("a", b"2" * 40)
    assert catch_up(rig) == CANNOT_BE


def test_who_reads_hears_of_originals_that_cannot_be_read(rig: Rig, fs: FaultyFileSystem) -> None:
    put(rig, "a")
    route(rig, "r", "a", "b")
    fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"pread"})))
    rig.append("a", b"1")
    assert catch_up(rig) == CANNOT_BE
    fs.arm(None)
    assert catch_up(rig) == ALL
    assert rig.read("b") == [(1, b"1")]


def test_what_waits_for_room_in_the_dest_is_not_pending(rig: Rig) -> None:
    put(rig, "a", cap_records=2)
    put(rig, "b", cap_records=1, discard="reject")
    route(rig, "r", "a", "b")
    rig.append("a", b"1", b"2")
    assert catch_up(rig) == ALL
    rig.append("a", b"3", b"4")
    assert catch_up(rig) == ALL, "nor does a gap, for what the source lost meanwhile"
    assert rig.read("b") == [(1, b"1")]
    rig.call(DeleteRecords("b", 2, None, b""))
    assert catch_up(rig) == ALL
    view = rig.view("b")
    assert view.head_seq > 1


@pytest.mark.shard(shards=2)
def test_who_reads_is_to_ask_again_while_the_source_cannot_be_looked_at(rig: Rig) -> None:
    source = next(f"a{n}" for n in range(100) if rig.owner(f"a{n}") == 1)
    dest = next(f"b{n}" for n in range(100) if rig.owner(f"b{n}") == 0)
    rig.call(PutTopic(source, TopicConfig(), False), 1)
    route(rig, "r", source, dest)
    rig.append(source, b"1")
    assert catch_up(rig, dest) == ALL
    cell = rig.shared.control.cell(Role.WALSHARD, 1)
    generation = cell.get("generation")
    cell.set("generation", 0)  # as long as it has not recovered for the first time
    asked = rig.post_call(CatchUp(dest))
    assert rig.step()
    rig.take_replies()
    assert rig.replies[asked] == NOT_AT_HAND
    cell.set("generation", generation)
    assert catch_up(rig, dest) == ALL


@pytest.mark.shard(shards=2)
def test_who_reads_hears_of_a_router_that_could_not_begin(rig: Rig) -> None:
    source = next(f"a{n}" for n in range(100) if rig.owner(f"a{n}") == 1)
    dest = next(f"b{n}" for n in range(100) if rig.owner(f"b{n}") == 0)
    rig.call(EnsureTopic(dest))
    assert catch_up(rig, dest) == ALL
    cell = rig.shared.control.cell(Role.WALSHARD, 1)
    generation = cell.get("generation")
    cell.set("generation", 0)
    rig.post_call(PutRouter("r", RouterSpec(source, dest)))
    asked = rig.post_call(CatchUp(dest))
    assert rig.step()
    rig.take_replies()
    assert rig.replies[asked] == CANNOT_BE
    cell.set("generation", generation)
    assert catch_up(rig, dest) == ALL


@pytest.mark.parametrize("same_name", [False, True], ids=["another router", "the same router"])
def test_a_dest_that_was_ephemeral_all_along_goes_on_with_the_source_that_it_has_now(rig: Rig, same_name: bool) -> None:
    """The cursor that the RAM log has of the former source is older, though more were written."""
    put(rig, "e", durability="ephemeral")
    rig.append("b", b"0")
    route(rig, "r", "a", "e")
    for at in range(5):
        rig.append("a", b"%d" % at)
    if not same_name:
        rig.call(DeleteRouter("r"))
        rig.call(SyncRouters("e", 0, 0))
    route(rig, "r" if same_name else "s", "b", "e")
    rig.boot()
    rig.append("b", b"new")
    assert rig.read("e")[-2:] == [(5, b"4"), (6, b"new")]


def test_a_dest_that_has_all_is_not_pending_because_it_cannot_expire(tmp_path: Path) -> None:
    fs = FullDisk()
    rig = Rig(str(tmp_path), fs)
    try:
        put(rig, "b", ttl_ms=1_000, cap_records=10)
        route(rig, "r", "a", "b")
        rig.append("a", *[b"1"] * 10)
        rig.clock.ms += 5_000
        fs.full_dir = group_dir(rig.settings.data_dir, 0, 1)
        assert catch_up(rig) == ALL
    finally:
        fs.full_dir = None
        rig.close()
