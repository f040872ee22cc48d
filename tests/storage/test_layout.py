"""Names of files, and what counts as a log."""

from __future__ import annotations

from pathlib import Path

from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.layout import Group


def test_file_names_sort_for_all_of_u64() -> None:
    numbers = [1, 9, 10, 2**32, 2**64 - 1]
    names = [layout.log_name(number) for number in numbers]
    assert names == sorted(names)
    assert names[0] == "wal-00000000000000000001.log"
    assert [layout.log_file_no(name) for name in names] == numbers
    for other in ("CURRENT", "wal-1.log", "wal-00000000000000000001.log.tmp", "wal-00000000000000000001.log.damaged-1"):
        assert layout.log_file_no(other) is None


def test_groups_are_found_flat_and_sharded(tmp_path: Path) -> None:
    fs, data_dir = OsFileSystem(), str(tmp_path)
    root = layout.wal_dir(data_dir)
    assert layout.discover_groups(fs, root) == []
    for shard in (1, 0, 100):
        Path(layout.group_dir(data_dir, shard, 101)).mkdir(parents=True)
    Path(root, "shard-x").mkdir()
    expected = [Group(0, f"{root}/shard-00"), Group(1, f"{root}/shard-01"), Group(100, f"{root}/shard-100")]
    assert layout.discover_groups(fs, root) == expected
    Path(layout.log_path(layout.group_dir(data_dir, 0, 1), 7)).touch()
    assert layout.discover_groups(fs, root) == [Group(0, root), *expected]
    assert layout.list_log_files(fs, root) == [7]
