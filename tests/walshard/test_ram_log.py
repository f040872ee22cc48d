"""The RAM log stays about as long as what is live in it, and says all of it whenever the shard is killed."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.storage.faults import Fault, FaultyFileSystem, SmallFileSystem
from tests.walshard.killing import at_every_line, is_killed_at_line, serve
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.shm.append_messages import AppendReply
from topics.shm.topic_messages import DeleteRecords, DeleteTopic, PutTopic, SessionClose, SessionOpen, SessionPut
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.walshard import setup
from topics.walshard.commit.log_trim import RamTrim

FILE_BYTES = 64 * 1024
EPHEMERAL = TopicConfig(durability="ephemeral")
CAPPED = TopicConfig(durability="ephemeral", cap_records=20)
LARGE = b'"%b"' % (b"x" * 5000)
BLOCK = b'"' + b"x" * 998 + b'"'


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "RAM_FILE_BYTES", FILE_BYTES)


def files(rig: Rig) -> list[int]:
    return layout.list_log_files(OsFileSystem(), layout.ram_group_dir(rig.shared.ram_dir, 0))


def ram_bytes(rig: Rig) -> int:
    directory = layout.ram_group_dir(rig.shared.ram_dir, 0)
    return sum(os.stat(os.path.join(directory, name)).st_size for name in os.listdir(directory))


def floors(rig: Rig, name: str) -> tuple[int, ...]:
    found = rig.view(name)
    return (
        *(found.head_seq, found.earliest_seq, found.evict_floor, found.evict_reason, found.evict_run_seq),
        *(found.records, found.live_bytes, found.last_write_ts),
    )


def churn(rig: Rig, file_count: int, name: str = "busy") -> None:
    """Write so many files' worth to a topic that keeps little of it."""
    for _ in range(file_count * FILE_BYTES // len(BLOCK)):
        rig.append(name, BLOCK, config=CAPPED)


def test_megabytes_through_a_capped_topic_leave_a_bounded_log(rig: Rig) -> None:
    most = 0
    for round in range(1, 11):
        churn(rig, 8)
        most = max(most, ram_bytes(rig))
        assert rig.view("busy").head_seq == round * (8 * FILE_BYTES // len(BLOCK))
    assert rig.parts.logs.ram is not None
    assert rig.parts.logs.ram.bytes_written > 5 << 20
    assert most <= 5 * FILE_BYTES
    head_seq = rig.view("busy").head_seq
    kept = [(seq, BLOCK) for seq in range(head_seq - 19, head_seq + 1)]
    before = floors(rig, "busy")
    assert rig.read("busy") == kept
    for _ in range(2):
        rig.boot()
        assert rig.read("busy") == kept
        assert floors(rig, "busy") == before
    assert rig.append("busy", BLOCK).first_seq == head_seq + 1
    churn(rig, 8)
    assert ram_bytes(rig) <= 5 * FILE_BYTES


def test_quiet_topics_do_not_keep_old_files_alive(rig: Rig) -> None:
    quiet = {f"quiet-{number}": [b'"%d"' % number, b'"second"'] for number in range(20)}
    for name, data in quiet.items():
        rig.append(name, *data, config=EPHEMERAL)
    churn(rig, 40)
    assert files(rig)[0] > 20
    assert ram_bytes(rig) <= 12 * FILE_BYTES
    for name, data in quiet.items():
        assert rig.read(name) == [(1, data[0]), (2, data[1])]
    rig.boot()
    for name, data in quiet.items():
        assert rig.read(name) == [(1, data[0]), (2, data[1])]
        assert rig.append(name, b"3").first_seq == 3
    assert len(rig.read("busy")) == 20


def test_what_is_live_is_all_kept_when_it_is_much(rig: Rig) -> None:
    """Live records many times the size of a file, overwritten in another order than they were written."""
    configs = {f"t{number}": TopicConfig(durability="ephemeral", cap_records=100 + 100 * number) for number in range(4)}
    noise = random.Random(3)
    written: dict[str, int] = dict.fromkeys(configs, 0)
    most = live = 0
    for number in range(2500):
        name = noise.choices(list(configs), weights=[8, 4, 2, 1])[0]
        rig.append(name, b'"%d%s"' % (number, b"y" * 900), config=configs[name])
        written[name] += 1
        live = sum(rig.view(name).live_bytes for name in configs if written[name]) if number % 100 == 0 else live
        most = max(most, ram_bytes(rig) - 2 * live)
    assert most <= 10 * FILE_BYTES
    before = {name: (rig.read(name), floors(rig, name)) for name in configs}
    for name, config in configs.items():
        assert len(before[name][0]) == min(written[name], config.cap_records)
    rig.boot()
    assert {name: (rig.read(name), floors(rig, name)) for name in configs} == before


def test_a_topic_whose_records_are_all_gone_keeps_its_head_floors_and_clock(rig: Rig) -> None:
    rig.append("t", b"1", b"2", config=TopicConfig(durability="ephemeral", ttl_ms=1000))
    rig.clock.ms += 5000
    rig.shard.sweep()
    before = floors(rig, "t")
    assert before[:2] == (2, 3)
    churn(rig, 8)
    assert files(rig)[0] > 1
    rig.boot()
    assert floors(rig, "t") == before
    assert rig.append("t", b"3").first_seq == 3
    rig.boot()
    assert rig.read("t") == [(3, b"3")]


@pytest.mark.parametrize("by_cap", [False, True])
def test_a_burst_that_is_over_leaves_no_large_ring(rig: Rig, by_cap: bool) -> None:
    rig.append("t", b"0", config=TopicConfig(durability="ephemeral", ttl_ms=0 if by_cap else 1000))
    small = rig.view("t")
    for _ in range(4):
        rig.append("t", *[b"1"] * 4096)
    during = rig.view("t")
    assert during.ring_capacity == 32768
    used_bytes = rig.parts.catalog.arena.used_bytes
    rig.clock.ms += 5000
    rig.append("t", *[b"%d" % number for number in range(100)])
    if by_cap:
        rig.call(PutTopic("t", TopicConfig(durability="ephemeral", cap_records=100), False))
    rig.shard.sweep()
    after = rig.view("t")
    assert small.ring_capacity < after.ring_capacity <= 256
    assert rig.parts.catalog.arena.used_bytes < used_bytes - 400_000
    kept = [(seq, b"%d" % (seq - after.earliest_seq)) for seq in range(after.earliest_seq, after.head_seq + 1)]
    assert len(kept) == 100
    assert rig.read("t") == kept
    # Who still has the former view takes a new one, or gets what it asked for.
    old = rig.reader.locations(during, during.head_seq, during.head_seq)
    assert old is None or old.ts == [1_700_000_000_000]
    rig.shard.sweep()
    assert rig.view("t") == after, "nothing is moved twice"
    assert rig.append("t", *[b"2"] * 4000).first_seq == after.head_seq + 1
    assert len(rig.read("t")) == (100 if by_cap else 4100)
    rig.boot()
    assert rig.append("t", b"3").first_seq == after.head_seq + 4001


def test_keys_are_known_as_long_as_they_should(rig: Rig) -> None:
    first = rig.append("t", b"1", b"2", key=b"k", config=EPHEMERAL)
    churn(rig, 20)
    assert files(rig)[0] > 10
    rig.boot()
    again = rig.append("t", b"1", b"2", key=b"k")
    assert (again.first_seq, again.deduped, again.count) == (first.first_seq, True, 2)
    rig.clock.ms += EPHEMERAL.idempotency_window_ms + 1
    churn(rig, 8)
    rig.boot()
    assert not rig.append("t", b"1", b"2", key=b"k").deduped


def test_sessions_outlive_the_files_they_were_logged_in(rig: Rig) -> None:
    rig.call(SessionPut("kept", b"body"))
    rig.call(SessionOpen("kept", 1))
    rig.call(SessionClose("kept", 1, {"t": 7}))
    rig.call(SessionPut("idle", b"body"))
    churn(rig, 8)
    rig.clock.ms += 300_001
    rig.call(SessionOpen("kept", 2))
    rig.shard.sweep()
    churn(rig, 8)
    assert files(rig)[0] > 8
    rig.boot()
    reply = rig.call(SessionOpen("kept", 3))
    assert (reply.body, reply.positions) == (b"body", {"t": 7})
    with pytest.raises(TopicsError, match="no watch session 'idle'"):
        rig.call(SessionOpen("idle", 4))


def test_sessions_that_fill_many_files_are_not_repeated_with_every_write(rig: Rig) -> None:
    for number in range(60):
        rig.call(SessionPut(f"w{number}", b"b" * 10_000))
    wal = rig.parts.logs.ram
    assert wal is not None
    before = wal.bytes_written
    churn(rig, 80)
    written = 80 * FILE_BYTES
    assert wal.bytes_written - before < 2.5 * written
    assert ram_bytes(rig) < 3 * 600_000 + 6 * FILE_BYTES
    rig.boot()
    assert rig.call(SessionOpen("w59", 1)).body == b"b" * 10_000


def test_a_topic_that_was_ephemeral_for_a_while(rig: Rig) -> None:
    rig.append("t", b"1")
    rig.call(PutTopic("t", EPHEMERAL, False))
    rig.append("t", b"2", b"3")
    rig.call(PutTopic("t", TopicConfig(durability="fsync"), False))
    rig.append("t", b"4")
    whole = [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]
    churn(rig, 40)
    assert files(rig)[0] > 20
    assert rig.read("t") == whole
    rig.boot()
    assert rig.read("t") == whole
    rig.restart_service()
    assert rig.read("t") == whole


def test_a_topic_that_is_ephemeral_again_and_again(rig: Rig) -> None:
    seq = 0
    for config in (EPHEMERAL, TopicConfig(durability="fsync")) * 3:
        if seq:
            rig.call(PutTopic("t", config, False))
        for _ in range(2):
            seq += 1
            assert rig.append("t", b"%d" % seq, config=config).first_seq == seq
        before = rig.read("t")
        assert before == [(number, b"%d" % number) for number in range(1, seq + 1)]
        rig.boot()
        assert rig.read("t") == before
    rig.restart_service()
    assert rig.append("t", b"next").first_seq == seq + 1


def test_a_changed_configuration_takes_no_seq_back(rig: Rig) -> None:
    """Its record of the exact head must not hide that later seqs were given out."""
    rig.append("t", b"1", config=EPHEMERAL)
    rig.call(PutTopic("t", TopicConfig(durability="ephemeral", cap_records=9), False))
    rig.append("t", b"2", b"3")
    rig.restart_service()
    assert rig.append("t", b"4").first_seq > 3


def test_a_commit_to_the_ram_log_alone_does_not_take_floors_for_logged(rig: Rig) -> None:
    rig.append("t", *[b"%d" % number for number in range(5)], config=TopicConfig(cap_records=2))
    rig.call(SessionPut("w", b"body"))
    rig.call(PutTopic("t", TopicConfig(cap_records=100), False))
    before = rig.read("t"), floors(rig, "t")
    assert before[0] == [(4, b"3"), (5, b"4")]
    rig.boot()
    assert (rig.read("t"), floors(rig, "t")) == before


def test_a_deleted_topic_is_forgotten(rig: Rig) -> None:
    rig.append("t", BLOCK, config=EPHEMERAL)
    churn(rig, 8)
    rig.call(DeleteTopic("t", False))
    rig.append("t", b"new", config=EPHEMERAL)
    churn(rig, 40)
    assert files(rig)[0] > 20
    rig.boot()
    assert rig.read("t") == [(1, b"new")]


def test_a_service_without_ram_records_makes_no_ram_log(rig: Rig) -> None:
    for _ in range(100):
        rig.append("t", BLOCK)
    assert not os.path.exists(layout.ram_group_dir(rig.shared.ram_dir, 0))


@pytest.mark.long
@pytest.mark.parametrize("calls", [{"unlink"}, {"pwritev"}, {"fsync_dir"}, {"pread"}, {"ftruncate"}])
def test_an_error_while_trimming_costs_nothing_but_time(rig: Rig, fs: FaultyFileSystem, calls: set[str]) -> None:
    rig.append("quiet", b'"q"', config=EPHEMERAL)
    churn(rig, 5)
    head_seq = rig.view("busy").head_seq
    for round in range(16):
        fs.arm(Fault(1 + round % 2 + (round * 17 if "pwritev" in calls else 0), errno.EIO, calls=frozenset(calls)))
        for _ in range(130):
            reply = rig.outcome(rig.post_append("busy", [BLOCK]))
            if isinstance(reply, TopicsError):
                assert reply.code == "storage_unavailable"
            else:
                assert reply.first_seq == head_seq + 1
                head_seq += 1
        fs.arm(None)
    assert fs.struck > 1
    churn(rig, 40)
    assert ram_bytes(rig) <= 12 * FILE_BYTES
    head_seq = rig.view("busy").head_seq
    assert [seq for seq, _ in rig.read("busy")] == list(range(head_seq - 19, head_seq + 1))
    before = floors(rig, "busy")
    rig.boot()
    assert floors(rig, "busy") == before
    assert rig.read("quiet") == [(1, b'"q"')]


def test_a_trimming_that_fails_again_and_again_is_logged_until_it_is_over(rig: Rig, fs: FaultyFileSystem) -> None:
    """Each write makes another one due. Two errors that took turns filled the log."""
    rig.append("quiet", b'"q"', config=EPHEMERAL)
    churn(rig, 5)
    with capture_logs() as lines:
        for error in (errno.EIO, errno.ENOMEM) * 3:
            fs.arm(Fault(1, error, always=True, calls=frozenset({"pread"})))
            churn(rig, 4)
        assert fs.struck > 2
        fs.arm(None)
        churn(rig, 4)
    told = [line for line in lines if "the RAM log cannot be trimmed" in line.values()]
    assert [line["event"] for line in told] == ["the RAM log cannot be trimmed", "a failure is over"]


def test_files_that_cannot_be_removed_are_told_once_until_it_is_over(rig: Rig, fs: FaultyFileSystem) -> None:
    event = "files of the RAM log cannot be removed"
    churn(rig, 5)
    with capture_logs() as lines:
        fs.arm(Fault(1, errno.EIO, always=True, calls=frozenset({"unlink"})))
        churn(rig, 30)
        assert fs.struck > 2
        fs.arm(None)
        churn(rig, 10)
    assert [line["event"] for line in lines if event in line.values()] == [event, "a failure is over"]


def test_records_that_cannot_be_read_to_be_made_durable_are_told_once(rig: Rig) -> None:
    """A client may ask as often as it likes."""
    rig.append("t", b"1", config=EPHEMERAL)
    for file_no in files(rig):
        os.unlink(layout.log_path(layout.ram_group_dir(rig.shared.ram_dir, 0), file_no))
    with capture_logs() as lines:
        for _ in range(3):
            with pytest.raises(TopicsError, match="cannot be read to make them durable"):
                rig.call(PutTopic("t", TopicConfig(), False))
    assert [line["event"] for line in lines] == ["records of the RAM log cannot be read"]


# -- killed at every line


def prepare(rig: Rig) -> None:
    """A RAM log that is about to be trimmed, records to be moved out of its oldest file among other things."""
    rig.append("quiet", b'"1"', b'"2"', key=b"k", config=EPHEMERAL)
    rig.append("gone", b'"1"', config=TopicConfig(durability="ephemeral", ttl_ms=1000))
    rig.call(SessionPut("w", b"body"))
    rig.clock.ms += 2000
    rig.shard.sweep()
    with pytest.MonkeyPatch.context() as not_yet:
        not_yet.setattr(RamTrim, "due", False)
        while len(files(rig)) < 9:
            rig.append("busy", BLOCK, config=CAPPED)


def check_kill_at(n: int, data_dir: str) -> bool:
    rig = Rig(data_dir)
    try:
        prepare(rig)
        before = {name: floors(rig, name) for name in ("quiet", "gone")}
        head_seq = rig.view("busy").head_seq
        id = rig.post_append("busy", [b'"last"'])
        later = rig.post_append("quiet", [b'"3"'])
        is_killed = is_killed_at_line(n, lambda: serve(rig))
        if not is_killed:
            assert files(rig)[0] > 1, "nothing was trimmed"
        rig.take_replies()
        rig.boot()
        rig.run()
        for reply, seq in ((rig.replies[id], head_seq + 1), (rig.replies[later], 3)):
            assert isinstance(reply, AppendReply)
            assert reply.first_seq == seq
        kept = [(seq, BLOCK) for seq in range(head_seq - 18, head_seq + 1)]
        assert rig.read("busy") == [*kept, (head_seq + 1, b'"last"')]
        assert rig.read("quiet") == [(1, b'"1"'), (2, b'"2"'), (3, b'"3"')]
        assert floors(rig, "gone") == before["gone"]
        assert floors(rig, "quiet")[1:5] == before["quiet"][1:5]
        assert rig.call(SessionOpen("w", 1)).body == b"body"
        assert rig.append("quiet", b'"1"', b'"2"', key=b"k").deduped
        numbers = files(rig)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        churn(rig, 8)
        assert ram_bytes(rig) <= 12 * FILE_BYTES
        rig.boot()
        assert [data for _, data in rig.read("quiet")] == [b'"1"', b'"2"', b'"3"']
        assert len(rig.read("busy")) == 20
    finally:
        rig.close()
    return is_killed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_kill_at_every_line_of_a_trimming(tmp_path: Path) -> None:
    at_every_line(tmp_path, 31, 500, check_kill_at)


@pytest.mark.parametrize("turns", range(0, 15, 3))
def test_what_is_deleted_while_a_full_dev_shm_is_relieved_gives_its_room_back(tmp_path: Path, turns: int) -> None:
    """The relief goes file by file, and may have passed those in which records die meanwhile."""
    fs = SmallFileSystem(12 * FILE_BYTES)
    rig = Rig(str(tmp_path), fs)
    fs.directory = rig.shared.ram_dir
    try:
        rig.append("kept", LARGE, config=EPHEMERAL)
        rig.append("old", LARGE, config=EPHEMERAL)
        rig.shard.sweep()
        kept = fill_up(rig, LARGE)
        rig.shard.sweep()
        for _ in range(turns):
            rig.shard.serve()
        rig.call(DeleteRecords("old", kept + 2, None, b""))
        refusals = 0
        while rig.view("kept").head_seq < kept + kept // 2:
            try:
                rig.append("kept", LARGE)
            except TopicsError:
                refusals += 1
                assert refusals < 20, rig.view("kept").head_seq - kept
                rig.shard.sweep()
    finally:
        rig.close()


def fill_up(rig: Rig, block: bytes = BLOCK) -> int:
    """Append to "old" and "kept" in turns until /dev/shm is full; return how many records "kept" has."""
    kept = 0

    def fill() -> None:
        nonlocal kept
        while True:
            kept += 1
            rig.append("old", block)
            rig.append("kept", block)

    with pytest.raises(TopicsError) as refused:
        fill()
    assert refused.value.code == "storage_unavailable"
    assert (refused.value.detail or {})["cause"] == "ENOSPC"
    return kept


@pytest.mark.parametrize("how", ["topic", "records", "ttl"])
def test_on_a_full_dev_shm_deleted_records_give_their_room_back_at_once(tmp_path: Path, how: str) -> None:
    """Though they share every file with records that stay, and without room for these to be repeated in."""
    fs = SmallFileSystem(12 * FILE_BYTES)
    rig = Rig(str(tmp_path), fs)
    fs.directory = rig.shared.ram_dir
    try:
        rig.append("kept", BLOCK, config=EPHEMERAL)
        rig.append("old", BLOCK, config=TopicConfig(durability="ephemeral", ttl_ms=60_000))
        rig.shard.sweep()
        kept = fill_up(rig)
        before = fs.free_bytes("")
        for _ in range(3):
            rig.shard.sweep()  # nothing is dead: no room comes of it
            rig.run()
        assert fs.free_bytes("") <= before + FILE_BYTES
        if how == "topic":
            rig.call(DeleteTopic("old", False))
        elif how == "records":
            rig.call(DeleteRecords("old", kept + 2, None, b""))
        else:
            rig.clock.ms += 60_001
        rig.shard.sweep()
        while rig.shard.upkeep.busy:
            rig.run()
        again = [rig.append("kept", BLOCK).first_seq for _ in range(kept // 2)]
        assert again[-1] == kept + kept // 2
        for _ in range(2):
            assert rig.read("kept") == [(seq, BLOCK) for seq in range(1, again[-1] + 1)]
            rig.boot()
    finally:
        rig.close()
