"""A disk that fails under a shard: an error to the writer, nothing half visible, and on it goes by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.storage.faults import CHANGING_CALLS, Fault, FaultyFileSystem
from tests.walshard.rig import Rig
from tests.walshard.test_routing import FullDisk, route
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.idempotency import ProducerTurn, producer_key
from topics.shm.asks import Message
from topics.shm.queue_messages import Ack, Claim, Peek, WorkOpen
from topics.shm.topic_messages import Checkpoint, PutTopic, Trim
from topics.storage.layout import group_dir
from topics.storage.wal import ROOM_STEP_BYTES

FSYNC, EPHEMERAL = TopicConfig(durability="fsync"), TopicConfig(durability="ephemeral")


def outcome(rig: Rig, *data: bytes, **options: Any) -> str:
    """ "ok", or the code of the error."""
    try:
        rig.append("t", *data, **options)
    except TopicsError as error:
        return error.code
    return "ok"


def stored(rig: Rig) -> list[bytes]:
    return [data for _, data in rig.read("t")]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, Fault.SHORT])
@pytest.mark.parametrize("config", [TopicConfig(), FSYNC], ids=["disk", "fsync"])
def test_a_failed_write_commits_nothing_and_the_next_one_does(
    rig: Rig, fs: FaultyFileSystem, error: int, config: TopicConfig
) -> None:
    rig.append("t", b"1", config=config)
    fs.arm(Fault(1, error, calls=frozenset({"pwritev"})))
    ids = [rig.post_append("t", [b"lost"] * 3), rig.post_append("new", [b"lost"], key=b"k")]
    rig.run()
    for id in ids:
        refused = rig.replies[id]
        assert isinstance(refused, TopicsError)
        assert (refused.code, refused.detail) == (
            "storage_unavailable",
            {"cause": "EIO" if error == Fault.SHORT else errno.errorcode[error], "read_only": False},
        )
    assert stored(rig) == [b"1"]
    assert not rig.exists("new")
    fs.arm(None)
    assert rig.append("t", b"2").first_seq == 2
    assert rig.append("new", b"3", key=b"k").created
    rig.boot()
    assert stored(rig) == [b"1", b"2"]
    assert rig.read("new") == [(1, b"3")]


def test_a_configuration_that_cannot_be_logged_changes_nothing(rig: Rig, fs: FaultyFileSystem) -> None:
    """rules.md, Topics: no eviction included, neither now nor after a restart."""
    rig.append("t", b"1", b"2", b"3")
    tight = PutTopic("t", TopicConfig(cap_records=1, durability="fsync", ttl_ms=1), False)
    fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"pwritev"})))
    with pytest.raises(TopicsError) as refused:
        rig.call(tight)
    assert refused.value.code == "storage_unavailable"
    fs.arm(None)
    for boot in (False, True):
        if boot:
            rig.boot()
        view = rig.view("t")
        assert (view.records, view.earliest_seq, view.evict_floor) == (3, 1, 1)
        assert stored(rig) == [b"1", b"2", b"3"]
        assert rig.call(PutTopic("t", TopicConfig(), False)).config == TopicConfig()
    assert rig.call(PutTopic("t", TopicConfig(cap_records=1), False)).created is False
    assert stored(rig) == [b"3"]


def test_a_longer_ttl_waits_until_what_has_expired_can_be_logged(rig: Rig, fs: FaultyFileSystem) -> None:
    """api §3.2: readers were told that it is gone, by their own clocks."""
    short = TopicConfig(ttl_ms=100)
    rig.append("t", b"1", b"2", config=short)
    rig.clock.ms += 101
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    with pytest.raises(TopicsError) as refused:
        rig.call(PutTopic("t", TopicConfig(), False))
    assert refused.value.code == "storage_unavailable"
    found = rig.reader.look_up("t")
    assert found is not None
    assert rig.reader.config(*found) == short
    rig.append("t", b"3")
    rig.call(PutTopic("t", TopicConfig(), False))
    for end in (rig.run, rig.boot, rig.restart_service):
        end()
        view = rig.view("t")
        assert (view.earliest_seq, view.evict_floor, stored(rig)) == (3, 3, [b"3"])


def test_a_background_sync_that_fails_again_and_again_is_told_once(rig: Rig, fs: FaultyFileSystem) -> None:
    with capture_logs() as lines:
        for _ in range(5):
            rig.append("t", b"1")
            fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
            rig.clock.ms += 1000
            rig.shard.sync_in_background()
            rig.shard.sync_in_background()
        assert fs.struck > 2
        fs.arm(None)
        rig.append("t", b"1")
        rig.clock.ms += 1000
        rig.shard.sync_in_background()
        rig.shard.sync_in_background()
    told = [line["event"] for line in lines if "background sync failed" in line.values()]
    assert told == ["background sync failed", "a failure is over"]


def test_log_files_that_cannot_be_removed_are_told_once(rig: Rig, fs: FaultyFileSystem) -> None:
    def trim() -> None:
        rig.call(Trim(2))
        rig.shard.sync_in_background()

    for _ in range(14):
        rig.append("t", b"1" * 200_000, config=TopicConfig(cap_records=1))
    with capture_logs() as lines:
        fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"unlink"})))
        for _ in range(3):
            trim()
        assert fs.struck == 3
        fs.arm(None)
        trim()
    told = [line["event"] for line in lines if "log files cannot be removed" in line.values()]
    assert told == ["log files cannot be removed", "a failure is over"]


def test_expired_records_that_a_full_disk_keeps_are_told_of_once(tmp_path: Path) -> None:
    """A service with 100,000 topics logged as many lines."""
    disk = FullDisk()
    rig = Rig(str(tmp_path / "data"), disk)
    for number in range(5):
        rig.append(f"t{number}", b"1", config=TopicConfig(ttl_ms=100))
    rig.clock.ms += 101
    disk.full_dir = str(tmp_path)
    with capture_logs() as lines:
        for _ in range(3):
            rig.shard.sweep()
            while rig.shard.upkeep.busy:
                rig.shard.serve()
    rig.close()
    assert [line["event"] for line in lines if "outlived" in line["event"]] == [
        "records that have outlived ttl_ms stay: the log cannot be written"
    ]


def test_a_full_disk_refuses_until_there_is_room(rig: Rig, fs: FaultyFileSystem) -> None:
    """The file in use is preallocated, so it is the next one that finds no room."""
    block = b"1" * 200_000
    fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset({"fallocate"})))
    outcomes = [outcome(rig, block) for _ in range(8)]
    committed = outcomes.count("ok")
    assert 0 < committed < 8
    assert outcomes == ["ok"] * committed + ["storage_unavailable"] * (8 - committed)
    assert stored(rig) == [block] * committed
    assert rig.cell.get("write_errors") == 8 - committed
    fs.arm(None)
    assert outcome(rig, block) == "ok"
    rig.boot()
    assert stored(rig) == [block] * (committed + 1)


class NoRoom(FaultyFileSystem):
    """Disks of which one, or with "/" each, has no more room than is kept, as long as it is told so."""

    full = ""

    def free_bytes(self, path: str) -> int:
        return 0 if self.full and path.startswith(self.full) else super().free_bytes(path)


def test_where_records_find_no_room_jobs_are_acknowledged_all_the_same(tmp_path: Path) -> None:
    """A group was refused as a whole: as long as writers tried again, no job could be acknowledged."""
    fs = NoRoom()
    rig = Rig(str(tmp_path), fs)
    config = TopicConfig(type="queue")
    rig.append("q", *[b"1"] * 4, config=config)
    rig.call(Claim("q", "w", 4, 60_000, 1))
    rig.append("t", b"x" * ROOM_STEP_BYTES)
    fs.full = "/"
    assert outcome(rig, b"refused") == "storage_unavailable"
    before = rig.cell.get("wal_batches")
    appends = [rig.post_append(name, [b"refused"], config=config) for name in ("t", "q", "new")]
    put, ack = rig.post_call(PutTopic("put", config, True)), rig.post_call(Ack("q", "w", [1, 2], None))
    rig.run()
    assert [rig.replies[id].detail for id in (*appends, put)] == [{"cause": "ENOSPC", "read_only": False}] * 4
    assert (rig.replies[ack].count, rig.cell.get("wal_batches") - before) == (2, 1)
    fs.full = ""
    assert outcome(rig, b"taken") == "ok"
    rig.close()


@pytest.mark.parametrize(
    ("full", "first", "config"),
    [
        ("disk", TopicConfig(), TopicConfig()),
        ("/dev/shm", EPHEMERAL, EPHEMERAL),
        ("/dev/shm", TopicConfig(), EPHEMERAL),
        ("disk", TopicConfig(), EPHEMERAL),
    ],
    ids=["disk", "ram", "first in ram", "ephemeral on a full disk"],
)
def test_a_write_that_finds_no_room_makes_no_topic(
    tmp_path: Path, full: str, first: TopicConfig, config: TopicConfig
) -> None:
    """The topics of writes that a full /dev/shm refused were there, and empty; a full disk went on taking some."""
    fs = NoRoom()
    rig = Rig(str(tmp_path), fs)
    rig.append("t", b"x" * ROOM_STEP_BYTES, config=first)
    fs.full = str(tmp_path) if full == "disk" else full
    with pytest.raises(TopicsError) as refused:
        rig.append("new", b"refused", config=config)
    assert refused.value.detail == {"cause": "ENOSPC", "read_only": False}
    assert not rig.exists("new")
    fs.full = ""
    assert rig.append("new", b"taken", config=config).created
    rig.close()


def test_after_a_failed_sync_what_was_acknowledged_is_elsewhere_and_what_was_not_is_gone(
    rig: Rig, fs: FaultyFileSystem
) -> None:
    rig.append("t", b"1", b"2")
    rig.append("f", b"1", config=FSYNC)
    rig.append("t", b"3", b"4")
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    refused = rig.post_append("f", [b"lost"])
    rig.run()
    assert rig.replies[refused].code == "storage_unavailable"
    fs.arm(None)
    assert stored(rig) == [b"1", b"2", b"3", b"4"]
    assert rig.read("f") == [(1, b"1")]
    assert rig.append("f", b"2").first_seq == 2
    assert rig.append("t", b"5").first_seq == 5
    rig.boot()
    assert stored(rig) == [b"1", b"2", b"3", b"4", b"5"]
    assert rig.read("f") == [(1, b"1"), (2, b"2")]


def test_a_failed_background_sync_loses_nothing_either(rig: Rig, fs: FaultyFileSystem) -> None:
    rig.append("t", b"1")
    rig.clock.ms += 1000
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    rig.shard.sync_in_background()
    rig.shard.sync_in_background()
    assert fs.struck == 1
    fs.arm(None)
    assert rig.append("t", b"2").first_seq == 2
    assert stored(rig) == [b"1", b"2"]
    rig.boot()
    assert stored(rig) == [b"1", b"2"]


def test_a_log_that_cannot_be_saved_is_read_only_and_says_so(rig: Rig, fs: FaultyFileSystem) -> None:
    rig.append("t", b"1")
    fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"fdatasync", "fallocate"})))
    assert outcome(rig, b"2") == "ok"
    refused = rig.post_append("f", [b"lost"], config=FSYNC)
    rig.run()
    assert rig.replies[refused].detail == {"cause": "sync", "read_only": True}
    assert outcome(rig, b"3") == "storage_unavailable"
    assert rig.cell.get("wal_read_only") == 1
    assert stored(rig) == [b"1", b"2"], "reads go on"


def test_nothing_is_durable_by_a_repeated_sync_of_a_read_only_log(rig: Rig, fs: FaultyFileSystem) -> None:
    rig.append("t", b"1")
    fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"fdatasync", "fallocate"})))
    rig.clock.ms += 1000
    rig.shard.sync_in_background()
    rig.shard.sync_in_background()
    assert rig.cell.get("wal_read_only") == 1
    fs.arm(None)  # a kernel reports a failed write-back once, and calls the pages clean
    syncs = fs.log.count("fdatasync")
    for _ in range(5):
        rig.clock.ms += 1000
        rig.shard.sync_in_background()
    assert fs.log.count("fdatasync") == syncs
    view = rig.view("t")
    assert (view.head_seq, view.durable_seq) == (1, 0)
    with pytest.raises(TopicsError, match="cannot be synced"):
        rig.call(Checkpoint([]))


def test_configurations_that_are_not_logged_take_no_room(rig: Rig, fs: FaultyFileSystem) -> None:
    rig.append("t", b"1")
    fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset({"pwritev"})))
    heap = rig.parts.catalog.arena.heap
    refused = rig.post_call(PutTopic("t", TopicConfig(cap_records=5), type_given=False))
    rig.run()
    assert isinstance(rig.replies[refused], TopicsError)
    end = heap._next
    for cap in range(6, 100):
        refused = rig.post_call(PutTopic("t", TopicConfig(cap_records=cap), type_given=False))
        rig.run()
        assert isinstance(rig.replies[refused], TopicsError)
    assert heap._next == end
    fs.arm(None)
    rig.call(PutTopic("t", TopicConfig(cap_records=7), type_given=False))
    rig.append("t", b"2")


def test_every_call_failing_once(tmp_path: Path) -> None:
    """Every write is either answered and there, or refused and not there, whichever call fails."""
    sites = 0
    while True:
        sites += 1
        fs = FaultyFileSystem()
        rig = Rig(str(tmp_path / str(sites)), fs)
        try:
            kept = []
            rig.append("t", b"0")
            fs.arm(Fault(sites, errno.EIO, calls=CHANGING_CALLS))
            for number in range(1, 12):
                data = b'"%d%s"' % (number, b"x" * 150_000)
                config = FSYNC if number % 2 else TopicConfig()
                if outcome(rig, data, config=config) == "ok":
                    kept.append(data)
                rig.clock.ms += 700
                rig.shard.sync_in_background()
            assert stored(rig) == [b"0", *kept]
            reached = fs.struck
            fs.arm(None)
            rig.boot()
            assert stored(rig) == [b"0", *kept]
        finally:
            rig.close()
        if not reached:
            break
    assert sites > 15, f"only {sites} calls"


@pytest.mark.parametrize("calls", [{"pwritev"}, {"fdatasync"}])
@pytest.mark.parametrize("config", [FSYNC, TopicConfig(durability="ephemeral")], ids=["fsync", "ephemeral"])
def test_a_refused_write_is_not_taken_for_committed_by_the_next_incarnation(
    rig: Rig, fs: FaultyFileSystem, calls: set[str], config: TopicConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is killed before it answers, when the log has gone on past where the write would have been."""
    rig.append("t", b"1", config=config)
    fs.arm(Fault(1, errno.EIO, calls=frozenset(calls)))
    refused = rig.post_append("t", [b"2" * 300], config=config)
    with monkeypatch.context() as killed_before:
        killed_before.setattr(rig.outbox, "answer", lambda *_: None)
        rig.step()
    if not fs.struck:
        return  # the RAM log is not synced
    fs.arm(None)
    other = rig.post_append("other", [b"3"] * 20, config=config)
    monkeypatch.setattr(rig.outbox, "answer", lambda *_: None)
    rig.step()
    rig.boot()
    rig.run()
    assert rig.replies[refused].first_seq == 2, "it was never committed, so it runs as new"
    assert rig.replies[other].first_seq == 1
    assert stored(rig) == [b"1", b"2" * 300]
    assert len(rig.read("other")) == 20


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_copies_that_cannot_be_logged_keep_their_topic_and_no_other_from_expiring(
    rig: Rig, fs: FaultyFileSystem, durability: Any
) -> None:
    """The sweep asks nobody: what it cannot do now it does later, and the shard lives."""
    ttl = TopicConfig(ttl_ms=1000, durability=durability)
    rig.call(PutTopic("dest", ttl, False))
    route(rig, "r", "source", "dest")
    rig.call(PutTopic("t", TopicConfig(ttl_ms=1000), False))
    rig.append("source", b"1")
    rig.append("t", b"1")
    assert rig.read("dest") == [(1, b"1")]
    rig.clock.ms += 1001
    for _ in range(2):
        fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"pwritev"})))
        rig.shard.sweep()
        assert fs.struck
    dest, other = rig.view("dest"), rig.view("t")
    assert (dest.records, other.records) == (1, 0)
    fs.arm(None)
    rig.shard.sweep()
    rig.boot()
    dest = rig.view("dest")
    assert (dest.records, dest.evict_floor) == (0, 2)


# -- what has expired, and the log cannot take that it goes


@pytest.fixture
def full(fs: FaultyFileSystem) -> Callable[[], None]:
    """From now on the log cannot be written."""
    return lambda: fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset({"pwritev"})))


def test_what_cannot_expire_keeps_no_repeat_from_its_answer(rig: Rig, full: Callable[[], None]) -> None:
    rig.append("t", b"1", key=b"\0k", config=TopicConfig(ttl_ms=1_000, cap_records=1, idempotency_window_ms=60_000))
    rig.clock.ms += 5_000
    full()
    assert rig.append("t", b"1", key=b"\0k").deduped
    assert outcome(rig, b"2") == "storage_unavailable"


def test_what_cannot_expire_keeps_no_record_from_an_ephemeral_topic(tmp_path: Path) -> None:
    fs = FullDisk()
    rig = Rig(str(tmp_path), fs)
    try:
        config = TopicConfig(durability="ephemeral", ttl_ms=1_000, cap_records=2)
        rig.append("t", b"1", b"2", config=config)
        rig.clock.ms += 5_000
        fs.full_dir = group_dir(rig.settings.data_dir, 0, 1)
        assert rig.append("t", b"3").first_seq == 3
        assert rig.read("t") == [(2, b"2"), (3, b"3")]
    finally:
        rig.close()


@pytest.mark.parametrize(
    "call", [Claim("q", "w", 1, None, 1), WorkOpen("q", 1, "w", 1, None), Peek("q", 0, None, 10)], ids=type
)
def test_what_cannot_expire_keeps_no_job_from_its_worker(rig: Rig, full: Callable[[], None], call: Message) -> None:
    rig.append("q", b"1", config=TopicConfig(type="queue", ttl_ms=1_000))
    rig.clock.ms += 900
    rig.append("q", b"2")
    rig.clock.ms += 500
    full()
    assert rig.call(call)


@pytest.mark.parametrize("config", [TopicConfig(), TopicConfig(durability="ephemeral")], ids=["disk", "ephemeral"])
@pytest.mark.parametrize("key", [b"k", producer_key(b"p", ProducerTurn(1, 1))], ids=["key", "producer"])
def test_a_repeat_is_told_of_no_write_of_its_group_that_the_log_refuses(
    rig: Rig, fs: FaultyFileSystem, config: TopicConfig, key: bytes
) -> None:
    rig.append("t", b"1", config=config)
    fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"pwritev"})))
    first, repeat = (rig.post_append("t", [b"2"], key=key) for _ in range(2))
    rig.run()
    assert isinstance(rig.replies[first], TopicsError)
    assert (rig.replies[repeat].first_seq, rig.replies[repeat].deduped) == (2, False), "it is a write of its own"
    assert stored(rig) == [b"1", b"2"]
    rig.boot()
    assert stored(rig) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ({}, {"if_head_seq": 1}),
        ({"key": producer_key(b"p", ProducerTurn(2, 1))}, {"key": producer_key(b"p", ProducerTurn(1, 1))}),
        ({}, {"data": [b"2"] * 3}),
    ],
    ids=["head_mismatch", "fenced", "topic_full"],
)
def test_a_write_is_refused_for_no_write_of_its_group_that_the_log_refuses(
    rig: Rig, fs: FaultyFileSystem, key: dict[str, Any], other: dict[str, Any]
) -> None:
    rig.append("t", b"1", config=TopicConfig(cap_records=4, discard="reject"))
    fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"pwritev"})))
    refused = rig.post_append("t", [b"x"], **key)
    alone = rig.post_append("t", **({"data": [b"2"]} | other))
    rig.run()
    assert isinstance(rig.replies[refused], TopicsError)
    assert rig.answer(alone).first_seq == 2
