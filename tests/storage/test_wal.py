"""The writing end of the log, on a disk that works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.executors import Inline
from tests.storage.faults import FaultyFileSystem
from tests.storage.logs import (
    IDENTITY,
    LATER_BOOT,
    Place,
    appends,
    commit,
    content_at,
    file_bytes,
    kill,
    open_writer,
    read_log,
)
from topics.storage import layout, wal
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import FrameType, scan
from topics.storage.logfile import WalPosition


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "data" / "wal")


def types_in(directory: str, file_no: int) -> list[FrameType]:
    content = file_bytes(directory, file_no)
    return [FrameType(frame[2]) for frame in scan(content, 0, len(content)).frames]


def test_a_group_lies_where_the_plan_said(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory)
    places: list[Place] = []
    seq = 1
    for size in (1, 3, 2):
        writes = [appends(seq + number, [b'"x"' * (number + 1)]) for number in range(size)]
        seq += size
        places += commit(writer, *writes)
    assert [content_at(directory, place) for place in places] == [place.content for place in places]
    writer.close()
    assert read_log(directory).content == b"".join(place.content for place in places)


def test_planning_changes_nothing(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    before = file_bytes(directory, 1)
    plan = writer.plan([100, 200])
    assert plan.offsets[1] == plan.offsets[0] + 100
    assert plan == writer.plan([100, 200])
    assert plan.end - plan.start == 300
    assert (file_bytes(directory, 1), writer.offset) == (before, plan.start)


def test_new_space_is_written_not_only_reserved(directory: str) -> None:
    """storage.md: syncing overwritten space needs no journal commit."""
    writer = open_writer(OsFileSystem(), directory, file_bytes=1 << 20)
    path = layout.log_path(directory, 1)
    assert os.stat(path).st_size == 1 << 20
    assert os.stat(path).st_blocks * 512 >= 1 << 20
    kill(writer)


def test_a_log_without_preallocation_takes_no_space_before_it_is_written(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory, file_bytes=8 << 20, preallocate="none")
    assert os.stat(layout.log_path(directory, 1)).st_blocks * 512 < 1 << 20
    (place,) = commit(writer, appends(1, [b"1"]))
    assert content_at(directory, place) == place.content
    kill(writer)


@pytest.mark.parametrize("helper", [None, Inline()])
def test_a_full_file_is_ended_and_the_next_one_is_current(directory: str, helper: Inline | None) -> None:
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=1000, helper=helper)
    places: list[Place] = []
    for seq in range(1, 31):
        places += commit(writer, appends(seq, [b'"%d"' % seq]))
    assert writer.rotations == writer.file_no - 1 > 1
    with open(os.path.join(directory, layout.CURRENT_NAME)) as current:
        assert current.read() == layout.log_name(writer.file_no) + "\n"
    for file_no in range(1, writer.file_no):
        types = types_in(directory, file_no)
        assert (types[0], types[-1]) == (FrameType.FILE_START, FrameType.FILE_END)
    assert FrameType.FILE_END not in types_in(directory, writer.file_no)
    assert [content_at(directory, place) for place in places] == [place.content for place in places]
    kill(writer)
    assert read_log(directory).content == b"".join(place.content for place in places)


def test_a_finished_file_is_synced_before_the_next_gets_a_frame(directory: str) -> None:
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=400)
    commit(writer, appends(1, [b'"x"' * 60]))
    assert writer.plan([200]).file_no == 2
    fs.log.clear()
    commit(writer, appends(2, [b'"x"' * 60]))
    assert fs.log == [
        *["open", "fallocate", "pwritev", "pwritev", "fdatasync", "rename", "fsync_dir"],  # the next file, durable
        *["open", "open"],
        *["pwritev", "fdatasync"],  # FILE_END
        *["open", "pwritev", "fdatasync", "rename", "fsync_dir"],  # CURRENT
        "pwritev",  # the group
    ]
    assert writer.synced == WalPosition(2, writer.plan([]).start - len(appends(2, [b'"x"' * 60])))
    kill(writer)


def test_a_spare_is_made_beforehand(directory: str) -> None:
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=1000, helper=Inline())
    while not os.path.exists(layout.log_path(directory, 2)):
        commit(writer, appends(1, [b'"x"']))
    assert writer.file_no == 1
    assert 500 < writer.offset < 700
    fs.log.clear()
    commit(writer, appends(2, [b'"x"' * 150]))
    assert writer.file_no == 2
    assert fs.log[:4] == ["open", "open", "pwritev", "fdatasync"]  # FILE_END at once, no file to make first
    kill(writer)


def test_a_group_larger_than_a_file_gets_a_file_of_its_size(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory, file_bytes=1000, helper=Inline())
    (small,) = commit(writer, appends(1, [b'"x"' * 150]))  # the spare is there, and too small
    (large,) = commit(writer, appends(2, [b'"%d"' % number for number in range(200)]))
    (after,) = commit(writer, appends(202, [b"1"]))
    assert (small.file_no, large.file_no, after.file_no) == (1, 2, 3)
    kill(writer)
    assert read_log(directory).content == small.content + large.content + after.content


def test_more_pieces_than_one_vectored_write_takes(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory, file_bytes=1 << 20)
    writes = [appends(seq, [b"1"]) for seq in range(1, 2501)]
    places = commit(writer, *writes)
    kill(writer)
    assert read_log(directory).content == b"".join(writes)
    assert content_at(directory, places[-1]) == writes[-1]


def test_the_synced_position_moves_with_a_sync_and_is_marked_by_the_next_group(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    commit(writer, appends(1, [b"1"]))
    assert writer.unsynced_bytes == len(appends(1, [b"1"]))
    assert writer.plan([10]).mark == b""
    commit(writer, appends(2, [b"2"]), sync=True)
    synced = writer.offset
    assert (writer.unsynced_bytes, writer.synced) == (0, WalPosition(1, synced))
    commit(writer, appends(3, [b"3"]))
    content = file_bytes(directory, 1)
    marks = [frame for frame in scan(content, 0, len(content)).frames if frame[2] == FrameType.SYNC_MARK]
    assert [(mark[4], mark[5]) for mark in marks] == [(1, synced)]
    assert writer.plan([10]).mark == b""
    kill(writer)


def test_a_background_sync_is_taken_over_by_the_owner(directory: str) -> None:
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=600)
    commit(writer, appends(1, [b"1"]))
    synced = writer.sync_now()
    assert synced == WalPosition(1, writer.offset)
    assert writer.unsynced_bytes > 0
    commit(writer, appends(2, [b"2"]))
    writer.note_synced(synced)
    assert writer.synced == synced
    assert writer.unsynced_bytes == writer.offset - synced.offset
    late = writer.sync_now()
    commit(writer, appends(3, [b'"x"' * 100]))
    assert writer.file_no == 2
    before = writer.synced
    writer.note_synced(late)  # of a file that was left meanwhile
    assert writer.synced == before
    kill(writer)


def test_an_idle_log_is_marked_once(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    commit(writer, appends(1, [b"1"]), sync=True)
    end = writer.offset
    writer.commit(writer.plan([]), [], sync=False)
    assert writer.offset > end
    end = writer.offset
    writer.commit(writer.plan([]), [], sync=False)
    assert writer.offset == end
    writer.note_synced(writer.sync_now())  # the mark itself
    writer.commit(writer.plan([]), [], sync=False)
    assert writer.offset == end
    commit(writer, appends(2, [b"2"]), sync=True)
    assert writer.plan([]).mark
    kill(writer)


def test_a_closed_log_ends_with_a_mark_of_all_that_is_in_it(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    commit(writer, appends(1, [b"1"]))
    writer.close()
    content = file_bytes(directory, 1)
    last = scan(content, 0, len(content)).frames[-1]
    assert (last[2], last[5]) == (FrameType.SYNC_MARK, last[0])


def test_a_log_goes_on_where_it_ended(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    first = commit(writer, appends(1, [b"1"]))
    kill(writer)
    again = open_writer(FaultyFileSystem(), directory, read_log(directory).recovery.end)
    second = commit(again, appends(2, [b"2"]))
    assert (again.file_no, second[0].file_no) == (1, 1)
    kill(again)
    assert read_log(directory).content == first[0].content + second[0].content


def test_a_file_of_an_earlier_boot_gets_no_more_groups(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    first = commit(writer, appends(1, [b"1"]))
    writer.close()
    again = open_writer(FaultyFileSystem(), directory, read_log(directory, LATER_BOOT).recovery.end, LATER_BOOT)
    second = commit(again, appends(2, [b"2"]))
    assert second[0].file_no == 2
    again.close()
    read = read_log(directory, LATER_BOOT)
    assert read.content == first[0].content + second[0].content
    assert read.recovery.end is not None
    assert read.recovery.end.boot_id == LATER_BOOT.boot_id


def test_counters_count(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    write = appends(1, [b"1", b"2"])
    plan = writer.plan([len(write)])
    times = writer.commit(plan, [write], sync=True, frames=2)
    assert (writer.frames, writer.batches, writer.bytes_written, writer.fsyncs) == (2, 1, len(write), 1)
    assert times.write_us >= 0
    assert times.fsync_us >= 0
    kill(writer)


def test_times_are_those_of_the_write_and_of_the_sync(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1_000_000, 5_000))
    monkeypatch.setattr(wal, "perf_counter_ns", lambda: next(ticks))
    writer = open_writer(FaultyFileSystem(), directory)
    write = appends(1, [b"1"])
    assert writer.commit(writer.plan([len(write)]), [write], sync=True) == (5.0, 5.0)
    assert writer.commit(writer.plan([len(write)]), [write], sync=False) == (5.0, 0.0)
    kill(writer)


def test_the_real_disk_is_really_synced(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fdatasync, fsync = os.fdatasync, os.fsync

    def note(call: str, fd: int) -> None:
        synced.append(call + " " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        (fdatasync if call == "fdatasync" else fsync)(fd)

    monkeypatch.setattr(os, "fdatasync", lambda fd: note("fdatasync", fd))
    monkeypatch.setattr(os, "fsync", lambda fd: note("fsync", fd))
    writer = open_writer(OsFileSystem(), directory)
    assert synced == [
        "fsync " + os.path.basename(os.path.dirname(os.path.dirname(directory))),
        "fsync data",
        "fdatasync COMMITTED",
        "fsync wal",
        "fdatasync wal-00000000000000000001.log.tmp",
        "fsync wal",
        "fdatasync CURRENT.tmp",
        "fsync wal",
    ]
    synced.clear()
    commit(writer, appends(1, [b"1"]), sync=True)
    assert synced == ["fdatasync wal-00000000000000000001.log"]
    kill(writer)


def test_identity_is_in_every_file(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory, file_bytes=300)
    for seq in range(1, 6):
        commit(writer, appends(seq, [b'"x"' * 20]))
    kill(writer)
    read = read_log(directory, IDENTITY)
    assert read.recovery.end is not None
    assert read.recovery.end.file_no == writer.file_no > 2
