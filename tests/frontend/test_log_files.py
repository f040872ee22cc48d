"""Maps of log files do not keep alive what the shard has removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from topics.frontend.reads.files import LogFiles
from topics.storage import layout


def mapped_paths() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("in_ram", [False, True])
def test_a_removed_file_is_let_go_with_the_next_new_one(tmp_path: Path, in_ram: bool) -> None:
    directories = layout.group_dir(str(tmp_path), 0, 1), layout.ram_group_dir(str(tmp_path / "ram"), 0)
    for directory in directories:
        os.makedirs(directory)
        for number in (1, 2, 3):
            Path(layout.log_path(directory, number)).write_bytes(b"%d" % number * 8192)
    files = LogFiles(str(tmp_path), str(tmp_path / "ram"), 1)
    for number in (1, 2):
        assert files.get(0, in_ram, number, 100)[:1] == b"%d" % number
        assert files.get(0, not in_ram, number, 100)[:1] == b"%d" % number
    first = layout.log_path(directories[in_ram], 1)
    os.unlink(first)
    held = files.get(0, in_ram, 1, 100)
    assert held[:1] == b"1", "what is mapped stays readable"
    del held
    assert first in mapped_paths()
    assert files.get(0, in_ram, 3, 100)[:1] == b"3"
    assert first not in mapped_paths()
    assert layout.log_path(directories[in_ram], 2) in mapped_paths()
    assert layout.log_path(directories[not in_ram], 1) in mapped_paths()
    with pytest.raises(FileNotFoundError):
        files.get(0, in_ram, 1, 100)
