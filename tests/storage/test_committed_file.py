"""Readers of a segment's file: what they get, and what they are told when the file has changed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from topics.storage.segment import CommittedFile, CorruptSegment

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "seg-1.data"
    path.write_bytes(CONTENT + b"not committed")
    return path


def opened(path: Path) -> int:
    """Return the number of this process's descriptors of that file."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{number}") == str(path)
    return count


def test_slices_are_those_of_the_committed_bytes(path: Path) -> None:
    file = CommittedFile(str(path), len(CONTENT))
    assert len(file) == len(CONTENT)
    for part in (slice(0, 5), slice(100, 100), slice(7, 3), slice(1000, 9999), slice(None), slice(-9, None)):
        assert file[part] == CONTENT[part]


def test_a_file_that_is_shorter_is_refused(path: Path) -> None:
    with pytest.raises(CorruptSegment, match=f"at offset {len(CONTENT) + 13}: the file ends there") as caught:
        CommittedFile(str(path), len(CONTENT) + 14)
    del caught
    assert opened(path) == 0
    with pytest.raises(FileNotFoundError):
        CommittedFile(f"{path}.no", 1)


def test_a_file_that_is_cut_while_it_is_open_is_damage_and_no_death(path: Path) -> None:
    file = CommittedFile(str(path), len(CONTENT))
    os.truncate(path, 300)
    assert file[290:300] == CONTENT[290:300]
    for part in (slice(290, 301), slice(500, 600)):
        with pytest.raises(CorruptSegment) as caught:
            file[part]
        assert (caught.value.path, caught.value.offset) == (str(path), 300)
        assert "rename it to this name" in str(caught.value)
    path.write_bytes(CONTENT)  # into the same file
    assert file[:] == CONTENT


def test_what_the_disk_does_not_give_is_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CommittedFile(str(path), len(CONTENT))

    def bad_sector(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("topics.storage.segment.os.pread", bad_sector)
    with pytest.raises(CorruptSegment, match=r"at offset 8: 4 bytes cannot be read: .*Input/output error"):
        file[8:12]


def test_a_read_that_gives_less_is_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives 2 GiB at most by one call."""
    file, pread = CommittedFile(str(path), len(CONTENT)), os.pread
    monkeypatch.setattr(
        "topics.storage.segment.os.pread", lambda fd, length, offset: pread(fd, min(length, 100), offset)
    )
    assert file[3:777] == CONTENT[3:777]


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_it_knows_whether_it_still_has_its_name(path: Path, change: str) -> None:
    file = CommittedFile(str(path), len(CONTENT))
    assert file.has_its_name
    if change == "removed":
        path.unlink()
    else:
        other = path.with_suffix(".copy")
        other.write_bytes(CONTENT[::-1])
        other.rename(path)
    assert not file.has_its_name
    assert file[:] == CONTENT


def test_it_is_closed_when_nobody_refers_to_it(path: Path) -> None:
    file = CommittedFile(str(path), len(CONTENT))
    assert opened(path) == 1
    del file
    assert opened(path) == 0
