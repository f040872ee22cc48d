"""Answers and steps of a shard that come only once its log is on the disk: without the sync each test fails.

A kill cannot show one that is missing, for the page cache survives it (docs/reliability.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.storage.unsynced import UnsyncedFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.compactor.checkpoints import SYNC_ONE_BY_ONE_MAX
from topics.core.config import TopicConfig
from topics.core.routers import RouterSpec
from topics.shm.arena import TopicView
from topics.shm.asks import Message
from topics.shm.queue_messages import CursorDelete, CursorPut
from topics.shm.topic_messages import (
    Checkpoint,
    DeleteRecords,
    DeleteRouter,
    DeleteTopic,
    EnsureTopic,
    PutRouter,
    PutTopic,
    RemoveRouters,
    SyncRouters,
)
from topics.storage import layout
from topics.walshard.commit.draft import LogWrite, Steps
from topics.walshard.routers.feeds import Feed


class Machine:
    def __init__(self, data_dir: str) -> None:
        self.fs = UnsyncedFileSystem()
        self.rig = Rig(data_dir, self.fs)

    @property
    def unsynced_logs(self) -> list[str]:
        """Return the durable logs with un-synced bytes; the RAM log is on no disk."""
        wal = f"{self.rig.settings.data_dir}/wal"
        return sorted(path for path in self.fs.unsynced if path.startswith(wal))

    @property
    def unsynced_segments(self) -> list[str]:
        topics = layout.topics_dir(self.rig.settings.data_dir)
        return sorted(path for path in self.fs.unsynced if path.startswith(topics))

    def begin(self) -> None:
        """Everything is on the disk."""
        self.rig.call(Checkpoint([]))
        assert not self.unsynced_logs


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(str(tmp_path))
    yield machine
    machine.rig.close()


def put(name: str = "t", **config: Any) -> PutTopic:
    return PutTopic(name, TopicConfig(**config), type_given=False)


def cursor(persist_every: int | None = None, seq: int | None = None) -> CursorPut:
    return CursorPut("t", "c", None, persist_every, seq, False)


ROUTER = PutRouter("r", RouterSpec("t", "u"))
ANSWERED: dict[str, tuple[list[Message], Message | Callable[[Rig], object]]] = {
    "a topic that is made": ([], put()),
    "a topic that is made for a router": ([], EnsureTopic("t")),
    "a configuration": ([put()], put(ttl_ms=9)),
    "a topic that becomes ephemeral": ([put()], put(durability="ephemeral")),
    "a topic that is ephemeral no more": ([put(durability="ephemeral")], put()),
    "a topic that goes": ([put()], DeleteTopic("t", if_empty=False)),
    "how far an ephemeral head may go": ([put(durability="ephemeral")], lambda rig: rig.append("t", *[b"1"] * 2000)),
    "a record of class fsync": ([put(durability="fsync")], lambda rig: rig.append("t", b"1")),
    "a cursor that is made": ([put()], cursor()),
    "a cursor that is changed": ([put(), cursor()], cursor(persist_every=5)),
    "a cursor that is moved": ([put(), cursor()], cursor(seq=0)),
    "a cursor that goes": ([put(), cursor()], CursorDelete("t", "c")),
    "a router that is made": ([put()], ROUTER),
    "a router that goes": ([put(), ROUTER], DeleteRouter("r")),
    "routers whose topics are gone": ([put(), ROUTER], RemoveRouters([1])),
}


@pytest.mark.parametrize("what", ANSWERED)
def test_what_is_answered_is_on_the_disk(machine: Machine, what: str) -> None:
    before, asked = ANSWERED[what]
    for call in before:
        machine.rig.call(call)
    machine.begin()
    synced = machine.fs.log.count("fdatasync")
    if callable(asked):
        asked(machine.rig)
    else:
        machine.rig.call(asked)
    assert machine.fs.log.count("fdatasync") > synced, "something was written"
    assert not machine.unsynced_logs


def test_a_record_of_class_disk_is_answered_before(machine: Machine) -> None:
    """Otherwise the other tests would say nothing."""
    machine.rig.call(put())
    machine.begin()
    machine.rig.append("t", b"1")
    assert machine.unsynced_logs


def test_at_a_clean_end_all_of_the_log_is_on_the_disk(machine: Machine) -> None:
    """Exact heads of `ephemeral` topics among it."""
    machine.rig.call(put(durability="ephemeral"))
    machine.rig.append("t", b"1")
    machine.rig.append("u", b"1")
    assert machine.unsynced_logs
    written = machine.fs.log.count("pwritev")
    machine.rig.shard.close()
    assert machine.fs.log.count("pwritev") > written
    assert not machine.unsynced_logs


def test_the_end_of_a_checkpoint_is_answered_when_all_of_the_log_is_on_the_disk(machine: Machine) -> None:
    """The snapshot that follows says that it goes on in it, and what came before may go."""
    machine.rig.call(put())
    machine.rig.append("t", b"1")
    assert machine.unsynced_logs
    machine.rig.call(Checkpoint([]))
    assert not machine.unsynced_logs


@pytest.mark.parametrize("topics", [1, SYNC_ONE_BY_ONE_MAX + 1])
def test_each_step_of_a_checkpoint_is_on_the_disk_before_the_next(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, topics: int
) -> None:
    """Segments, then the marks that name them, and after these the log files that have the records may go. Marks of
    deletions before the snapshot that takes them for done.
    """
    rig = machine.rig
    alone = rig.shard.handlers.alone
    assert isinstance(alone, dict)
    take = alone[Checkpoint]
    told: list[int] = []
    left: list[list[str]] = []
    compaction = Compaction(rig)

    def looking(call: Checkpoint, frontend: int) -> Steps[Any]:
        if call.topics:
            left.append(machine.unsynced_segments)
        reply = yield from take(call, frontend)
        left.append(machine.unsynced_logs)
        told.append(len(call.topics))
        return reply

    def looking_again(follower: Any) -> Any:
        found = sync_marks(follower)
        left.append(machine.unsynced_segments)
        return found

    sync_marks = compaction.compactor.marks.sync
    monkeypatch.setattr(compaction.compactor.marks, "sync", looking_again)
    monkeypatch.setitem(alone, Checkpoint, looking)
    for number in range(topics):
        for tag in (b"x", b"y", b"x"):
            rig.append(f"t{number}", b"1", tag=tag)
    assert compaction.cut()
    assert sum(told) == topics
    for number in range(topics):
        assert rig.delete(DeleteRecords(f"t{number}", None, "eq", b"y")) == 1
    assert machine.unsynced_segments
    assert compaction.cut()
    assert len(left) > 4
    assert not any(left)


def test_where_a_dest_stands_is_on_the_disk_whenever_its_routers_change(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are made from some record on, and of all by the end: the source may give up its records."""
    rig = machine.rig
    feeds = rig.shard.routing.feeds
    bind = feeds.bind
    on_disk: list[bool] = []

    def looking(make: Callable[..., LogWrite], *arguments: Any) -> LogWrite:
        write = make(*arguments)
        apply = write.apply

        def logged() -> None:
            assert apply is not None
            apply()
            on_disk.append(not machine.unsynced_logs)

        write.apply = logged
        return write

    def looking_at_bind(feed: Feed, sight: TopicView) -> Steps[bool]:
        logged = yield from bind(feed, sight)
        on_disk.append(not machine.unsynced_logs)
        return logged

    for name in ("start", "reroute", "stop"):
        monkeypatch.setattr(feeds, name, partial(looking, getattr(feeds, name)))
    monkeypatch.setattr(feeds, "bind", looking_at_bind)

    def changed(call: Message) -> None:
        before = len(on_disk)
        reply = rig.call(call)
        rig.call(EnsureTopic("u"))
        router = reply.router if isinstance(call, PutRouter) else None
        for _ in range(10):
            rig.call(SyncRouters("u", router.id if router else 0, router.version if router else 0))
        assert len(on_disk) > before
        assert all(on_disk)

    changed(ROUTER)  # of a source that is not there yet
    rig.append("t", b"1")
    assert all(on_disk)
    changed(PutRouter("also", RouterSpec("t", "u", preserve_tag=False)))
    rig.append("t", b"2")
    changed(DeleteRouter("also"))
    changed(DeleteRouter("r"))
    assert [data for _, data in rig.read("u")] == [b"1", b"2", b"2"]
