"""The body of a snapshot: what each shard's log says up to a position in it (`snapshot.py` has what surrounds the body).

    {"logs": [{"shard": int, "shards": int, "log_id": u64, "position": {"file_no": u64, "offset": u64},
     "state": […]}, …]}

One entry for every shard, by number; `state` is `core.shard_state.ShardState`. A start reads each log from its position
on. The snapshot is of use only with the logs that it names by their random ids.
"""

from __future__ import annotations

import msgspec

from topics.core.shard_state import ShardState
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import NotALogFile, WalPosition, read_first_start
from topics.storage.snapshot import load_snapshot


class LogState(msgspec.Struct):
    """One shard's log, and what it says up to `position`."""

    shard: int
    shards: int
    log_id: int
    position: WalPosition
    state: ShardState


class _Body(msgspec.Struct):
    logs: list[LogState]


class _LogName(msgspec.Struct):
    shard: int
    shards: int
    log_id: int


class _Names(msgspec.Struct):
    logs: list[_LogName]


class SnapshotState(msgspec.Struct):
    """The snapshot that a start begins with; `notes` has a line for each newer one that was passed over."""

    number: int
    logs: list[LogState]
    notes: list[str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode
_decode_names = msgspec.msgpack.Decoder(_Names).decode


def encode_snapshot(logs: list[LogState]) -> bytes:
    """The body for `snapshot.save_snapshot`."""
    return _encode(_Body(logs))


def decode_snapshot(body: bytes) -> list[LogState]:
    """Raises msgspec.DecodeError for what no release has written."""
    return _decode(body).logs


def goes_with_logs(fs: FileSystem, data_dir: str, body: bytes) -> bool:
    """Whether the logs that are in `wal` are those that the snapshot names. Raises OSError, UnknownLogVersion."""
    for name in _decode_names(body).logs:
        try:
            start = read_first_start(fs, layout.group_dir(data_dir, name.shard, name.shards))
        except (NotALogFile, FileNotFoundError):
            return False
        if start is None or start.log_id != name.log_id:
            return False
    return True


def load_state(fs: FileSystem, data_dir: str) -> SnapshotState | None:
    """The newest snapshot that can be used, None when there is none at all.

    Raises BadSnapshot when there are some and none will do, UnknownSnapshotVersion, OSError.
    """
    loaded = load_snapshot(fs, data_dir, lambda body: goes_with_logs(fs, data_dir, body))
    if loaded is None:
        return None
    return SnapshotState(loaded.number, decode_snapshot(loaded.body), [str(skipped) for skipped in loaded.skipped])
