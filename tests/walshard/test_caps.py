"""Holdings of a shard, as its cell says them, and the caps of the service that it keeps to (api §11)."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.rig import Rig
from topics.core.config import CLASSES, TopicConfig
from topics.core.errors import TopicsError
from topics.core.names import owner_shard
from topics.shm.arena import ArenaReader
from topics.shm.control import Role
from topics.shm.topic_messages import (
    SESSION_TTL_MS,
    DeleteRecords,
    DeleteTopic,
    PutTopic,
    SessionClose,
    SessionOpen,
    SessionPut,
)

MakeRig = Callable[..., Rig]
RECORD_BYTES = 54
"""In the log, with one byte of data."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    rigs = []

    def make(fs: FaultyFileSystem | None = None, **settings: Any) -> Rig:
        rigs.append(Rig(str(tmp_path), fs, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def put(rig: Rig, name: str, **config: Any) -> bool:
    created: bool = rig.call(PutTopic(name, TopicConfig(**config), "type" in config)).created
    return created


def refused(rig: Rig, ask: Callable[[], object]) -> dict[str, Any] | None:
    """The detail of a `throttled`."""
    with pytest.raises(TopicsError) as error:
        ask()
    assert error.value.code == "throttled"
    return error.value.detail


def says(rig: Rig) -> dict[str, int]:
    """Return the holdings of the shard, as its cell says them."""
    return {field: rig.cell.get(field) for field in holds(rig, 0)}


def holds(rig: Rig, sessions: int) -> dict[str, int]:
    """The same, counted in what readers see."""
    reader = ArenaReader(rig.identity, 0, rig.cell.get("generation"))
    found = [reader.look_up(name) for name in reader.names]
    views = [(view, reader.config(slot, view)) for slot, view in filter(None, found) if view is not None]
    classes = Counter(config.durability for _, config in views)
    return {
        "topics": len(views),
        **{f"topics_{name}": classes[name] for name in CLASSES},
        "queue_topics": sum(config.type == "queue" for _, config in views),
        "leases_in_flight": sum(view.jobs_in_flight for view, _ in views),
        "records_live": sum(view.records for view, _ in views),
        "bytes_live": sum(view.live_bytes for view, _ in views),
        "sessions": sessions,
        "routers": 0,
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_cell_says_what_is_there_after_whatever_happens(make: MakeRig, seed: int) -> None:
    rig = make(max_topics="4", max_total_bytes="3000", max_watch_sessions="3")
    chance = random.Random(seed)
    sessions = 0
    refusals: Counter[str] = Counter()
    for step in range(150):
        name = f"t{chance.randrange(6)}"
        try:
            match chance.randrange(9):
                case 0 | 1 | 2:
                    rig.append(name, *[b"1"] * chance.randrange(1, 8))
                case 3:
                    rig.append(name, b"1", config=TopicConfig(durability=chance.choice(CLASSES), cap_records=3))
                case 4:
                    put(rig, name, type="log", durability=chance.choice(CLASSES), cap_records=chance.choice([0, 2]))
                case 5:
                    rig.call(DeleteTopic(name, False))
                case 6:
                    rig.call(DeleteRecords(name, chance.randrange(1, 20), None, b""))
                case 7:
                    rig.call(SessionPut(f"w{step}", b"body"))
                    sessions += 1
                case 8:
                    put(rig, f"q{name}", type="queue", ttl_ms=500)
                    rig.clock.ms += chance.randrange(400)
                    rig.shard.sweep()
        except TopicsError as error:
            refusals[(error.detail or {}).get("limit", error.code)] += 1
        assert says(rig) == holds(rig, sessions), f"step {step}"
        if step % 40 == 39:
            rig.boot()  # the shard was killed
            assert says(rig) == holds(rig, sessions), f"recovered at step {step}"
    assert says(rig)["topics"] <= 4
    assert refusals["max_topics"], refusals
    assert refusals["max_watch_sessions"], refusals


def test_topics_are_capped_and_what_exists_is_not(make: MakeRig) -> None:
    rig = make(max_topics="2")
    rig.append("a", b"1")
    assert put(rig, "b")
    assert refused(rig, lambda: rig.append("c", b"1")) == {"limit": "max_topics", "max": 2}
    assert refused(rig, lambda: put(rig, "c")) == {"limit": "max_topics", "max": 2}
    assert rig.append("a", b"2").head_seq == 2
    assert not put(rig, "b", ttl_ms=5)
    rig.call(DeleteTopic("a", False))
    assert rig.append("c", b"1").created


def test_a_group_of_creations_stops_at_the_cap(make: MakeRig) -> None:
    rig = make(max_topics="3")
    ids = [rig.post_append(f"t{n}", [b"1"]) for n in range(6)]
    rig.run()
    codes = [getattr(rig.replies[id], "code", "ok") for id in ids]
    assert codes == ["ok"] * 3 + ["throttled"] * 3
    assert says(rig)["topics"] == 3


def test_a_creation_that_is_refused_for_another_reason_gives_its_place_back_within_the_group(make: MakeRig) -> None:
    rig = make(max_topics="1")
    first = rig.post_append("a", [b"1"], if_head_seq=7)
    second = rig.post_append("b", [b"1"])
    rig.run()
    assert rig.replies[first].code == "head_mismatch"
    assert rig.replies[second].created


@pytest.mark.parametrize("how", ["put", "append"])
def test_a_creation_that_the_disk_refuses_gives_its_place_back(make: MakeRig, how: str) -> None:
    fs = FaultyFileSystem()
    rig = make(fs, max_topics="1")
    fs.arm(Fault(1, errno.EIO, calls=frozenset(["pwritev"])))
    with pytest.raises(TopicsError, match="cannot be written"):
        put(rig, "a") if how == "put" else rig.append("a", b"1")
    fs.arm(None)
    assert says(rig)["topics"] == 0
    assert rig.append("b", b"1").created


def test_the_cap_counts_what_the_log_brings_back(make: MakeRig) -> None:
    rig = make(max_topics="2")
    for name in "ab":
        rig.append(name, b"1")
    rig.restart_service()
    assert says(rig)["topics"] == 2
    assert refused(rig, lambda: rig.append("c", b"1")) == {"limit": "max_topics", "max": 2}


def test_other_shards_count_also_while_they_are_down(make: MakeRig) -> None:
    rig = make(max_topics="3", shards=2)
    one, two = [name for name in "abcdefgh" if owner_shard(name, 2) == 0][:2]
    # The words of the second shard, as a process of its own would leave them.
    rig.every.pop()
    other = rig.shared.control.cell(Role.WALSHARD, 1)
    other.set("generation", 0)
    other.set("progress_ppm", 500_000)
    with pytest.raises(TopicsError) as error:
        rig.append(one, b"1")
    assert (error.value.code, error.value.detail) == ("not_ready", {"replay_progress": 0.75})
    other.set("generation", 1)
    other.set("topics", 2)
    assert rig.append(one, b"1").created
    assert refused(rig, lambda: rig.append(two, b"1")) == {"limit": "max_topics", "max": 3}


def test_total_bytes_are_capped(make: MakeRig) -> None:
    rig = make(max_total_bytes=str(3 * RECORD_BYTES))
    rig.append("a", b"1", b"2")
    assert says(rig)["bytes_live"] == 2 * RECORD_BYTES
    assert refused(rig, lambda: rig.append("b", b"1", b"2")) == {"limit": "max_total_bytes", "max": 3 * RECORD_BYTES}
    assert not rig.exists("b")
    assert rig.append("b", b"1").created
    assert refused(rig, lambda: rig.append("a", b"3")) == {"limit": "max_total_bytes", "max": 3 * RECORD_BYTES}
    rig.call(DeleteRecords("a", 2, None, b""))
    assert rig.append("a", b"3").head_seq == 3


def test_bytes_of_one_group_count_together(make: MakeRig) -> None:
    rig = make(max_total_bytes=str(3 * RECORD_BYTES))
    ids = [rig.post_append(name, [b"1"]) for name in "aabb"]
    rig.run()
    assert [getattr(rig.replies[id], "code", "ok") for id in ids] == ["ok"] * 3 + ["throttled"]
    assert says(rig)["bytes_live"] == 3 * RECORD_BYTES


@pytest.mark.parametrize("cap", [{"cap_records": 2}, {"cap_bytes": 2 * RECORD_BYTES}])
def test_a_topic_whose_caps_make_the_room_needs_none(make: MakeRig, cap: dict[str, int]) -> None:
    rig = make(max_total_bytes=str(4 * RECORD_BYTES))
    put(rig, "ring", **cap)
    rig.append("ring", b"1", b"2")
    rig.append("log", b"1", b"2")
    for n in range(5):
        assert rig.append("ring", b"x").head_seq == 3 + n
    ids = [rig.post_append("ring", [b"x"]) for _ in range(2)]
    rig.run()
    assert [rig.replies[id].head_seq for id in ids] == [8, 9]
    assert refused(rig, lambda: rig.append("log", b"3")) == {"limit": "max_total_bytes", "max": 4 * RECORD_BYTES}
    assert says(rig)["bytes_live"] == 4 * RECORD_BYTES


def test_a_repeated_key_needs_no_room(make: MakeRig) -> None:
    rig = make(max_total_bytes=str(RECORD_BYTES))
    rig.append("a", b"1", key=b"k")
    assert rig.append("a", b"1", key=b"k").deduped


def test_sessions_are_capped_until_they_are_collected(make: MakeRig) -> None:
    rig = make(max_watch_sessions="2")
    rig.call(SessionPut("w1", b"body"))
    rig.call(SessionPut("w2", b"body"))
    assert refused(rig, lambda: rig.call(SessionPut("w3", b"body"))) == {"limit": "max_watch_sessions", "max": 2}
    rig.call(SessionOpen("w1", 1))
    rig.call(SessionClose("w1", 1, {}))
    rig.call(SessionOpen("w1", 2))
    rig.clock.ms += SESSION_TTL_MS + 1
    rig.shard.sweep()
    assert says(rig)["sessions"] == 1
    rig.call(SessionPut("w3", b"body"))
    assert says(rig)["sessions"] == 2


def test_without_caps_there_are_none(make: MakeRig) -> None:
    rig = make(max_topics="0", max_watch_sessions="0")
    for n in range(50):
        rig.append(f"t{n}", b"x" * 1000)
        rig.call(SessionPut(f"w{n}", b"body"))
    assert (says(rig)["topics"], says(rig)["sessions"]) == (50, 50)


def test_counters_go_on_over_lives(make: MakeRig) -> None:
    rig = make()
    for _ in range(5):
        rig.append("a", b"1", config=TopicConfig(durability="fsync"))
    before = {field: rig.cell.get(field) for field in ("wal_frames", "wal_batches", "wal_fsyncs", "wal_bytes_written")}
    waited = sum(rig.cell.get(f"fsync_us_{bucket:02d}") for bucket in range(24))
    assert waited == 5
    rig.boot()
    rig.append("a", b"2")
    after = {field: rig.cell.get(field) for field in before}
    assert all(after[field] > before[field] for field in before), (before, after)
    assert after["wal_batches"] >= before["wal_batches"] + 1
    assert sum(rig.cell.get(f"fsync_us_{bucket:02d}") for bucket in range(24)) == waited + 1
