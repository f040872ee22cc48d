"""Routers on one shard, step by step: what is logged when, and that copies are the same after every kind of end."""

from __future__ import annotations

import errno
import os
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.storage.faults import FaultyFileSystem
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.routers import RouterSpec
from topics.shm import append_messages
from topics.shm.arena import TopicView
from topics.shm.memory import SharedObject
from topics.shm.topic_messages import (
    CatchUp,
    DeleteRecords,
    DeleteRouter,
    DeleteTopic,
    EnsureTopic,
    PutRouter,
    PutTopic,
    SyncRouters,
)
from topics.storage.copies import UnstampedCopies, as_copies
from topics.storage.frame import FLAG_MORE, Bytes, FrameType, lay_out, scan
from topics.storage.layout import group_dir, log_path
from topics.walshard import setup
from topics.walshard.routers import originals, routing
from topics.walshard.routers.copier import Copier
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.originals import Originals
from topics.walshard.routers.page import PAGE_BYTES, PAGE_RECORDS
from topics.walshard.routers.routing import FEEDS_PER_STEP
from topics.walshard.routers.sources import Ended


def route(rig: Rig, name: str, source: str, dest: str, **fields: Any) -> None:
    """Register a router as a frontend does."""
    router = rig.call(PutRouter(name, RouterSpec(source, dest, **fields))).router
    rig.call(EnsureTopic(dest))
    for _ in range(10):
        reply = rig.call(SyncRouters(dest, router.id, router.version))
        if reply.begun:
            return
    raise AssertionError(f"{name} does not begin: {reply}")


def put(rig: Rig, name: str, **config: Any) -> None:
    rig.call(PutTopic(name, TopicConfig(**config), type_given=False))


def append_tagged(rig: Rig, name: str, *records: tuple[bytes, bytes]) -> None:
    """(tag, data) each."""
    laid_out = lay_out([(b"", tag, data, b"") for tag, data in records])
    rig.next_id += 1
    options = append_messages.AppendOptions(name)
    message = append_messages.encode_append(rig.next_id, options, laid_out.offset_len, laid_out.flags, laid_out.buffer)
    assert rig.shared.rings[0][0].requests.push(*message)
    rig.answer(rig.next_id)


def feeds(rig: Rig) -> Feeds:
    return rig.shard.routing.feeds


def logged_types(rig: Rig) -> list[FrameType]:
    """Return the types of all frames in the durable log that say something about topics."""
    found = []
    for number in range(1, rig.cell.get("wal_file") + 1):
        content = Path(log_path(group_dir(rig.settings.data_dir, 0, 1), number)).read_bytes()
        found += [FrameType(frame[2]) for frame in scan(content, 0, len(content)).frames]
    return [type_ for type_ in found if type_ not in (32, 33, 34)]


def most_copies_in_a_step(rig: Rig, other_requests: bool) -> int:
    """Records of a burst of 6 pages that one step of the shard copies, at most, until all are copied."""
    route(rig, "r", "a", "b")
    rig.append("other", b"1")
    for _ in range(2):
        rig.post_append("a", [b"1"] * (3 * PAGE_RECORDS))
    most = copied = 0
    while copied < 6 * PAGE_RECORDS:
        if other_requests:
            rig.post_append("other", [b"1"])
        assert rig.step()
        rig.take_replies()
        view = rig.view("b")
        most, copied = max(most, view.head_seq - copied), view.head_seq
    return most


@pytest.mark.parametrize("other_requests", [True, False])
def test_a_step_copies_a_page_then_requests_have_their_turn(rig: Rig, other_requests: bool) -> None:
    assert most_copies_in_a_step(rig, other_requests) == PAGE_RECORDS


@pytest.mark.parametrize(
    ("records", "dests"), [(1, FEEDS_PER_STEP), (PAGE_RECORDS // 2, 2), (PAGE_RECORDS, 1), (5 * PAGE_RECORDS, 1)]
)
def test_a_step_copies_into_as_many_dests_as_make_a_page(rig: Rig, records: int, dests: int) -> None:
    names = [f"d{number:02}" for number in range(2 * FEEDS_PER_STEP)]
    for name in names:
        route(rig, name, "a", name)
    rig.post_append("a", [b"1"] * records)
    rig.shard.serve()
    for step in (1, 2):
        assert rig.shard.copy()
        assert [name for name in names if rig.view(name).head_seq > 0] == names[: step * dests]
    rig.run()
    assert {rig.view(name).head_seq for name in names} == {records}


@pytest.mark.parametrize("cap", [{"cap_records": 5}, {"cap_bytes": 400}])
def test_a_dest_with_little_room_has_few_records_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, cap: dict[str, int]
) -> None:
    read: list[int] = []

    def counted(frames: bytearray, rows: array[int], topic_id: int, first_seq: int) -> UnstampedCopies:
        read.extend(range(first_seq, first_seq + len(rows)))
        return as_copies(frames, rows, topic_id, first_seq)

    monkeypatch.setattr(originals, "as_copies", counted)
    put(rig, "b", discard="reject", **cap)
    route(rig, "r", "a", "b")
    rig.append("a", *[b"1"] * (3 * PAGE_RECORDS))
    copied = rig.view("b").head_seq
    assert 4 < copied < 8
    assert max(read) < 16


@pytest.mark.parametrize("config", [{"cap_records": 5, "discard": "reject"}, {}])
@pytest.mark.parametrize("damaged_seq", [1, 3, 5, 6, 20])
def test_a_damaged_record_holds_up_none_before_it(rig: Rig, damaged_seq: int, config: dict[str, Any]) -> None:
    put(rig, "b", **config)
    route(rig, "r", "a", "b")
    rig.post_append("a", [b"%d" % at for at in range(40)])
    rig.shard.serve()
    place = next(iter(rig.hosted("a").index.entries(damaged_seq, damaged_seq)[2:3]))
    path = log_path(group_dir(rig.settings.data_dir, 0, 1), rig.cell.get("wal_file"))
    with Path(path).open("r+b") as file:
        file.seek((place & 0xFFFF_FFFF) + 40)
        file.write(b"?")
    got = []
    for _ in range(8):
        rig.run()
        got += rig.read("b")
        rig.call(DeleteRecords("b", rig.view("b").head_seq + 1, None, b""))
        rig.clock.ms += 2000
    assert got == [(at + 1, b"%d" % at) for at in range(damaged_seq - 1)]


def test_a_dest_that_has_everything_has_no_turn(rig: Rig) -> None:
    route(rig, "r", "a", "b")
    rig.post_append("a", [b"1"] * (PAGE_RECORDS + 1))
    rig.shard.serve()
    for head_seq, idle in ((PAGE_RECORDS, False), (PAGE_RECORDS + 1, True)):
        assert rig.shard.copy()
        assert (rig.view("b").head_seq, rig.shard.routing.idle) == (head_seq, idle)


def test_a_step_of_large_records_is_less_than_two_pages_of_bytes(rig: Rig) -> None:
    names = [f"d{number}" for number in range(FEEDS_PER_STEP)]
    for name in names:
        route(rig, name, "a", name)
    for _ in range(3):
        rig.post_append("a", [b'"%s"' % (b"x" * (PAGE_BYTES // 8))] * 2)
        rig.shard.serve()
    for step in range(1, FEEDS_PER_STEP // 2 + 1):
        assert rig.shard.copy()
        assert [name for name in names if rig.view(name).head_seq == 6] == names[: 2 * step]


def test_the_look_once_a_second_is_taken_in_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"d{number}" for number in range(5)]
    for name in names:
        route(rig, name, f"from-{name}", name)
        rig.append(f"from-{name}", b"1")
    looked: list[str] = []
    look = Originals.look

    def noted(self: Originals, source: str) -> TopicView | None:
        looked.append(source)
        return look(self, source)

    monkeypatch.setattr(Originals, "look", noted)
    monkeypatch.setattr(routing, "LOOKED_AT_PER_STEP", 2)
    rig.shard.sweep()
    steps: list[int] = []
    while rig.shard.copy():
        steps.append(len(looked) - sum(steps))
    assert steps == [2, 2, 1], "all of them have everything, so none has a turn"
    assert sorted(looked) == [f"from-{name}" for name in names]


def test_a_look_that_fails_ends_no_shard(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    route(rig, "r", "a", "b")
    rig.append("a", b"1")
    with monkeypatch.context() as patches:

        def fails(_self: Originals, _source: str) -> TopicView | None:
            raise OSError(errno.EMFILE, "too many open files")

        patches.setattr(Originals, "look", fails)
        rig.shard.sweep()
        while rig.shard.copy():
            pass
    rig.clock.ms += 2000
    rig.append("a", b"2")
    assert rig.read("b") == [(1, b"1"), (2, b"2")]


def test_copies_and_their_cursor_are_one_write_of_the_dest(rig: Rig) -> None:
    route(rig, "r", "a", "b")
    rig.append("a", b"1")
    rig.append("a", b"2", b"3")
    assert rig.read("b") == [(1, b"1"), (2, b"2"), (3, b"3")]
    types = logged_types(rig)
    assert types[-5:] == [FrameType.APPEND] * 4 + [FrameType.ROUTER_CURSOR]
    content = Path(log_path(group_dir(rig.settings.data_dir, 0, 1), 1)).read_bytes()
    frames = scan(content, 0, len(content)).frames
    copies = [frame for frame in frames if frame[2] == FrameType.APPEND and frame[4] == rig.view("b").topic_id]
    assert all(frame[3] & FLAG_MORE for frame in copies), "the cursor ends the write"
    rig.append("b", b"own")
    for end in (rig.boot, rig.restart_service):
        rig.append("a", b"4")
        expected = rig.read("b")
        end()
        assert rig.read("b") == expected, "before anything is copied again"
        rig.run()
        assert rig.read("b") == expected


def test_a_source_keeps_what_its_routers_have_yet_to_copy(rig: Rig) -> None:
    """The source also keeps records that its caps evicted or a client deleted in the very group that wrote them."""
    put(rig, "a", cap_records=2)
    route(rig, "r", "a", "b")
    rig.append("a", *[b"%d" % at for at in range(20)])
    rig.post_append("a", [b"20"])
    rig.call(DeleteRecords("a", 100, None, b""))
    assert rig.read("b") == [(at + 1, b"%d" % at) for at in range(21)]


def test_records_that_are_too_large_for_the_dest_are_told_of_once(rig: Rig) -> None:
    """A writer may send one large and one small record by turns."""
    put(rig, "b", cap_bytes=1000, discard="reject")
    route(rig, "r", "a", "b")
    with capture_logs() as lines:
        for _ in range(4):
            rig.append("a", b"1" * 2000)
            rig.append("a", b"1")
            rig.run()
    assert rig.cell.get("router_oversize") == 4
    assert [line["event"] for line in lines] == [
        "a record is larger than the dest of its router may ever hold, and left out"
    ]


def test_a_source_keeps_nothing_that_was_copied(rig: Rig) -> None:
    put(rig, "a", cap_records=1)
    route(rig, "r", "a", "b")
    for at in range(50):
        rig.append("a", b"%d" % at)
    rig.shard.sweep()
    view = rig.view("a")
    assert (view.base_seq, view.earliest_seq) == (50, 50)
    rig.call(DeleteRouter("r"))
    rig.call(SyncRouters("b", 0, 0))
    rig.append("a", b"50")
    view = rig.view("a")
    assert view.base_seq == 51
    assert len(rig.read("b")) == 50


@pytest.mark.parametrize("end", [Rig.boot, Rig.restart_service])
def test_what_a_source_evicted_before_a_crash_and_a_copy_is_a_gap(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, end: Callable[[Rig], None]
) -> None:
    put(rig, "a", cap_records=2)
    route(rig, "r", "a", "b")
    rig.append("a", b"1")
    with monkeypatch.context() as before_copying:
        before_copying.setattr(Copier, "next_write", lambda *_: None)
        rig.append("a", b"2", b"3", b"4", b"5")
    end(rig)
    rig.run()
    assert rig.read("b") == [(1, b"1"), (4, b"4"), (5, b"5")]
    rig.call(DeleteRecords("b", 2, None, b""))
    view = rig.view("b")
    assert (view.evict_floor, view.evict_reason, view.head_seq) == (4, EvictReason.SOURCE_TRIM, 5)


def test_the_ram_log_is_trimmed_and_keeps_what_only_it_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "RAM_FILE_BYTES", 100_000)
    rig.restart_service()
    put(rig, "e", durability="ephemeral")
    route(rig, "r", "a", "b")
    route(rig, "s", "a", "quiet", filter="rare")
    route(rig, "t", "a", "e", filter="rare")
    append_tagged(rig, "a", (b"rare", b"1"))
    for at in range(300):
        rig.append("a", b'"%04d' % at + b"x" * 3000 + b'"')
    expected = {name: rig.read(name) for name in ("b", "quiet", "e")}
    assert len(expected["b"]) == 301
    assert expected["quiet"] == expected["e"] == [(1, b"1")]
    rig.boot()
    rig.run()
    assert {name: rig.read(name) for name in ("b", "quiet", "e")} == expected
    append_tagged(rig, "a", (b"rare", b"2"))
    assert rig.read("e") == [(1, b"1"), (2, b"2")]


def test_from_an_ephemeral_source_every_copy_is_logged(rig: Rig) -> None:
    put(rig, "a", durability="ephemeral")
    route(rig, "r", "a", "b")
    rig.append("a", b"1")
    rig.append("a", b"2")
    assert logged_types(rig).count(FrameType.APPEND) == 2
    rig.restart_service()
    rig.run()
    assert rig.read("b") == [(1, b"1"), (2, b"2")]
    rig.append("a", b"3")
    assert rig.read("b") == [(1, b"1"), (2, b"2"), (4, b"3")], "how many were lost with the source nobody knows"
    rig.shard.close()
    rig.restart_service()
    rig.append("a", b"4")
    assert rig.read("b")[-1] == (5, b"4"), "after an orderly end it is known"


def test_an_ephemeral_dest_goes_on_where_it_was(rig: Rig) -> None:
    put(rig, "b", durability="ephemeral")
    route(rig, "r", "a", "b")
    rig.append("a", b"1", b"2")
    rig.boot()
    rig.run()
    assert rig.read("b") == [(1, b"1"), (2, b"2")]
    rig.append("a", b"3")
    assert rig.read("b") == [(1, b"1"), (2, b"2"), (3, b"3")]
    rig.shard.close()
    rig.restart_service()
    rig.run()
    rig.append("a", b"4")
    assert rig.read("b") == [(4, b"4")]


def test_a_changed_router_leaves_older_copies_as_they_were(rig: Rig) -> None:
    route(rig, "r", "a", "b", filter="x")
    append_tagged(rig, "a", (b"x", b"1"), (b"y", b"2"))
    route(rig, "r", "a", "b", filter="y")
    append_tagged(rig, "a", (b"x", b"3"), (b"y", b"4"))
    expected = [(1, b"1"), (2, b"4")]
    assert rig.read("b") == expected
    rig.restart_service()
    rig.run()
    assert rig.read("b") == expected


def test_routers_of_a_deleted_topic_are_gone_for_good(rig: Rig) -> None:
    route(rig, "r", "a", "b")
    route(rig, "q", "b", "c")
    rig.append("a", b"1")
    rig.call(DeleteTopic("b", if_empty=False))
    rig.run()
    for end in (rig.run, rig.boot, rig.restart_service):
        end()
        rig.run()
        rig.append("b", b"new")
        rig.append("a", b"2")
        rig.run()
        assert rig.read("c") == [(1, b"1")]
        assert rig.cell.get("routers") == 0
        rig.call(DeleteTopic("b", if_empty=False))


def test_copies_find_room_where_records_have_expired(rig: Rig) -> None:
    """In a dest that is full of what has outlived its ttl: at the next copy, not at the next sweep."""
    put(rig, "b", cap_records=2, discard="reject", ttl_ms=100)
    put(rig, "c", cap_records=3, ttl_ms=100)
    route(rig, "r", "a", "b")
    route(rig, "q", "a", "c")
    rig.append("a", b"1", b"2")
    rig.run()
    rig.clock.ms += 101
    rig.append("a", b"3", b"4")
    rig.run()
    assert rig.read("b") == rig.read("c") == [(3, b"3"), (4, b"4")]
    for name in "bc":
        view = rig.view(name)
        assert (view.evict_reason, view.evict_run_seq) == (EvictReason.TTL, 1)
    rig.restart_service()
    rig.run()
    assert rig.read("b") == rig.read("c") == [(3, b"3"), (4, b"4")]


class FullDisk(FaultyFileSystem):
    """A disk that takes no writes below one directory, as long as it is told so; RAM does take them."""

    full_dir: str | None = None

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        if self.full_dir is not None and os.readlink(f"/proc/self/fd/{fd}").startswith(self.full_dir):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


def test_a_router_id_is_never_used_again(rig: Rig) -> None:
    first = rig.call(PutRouter("r", RouterSpec("a", "b"))).router
    rig.call(DeleteRouter("r"))
    rig.restart_service()
    assert rig.call(PutRouter("r", RouterSpec("a", "b"))).router.id > first.id


class Model:
    """The records that each topic must have: (seq, data) of all that was ever there, and what is gone."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[bytes, bytes]]] = {name: [] for name in "abcd"}
        self.gone: dict[str, set[int]] = {name: set() for name in "abcd"}

    def append(self, name: str, tag: bytes, data: bytes) -> None:
        self.records[name].append((tag, data))
        if name == "a":
            self.append("b", tag, data)
            if tag == b"x":
                self.append("c", b"", data)
        if name == "b":
            self.append("d", tag, data)
        if name == "a" and len(self.records["a"]) > 5:
            self.gone["a"].update(range(1, len(self.records["a"]) - 4))

    def delete(self, name: str, before_seq: int) -> None:
        self.gone[name].update(range(1, min(before_seq, len(self.records[name]) + 1)))

    def live(self, name: str) -> list[tuple[int, bytes]]:
        records = enumerate(self.records[name], 1)
        return [(seq, data) for seq, (_, data) in records if seq not in self.gone[name]]

    @staticmethod
    def begin(rig: Rig, chance: random.Random) -> Model:
        """Make the topics and routers: a → b → d and a → c by tag; a evicts."""
        put(rig, "a", cap_records=5)
        put(rig, "c", durability=chance.choice(["disk", "fsync", "memory"]))
        route(rig, "r", "a", "b")
        route(rig, "q", "a", "c", filter="x", preserve_tag=False)
        route(rig, "p", "b", "d")
        return Model()

    def do(self, what: int, step: int, rig: Rig, chance: random.Random) -> None:
        """Do one of ten things: write to a, b and c, delete from all, configure b, let time pass, sync."""
        match what:
            case 0 | 1 | 2 | 3:
                records = [
                    (chance.choice([b"", b"x", b"y"]), b"%d" % (1000 * step + at))
                    for at in range(chance.randrange(1, 9))
                ]
                append_tagged(rig, "a", *records)
                for tag, data in records:
                    self.append("a", tag, data)
            case 4 | 5:
                name = chance.choice("bc")
                append_tagged(rig, name, (b"x", b"%d" % step))
                self.append(name, b"x", b"%d" % step)
            case 6:
                name = chance.choice("abcd")
                if self.records[name]:
                    before_seq = chance.randrange(1, len(self.records[name]) + 2)
                    rig.call(DeleteRecords(name, before_seq, None, b""))
                    self.delete(name, before_seq)
            case 7:
                put(rig, "b", ttl_ms=chance.choice([0, 10**12]))
            case 8:
                rig.clock.ms += 1500
                rig.shard.sweep()
            case 9:
                rig.shard.sync_in_background()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_copies_are_those_of_the_model(rig: Rig, seed: int) -> None:
    chance = random.Random(seed)
    model = Model.begin(rig, chance)
    ends = 0
    for step in range(120):
        what = chance.randrange(12)
        model.do(what, step, rig, chance)
        if what >= 10:
            (rig.boot if what == 10 else rig.restart_service)()
            ends += 1
        for dest in "bcd":
            rig.call(CatchUp(dest))
        for name in "abcd":
            if model.records[name]:
                assert rig.read(name) == model.live(name), f"step {step}, topic {name}"
    assert ends > 5


def test_a_source_that_is_deleted_leaves_a_gap_once(rig: Rig) -> None:
    put(rig, "b", cap_records=2, discard="reject")
    route(rig, "r", "a", "b")
    rig.append("a", b"1", b"2", b"3", b"4", b"5")
    rig.run()
    rig.call(DeleteTopic("a", if_empty=False))
    for end in (rig.run, rig.boot, rig.restart_service):
        end()
        rig.run()
        assert rig.read("b") == [(1, b"1"), (2, b"2")]
        view = rig.view("b")
        assert (view.head_seq, view.records) == (5, 2)
    rig.call(DeleteRecords("b", 2, None, b""))
    rig.append("b", b"own")
    assert rig.read("b") == [(2, b"2"), (6, b"own")]


def seconds_pass(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.clock.ms += 1000
        rig.shard.sweep()
        rig.run()
        rig.shard.sync_in_background()
        rig.shard.sync_in_background()


def test_a_gap_becomes_durable_and_so_does_what_follows(rig: Rig) -> None:
    put(rig, "b", cap_bytes=4000, discard="reject")
    route(rig, "r", "a", "b")
    oversize = b'"' + b"x" * 5000 + b'"'
    for head_seq, data in enumerate((b"1", oversize, oversize, b"4"), 1):
        rig.append("a", data)
        seconds_pass(rig, 3)
        view = rig.view("b")
        assert (view.head_seq, view.durable_seq) == (head_seq, head_seq)


@pytest.mark.shard(shards=2)
def test_a_shard_whose_peer_takes_nothing_sleeps_meanwhile(rig: Rig) -> None:
    rig.run()
    links = rig.shards[0].routing.sources.links
    assert links.idle
    for _ in range(100_000):
        links.send(1, Ended("n" * 255, 1, 1))
        links.flush()
        if links.stuck:
            break
    assert links.stuck
    assert links.idle


def test_routers_that_go_with_their_topic_wait_for_room_in_shared_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.append("a", b"1")
    route(rig, "r", "a", "b")

    def full(_object: SharedObject, _start: int, _length_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SharedObject, "reserve", full)
        for number in range(10_000):  # until the table is at its border
            refused = rig.post_call(PutRouter("r", RouterSpec("a", "b", filter=f"x{number}")))
            rig.run()
            if isinstance(rig.replies[refused], TopicsError):
                break
        assert isinstance(rig.replies[refused], TopicsError)
        rig.call(DeleteTopic("a", if_empty=False))
        seconds_pass(rig, 2)
        assert rig.cell.get("routers") == 1, "there is no room to say it"
    seconds_pass(rig, 2)
    assert rig.cell.get("routers") == 0


@pytest.mark.parametrize("end", [Rig.boot, Rig.restart_service])
def test_what_was_deleted_while_it_waited_is_known_to_a_life_that_begins_with_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, end: Callable[[Rig], None]
) -> None:
    put(rig, "b", cap_records=2, discard="reject")
    route(rig, "r", "a", "b")
    append_tagged(rig, "a", *[(b"x" if at in (2, 4) else b"y", b"%d" % at) for at in range(6)])
    rig.run()
    rig.call(DeleteRecords("a", None, "eq", b"x"))
    # The shard ends after it made room, and before anything is copied into it.
    with monkeypatch.context() as before_copying:
        before_copying.setattr(Copier, "next_write", lambda *_: None)
        rig.call(DeleteRecords("b", 3, None, b""))
    end(rig)
    rig.run()
    assert rig.read("b") == [(3, b"3"), (4, b"5")]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_full_dest_gets_what_lives_when_there_is_room(rig: Rig, seed: int) -> None:
    chance = random.Random(seed)
    put(rig, "a", durability=chance.choice(["disk", "fsync", "memory"]))
    put(rig, "b", cap_records=4, discard="reject")
    route(rig, "r", "a", "b")
    waiting: list[tuple[int, bytes, bytes]] = []
    copies: list[tuple[int, bytes]] = []
    head_a = head_b = left_out = 0
    for step in range(150):
        before = len(waiting)
        match chance.randrange(9):
            case 0 | 1 | 2:
                new = [(chance.choice([b"x", b"y"]), b"%d.%d" % (step, at)) for at in range(chance.randrange(1, 4))]
                append_tagged(rig, "a", *new)
                for tag, data in new:
                    head_a += 1
                    waiting.append((head_a, tag, data))
            case 3:
                tag = chance.choice([b"x", b"y"])
                rig.call(DeleteRecords("a", None, "eq", tag)) if head_a else None
                waiting = [one for one in waiting if one[1] != tag]
                left_out += before - len(waiting)
            case 4 if head_a:
                before_seq = chance.randrange(1, head_a + 2)
                rig.call(DeleteRecords("a", before_seq, None, b""))
                waiting = [one for one in waiting if one[0] >= before_seq]
                left_out += before - len(waiting)
            case 5 | 6 if copies:
                before_seq = chance.randrange(copies[0][0], head_b + 2)
                rig.call(DeleteRecords("b", before_seq, None, b""))
                copies = [one for one in copies if one[0] >= before_seq]
            case 7:
                rig.boot()
            case 8:
                rig.restart_service()
        while waiting and len(copies) < 4:
            head_b += 1
            copies.append((head_b, waiting.pop(0)[2]))
        rig.run()
        if head_b:
            rig.call(CatchUp("b"))
            assert rig.read("b") == copies, f"step {step}"
            view = rig.view("b")
            assert (view.head_seq, view.evict_floor) == (head_b, 1), f"step {step}"
    assert left_out > 5


def test_a_cycle_is_refused_by_the_registry(rig: Rig) -> None:
    route(rig, "r", "a", "b")
    with pytest.raises(TopicsError, match="cycle"):
        rig.call(PutRouter("q", RouterSpec("b", "a")))


@pytest.mark.parametrize("together", [False, True], ids=["one write", "one group"])
def test_a_source_is_copied_from_its_first_record_on_whatever_its_first_group_evicts(rig: Rig, together: bool) -> None:
    route(rig, "r", "a", "b")
    data = [b"%d" % at for at in range(20)]
    for piece in [[one] for one in data] if together else [data]:
        for name in ("a", "unrouted"):
            rig.post_append(name, piece, config=TopicConfig(cap_records=2))
    rig.run()
    assert rig.read("b") == [(at + 1, b"%d" % at) for at in range(20)]
    rig.shard.sweep()
    for name in ("a", "unrouted"):
        view = rig.view(name)
        assert (view.base_seq, view.earliest_seq) == (19, 19), name


def test_what_the_first_group_after_a_crash_evicts_is_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put(rig, "a", cap_records=2)
    route(rig, "r", "a", "b")
    with monkeypatch.context() as before_copying:
        before_copying.setattr(Copier, "next_write", lambda *_: None)
        rig.append("a", b"1", b"2")
    rig.post_append("a", [b"3", b"4"])
    rig.boot()
    rig.run()
    assert rig.read("b") == [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]
