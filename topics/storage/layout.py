"""Names and places of the files below a data directory; docs/storage-format.md begins with a list of them.

A group is one shard's log: a directory with files that one process writes. With one shard it is `wal` itself, otherwise
`wal/shard-<NN>`. Groups for `ephemeral` topics are in `<ram dir>/shard-<NN>`; the service wipes them at its start.
`wal.new` and `wal.old` exist only while the shard count changes (`reshard.py`). A file whose name ends in `.tmp` was
never completed.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from topics.core.segment_list import SegmentName
from topics.storage.filesystem import FileSystem, names_in

LOCK_NAME = ".topics.lock"
WAL_NAME = "wal"
NEW_WAL_NAME = "wal.new"
OLD_WAL_NAME = "wal.old"
CURRENT_NAME = "CURRENT"
COMMITTED_NAME = "COMMITTED"
TMP_SUFFIX = ".tmp"
TOPICS_NAME = "topics"
META_NAME = "meta"
CLOCK_NAME = "clock.json"
FORMAT_NAME = "format.json"
TXN_NAME = "txn"

_LOG_NAME = re.compile(r"wal-(\d{20})\.log")
_SHARD_NAME = re.compile(r"shard-(\d{2,})")
_TOPIC_NAME = re.compile(r"[0-9a-f]{16}")
_SEGMENT_NAME = re.compile(r"seg-(\d{20})(?:\.([1-9]\d*))?\.(data|idx|tags)")
_SNAPSHOT_NAME = re.compile(r"snapshot\.(\d{20})\.bin")


class Group(NamedTuple):
    """One shard's log on the disk."""

    shard: int
    path: str


def lock_path(data_dir: str) -> str:
    return os.path.join(data_dir, LOCK_NAME)


def wal_dir(data_dir: str) -> str:
    return os.path.join(data_dir, WAL_NAME)


def group_dir(data_dir: str, shard: int, shards: int) -> str:
    """Return the directory of the log of shard `shard` of `shards`."""
    return group_dir_in(wal_dir(data_dir), shard, shards)


def group_dir_in(root: str, shard: int, shards: int) -> str:
    """Return the directory of a shard's log below `root` (`wal`, or `wal.new` while the shard count changes)."""
    assert 0 <= shard < shards
    return root if shards == 1 else os.path.join(root, _shard_name(shard))


def ram_group_dir(ram_dir: str, shard: int) -> str:
    """Return the directory of the log of a shard's `ephemeral` topics."""
    return os.path.join(ram_dir, _shard_name(shard))


def log_name(file_no: int) -> str:
    return f"wal-{file_no:020d}.log"


def log_path(directory: str, file_no: int) -> str:
    return os.path.join(directory, log_name(file_no))


def log_file_no(name: str) -> int | None:
    """Return the number in a log file's name, None for any other name."""
    match = _LOG_NAME.fullmatch(name)
    return int(match[1]) if match else None


def belongs_to_log(name: str) -> bool:
    """True if a file of this name in a group's directory is part of the log."""
    return name in (CURRENT_NAME, COMMITTED_NAME) or log_file_no(name) is not None or name.endswith(TMP_SUFFIX)


def list_log_files(fs: FileSystem, directory: str) -> list[int]:
    """Return the numbers of the group's log files, ascending; none if the directory does not exist."""
    return sorted(number for name in names_in(fs, directory) if (number := log_file_no(name)) is not None)


def discover_groups(fs: FileSystem, root: str) -> list[Group]:
    """Return every group below a wal directory, flat or sharded, by shard number."""
    names = names_in(fs, root)
    groups = [
        Group(int(match[1]), os.path.join(root, name)) for name in names if (match := _SHARD_NAME.fullmatch(name))
    ]
    if any(log_file_no(name) is not None or name == CURRENT_NAME for name in names):
        groups.append(Group(0, root))
    return sorted(groups)


def stages_dir(data_dir: str) -> str:
    return os.path.join(data_dir, TXN_NAME, "stages")


def sinks_dir(data_dir: str) -> str:
    return os.path.join(data_dir, TXN_NAME, "sinks")


def topics_dir(data_dir: str) -> str:
    """Return the directory of the segments of all topics, in a data or cold directory."""
    return os.path.join(data_dir, TOPICS_NAME)


def topic_dir(data_dir: str, topic_id: int) -> str:
    """Return the directory of one topic's segments."""
    return os.path.join(topics_dir(data_dir), f"{topic_id:016x}")


def segment_data_path(directory: str, first_seq: int, version: int = 0) -> str:
    return os.path.join(directory, f"{_segment_stem(first_seq, version)}.data")


def segment_idx_path(directory: str, first_seq: int, version: int = 0) -> str:
    return os.path.join(directory, f"{_segment_stem(first_seq, version)}.idx")


def segment_tags_path(directory: str, first_seq: int, version: int = 0) -> str:
    return os.path.join(directory, f"{_segment_stem(first_seq, version)}.tags")


def segment_paths(directory: str, first_seq: int, version: int = 0) -> dict[str, str]:
    """Return the paths of a segment's files by their kinds ("tags", "idx", "data"), the data last."""
    stem = os.path.join(directory, _segment_stem(first_seq, version))
    return {kind: f"{stem}.{kind}" for kind in ("tags", "idx", "data")}


def object_name(topic_id: int, first_seq: int, version: int) -> str:
    """Return the name of a segment's data in the cold tier."""
    return segment_data_path(f"{topic_id:016x}", first_seq, version)


def object_names(topic_id: int, first_seq: int, version: int) -> list[str]:
    """Return the names of a segment's files in the cold tier, the data last: a reader that finds the data finds all."""
    return list(segment_paths(f"{topic_id:016x}", first_seq, version).values())


def discover_topics(fs: FileSystem, data_dir: str) -> list[int]:
    """Return the ids of topics that have a directory for segments, ascending."""
    names = names_in(fs, topics_dir(data_dir))
    return sorted(topic_id for name in names if (topic_id := topic_id_of(name)) is not None)


def parse_segment_file(file_name: str) -> tuple[SegmentName, str] | None:
    """Return (the segment, "data", "idx" or "tags") of the name of a segment's file; None for any other name."""
    match = _SEGMENT_NAME.fullmatch(file_name)
    return (SegmentName(int(match[1]), int(match[2] or 0)), match[3]) if match else None


def topic_id_of(directory_name: str) -> int | None:
    """Return the topic of a directory of segments; None for any other name."""
    return int(directory_name, 16) if _TOPIC_NAME.fullmatch(directory_name) else None


def discover_segments(fs: FileSystem, directory: str) -> dict[SegmentName, set[str]]:
    """Return the files ("data", "idx", "tags") of each segment, ascending; none if the directory does not exist."""
    found: dict[SegmentName, set[str]] = {}
    for name in names_in(fs, directory):
        if parsed := parse_segment_file(name):
            found.setdefault(parsed[0], set()).add(parsed[1])
    return dict(sorted(found.items()))


def meta_dir(data_dir: str) -> str:
    return os.path.join(data_dir, META_NAME)


def snapshot_path(data_dir: str, number: int) -> str:
    return os.path.join(meta_dir(data_dir), f"snapshot.{number:020d}.bin")


def list_snapshots(fs: FileSystem, data_dir: str) -> list[int]:
    """Return the numbers of all snapshots, ascending."""
    names = names_in(fs, meta_dir(data_dir))
    return sorted(int(match[1]) for name in names if (match := _SNAPSHOT_NAME.fullmatch(name)))


def _segment_stem(first_seq: int, version: int) -> str:
    return f"seg-{first_seq:020d}.{version}" if version else f"seg-{first_seq:020d}"


def _shard_name(shard: int) -> str:
    return f"shard-{shard:02d}"
