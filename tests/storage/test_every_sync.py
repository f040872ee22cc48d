"""Calls that make files last, in the order in which they are made, step by step: a missing one fails here.

A kill cannot show one that is missing, for the page cache survives it (docs/reliability.md).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.executors import Inline
from tests.storage.logs import IDENTITY, TOPIC_ID, appends, commit, kill, open_writer, patch, read_log, topic_create
from tests.storage.segments import Record, make_segment
from tests.storage.unsynced import UnsyncedFileSystem
from topics.compactor.rewriting import rewrite
from topics.compactor.segment_building import SealAt, SegmentAppender
from topics.core.segment_list import SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.reshard import finish_swap, reshard
from topics.storage.segment_deletes import mark_deleted, sync_segment
from topics.storage.segment_store import LocalStore
from topics.storage.snapshot import save_snapshot


def made(fs: UnsyncedFileSystem) -> list[str]:
    """Return the calls that made something last since this was asked last."""
    calls = fs.lasting[:]
    fs.lasting.clear()
    return calls


NEW_FILE = ["fdatasync wal-#.log.tmp", "rename wal-#.log", "fsync_dir wal"]
CURRENT = ["fdatasync CURRENT.tmp", "rename CURRENT", "fsync_dir wal"]
SYNCED = ["fdatasync wal-#.log"]
LONG = b'"' + b"x" * 900 + b'"'


@pytest.fixture
def fs() -> UnsyncedFileSystem:
    return UnsyncedFileSystem()


@pytest.fixture
def wal(tmp_path: Path) -> str:
    (tmp_path / "data").mkdir()
    return str(tmp_path / "data" / "wal")


def test_a_log_from_its_first_file_to_its_end(fs: UnsyncedFileSystem, wal: str) -> None:
    writer = open_writer(fs, wal, helper=Inline())
    noted = ["fdatasync COMMITTED", "fsync_dir wal"]
    assert made(fs) == ["fsync_dir data", *noted, *NEW_FILE, *CURRENT]
    commit(writer, appends(1, [b"1"]))
    assert made(fs) == []
    writer.sync_now()
    assert made(fs) == SYNCED
    commit(writer, appends(2, [b"1"]), sync=True)
    assert made(fs) == SYNCED
    seq = 3
    while writer.file_no == 1:
        commit(writer, appends(seq, [LONG]))
        seq += 1
    assert made(fs) == [*NEW_FILE, *SYNCED, *CURRENT]  # a spare, and the file that is full before it takes over
    assert writer.drop_files_below(2) == 1
    assert made(fs) == ["fsync_dir wal"]
    writer.close()
    assert made(fs) == [*SYNCED * 2, "fdatasync COMMITTED"]  # the log, the mark that covers it, and its end
    assert not fs.unsynced


def test_what_a_start_finds_and_removes(fs: UnsyncedFileSystem, wal: str) -> None:
    writer = open_writer(fs, wal, helper=Inline())
    seq = 1
    while not os.path.exists(layout.log_path(wal, 2)):
        commit(writer, appends(seq, [LONG]))
        seq += 1
    assert writer.file_no == 1
    kill(writer)
    os.unlink(os.path.join(wal, layout.CURRENT_NAME))
    made(fs)
    read_log(wal, fs=fs)
    assert made(fs) == ["fsync_dir wal", *SYNCED, *CURRENT]  # without the spare
    assert not fs.unsynced


def test_what_is_given_up_is_kept_before(fs: UnsyncedFileSystem, wal: str) -> None:
    writer = open_writer(fs, wal, file_bytes=600)
    seq = 1
    while writer.file_no < 3:
        commit(writer, appends(seq, [b'"' + b"x" * 100 + b'"']))
        seq += 1
    writer.close()
    patch(wal, 2, 300, b"\xff" * 20)
    made(fs)
    read_log(wal, fs=fs, accept_data_loss=True)
    copy = ["fdatasync wal-#.log.damaged-1.tmp", "rename wal-#.log.damaged-1", "fsync_dir wal"]
    others = ["rename wal-#.log.damaged-1", "fsync_dir wal"]
    assert made(fs) == [*copy, *CURRENT, *others, *SYNCED]


def test_another_number_of_shards(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    (data_dir / "wal").mkdir(parents=True)
    writer = open_writer(fs, str(data_dir / "wal"), identity=IDENTITY)
    commit(writer, topic_create(7, "t"), appends(1, [b"1"]))
    writer.close()
    (data_dir / "wal" / "notes.txt").touch()  # not ours: it stays
    made(fs)
    reshard(fs, str(data_dir), 2, IDENTITY.boot_id, lambda _name: 1, lambda _share: None, file_bytes=4096)
    calls = made(fs)
    begun = calls.index("rename wal.old")
    assert calls[:2] == ["fsync_dir data", "fsync_dir wal.new"]
    assert calls[begun - 2].startswith("fdatasync wal-")
    assert calls[begun - 1] == "fdatasync COMMITTED"
    swapped = ["rename wal.old", "fsync_dir data", "rename wal", "fsync_dir data"]
    assert calls[begun:] == [*swapped, "fsync_dir data", "rename wal.kept-1", "fsync_dir data"]
    assert not fs.unsynced
    (data_dir / "wal").rename(data_dir / "wal.old")
    finish_swap(fs, str(data_dir))
    assert made(fs) == ["rename wal", "fsync_dir data"]


def test_snapshots(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    saved = ["fdatasync snapshot.#.bin.tmp", "rename snapshot.#.bin", "fsync_dir meta"]
    save_snapshot(fs, data_dir, b"state")
    assert made(fs) == [f"fsync_dir {tmp_path.name}", "fsync_dir data", *saved]
    save_snapshot(fs, data_dir, b"state")
    assert made(fs) == saved


def test_a_segment_its_marks_and_its_next_version(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    segment = make_segment(fs, str(tmp_path / "data"), [Record(b"1", tag=b"t"), Record(b"2")])
    files = ["fdatasync seg-#.data", "fdatasync seg-#.idx"]
    names = ["fsync_dir #", "fsync_dir topics", "fsync_dir data"]
    tags = ["fdatasync seg-#.tags.tmp", "rename seg-#.tags", "fsync_dir #"]
    assert made(fs) == ["fsync_dir data", "fsync_dir topics", *files, *names, *tags]
    directory = os.path.dirname(segment.data_path)
    mark_deleted(fs, directory, 1, [1])
    assert made(fs) == []
    sync_segment(fs, directory, 1)
    assert made(fs) == files
    ts = segment.entries(1, 2)[1::4]
    rewrite(fs, directory, SegmentInfo(1, 2, ts[0], ts[1], len(segment.data), 0, SEALED))
    assert made(fs) == [call.replace("#.", "#.1.") for call in [*files, *tags]] + ["fsync_dir #"]
    assert not fs.unsynced


def test_a_segment_that_is_sealed_for_its_age(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    """Bytes that a killed process had begun to append are cut off for good first: nothing may lie behind the
    segment.
    """
    segment = make_segment(OsFileSystem(), str(tmp_path), [Record(b"1", tag=b"t"), Record(b"2")], sealed=False)
    ts = segment.entries(1, 2)[1::4]
    for path in (segment.data_path, segment.idx_path):
        with open(path, "ab") as file:
            file.write(b"begun")
    info = SegmentInfo(1, 2, ts[0], ts[1], len(segment.data), 0, 0)
    sealed = SegmentAppender(fs, str(tmp_path), SealAt(10, 1 << 20, 1), set()).seal(TOPIC_ID, info)
    assert sealed is not None
    assert fs.log.count("ftruncate") == 2
    files = ["fdatasync seg-#.data", "fdatasync seg-#.idx"]
    assert made(fs) == [*files, "fdatasync seg-#.tags.tmp", "rename seg-#.tags", "fsync_dir #"]


def test_an_object_of_the_cold_tier(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    store = LocalStore(fs, str(tmp_path / "cold/topics"))
    name = f"{7:016x}/a"
    store.put(name, [b"1"])
    folders = [f"fsync_dir {tmp_path.name}", "fsync_dir cold", "fsync_dir topics"]
    assert made(fs) == [*folders, "fdatasync a.tmp", "rename a", "fsync_dir #", "fsync_dir topics", "fsync_dir cold"]
    store.delete(name)
    assert made(fs) == ["fsync_dir #"]


def test_the_calls_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of a service makes these calls."""
    calls: list[str] = []
    for call in ("fdatasync", "fsync", "rename"):
        monkeypatch.setattr(os, call, lambda *_parts, _call=call: calls.append(_call))
    fs = OsFileSystem()
    fd = fs.open(str(tmp_path / "a"), os.O_RDWR | os.O_CREAT)
    fs.fdatasync(fd)
    fs.close(fd)
    fs.fsync_dir(str(tmp_path))
    fs.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    assert calls == ["fdatasync", "fsync", "rename"]
