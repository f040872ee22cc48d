"""The snapshot: what the logs say up to a place in each of them, so that a start need not read all that was written.

`meta/snapshot.<20 digits>.bin`, numbered upwards. All integers are little-endian.

  0       8         12    16         24         32
  ┌───────┬─────────┬─────┬──────────┬──────────┬──────────────────────┐
  │ magic │ version │ pad │ body_len │ checksum │ body                 │
  │ 8     │ u32     │ 4×0 │ u64      │ u64      │ msgpack, body_len    │
  └───────┴─────────┴─────┴──────────┴──────────┴──────────────────────┘
    magic    = "topicSNP"
    checksum = XXH3-64 of bytes [0, 24) and the body; in the same place in every version, so that a version is believed
               only if it is undamaged

The newest valid one counts; one that is not is passed over, and said. A file has its name only once it is whole and on
the disk. The valid one before the newest stays as well, to fall back on. It can take the newest one's place only if the
logs still hold what came after it: trimmed further than that, they refuse to be read from its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, read_all, replace_file

MAGIC: Final = b"topicSNP"
VERSION: Final = 1
PREFIX: Final = Struct("<8sI4xQ")
CHECKSUM: Final = Struct("<Q")
HEADER_LEN: Final = PREFIX.size + CHECKSUM.size


class BadSnapshot(Exception):  # noqa: N818 — named for what it is
    """The file is not what was written, or is of no use. `.path` and `.offset` (bytes) say where."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: not to be used, at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class UnknownSnapshotVersion(Exception):  # noqa: N818
    """Written by another release, in a format that this one does not know. Never passed over: an older snapshot and
    what is left of the log need not be the whole truth.
    """

    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            f"{path}: snapshot version {version} is unknown (this release reads version {VERSION}); "
            f"start the release that wrote it, or point TOPICS_DATA_DIR elsewhere"
        )
        self.path = path
        self.version = version


class Loaded(NamedTuple):
    """The newest valid snapshot and what was passed over to get to it."""

    number: int
    body: bytes
    skipped: list[BadSnapshot]


class Saved(NamedTuple):
    """The number of a snapshot that was made, and of the valid one to fall back on: the newest before it, if there is
    one and that can be told. What that one needs must stay, though it may be older than the one that came before.
    """

    number: int
    fallback: int | None


def save_snapshot(fs: FileSystem, data_dir: str, body: bytes) -> Saved:
    """Makes the next snapshot durably, then removes all but the valid one before it.

    Raises OSError; the former snapshots are as they were then.
    """
    make_dirs(fs, layout.meta_dir(data_dir))
    numbers = layout.list_snapshots(fs, data_dir)
    number = numbers[-1] + 1 if numbers else 1
    prefix = PREFIX.pack(MAGIC, VERSION, len(body))
    checksum = CHECKSUM.pack(xxh3_64_intdigest(prefix + body))
    replace_file(fs, layout.snapshot_path(data_dir, number), prefix + checksum + body)
    # What cannot be removed now is tried again with the next one; the snapshot counts either way.
    kept, fallback = _fallbacks(fs, data_dir, numbers)
    with suppress(OSError):
        for old in numbers:
            if old not in kept:
                fs.unlink(layout.snapshot_path(data_dir, old))
    return Saved(number, fallback)


def _fallbacks(fs: FileSystem, data_dir: str, numbers: list[int]) -> tuple[set[int], int | None]:
    """The newest valid one, and before it those of which that cannot be told now: a damaged one pushes out no other.
    Then which one of them it is, None if that cannot be told.
    """
    kept: set[int] = set()
    for number in reversed(numbers):
        try:
            read_snapshot(fs, data_dir, number)
        except BadSnapshot:
            continue
        except (OSError, UnknownSnapshotVersion):
            kept.add(number)
            continue
        kept.add(number)
        return kept, number if len(kept) == 1 else None
    return kept, None


def load_snapshot(
    fs: FileSystem, data_dir: str, goes_with_logs: Callable[[bytes], bool] = lambda body: True
) -> Loaded | None:
    """The newest valid one whose body goes with the logs that are here (see `reshard.py`), None when there is none.

    Raises UnknownSnapshotVersion, OSError, and BadSnapshot (of the newest) when there are some and none will do.
    """
    skipped: list[BadSnapshot] = []
    for number in reversed(layout.list_snapshots(fs, data_dir)):
        try:
            body = read_snapshot(fs, data_dir, number)
        except BadSnapshot as bad:
            skipped.append(bad)
        else:
            if goes_with_logs(body):
                return Loaded(number, body, skipped)
            path = layout.snapshot_path(data_dir, number)
            skipped.append(BadSnapshot(path, HEADER_LEN, "it goes with other logs than those that are here"))
    if skipped:
        raise skipped[0]
    return None


def read_snapshot(fs: FileSystem, data_dir: str, number: int) -> bytes:
    """The body of one snapshot. Raises BadSnapshot, UnknownSnapshotVersion, OSError."""
    path = layout.snapshot_path(data_dir, number)
    content = read_all(fs, path)
    if len(content) < HEADER_LEN:
        raise BadSnapshot(path, len(content), f"the file ends inside its header of {HEADER_LEN} bytes")
    magic, version, body_len = PREFIX.unpack_from(content)
    if magic != MAGIC:
        raise BadSnapshot(path, 0, f"begins with {magic!r} instead of {MAGIC!r}")
    if HEADER_LEN + body_len != len(content):
        raise BadSnapshot(path, 16, f"body_len is {body_len}, the file has {len(content) - HEADER_LEN}")
    body = content[HEADER_LEN:]
    if CHECKSUM.unpack_from(content, PREFIX.size)[0] != xxh3_64_intdigest(content[: PREFIX.size] + body):
        raise BadSnapshot(path, PREFIX.size, "checksum does not match")
    if version != VERSION:
        raise UnknownSnapshotVersion(path, version)
    return body
