"""The mark that says which format a data directory has."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.storage.faults import CHANGING_CALLS, Fault, FaultyFileSystem
from topics.storage.layout import FORMAT_NAME
from topics.storage.logfile import RefusedLog
from topics.storage.notes import note_path
from topics.storage.upgrade import has_mark, write_mark


def test_it_is_there_once_it_was_made(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    assert not has_mark(fs, str(tmp_path))
    for _ in range(2):
        write_mark(fs, str(tmp_path))
        assert has_mark(fs, str(tmp_path))
    assert os.listdir(tmp_path / "meta") == ["format.json"]
    assert Path(note_path(str(tmp_path), FORMAT_NAME)).read_bytes() == b'{"version":2}'


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_failed_write_leaves_none_or_a_whole_one(tmp_path: Path, nth: int) -> None:
    fs = FaultyFileSystem()
    fs.arm(Fault(nth, errno.EIO, calls=CHANGING_CALLS))
    failed = False
    try:
        write_mark(fs, str(tmp_path))
    except OSError:
        failed = True
    assert failed == fs.struck
    assert has_mark(fs, str(tmp_path)) or failed


@pytest.mark.parametrize("version", [1, 3])
def test_the_data_of_another_release_are_refused(tmp_path: Path, version: int) -> None:
    fs = FaultyFileSystem()
    write_mark(fs, str(tmp_path))
    Path(note_path(str(tmp_path), FORMAT_NAME)).write_text(f'{{"version": {version}}}')
    with pytest.raises(RefusedLog, match=rf"format\.json: format version {version} is unknown .* start the release"):
        has_mark(fs, str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"version": "2"}', b'{"version": 2'])
def test_what_is_not_understood_is_not_guessed(tmp_path: Path, content: bytes) -> None:
    fs = FaultyFileSystem()
    write_mark(fs, str(tmp_path))
    Path(note_path(str(tmp_path), FORMAT_NAME)).write_bytes(content)
    with pytest.raises(RefusedLog, match=r"format\.json: cannot be decoded: .*; restore it from a copy"):
        has_mark(fs, str(tmp_path))
