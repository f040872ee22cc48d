"""The compactor reads what is committed, every frame once or again after a salvage, and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.storage.logs import appends, commit, open_writer
from topics.storage.filesystem import OsFileSystem
from topics.storage.log_tail import LogTail, TailLost
from topics.storage.logfile import WalPosition
from topics.storage.wal import WalSyncError, WalWriter


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "wal")


def here(writer: WalWriter) -> WalPosition:
    return WalPosition(writer.file_no, writer.offset)


def read(tail: LogTail, until: WalPosition) -> list[bytes]:
    """The frames, as bytes."""
    return [
        bytes(batch.buffer[offset : offset + total_len])
        for batch in tail.read(until)
        for offset, total_len, *_ in batch.frames
    ]


def test_reads_on_from_where_it_stopped_over_many_files(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory)
    tail = LogTail(directory, WalPosition(1, 0))
    written: list[bytes] = []
    found: list[bytes] = []
    for seq in range(1, 200):
        write = appends(seq, [b"%d" % seq * 20])
        commit(writer, write, sync=seq % 7 == 0)
        written.append(write)
        if seq % 13 == 0:
            found += read(tail, here(writer))
            assert found == written
            assert tail.position == here(writer)
    found += read(tail, here(writer))
    assert found == written
    assert writer.file_no > 5
    assert read(tail, here(writer)) == []


def test_nothing_behind_the_committed_end_is_looked_at(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory)
    commit(writer, appends(1, [b"1"]))
    first = here(writer)
    commit(writer, appends(2, [b"2"]))
    tail = LogTail(directory, WalPosition(1, 0))
    assert read(tail, first) == [appends(1, [b"1"])]
    assert read(tail, here(writer)) == [appends(2, [b"2"])]


def test_a_file_whose_sync_failed_goes_on_in_the_next_one(directory: str) -> None:
    """Frames that were read already come again; no frame is missed."""
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory)
    commit(writer, appends(1, [b"1"]), sync=True)
    commit(writer, appends(2, [b"2"]))
    ahead = LogTail(directory, WalPosition(1, 0))
    behind = LogTail(directory, WalPosition(1, 0))
    assert len(read(ahead, here(writer))) == 2
    fs.arm(Fault(1, errno.EIO, calls=frozenset(("fdatasync",))))
    with pytest.raises(WalSyncError):
        commit(writer, appends(3, [b"3"]), sync=True)
    assert writer.file_no == 2
    commit(writer, appends(3, [b"again"]))
    assert read(ahead, here(writer)) == [appends(2, [b"2"]), appends(3, [b"again"])]
    assert read(behind, here(writer)) == [appends(1, [b"1"]), appends(2, [b"2"]), appends(3, [b"again"])]


def test_a_position_in_the_middle_is_a_place_to_begin(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory)
    commit(writer, appends(1, [b"1"]))
    position = here(writer)
    for seq in range(2, 100):
        commit(writer, appends(seq, [b"x" * 100]))
    tail = LogTail(directory, position)
    assert read(tail, here(writer)) == [appends(seq, [b"x" * 100]) for seq in range(2, 100)]
    assert tail.log_id() == writer.log_id


def test_damage_and_a_missing_file_are_no_end_of_the_log(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory)
    for seq in range(1, 100):
        commit(writer, appends(seq, [b"x" * 100]))
    end = here(writer)
    with pytest.raises(TailLost, match="is committed only up to"):
        read(LogTail(directory, WalPosition(end.file_no + 1, 0)), end)
    path = Path(directory, f"wal-{2:020d}.log")
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    with pytest.raises(TailLost, match="has no frame at offset"):
        read(LogTail(directory, WalPosition(1, 0)), end)
    path.unlink()
    with pytest.raises(TailLost, match="does not exist"):
        read(LogTail(directory, WalPosition(1, 0)), end)


def test_an_error_in_opening_a_file_leaves_a_place_to_go_on_from(directory: str) -> None:
    writer = open_writer(OsFileSystem(), directory)
    for seq in range(1, 100):
        commit(writer, appends(seq, [b"x" * 100]))
    end = here(writer)
    assert end.file_no > 3
    path = Path(directory, f"wal-{3:020d}.log")
    aside = path.rename(path.with_suffix(".aside"))
    path.symlink_to(path)
    tail = LogTail(directory, WalPosition(1, 0))
    found: list[bytes] = []

    def follow() -> None:
        for batch in tail.read(end):
            found.extend(bytes(batch.buffer[at : at + length]) for at, length, *_ in batch.frames)

    with pytest.raises(OSError, match="symbolic links"):
        follow()
    assert found
    path.unlink()
    aside.rename(path)
    assert found + read(tail, end) == [appends(seq, [b"x" * 100]) for seq in range(1, 100)]
