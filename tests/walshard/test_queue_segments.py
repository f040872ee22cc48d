"""Queues and named cursors over cuts: a snapshot, segments and a trimmed log bring back what the log alone does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.shm.queue_messages import (
    Ack,
    Bury,
    Claim,
    CursorAdvance,
    CursorDelete,
    CursorGet,
    CursorPut,
    Dealt,
    Extend,
    Nack,
    Release,
    Remove,
)
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.storage import kill_points, layout
from topics.storage.layout import list_log_files

MINUTE_MS = 60_000
QUEUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "durable": {"leases_durable": True, "max_deliveries": 2, "dead_letter": "dead"},
    "keep": {"on_ack": "keep", "leases_durable": True},
    "capped": {"cap_records": 12, "leases_durable": True},
    "ram": {"durability": "ephemeral", "leases_durable": True},
}


class Pair:
    """The same calls to two shards, of which the second has a compactor."""

    def __init__(self, path: Path) -> None:
        self.rigs = [Rig(str(path / name), segment_max_events="8") for name in ("without", "with")]
        self.compaction = Compaction(self.rigs[1])

    def both(self, do: Callable[[Rig], Any]) -> Any:
        first, second = (do(rig) for rig in self.rigs)
        assert first == second
        return first

    def call(self, call: Any) -> Any:
        return self.both(lambda rig: _comparable(rig.call(call)))

    def put(self, name: str, config: TopicConfig) -> None:
        self.both(lambda rig: type(rig.call(PutTopic(name, config, True))))

    def append(self, name: str, data: list[bytes], jobs: Any) -> None:
        self.both(lambda rig: rig.answer(rig.post_append(name, data, jobs=jobs)).first_seq)

    def restart(self, whole_service: bool) -> None:
        for rig in self.rigs:
            if whole_service:
                rig.restart_service()
            else:
                rig.boot()
        self.compaction.begin_again()

    def look(self, name: str) -> None:
        """Everything that can be seen of a queue is the same."""
        self.both(lambda rig: _seen(rig, name))
        assert self.rigs[0].read(name) == self.compaction.read(name)
        self.call(CursorGet(name, None))


def _seen(rig: Rig, name: str) -> Any:
    view = rig.view(name)
    jobs = (view.jobs_ready, view.jobs_in_flight, view.jobs_dead_lettered)
    return view.head_seq, view.earliest_seq, view.evict_floor, view.records, view.live_bytes, jobs


def _comparable(reply: Any) -> Any:
    """Return the reply without random parts."""
    if isinstance(reply, Dealt):
        return reply.seqs, reply.deadline_ms, reply.deliveries, reply.ready, reply.dead, reply.dead_deliveries
    if hasattr(reply, "cursors"):
        return [(one.cursor, one.consistency, one.persist_every, one.seq, one.persisted_seq) for one in reply.cursors]
    for field in ("revision", "topic_id"):
        if hasattr(reply, field):
            return type(reply).__name__, getattr(reply, "moved", None), getattr(reply, "seq", None)
    return reply


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for rig in pair.rigs:
        rig.close()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_a_snapshot_says_what_the_log_says(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    for name, config in QUEUES.items():
        made = TopicConfig(type="queue", **config)
        pair.put(name, made)
    leased: dict[str, list[int]] = {name: [] for name in QUEUES}
    dead: dict[str, list[int]] = {name: [] for name in QUEUES}
    for _ in range(150):
        name = chance.choice(list(QUEUES))
        some = sorted(chance.sample(leased[name], min(len(leased[name]), chance.randrange(1, 5))))
        now_ms = pair.rigs[0].clock.ms
        match chance.randrange(14):
            case 0 | 1 | 2:
                count = chance.randrange(1, 7)
                jobs = [
                    (at, chance.choice((0, now_ms + 300)), chance.choice((0, 200)), chance.choice(("", "a", "b")))
                    for at in range(count)
                    if chance.randrange(3) == 0
                ]
                jobs = [row for row in jobs if any(row[1:]) and not (row[1] and row[2])]
                pair.append(name, [b"%d" % chance.randrange(1000) for _ in range(count)], jobs or None)
            case 3 | 4:
                found = pair.call(Claim(name, "w", chance.randrange(1, 6), 500, 1))
                leased[name] += found[0]
                dead[name] += found[4]
            case 5 | 6:
                pair.call(Ack(name, "w", some, None))
            case 7:
                pair.call(Nack(name, "w", some, None, chance.choice((0, 400))))
            case 8:
                pair.call(Extend(name, "w", some, None, 900))
            case 9:
                cursor = f"c{chance.randrange(2)}"
                pair.call(
                    chance.choice(
                        (
                            CursorPut(name, cursor, "strictly_at_once", 1, chance.randrange(5), False),
                            CursorPut(name, cursor, "at_least_once", 2, None, True),
                            CursorDelete(name, cursor),
                        )
                    )
                )
            case 10:
                for number in range(2):
                    move_on(pair, name, f"c{number}", chance.randrange(4))
            case 11:
                pair.call(
                    chance.choice(
                        (
                            DeleteRecords(name, chance.randrange(1, 12), None, b""),
                            Remove(name, sorted(chance.sample(range(1, 40), 3))),
                            Bury(name, dead[name]),
                            Release(name, dead[name], delay_ms=100),
                        )
                    )
                )
            case 12:
                for rig in pair.rigs:
                    rig.clock.ms += 250
                    rig.run()
            case 13:
                if chance.randrange(3):
                    cut_beside(pair, chance, Ack(name, "w", leased[name], None))
                else:
                    pair.restart(whole_service=chance.randrange(2) == 0)
        pair.look(name)
    pair.compaction.cut()
    for whole_service in (False, True):
        pair.restart(whole_service)
        for name in QUEUES:
            pair.look(name)
            pair.call(Claim(name, "w", 100, 500, 1))


def cut_beside(pair: Pair, chance: random.Random, ack: Ack) -> None:
    """Half of the times jobs are done when the compactor has read the log up to where its snapshot will be, and the
    next start reads of that.
    """

    def act() -> None:
        kill_points.arm(None, lambda: None)
        pair.call(ack)

    if chance.randrange(2):
        kill_points.arm("checkpoint.followed", act)
        pair.compaction.cut()
        kill_points.arm(None, lambda: None)
        pair.restart(whole_service=False)
    else:
        pair.compaction.cut()


reads = itertools.count(1)


def move_on(pair: Pair, name: str, cursor: str, by: int) -> None:
    """A reader's step, each with the revision that it was told."""

    def step(rig: Rig) -> Any:
        found = [one for one in rig.call(CursorGet(name, None)).cursors if one.cursor == cursor]
        if not found:
            return None
        moved = rig.call(CursorAdvance(name, cursor, found[0].revision, found[0].seq, found[0].seq + by, next(reads)))
        return moved.moved, moved.seq

    pair.both(step)


def test_jobs_cursors_and_counters_are_there_when_the_log_behind_them_is_gone(pair: Pair) -> None:
    rig, compaction = pair.rigs[1], pair.compaction
    rig.call(PutTopic("q", TopicConfig(type="queue", leases_durable=True, max_deliveries=1, dead_letter="d"), True))
    rig.append("q", *[b"%d" % n for n in range(200)])
    rig.answer(
        rig.post_append(
            "q",
            [b"later", b"first", b"second"],
            jobs=[(0, rig.clock.ms + MINUTE_MS, 0, ""), (1, 0, 0, "k"), (2, 0, 0, "k")],
        )
    )
    rig.call(CursorPut("q", "c", "strictly_at_once", 1, 77, False))
    assert rig.call(Claim("q", "w", 100, MINUTE_MS, 1)).seqs == list(range(1, 101))
    rig.call(Nack("q", "w", list(range(41, 51)), None, 500))
    rig.call(Ack("q", "w", list(range(1, 31)), None))
    rig.clock.ms += 501
    dealt = rig.call(Claim("q", "w", 1, MINUTE_MS, 1))
    assert (dealt.seqs, dealt.dead) == ([101], list(range(41, 51)))
    rig.call(Bury("q", list(range(41, 46))))
    rig.call(Release("q", list(range(46, 51)), delay_ms=MINUTE_MS))
    directory = layout.wal_dir(rig.settings.data_dir)
    before = set(list_log_files(rig.fs, directory))
    for _ in range(4):
        compaction.cut()
        for _ in range(10):
            rig.append("other", b'"%0200000d"' % 0)
    assert not before & set(list_log_files(rig.fs, directory)), "the log of all this is still there"
    for restart in (rig.boot, rig.restart_service):
        restart()
        compaction.begin_again()
        view = rig.view("q")
        assert (view.earliest_seq, view.records) == (31, 203 - 35)
        # Leased are 31..40, 51..101; five wait for a minute, one for its time, one behind another of its key.
        assert (view.jobs_in_flight, view.jobs_ready, view.jobs_dead_lettered) == (61, 100, 5)
        (cursor,) = rig.call(CursorGet("q", "c")).cursors
        assert (cursor.seq, cursor.persisted_seq) == (77, 77)
        compaction.cut()
    assert rig.call(Ack("q", "w", [30, 31, 41, 51], None)).skipped == [30, 41]
    assert rig.call(Claim("q", "w", 200, 2 * MINUTE_MS, 1)).seqs == [*range(102, 201), 202]
    rig.clock.ms += MINUTE_MS + 1
    later = rig.call(Claim("q", "w", 200, MINUTE_MS, 1))
    assert later.dead == [*range(32, 41), *range(46, 51), *range(52, 102)]
    assert later.seqs == [201]


def test_an_ack_of_jobs_in_segments_looks_into_few_files_and_marks_them(pair: Pair) -> None:
    rig, compaction = pair.rigs[1], pair.compaction
    rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.append("q", *[b"%d" % n for n in range(1, 41)])
    compaction.cut()
    assert rig.view("q").base_seq == 41
    assert rig.call(Claim("q", "w", 40, MINUTE_MS, 1)).seqs == list(range(1, 41))
    odd = list(range(1, 41, 2))
    assert rig.call(Ack("q", "w", odd, None)).count == 20
    even = list(range(2, 41, 2))
    assert [seq for seq, _ in compaction.read("q")] == even
    compaction.cut()
    compaction.upkeep()
    rig.restart_service()
    compaction.begin_again()
    assert [seq for seq, _ in compaction.read("q")] == even
    assert rig.call(Claim("q", "w", 40, MINUTE_MS, 1)).seqs == even
    assert rig.call(Ack("q", "w", even, None)).count == 20
    view = rig.view("q")
    assert (view.earliest_seq, view.records, view.live_bytes) == (41, 0, 0)
    compaction.cut()
    compaction.cut()
    assert compaction.segments("q") == ()


def test_jobs_of_an_ephemeral_queue_keep_what_they_were_written_with_when_it_becomes_durable(pair: Pair) -> None:
    rig, compaction = pair.rigs[1], pair.compaction
    rig.call(PutTopic("q", TopicConfig(type="queue", durability="ephemeral"), True))
    later = rig.clock.ms + MINUTE_MS
    rig.answer(rig.post_append("q", [b"1", b"2", b"3"], jobs=[(0, later, 0, ""), (1, 0, 0, "k"), (2, 0, 0, "k")]))
    rig.call(PutTopic("q", TopicConfig(type="queue", durability="disk"), True))
    rig.append("q", b"4")
    compaction.cut()
    rig.restart_service()
    compaction.begin_again()
    assert [seq for seq, _ in compaction.read("q")] == [1, 2, 3, 4]
    assert rig.call(Claim("q", "w", 9, 2 * MINUTE_MS, 1)).seqs == [2, 4]
    assert rig.call(Ack("q", "w", [2], None)).count == 1
    rig.clock.ms = later
    assert rig.call(Claim("q", "w", 9, MINUTE_MS, 1)).seqs == [1, 3]
