"""The way a group is written is chosen by trying it, and both ways write the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.storage.logs import IDENTITY, appends
from topics.storage.filesystem import OsFileSystem, WritePath, choose_write_path
from topics.storage.frame import Bytes
from topics.storage.recovery import Recovery
from topics.storage.wal import WalWriter


class Refusing(OsFileSystem):
    """A file system without vectored writes."""

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        raise OSError(95, os.strerror(95))


class Lying(OsFileSystem):
    """One that says it wrote and did not."""

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return sum(map(len, buffers))


def test_vectored_where_it_works(tmp_path: Path) -> None:
    assert choose_write_path(str(tmp_path)) is WritePath.PWRITEV
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fs", [Refusing(), Lying()])
def test_plain_where_it_does_not(fs: OsFileSystem, tmp_path: Path) -> None:
    assert choose_write_path(str(tmp_path), fs) is WritePath.PWRITE
    assert os.listdir(tmp_path) == []


def test_a_directory_that_takes_no_writes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Not a directory"):
        choose_write_path(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("path", list(WritePath))
def test_both_write_the_same_log(path: WritePath, tmp_path: Path) -> None:
    fs = path.file_system()
    directory = str(tmp_path / "wal")
    frames = [appends(seq, [b'"data":%d' % seq]) for seq in range(1, 6)]
    wal = WalWriter(fs, directory, IDENTITY, None, file_bytes=1 << 16)
    wal.commit(wal.plan(list(map(len, frames))), frames, sync=True, frames=len(frames))
    wal.close()
    recovery = Recovery(OsFileSystem(), directory, IDENTITY)
    read = [bytes(batch.buffer[at : at + length]) for batch in recovery for at, length, *_ in batch.frames]
    assert [frame for frame in read if frame in frames] == frames
