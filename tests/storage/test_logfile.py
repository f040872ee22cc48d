"""The end of a finished log file is found from behind, whatever its records look like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.storage.faults import FaultyFileSystem
from tests.storage.logs import appends, commit, open_writer
from topics.storage import layout
from topics.storage.filesystem import FileSystem, OsFileSystem, opened
from topics.storage.frame import FrameType, scan
from topics.storage.logfile import FILE_END_LEN, file_end_frame, find_file_end

FS = OsFileSystem()
MIB = 1 << 20


class Counting:
    """The real file system. `read_bytes` is how much was read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(FS, name)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        found = FS.pread(fd, length, offset)
        self.read_bytes += len(found)
        return found


def found_end(path: Path, file_no: int = 1, fs: FileSystem = FS) -> int | None:
    with opened(fs, str(path), os.O_RDONLY) as fd:
        return find_file_end(fs, fd, file_no)


def test_it_is_where_a_scan_finds_it(tmp_path: Path) -> None:
    writer = open_writer(FaultyFileSystem(), str(tmp_path))
    seq = 1
    while writer.file_no < 5:
        commit(writer, appends(seq, [b"x" * (seq * 7 % 900)]), sync=True)
        seq += 1
    active = writer.file_no
    writer.close()
    for file_no in range(1, active):
        path = Path(layout.log_path(str(tmp_path), file_no))
        content = path.read_bytes()
        ends = [
            at + length
            for at, length, type_, *_ in scan(content, 0, len(content)).frames
            if type_ == FrameType.FILE_END
        ]
        assert ends == [found_end(path, file_no)]
    assert found_end(Path(layout.log_path(str(tmp_path), active)), active) is None


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_its_checksum_may_end_with_zeros(tmp_path: Path, zeros: int) -> None:
    ending = bytes(zeros)
    offset = next(at for at in range(1 << 24) if file_end_frame(1, at).endswith(ending) and (zeros or at > 99))
    path = tmp_path / "file"
    for behind in (0, 1, 3, 500_000):
        path.write_bytes(b"r" * offset + file_end_frame(1, offset) + bytes(behind))
        assert found_end(path) == offset + FILE_END_LEN


def test_what_only_looks_like_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (
        b"",
        bytes(3 * MIB),
        b"r" * 99 + file_end_frame(1, 100) + bytes(50),  # of another place
        b"r" * 99 + file_end_frame(2, 99) + bytes(50),  # of another file
        b"r" * 99 + file_end_frame(1, 99) + b"record" + bytes(50),
        file_end_frame(1, 0)[:-1],
    ):
        path.write_bytes(content)
        assert found_end(path) is None


def test_no_more_than_the_end_of_the_file_is_read(tmp_path: Path) -> None:
    fs = Counting()
    path = tmp_path / "file"
    path.write_bytes(b"r" * (8 * MIB) + file_end_frame(1, 8 * MIB) + bytes(MIB // 2))
    assert found_end(path, fs=fs) == 8 * MIB + FILE_END_LEN
    assert fs.read_bytes < 2 * MIB
