"""A changed shard count: the same frames, each topic's in order, in the log of its owner; repeatable after a crash."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from tests.storage.faults import Crash, Fault, FaultyFileSystem
from tests.storage.logs import appends, kill, open_writer, patch, topic_create
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import FLAG_MORE, HEADER_LEN, FrameType, encode
from topics.storage.logfile import RefusedLog, WalIdentity
from topics.storage.recovery import CorruptLog, Recovery
from topics.storage.reshard import needs_reshard, reshard

BOOT_ID = "boot-1"
NAMES = {topic_id: f"topic-{topic_id}" for topic_id in range(100, 106)}
FILE_BYTES = 1200


def owner_of(shards: int) -> Callable[[str], int]:
    return lambda name: xxhash.xxh3_64_intdigest(name.encode()) % shards


def write_logs(data_dir: str, shards: int, rounds: int = 3) -> None:
    """Every topic is created by its first write, behind an idempotency key as a shard logs it; then gets records."""
    for shard in range(shards):
        writer = open_writer(
            FaultyFileSystem(),
            layout.group_dir(data_dir, shard, shards),
            identity=WalIdentity(shard, shards, BOOT_ID),
            file_bytes=FILE_BYTES,
        )
        topic_ids = [topic_id for topic_id, name in NAMES.items() if owner_of(shards)(name) == shard]
        for number in range(rounds):
            for topic_id in topic_ids:
                write = appends(1 + 2 * number, [b'"first"', b'"second of %d"' % topic_id], topic_id)
                if number == 0:
                    key = encode(FrameType.IDEMPOTENCY, FLAG_MORE, topic_id, 1, 1, b"", b"", b"\2\0\0\0key")
                    body = msgspec.msgpack.encode({"name": NAMES[topic_id], "config": {}})
                    create = encode(FrameType.TOPIC_CREATE, FLAG_MORE, topic_id, 0, 1, b"", b"", body)
                    write = key + create + write
                writer.commit(writer.plan([len(write)]), [write], sync=number == 1)
        kill(writer)


def by_topic(data_dir: str, shards: int, boot_id: str = BOOT_ID) -> dict[int, bytes]:
    """All frames of each topic in order; each must be in its owner's log, which must hold it alone."""
    found: dict[int, bytes] = {}
    for shard in range(shards):
        seen: dict[int, list[bytes]] = {}
        directory = layout.group_dir(data_dir, shard, shards)
        for batch in Recovery(FaultyFileSystem(), directory, WalIdentity(shard, shards, boot_id)):
            for offset, total_len, _, _, topic_id, *_ in batch.frames:
                seen.setdefault(topic_id, []).append(bytes(batch.buffer[offset : offset + total_len]))
        for topic_id, frames in seen.items():
            assert owner_of(shards)(NAMES[topic_id]) == shard
            assert topic_id not in found
            found[topic_id] = b"".join(frames)
    return found


def run(data_dir: str, shards: int, fs: FileSystem | None = None) -> list[str]:
    return reshard(
        fs or FaultyFileSystem(), data_dir, shards, BOOT_ID, owner_of(shards), lambda share: None, file_bytes=FILE_BYTES
    )


def test_round_trip_over_shard_counts(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    write_logs(data_dir, 1)
    original = by_topic(data_dir, 1)
    assert set(original) == set(NAMES)
    for shards in (2, 3, 1, 4, 2):
        assert needs_reshard(FaultyFileSystem(), data_dir, shards)
        assert run(data_dir, shards) == []
        assert not needs_reshard(FaultyFileSystem(), data_dir, shards)
        assert by_topic(data_dir, shards) == original
        assert os.listdir(data_dir) == [layout.WAL_NAME]


def test_each_topic_stays_in_one_piece_with_frames_written_between(tmp_path: Path) -> None:
    """Logs go on after a reshard, and the next one keeps both parts."""
    data_dir = str(tmp_path)
    write_logs(data_dir, 2)
    original = by_topic(data_dir, 2)
    run(data_dir, 3)
    more = appends(7, [b'"later"'], 105)
    shard = owner_of(3)(NAMES[105])
    directory, identity = layout.group_dir(data_dir, shard, 3), WalIdentity(shard, 3, BOOT_ID)
    recovery = Recovery(FaultyFileSystem(), directory, identity)
    assert list(recovery)
    writer = open_writer(FaultyFileSystem(), directory, recovery.end, identity)
    writer.commit(writer.plan([len(more)]), [more], sync=False)
    kill(writer)
    run(data_dir, 1)
    assert by_topic(data_dir, 1) == {**original, 105: original[105] + more}


def test_progress_grows_to_one(tmp_path: Path) -> None:
    write_logs(str(tmp_path), 2)
    shares: list[float] = []
    reshard(FaultyFileSystem(), str(tmp_path), 1, BOOT_ID, owner_of(1), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) >= 4


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        pytest.param(1, 2, Fault.CRASH, id="1-to-2-before"),
        pytest.param(2, 3, Fault.CRASH, id="2-to-3-before", marks=pytest.mark.long),
        pytest.param(2, 3, Fault.LATE_CRASH, id="2-to-3-after", marks=pytest.mark.long),
        pytest.param(3, 1, Fault.TORN_CRASH, id="3-to-1-torn", marks=pytest.mark.long),
    ],
)
def test_a_crash_at_each_step_is_repeated_by_the_next_start(
    tmp_path: Path, before: int, after: int, error: int
) -> None:
    origin = str(tmp_path / "origin")
    os.mkdir(origin)
    write_logs(origin, before, rounds=2)
    shutil.copytree(origin, tmp_path / "clean")
    clean = FaultyFileSystem()
    run(str(tmp_path / "clean"), after, clean)
    expected = by_topic(str(tmp_path / "clean"), after)
    assert set(expected) == set(NAMES)
    assert by_topic(origin, before) == expected
    for nth in range(1, len(clean.log) + 1):
        for count in (after, before):  # the next start may also go back to the former count
            data_dir = str(tmp_path / f"{nth}")
            shutil.copytree(origin, data_dir)
            fs = FaultyFileSystem()
            fs.arm(Fault(nth, error))
            with pytest.raises(Crash):
                run(data_dir, after, fs)
            fs.bury()
            if needs_reshard(FaultyFileSystem(), data_dir, count):
                run(data_dir, count)
            assert by_topic(data_dir, count) == expected, (nth, clean.log[nth - 1], count)
            if count == after:
                assert os.listdir(data_dir) == [layout.WAL_NAME]
            shutil.rmtree(data_dir)
    assert len(clean.log) >= 35


def test_the_copy_is_on_the_disk_before_it_is_swapped_in_and_each_rename_before_the_next(tmp_path: Path) -> None:
    write_logs(str(tmp_path), 1)
    fs = FaultyFileSystem()
    run(str(tmp_path), 2, fs)
    old_away, new_in = [at for at, call in enumerate(fs.log) if call == "rename"][-2:]
    assert fs.log[old_away : new_in + 2] == ["rename", "fsync_dir", "rename", "fsync_dir"]
    # Two logs were written last: the group, its sync, the mark of it and the sync of that, for each.
    assert fs.log[old_away - 6 : old_away] == ["fdatasync", "pwritev", "fdatasync"] * 2


def test_an_error_at_each_step_leaves_the_old_logs_or_the_new(tmp_path: Path) -> None:
    origin = str(tmp_path / "origin")
    os.mkdir(origin)
    write_logs(origin, 2, rounds=2)
    expected = by_topic(origin, 2)
    shutil.copytree(origin, tmp_path / "clean")
    clean = FaultyFileSystem()
    run(str(tmp_path / "clean"), 3, clean)
    for nth in range(1, len(clean.log) + 1):
        data_dir = str(tmp_path / f"{nth}")
        shutil.copytree(origin, data_dir)
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, errno.ENOSPC))
        with pytest.raises(Exception, match="No space left"):
            run(data_dir, 3, fs)
        if needs_reshard(FaultyFileSystem(), data_dir, 3):
            run(data_dir, 3)
        assert by_topic(data_dir, 3) == expected
        shutil.rmtree(data_dir)


def test_a_new_service_gets_all_directories_at_once(tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    assert not needs_reshard(FaultyFileSystem(), data_dir, 1)
    assert needs_reshard(FaultyFileSystem(), data_dir, 3)
    run(data_dir, 3)
    assert sorted(os.listdir(layout.wal_dir(data_dir))) == ["shard-00", "shard-01", "shard-02"]
    assert not needs_reshard(FaultyFileSystem(), data_dir, 3)
    write_logs(data_dir, 3)
    assert not needs_reshard(FaultyFileSystem(), data_dir, 3)


def test_a_missing_log_of_a_set_is_refused(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    write_logs(data_dir, 3)
    shutil.rmtree(layout.group_dir(data_dir, 1, 3))
    for shards in (1, 2, 3):
        assert needs_reshard(FaultyFileSystem(), data_dir, shards)
        with pytest.raises(RefusedLog, match=r"shard-01: the log of shard 1 is missing"):
            run(data_dir, shards)
    assert not os.path.exists(layout.group_dir(data_dir, 1, 3))


def test_corruption_is_refused_and_the_old_logs_stay(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    write_logs(data_dir, 1)
    patch(layout.group_dir(data_dir, 0, 1), 1, 300, b"\xff\xff")
    with pytest.raises(CorruptLog):
        run(data_dir, 2)
    assert needs_reshard(FaultyFileSystem(), data_dir, 2)
    assert run(data_dir, 1) == []  # back to the former count: nothing is copied, the unfinished copy goes
    assert os.listdir(data_dir) == [layout.WAL_NAME]
    assert os.path.exists(layout.log_path(layout.group_dir(data_dir, 0, 1), 1))


def test_a_frame_of_a_topic_that_was_never_created_is_refused(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    writer = open_writer(FaultyFileSystem(), layout.group_dir(data_dir, 0, 1))
    writes = [topic_create(1, "a"), appends(1, [b"1"], topic_id=2)]
    plan = writer.plan([len(write) for write in writes])
    writer.commit(plan, writes, sync=False)
    kill(writer)
    with pytest.raises(RefusedLog, match=f"the write at offset {plan.offsets[1]} is of topic 0x2, which the log never"):
        run(data_dir, 2)


def test_a_write_over_topics_that_would_be_parted_is_refused(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    names = {shard: next(name for name in map(str, range(99)) if owner_of(2)(name) == shard) for shard in (0, 1)}
    writer = open_writer(FaultyFileSystem(), layout.group_dir(data_dir, 0, 1))
    first = bytearray(appends(1, [b"1", b"2"], topic_id=1))
    second = appends(1, [b"1"], topic_id=2)
    part = bytes(first[: HEADER_LEN + len(b'"data":1') + 8])
    assert part[5] & FLAG_MORE
    writes = [topic_create(1, names[0]), topic_create(2, names[1]), part + second]
    writer.commit(writer.plan([len(write) for write in writes]), writes, sync=False)
    kill(writer)
    with pytest.raises(RefusedLog, match="is of topics that 2 shards would separate"):
        run(data_dir, 2)


def test_foreign_files_are_not_deleted_with_the_old_logs(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    write_logs(data_dir, 2)
    Path(layout.group_dir(data_dir, 0, 2), "notes.txt").write_text("mine")
    (line,) = run(data_dir, 1)
    assert line.startswith(f"{data_dir}/wal.kept-1: holds files")
    assert Path(data_dir, "wal.kept-1", "shard-00", "notes.txt").read_text() == "mine"
    assert not needs_reshard(FaultyFileSystem(), data_dir, 1)
