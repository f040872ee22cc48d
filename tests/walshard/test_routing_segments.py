"""Routers whose topics are checkpointed: copies stay what they are, and what the log may let go of waits for them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_routing import Model, append_tagged, feeds, logged_types, put, route
from topics.core.routers import RouterSpec
from topics.shm.topic_messages import CatchUp, CaughtUp, DeleteRecords, Expire, PutRouter, SyncRouters
from topics.storage.frame import FrameType
from topics.storage.segment_store import LocalStore
from topics.storage.verify import verify
from topics.walshard.routers.originals import SegmentOriginals
from topics.walshard.shard import Shard

DEADLINE_S = 20.0


@pytest.fixture
def compaction(tmp_path: Path) -> Iterator[Compaction]:
    rig = Rig(
        str(tmp_path / "data"),
        segment_max_events="10",
        segment_rewrite_dead_ratio="0.1",
        cold_dir=str(tmp_path / "cold"),
        hot_retain_segments="1",
        wal_file_bytes=str(1 << 20),
    )
    yield Compaction(rig)
    rig.close()


def hosted(rig: Rig, name: str) -> Any:
    return rig.hosted(name)


def check_places(rig: Rig) -> None:
    """No entry is in the ring and in a segment."""
    for one in rig.parts.catalog:
        assert one.ring.base_seq > one.index.segments.last_seq


def verified(rig: Rig) -> None:
    rig.shard.close()
    assert verify(rig.settings.data_dir, lambda *_: None, rig.settings.cold_dir).damage == []


def test_source_and_copies_leave_the_log_for_segments(compaction: Compaction) -> None:
    rig = compaction.rig
    route(rig, "r", "a", "b")
    route(rig, "q", "b", "c")
    rig.append("a", *[b"%d" % at for at in range(25)])
    compaction.cut()
    check_places(rig)
    assert [info.last_seq for info in compaction.segments("a")] == [10, 20, 25]
    assert logged_types(rig).count(FrameType.APPEND) == 75
    expected = {name: compaction.read(name) for name in "abc"}
    for end in (rig.boot, rig.restart_service):
        end()
        compaction.begin_again()
        rig.run()
        check_places(rig)
        assert {name: compaction.read(name) for name in "abc"} == expected
    compaction.cut()
    compaction.cut()
    check_places(rig)
    rig.restart_service()
    rig.run()
    assert {name: compaction.read(name) for name in "abc"} == expected
    rig.append("a", b"more")
    assert [compaction.read(name)[-1] for name in "abc"] == [(26, b"more")] * 3
    verified(rig)


def test_what_was_copied_stays_though_its_source_evicted_and_deleted_it(compaction: Compaction) -> None:
    rig = compaction.rig
    put(rig, "a", cap_records=3)
    route(rig, "r", "a", "b")
    rig.append("a", *[b"%d" % at for at in range(8)])
    rig.call(DeleteRecords("a", 8, None, b""))
    expected = compaction.read("b")
    assert len(expected) == 8
    compaction.cut()
    rig.restart_service()
    rig.run()
    assert compaction.read("b") == expected
    assert compaction.read("a") == [(8, b"7")]


def test_a_full_dest_holds_up_no_checkpoint_and_copies_from_segments(compaction: Compaction) -> None:
    rig = compaction.rig
    put(rig, "b", cap_records=5, discard="reject")
    route(rig, "r", "a", "b")
    rig.append("a", *[b"%d" % at for at in range(47)])
    assert len(compaction.read("b")) == 5
    compaction.cut()
    check_places(rig)
    assert compaction.segments("a")[-1].last_seq == 47
    assert hosted(rig, "a").ring.base_seq == 48
    rig.append("a", b"47", b"48")
    got = [data for _, data in compaction.read("b")]
    for step in range(20):
        if step == 5:
            rig.boot()
        if step == 9:
            rig.restart_service()
            compaction.begin_again()
        if step == 12:
            compaction.cut()
        view = rig.view("b")
        rig.call(DeleteRecords("b", view.head_seq + 1, None, b""))
        for _ in range(3):
            rig.clock.ms += 2000
            rig.shard.sweep()
            rig.run()
        got += [data for _, data in compaction.read("b")]
        check_places(rig)
        if len(got) == 49:
            break
    assert got == [b"%d" % at for at in range(49)]
    assert feeds(rig).by_dest[hosted(rig, "b").topic.id].source_seq == 49
    verified(rig)


def copy_late(compaction: Compaction, dests: str) -> None:
    """Two writes of 47 records of `a` are in segments before anybody copies them."""
    rig = compaction.rig
    for dest in dests:
        route(rig, f"r-{dest}", "a", dest)
    for tag in (b"t", b""):
        rig.post_append("a", [b"%d" % at for at in range(47)], tag=tag)
        rig.shard.serve()
    with pytest.MonkeyPatch.context() as held:
        held.setattr(Shard, "copy", lambda _: False)
        compaction.compactor.cut()
    assert compaction.segments("a")[-1].last_seq == 94


def test_dests_that_come_late_copy_whole_pages_from_segments(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = compaction.rig
    reads: list[int] = []
    read_once = SegmentOriginals.copies

    def copies(self: SegmentOriginals, *page: Any) -> Any:
        reads.append(page[2])
        return read_once(self, *page)

    monkeypatch.setattr(SegmentOriginals, "copies", copies)
    route(rig, "r-t", "a", "tagged", filter="t")
    copy_late(compaction, "bcd")
    assert [rig.view(dest).head_seq for dest in "bcd"] == [0, 0, 0]
    rig.run()
    assert compaction.read("tagged") == compaction.read("a")[:47]
    assert sorted(set(reads)) == sorted(reads), "a page that several dests copy is read once"
    expected = compaction.read("a")
    assert [compaction.read(dest) for dest in "bcd"] == [expected] * 3
    assert rig.call(DeleteRecords("c", None, "eq", b"t")).deleted == 47
    rig.restart_service()
    compaction.begin_again()
    rig.run()
    assert [compaction.read(dest) for dest in "bcd"] == [expected, expected[47:], expected]
    verified(rig)


def cold_backlog(compaction: Compaction, **cap: int) -> None:
    """47 records of `a`, of which `b` has taken what it has room for; the others are in segments, the oldest cold."""
    rig = compaction.rig
    put(rig, "b", **(cap or {"cap_records": 5}), discard="reject")
    route(rig, "r", "a", "b")
    rig.append("a", *[b"%d" % at for at in range(47)])
    compaction.cut()
    compaction.upkeep()
    compaction.cut()
    compaction.cut()
    assert [info.flags & 2 for info in compaction.segments("a")] == [2, 2, 2, 0, 0]


def after_all_is_taken(compaction: Compaction) -> list[tuple[int, bytes]]:
    """`b` is emptied, and has time to take more: what it has then."""
    rig = compaction.rig
    view = rig.view("b")
    rig.call(DeleteRecords("b", view.head_seq + 1, None, b""))
    rig.clock.ms += 2000
    rig.shard.sweep()
    rig.run()
    return compaction.read("b")


def test_from_cold_segments_as_well_without_waiting_for_them(compaction: Compaction) -> None:
    cold_backlog(compaction)
    assert len(list(Path(compaction.rig.settings.data_dir).glob("topics/*/*.data"))) == 3
    got = compaction.read("b")
    until_s = time.monotonic() + DEADLINE_S
    while len(got) < 47:
        assert time.monotonic() < until_s, f"only {len(got)} were ever copied"
        got += after_all_is_taken(compaction)
        os.sched_yield()
    assert got == [(at + 1, b"%d" % at) for at in range(47)]


def test_a_cold_segment_that_was_damaged_is_copied_once_it_is_restored(compaction: Compaction) -> None:
    cold_backlog(compaction)
    cold_dir = compaction.rig.settings.cold_dir
    assert cold_dir is not None
    paths = sorted(Path(cold_dir).rglob("*.data"))
    contents = [path.read_bytes() for path in paths]
    assert len(paths) == 3
    for path in paths:
        path.write_bytes(bytes(path.stat().st_size))
    got = compaction.read("b")
    with capture_logs() as said:
        until_s = time.monotonic() + DEADLINE_S
        while not any(line["event"] == "a router cannot read its source" for line in said):
            assert time.monotonic() < until_s
            got += after_all_is_taken(compaction)
            os.sched_yield()
    assert len(got) < 10
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    until_s = time.monotonic() + DEADLINE_S
    while len(got) < 47:
        assert time.monotonic() < until_s, f"only {len(got)} were ever copied"
        got += after_all_is_taken(compaction)
        os.sched_yield()
    assert got == [(at + 1, b"%d" % at) for at in range(47)]


def test_damage_in_the_cold_directory_is_read_and_said_once_however_often_the_dest_is_read(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = compaction.rig
    cold_backlog(compaction)
    assert rig.settings.cold_dir is not None
    for path in Path(rig.settings.cold_dir).rglob("*.data"):
        path.write_bytes(bytes(path.stat().st_size))
    reads: list[str] = []
    read_range = LocalStore.read_range

    def counted(store: LocalStore, name: str, offset: int, length: int) -> bytes:
        reads.append(name)
        return read_range(store, name, offset, length)

    monkeypatch.setattr(LocalStore, "read_range", counted)
    rig.call(DeleteRecords("b", 6, None, b""))
    with capture_logs() as said:
        for second in range(3):
            until_s = time.monotonic() + DEADLINE_S
            # The first one finds what the second before had, and has it read again.
            damaged = 0
            while damaged < 20:
                assert time.monotonic() < until_s
                reply = rig.call(CatchUp("b"))
                assert reply.pending
                damaged += reply.done
            assert len(reads) == 1 + second
            rig.clock.ms += 1000
    assert [line["event"] for line in said].count("a router cannot read its source") == 1


class Hanging:
    """The cold directory answers nothing while `gate` is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = Event()
        self.reads = 0
        read_range = LocalStore.read_range

        def waits(store: LocalStore, name: str, offset: int, length: int) -> bytes:
            self.reads += 1
            assert self.gate.wait(DEADLINE_S)
            return read_range(store, name, offset, length)

        monkeypatch.setattr(LocalStore, "read_range", waits)


@pytest.mark.parametrize("life", ["same", "boot", "restart_service"])
@pytest.mark.parametrize("cap", [{"cap_records": 5}, {"cap_bytes": 100}])
def test_a_full_dest_is_read_without_the_cold_directory(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch, cap: dict[str, int], life: str
) -> None:
    """In a new life it is not known how large what waits is, but whether there is room for anything."""
    rig = compaction.rig
    cold_backlog(compaction, **cap)
    view = rig.view("b")
    had = view.records
    assert had < 10
    if "cap_bytes" in cap and life != "same":
        put(rig, "b", cap_bytes=view.live_bytes, discard="reject")
    tier = Hanging(monkeypatch)
    if life != "same":
        getattr(rig, life)()
        compaction.begin_again()
    for _ in range(3):
        assert rig.call(CatchUp("b")) == CaughtUp(done=True, pending=False)
        rig.clock.ms += 1000
    assert life != "same" or not tier.reads
    assert len(compaction.read("b")) == had
    rig.call(DeleteRecords("b", had + 1, None, b""))
    assert rig.call(CatchUp("b")) == CaughtUp(done=False, pending=True), "there is room now"
    tier.gate.set()
    until_s = time.monotonic() + DEADLINE_S
    while not rig.call(CatchUp("b")).done:
        assert time.monotonic() < until_s
    got = compaction.read("b")
    assert got == [(had + 1 + at, b"%d" % (had + at)) for at in range(len(got))]
    assert got


def test_a_full_dest_lacks_nothing_for_a_source_that_is_damaged(compaction: Compaction) -> None:
    rig = compaction.rig
    put(rig, "b", cap_records=5, discard="reject")
    route(rig, "r", "a", "b")
    rig.append("a", *[b"%d" % at for at in range(47)])
    compaction.cut()
    for path in Path(rig.settings.data_dir).rglob("*.data"):
        path.write_bytes(bytes(path.stat().st_size))
    rig.restart_service()
    assert rig.call(CatchUp("b")) == CaughtUp(done=True, pending=False)
    rig.call(DeleteRecords("b", 2, None, b""))
    assert rig.call(CatchUp("b")) == CaughtUp(done=True, pending=True)


def test_what_has_no_room_is_asked_for_again_when_its_router_changes(rig: Rig) -> None:
    """The same holds when the dest changes: waiting records may take less then, or no place at all."""
    put(rig, "b", cap_records=2, discard="reject")
    route(rig, "r", "a", "b")
    append_tagged(rig, "a", (b"x", b"1"), (b"x", b"2"), (b"x", b"3"), (b"y", b"4"))
    (feed,) = feeds(rig).by_dest.values()
    assert (feed.source_seq, feed.full) == (2, True)
    router = rig.call(PutRouter("r", RouterSpec("a", "b", filter="y"))).router
    rig.call(SyncRouters("b", router.id, router.version))
    rig.call(CatchUp("b"))
    assert (feed.source_seq, feed.full) == (3, True), "no router lets the third one pass"
    put(rig, "b", cap_records=3, discard="reject")
    rig.call(CatchUp("b"))
    assert [data for _, data in rig.read("b")] == [b"1", b"2", b"4"]
    assert (feed.source_seq, feed.full) == (4, False)


def test_what_was_deleted_while_it_waited_and_has_no_frame_in_its_segment_is_left_out(compaction: Compaction) -> None:
    rig = compaction.rig
    put(rig, "b", cap_records=2, discard="reject")
    route(rig, "r", "a", "b")
    append_tagged(rig, "a", *[(b"x" if at in (4, 5) else b"y", b"%d" % at) for at in range(10)])
    compaction.cut()
    compaction.begin_again()
    rig.call(DeleteRecords("a", None, "eq", b"x"))
    compaction.cut()
    compaction.upkeep()
    assert [info.version for info in compaction.segments("a")] == [1]
    got = compaction.read("b")
    for _ in range(8):
        got += after_all_is_taken(compaction)
    assert got == list(enumerate([b"%d" % at for at in range(10) if at not in (4, 5)], 1))


def test_marks_of_one_message_know_of_each_others_floors(compaction: Compaction) -> None:
    """Logging the copies of one topic says the floors of another: its mark must be newer than that."""
    rig = compaction.rig
    for at in range(4):
        put(rig, f"b{at}", cap_records=3)
        route(rig, f"r{at}", "a", f"b{at}")
    for life in range(4):
        for at in range(4):
            rig.append(f"b{at}", b'"own"')
        rig.append("a", *[b"%d" % at for at in range(9)])
        expected = {f"b{at}": compaction.read(f"b{at}") for at in range(4)}
        compaction.cut()
        check_places(rig)
        if life % 2:
            rig.boot()
        else:
            rig.restart_service()
            compaction.begin_again()
        rig.run()
        assert {f"b{at}": compaction.read(f"b{at}") for at in range(4)} == expected
        for at in range(4):
            view = rig.view(f"b{at}")
            assert view.records == 3
    verified(rig)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_the_copies_are_those_of_the_model(tmp_path: Path, seed: int) -> None:
    """The seeds of `test_routing`, with cuts, rewrites and ends of the compactor in between."""
    rig = Rig(str(tmp_path / "data"), segment_max_events="6", segment_rewrite_dead_ratio="0.3")
    compaction = Compaction(rig)
    try:
        chance = random.Random(seed)
        model = Model.begin(rig, chance)
        cuts = 0
        for step in range(150):
            what = chance.randrange(16)
            model.do(what, step, rig, chance)
            match what:
                case 8:
                    rig.call(Expire("a"))
                case 10:
                    rig.boot()
                case 11:
                    rig.restart_service()
                    compaction.begin_again()
                case 12 | 13:
                    compaction.cut()
                    cuts += 1
                case 14:
                    before_ms = rig.clock.ms
                    compaction.upkeep()
                    rig.clock.ms = before_ms
                case 15:
                    compaction.begin_again()
            for dest in "bcd":
                rig.call(CatchUp(dest))
            check_places(rig)
            for name in "abcd":
                if model.records[name]:
                    assert compaction.read(name) == model.live(name), f"step {step}, topic {name}"
        assert cuts > 5
        verified(rig)
    finally:
        rig.close()
