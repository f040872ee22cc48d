"""Names of files, and what counts as a log."""

from __future__ import annotations

import os
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


def test_segments_and_snapshots_are_found_by_their_names(tmp_path: Path) -> None:
    fs, data_dir = OsFileSystem(), str(tmp_path)
    assert layout.discover_topics(fs, data_dir) == layout.list_snapshots(fs, data_dir) == []
    topic_ids = [7, 10, 2**64 - 1]
    for topic_id in topic_ids:
        Path(layout.topic_dir(data_dir, topic_id)).mkdir(parents=True)
    Path(layout.topics_dir(data_dir), "7").mkdir()
    assert layout.discover_topics(fs, data_dir) == topic_ids
    directory = layout.topic_dir(data_dir, 7)
    assert directory == f"{data_dir}/topics/0000000000000007"
    assert layout.discover_segments(fs, layout.topic_dir(data_dir, 8)) == {}
    for path in (
        layout.segment_data_path(directory, 2**64 - 1),
        layout.segment_data_path(directory, 9),
        layout.segment_idx_path(directory, 9),
        layout.segment_tags_path(directory, 9),
        layout.segment_idx_path(directory, 9, 2),
        os.path.join(directory, "seg-00000000000000000009.0.idx"),
        layout.segment_tags_path(directory, 10) + layout.TMP_SUFFIX,
    ):
        Path(path).touch()
    found = layout.discover_segments(fs, directory)
    assert list(found.items()) == [((9, 0), {"data", "idx", "tags"}), ((9, 2), {"idx"}), ((2**64 - 1, 0), {"data"})]
    Path(layout.meta_dir(data_dir)).mkdir()
    for number in (2**64 - 1, 3):
        Path(layout.snapshot_path(data_dir, number)).touch()
    Path(layout.snapshot_path(data_dir, 4) + layout.TMP_SUFFIX).touch()
    assert layout.list_snapshots(fs, data_dir) == [3, 2**64 - 1]
