"""What a snapshot holds: of each log its state up to a place in it (`core/shard_state.py`). `snapshot.py` has the file.

Body, msgpack: `{"shards": [{"shard", "shards", "log_id", "position": {"file_no", "offset"}, "state"}, …]}`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from topics.core.router_state import ROUTERS_SHARD
from topics.core.shard_state import ShardState
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import NotALogFile, RefusedLog, WalPosition, read_first_start
from topics.storage.reshard import NewLog
from topics.storage.snapshot import BadSnapshot, Loaded, load_snapshot, save_snapshot


class ShardPart(msgspec.Struct, frozen=True):
    """One log up to `position`. `state` stays encoded until it is asked for: a shard wants no other's."""

    shard: int
    shards: int
    log_id: int
    position: WalPosition
    state: msgspec.Raw

    def decoded(self) -> ShardState:
        """Raises msgspec.DecodeError."""
        return _decode_state(self.state)


class _Body(msgspec.Struct):
    shards: list[ShardPart]


class Snapshot(NamedTuple):
    """The one that counts; `skipped` are newer ones that do not."""

    number: int
    parts: list[ShardPart]
    skipped: list[BadSnapshot]

    def part_of(self, log_id: int) -> ShardPart | None:
        """What it has of that log; None when it has nothing: then the log is read from its beginning."""
        return next((part for part in self.parts if part.log_id == log_id), None)


_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(ShardState).decode
_decode_body = msgspec.msgpack.Decoder(_Body).decode


def encode_part(shard: int, shards: int, log_id: int, position: WalPosition, state: ShardState) -> ShardPart:
    return ShardPart(shard, shards, log_id, position, msgspec.Raw(_encode(state)))


def encode_parts(parts: Iterable[ShardPart]) -> bytes:
    """The body for `save_snapshot`."""
    return _encode(_Body(list(parts)))


def decode_parts(body: bytes) -> list[ShardPart]:
    """Raises msgspec.DecodeError."""
    return _decode_body(body).shards


def load(fs: FileSystem, data_dir: str) -> Snapshot | None:
    """The newest snapshot that goes with the logs that are here, None without any.

    Raises RefusedLog when there are some and none will do, UnknownSnapshotVersion, OSError.
    """
    log_ids = present_log_ids(fs, data_dir)

    def goes_with_logs(body: bytes) -> bool:
        with suppress(msgspec.DecodeError):
            return {part.log_id for part in decode_parts(body)} <= log_ids
        return False

    try:
        loaded: Loaded | None = load_snapshot(fs, data_dir, goes_with_logs)
    except BadSnapshot as bad:
        raise RefusedLog(
            bad.path, f"{bad}; no other snapshot will do either. Restore the whole data directory from a copy"
        ) from bad
    return None if loaded is None else Snapshot(loaded.number, decode_parts(loaded.body), loaded.skipped)


def present_log_ids(fs: FileSystem, data_dir: str) -> set[int]:
    """Of the logs whose first file can be read; what is wrong with any other its recovery says."""
    found: set[int] = set()
    for group in layout.discover_groups(fs, layout.wal_dir(data_dir)):
        with suppress(NotALogFile, RefusedLog, OSError):
            start = read_first_start(fs, group.path)
            if start is not None:
                found.add(start.log_id)
    return found


def remove_useless(fs: FileSystem, data_dir: str, used: int) -> None:
    """Leaves snapshot `used` alone: others go with other logs, and must not push it out when the next one is made."""
    for number in layout.list_snapshots(fs, data_dir):
        if number != used:
            fs.unlink(layout.snapshot_path(data_dir, number))
    fs.fsync_dir(layout.meta_dir(data_dir))


def dealt_out(parts: Iterable[ShardPart], new_logs: Iterable[NewLog], owner: Callable[[str], int]) -> list[ShardPart]:
    """The same topics, each in the part of the log that its name's owner has now, with what routers are to it; the
    routers themselves in that of shard 0. Raises msgspec.DecodeError.
    """
    logs = list(new_logs)
    states = {log.shard: ShardState([], [], []) for log in logs}
    deleted_ids: set[int] = set()
    for part in parts:
        state = part.decoded()
        deleted_ids |= state.all_deleted_ids()
        for topic in state.topics:
            now = states[owner(topic.name)]
            now.topics.append(topic)
            now.routers.takes_over(topic.id, state.routers)
        for name in state.deleted_names:
            states[owner(name)].deleted_names.append(name)
        states[ROUTERS_SHARD].routers.knows(state.routers)
    for state in states.values():
        # Nobody knows whose they were; every shard may know of all.
        state.set_deleted_ids(deleted_ids)
        state.deleted_names.sort()
    return [encode_part(log.shard, len(logs), log.log_id, log.start, states[log.shard]) for log in logs]


class Move(NamedTuple):
    """What `reshard` must know of a snapshot, to be passed on to it."""

    starts: dict[str, WalPosition]
    topic_names: dict[int, str]
    before_swap: Callable[[list[NewLog]], None]


def plan_move(fs: FileSystem, data_dir: str, owner: Callable[[str], int]) -> Move | None:
    """For a changed shard count, after `finish_swap`. None without a snapshot: the logs are all there is.

    Raises RefusedLog, UnknownSnapshotVersion, OSError.
    """
    snapshot = load(fs, data_dir)
    if snapshot is None:
        return None
    paths: dict[int, str] = {}
    for group in layout.discover_groups(fs, layout.wal_dir(data_dir)):
        with suppress(NotALogFile):  # `reshard` says so
            start = read_first_start(fs, group.path)
            if start is not None:
                paths[start.log_id] = group.path
    topic_names = {topic.id: topic.name for part in snapshot.parts for topic in part.decoded().topics}

    def before_swap(new_logs: list[NewLog]) -> None:
        remove_useless(fs, data_dir, snapshot.number)
        save_snapshot(fs, data_dir, encode_parts(dealt_out(snapshot.parts, new_logs, owner)))

    return Move({paths[part.log_id]: part.position for part in snapshot.parts}, topic_names, before_swap)
