"""The snapshot: the state of all logs up to a place in each, so that a start need not read everything ever written.

The files are `meta/snapshot.<20 digits>.bin`, numbered upwards; docs/storage-format.md has their bytes. The body has
the state of each log up to a place in it (`core/shard_state.py`). The checksum has the same place in every version, so
that a reader believes the version number only if the file is undamaged.

The newest valid snapshot counts; a start skips a damaged one and logs that. A file gets its name only once it is whole
and on the disk. The valid snapshot before the newest stays as a fallback. It can replace the newest only if the logs
still have everything behind its positions; recovery refuses logs that were trimmed further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from topics.core.routers import ROUTERS_SHARD
from topics.core.shard_state import ShardState
from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, read_all, replace_file
from topics.storage.frame import CHECKSUM
from topics.storage.logfile import NotALogFile, RefusedLog, WalPosition, read_first_start
from topics.storage.reshard import Move, NewLog

MAGIC: Final = b"topicSNP"
VERSION: Final = 1
PREFIX: Final = Struct("<8sI4xQ")
HEADER_LEN: Final = PREFIX.size + CHECKSUM.size


class BadSnapshot(Exception):  # noqa: N818 — named for what it is
    """The file is damaged, or belongs to other logs. `.path` and `.offset` (bytes) say where."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: cannot be used, at offset {offset}: {reason}")
        self.path = path
        self.offset = offset
        self.reason = reason


class UnknownSnapshotVersion(Exception):  # noqa: N818
    """Another release wrote the snapshot, in a format that this one does not know. A start never skips it: an older
    snapshot and the rest of the log may lack something.
    """

    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            f"{path}: snapshot version {version} is unknown (this release reads version {VERSION}); "
            f"start the release that wrote it, or point TOPICS_DATA_DIR elsewhere"
        )
        self.path = path
        self.version = version


class Saved(NamedTuple):
    """The number of a new snapshot, and of its fallback: the newest valid one before it. The fallback is None if there
    is none or nobody can tell. Everything that the fallback needs must stay.
    """

    number: int
    fallback: int | None


def save_snapshot(
    fs: FileSystem, data_dir: str, body: bytes, newest: int = 1 << 64, *, is_tentative: bool = False
) -> Saved:
    """Make the next snapshot durably, then remove all older ones but its fallback. If this raises OSError, no former
    snapshot is lost. Snapshots above `newest` are no fallback: they belong to logs of an interrupted change of the
    shard count. A snapshot that `is_tentative` belongs to logs that do not count yet, so those up to `newest` stay.
    """
    make_dirs(fs, layout.meta_dir(data_dir))
    numbers = layout.list_snapshots(fs, data_dir)
    number = numbers[-1] + 1 if numbers else 1
    prefix = PREFIX.pack(MAGIC, VERSION, len(body))
    checksum = CHECKSUM.pack(xxh3_64_intdigest(prefix + body))
    replace_file(fs, layout.snapshot_path(data_dir, number), prefix + checksum + body)
    # A snapshot that cannot be removed now is removed with the next one; the new one counts either way.
    kept, fallback = _fallbacks(fs, data_dir, [old for old in numbers if old <= newest])
    with suppress(OSError):
        for old in numbers:
            if old not in kept and (old > newest or not is_tentative):
                fs.unlink(layout.snapshot_path(data_dir, old))
    return Saved(number, fallback)


def _fallbacks(fs: FileSystem, data_dir: str, numbers: list[int]) -> tuple[set[int], int | None]:
    """Return (the snapshots to keep, the newest valid one of them). Keep also newer ones that cannot be read now. The
    second value is None if nobody can tell. So a damaged snapshot never pushes out a valid one.
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


def read_snapshot(fs: FileSystem, data_dir: str, number: int) -> bytes:
    """Read the body of one snapshot. Raise BadSnapshot, UnknownSnapshotVersion, OSError."""
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


class ShardPart(msgspec.Struct, frozen=True):
    """One log up to `position`. `state` stays encoded until it is needed: a shard needs only its own."""

    shard: int
    shards: int
    log_id: int
    position: WalPosition
    state: msgspec.Raw

    def decoded(self) -> ShardState:
        """Decode the state. Raise msgspec.DecodeError."""
        return _decode_state(self.state)


class _SnapshotBody(msgspec.Struct):
    shards: list[ShardPart]


class Snapshot(NamedTuple):
    """The snapshot that counts. `skipped` are newer snapshots that cannot be used."""

    number: int
    body: bytes
    parts: list[ShardPart]
    skipped: list[BadSnapshot]

    def part_of(self, log_id: int) -> ShardPart | None:
        """Return the part of a log, None if there is none: then the log is read from its beginning."""
        return next((part for part in self.parts if part.log_id == log_id), None)


_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(ShardState).decode
_decode_body = msgspec.msgpack.Decoder(_SnapshotBody).decode


def encode_part(shard: int, shards: int, log_id: int, position: WalPosition, state: ShardState) -> ShardPart:
    return ShardPart(shard, shards, log_id, position, msgspec.Raw(_encode(state)))


def encode_parts(parts: Iterable[ShardPart]) -> bytes:
    """Encode the body for `save_snapshot`."""
    return _encode(_SnapshotBody(list(parts)))


def decode_parts(body: bytes) -> list[ShardPart]:
    """Decode the body. Raise msgspec.DecodeError."""
    return _decode_body(body).shards


def load_snapshot(fs: FileSystem, data_dir: str) -> Snapshot | None:
    """Load the newest valid snapshot that belongs to the present logs (see `reshard.py`), None without any snapshot.

    Raise RefusedLog if there are snapshots and none can be used, UnknownSnapshotVersion, OSError.
    """
    log_ids = present_log_ids(fs, layout.wal_dir(data_dir))
    skipped: list[BadSnapshot] = []
    for number in reversed(layout.list_snapshots(fs, data_dir)):
        try:
            body = read_snapshot(fs, data_dir, number)
        except BadSnapshot as bad:
            skipped.append(bad)
            continue
        with suppress(msgspec.DecodeError):
            parts = decode_parts(body)
            if {part.log_id for part in parts} <= log_ids:
                return Snapshot(number, body, parts, skipped)
        path = layout.snapshot_path(data_dir, number)
        skipped.append(BadSnapshot(path, HEADER_LEN, "it goes with other logs than those that are here"))
    if not skipped:
        return None
    for group in layout.discover_groups(fs, layout.wal_dir(data_dir)):
        try:  # an unreadable log gives a better error than a snapshot without its log
            read_first_start(fs, group.path)
        except NotALogFile as error:
            path = layout.log_path(group.path, layout.list_log_files(fs, group.path)[0])
            raise RefusedLog(path, f"not a log file: {error}; restore it, or the whole data directory") from error
    newest = skipped[0]
    way_out = "no other snapshot can be used either. Restore the whole data directory from a copy"
    why = f"cannot be used, at offset {newest.offset}: {newest.reason}; {way_out}"
    raise RefusedLog(newest.path, why) from newest


def present_log_ids(fs: FileSystem, root: str) -> set[int]:
    """Return the ids of the logs below `root` that can be read; recovery says what is wrong with any other."""
    found: set[int] = set()
    for group in layout.discover_groups(fs, root):
        with suppress(NotALogFile, RefusedLog, OSError):
            start = read_first_start(fs, group.path)
            if start is not None:
                found.add(start.log_id)
    return found


def redistributed(parts: list[ShardPart], logs: list[NewLog], owner: Callable[[str], int]) -> list[ShardPart]:
    """Return the snapshot parts of the new logs. Each topic goes, with its feeds, into the part of the shard that owns
    its name now; the routers go into the part of shard 0. Raise msgspec.DecodeError.
    """
    states = {log.shard: ShardState([], [], []) for log in logs}
    deleted_ids: set[int] = set()
    for part in parts:
        state = part.decoded()
        deleted_ids |= state.all_deleted_ids()
        for topic in state.topics:
            now = states[owner(topic.name)]
            now.topics.append(topic)
            now.routers.add_feeds(topic.id, state.routers)
        for name in state.deleted_names:
            states[owner(name)].deleted_names.append(name)
        states[ROUTERS_SHARD].routers.add_routers(state.routers)
    for state in states.values():
        # Every shard gets all deleted ids, because nobody knows which shard would own them now.
        state.set_deleted_ids(deleted_ids)
        state.deleted_names.sort()
    begin = WalPosition(1, 0)
    return [encode_part(log.shard, len(logs), log.log_id, begin, states[log.shard]) for log in logs]


def plan_move(fs: FileSystem, data_dir: str, owner: Callable[[str], int]) -> Move | None:
    """Plan the move of the snapshot to a new shard count, after `finish_swap`; None without a snapshot.

    Raise RefusedLog, UnknownSnapshotVersion, OSError.
    """
    snapshot = load_snapshot(fs, data_dir)
    if snapshot is None:
        return None
    paths: dict[int, str] = {}
    for group in layout.discover_groups(fs, layout.wal_dir(data_dir)):
        with suppress(NotALogFile):  # `reshard` reports this error
            start = read_first_start(fs, group.path)
            if start is not None:
                paths[start.log_id] = group.path
    states = [part.decoded() for part in snapshot.parts]
    topic_names = {topic.id: topic.name for state in states for topic in state.topics}
    deleted_ids = {topic_id for state in states for topic_id in state.all_deleted_ids()}

    def before_swap(new_logs: list[NewLog]) -> None:
        body = encode_parts(redistributed(snapshot.parts, new_logs, owner))
        save_snapshot(fs, data_dir, body, snapshot.number, is_tentative=True)

    starts = {paths[part.log_id]: part.position for part in snapshot.parts}
    return Move(starts, topic_names, deleted_ids - topic_names.keys(), before_swap)
