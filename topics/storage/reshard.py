"""Resharding: when the shard count changes, it copies each topic's frames, byte for byte, into its new owner's log.

It runs before any shard does, as the only user of the logs. It writes the new logs beside the old ones and then swaps
them in. So a kill at any step does no harm, and the next start repeats the change:

    what exists              means                                   a repeated start
    wal                      complete                                -
    wal, wal.new             the copy is not complete                removes wal.new, copies again
    wal.old, wal.new         half swapped                            renames wal.old back, copies again
    wal, wal.old             swapped                                 removes wal.old

A new service begins here as well: it makes the directories of all its shards at once, so a directory that is missing
later is damage.

With a snapshot (`Move`), resharding copies only the frames behind its positions. Each new log begins with a file 1 and
goes on behind a new snapshot, which has the same topics at their new owners. Old and new logs differ in their random
`log_id`, and a snapshot names the ids of its logs. So the steps need not be atomic together:

    1. the new logs are complete in wal.new, on the disk
    2. `before_swap` makes the snapshot of the new logs durable: the same topics, each at its new owner, every position
       (1, 0), the new log ids. The old snapshot stays
    3. the swap
    4. a start takes the newest snapshot whose log ids are the ids of the logs in `wal`: the old snapshot after a crash
    before step 3, else the new one. The next snapshot of the service removes those of interrupted runs. Until the
    swap, no snapshot of the old logs is removed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs
from topics.storage.frame import FLAG_MORE, HEADER_LEN, FrameType
from topics.storage.logfile import NotALogFile, RefusedLog, WalIdentity, WalPosition, read_first_start
from topics.storage.recovery import RecoveredFile, Recovery
from topics.storage.wal import FILE_BYTES, WalWriter


class _CreateName(msgspec.Struct):
    """The part of a TOPIC_CREATE's body that resharding needs; `core.control_bodies` has the whole body."""

    name: str


class NewLog(NamedTuple):
    """A shard's log that resharding made."""

    shard: int
    log_id: int


class Move(NamedTuple):
    """The part of a snapshot that `reshard` needs. Choose the snapshot after `finish_swap`: before it, an interrupted
    run may have left no `wal` with log ids to compare.
    """

    starts: Mapping[str, WalPosition]
    """Positions of the snapshot, by the path of the group."""
    topic_names: Mapping[int, str]
    """Live topics of the snapshot."""
    deleted_ids: Collection[int] = ()
    """Topics that are deleted in the snapshot."""
    before_swap: Callable[[list[NewLog]], None] = lambda _new_logs: None
    """Callback that `reshard` calls with all new logs once they are on the disk, before the swap."""


class _OldLog(NamedTuple):
    """A log on the disk and the shard count it was written under."""

    shard: int
    shards: int
    path: str


def needs_reshard(fs: FileSystem, data_dir: str, shards: int) -> bool:
    """True if `reshard` has anything to do before `shards` shards may open their logs. Changes nothing."""
    if any(fs.exists(os.path.join(data_dir, name)) for name in (layout.NEW_WAL_NAME, layout.OLD_WAL_NAME)):
        return True
    root = layout.wal_dir(data_dir)
    groups = layout.discover_groups(fs, root)
    if not groups:
        return shards > 1
    wanted = [layout.Group(shard, layout.group_dir_in(root, shard, shards)) for shard in range(shards)]
    if groups != wanted:
        return True
    try:
        return any(_shards_of(fs, group) not in (None, shards) for group in groups)
    except (NotALogFile, RefusedLog):
        return False  # an unreadable log: the shard's own recovery names the fault exactly


def reshard(
    fs: FileSystem,
    data_dir: str,
    shards: int,
    boot_id: str,
    owner: Callable[[str], int],
    progress: Callable[[float], None],
    *,
    file_bytes: int = FILE_BYTES,
    accept_data_loss: bool = False,
    move: Move | None = None,
) -> list[str]:
    """Bring the logs into the layout of `shards` shards, and return lines for the operator. `owner` returns the shard
    of a topic name, `progress` gets the share that is done, 0 to 1, and `move` comes from the snapshot if there is one.

    If this raises RefusedLog (or a subclass), OSError, WalWriteError or WalSyncError, the old logs still count.
    """
    root = layout.wal_dir(data_dir)
    new_root = os.path.join(data_dir, layout.NEW_WAL_NAME)
    report = finish_swap(fs, data_dir)
    if not needs_reshard(fs, data_dir, shards):
        return report
    make_dirs(fs, data_dir)
    groups = _old_logs(fs, root)
    starts = {} if move is None else move.starts
    if unknown := set(starts) - {group.path for group in groups}:
        why = "the log is missing, and the snapshot goes on in it; restore the whole data directory"
        raise RefusedLog(min(unknown), why)
    copy = _Copy(fs, new_root, shards, boot_id, owner, file_bytes)
    if move is not None:
        copy.add_topics(move.topic_names, move.deleted_ids)
    new_logs: list[NewLog] = []
    complete = True
    try:
        for position, group in enumerate(groups):
            identity = WalIdentity(group.shard, group.shards, boot_id)
            recovery = Recovery(fs, group.path, identity, accept_data_loss, start=starts.get(group.path))
            for batch in recovery:
                copy.add(batch)
                progress((position + recovery.progress) / len(groups))
            report += recovery.report
            complete &= recovery.has_end
        if move is not None:
            new_logs = copy.all_logs()
    finally:
        copy.close(complete)
    if move is not None:
        move.before_swap(new_logs)
    if fs.exists(root):
        fs.rename(root, os.path.join(data_dir, layout.OLD_WAL_NAME))
        fs.fsync_dir(data_dir)
    fs.rename(new_root, root)
    fs.fsync_dir(data_dir)
    report += _remove_old(fs, data_dir)
    progress(1.0)
    return report


class _Copy:
    """The new logs while they are being written."""

    def __init__(
        self, fs: FileSystem, root: str, shards: int, boot_id: str, owner: Callable[[str], int], file_bytes: int
    ) -> None:
        self._fs = fs
        self._root = root
        self._shards = shards
        self._boot_id = boot_id
        self._owner = owner
        self._file_bytes = file_bytes
        self._owners: dict[int, int | None] = {0: 0}
        """Shards by topic id. None: the topic is deleted, and its frames are dropped. Id 0: routers, at shard 0."""
        self._writers: dict[int, WalWriter] = {}
        for shard in range(shards):
            make_dirs(fs, layout.group_dir_in(root, shard, shards))

    def add_topics(self, topic_names: Mapping[int, str], deleted_ids: Collection[int]) -> None:
        """Add the topics of the snapshot, whose TOPIC_CREATE is not copied. The copied frames may belong to a topic
        that the snapshot has as deleted: the shard tells the compactor of a deletion before that has read the frame.
        """
        self._owners |= dict.fromkeys(deleted_ids)
        for topic_id, name in topic_names.items():
            self._owners[topic_id] = self._owner(name)

    def all_logs(self) -> list[NewLog]:
        """Return the log of every shard. Make logs that got no frame: the snapshot goes on in a log of each shard."""
        return [NewLog(shard, self._writer(shard).log_id) for shard in range(self._shards)]

    def add(self, batch: RecoveredFile) -> None:
        """Copy complete writes. Copy neighbours that go to the same shard as one piece."""
        runs: list[tuple[int | None, int, int]] = []
        """(shard or None, start, end) of neighbours."""
        write_start: int | None = None
        write_topic_ids: set[int] = set()
        for offset, total_len, type_, flags, topic_id, _, _, node_len, tag_len, data_len in batch.frames:
            if write_start is None:
                write_start = offset
                write_topic_ids.clear()
            write_topic_ids.add(topic_id)
            if type_ == FrameType.TOPIC_CREATE and topic_id not in self._owners:
                data_at = offset + HEADER_LEN + node_len + tag_len
                body = msgspec.msgpack.decode(batch.buffer[data_at : data_at + data_len], type=_CreateName)
                self._owners[topic_id] = self._owner(body.name)
            if flags & FLAG_MORE:
                continue
            shard = self._shard_of_write(batch, write_start, write_topic_ids)
            end = offset + total_len
            if runs and runs[-1][::2] == (shard, write_start):
                runs[-1] = (shard, runs[-1][1], end)
            else:
                runs.append((shard, write_start, end))
            write_start = None
        pieces: dict[int, list[memoryview]] = {}
        for shard, start, end in runs:
            if shard is not None:
                pieces.setdefault(shard, []).append(batch.buffer[start:end])
        for shard, buffers in pieces.items():
            writer = self._writer(shard)
            writer.commit(writer.plan([len(buffer) for buffer in buffers]), buffers, sync=False)

    def close(self, complete: bool) -> None:
        """Sync and close the new logs; note their ends if they are `complete`."""
        for writer in self._writers.values():
            writer.close(complete=complete)

    def _shard_of_write(self, batch: RecoveredFile, offset: int, topic_ids: set[int]) -> int | None:
        """Return the shard that owns the topics of a write, None if all of them are deleted."""
        try:
            shards = {owner for topic_id in topic_ids if (owner := self._owners[topic_id]) is not None}
        except KeyError as missing:
            raise RefusedLog(
                batch.path,
                f"the write at offset {offset} is of topic {missing.args[0]:#x}, which the log never created; start "
                f"with the former TOPICS_WAL_SHARDS or restore the log from a copy",
            ) from None
        if len(shards) > 1:
            raise RefusedLog(
                batch.path,
                f"the write at offset {offset} is of topics that {self._shards} shards would separate; start with the "
                f"former TOPICS_WAL_SHARDS",
            )
        return shards.pop() if shards else None

    def _writer(self, shard: int) -> WalWriter:
        writer = self._writers.get(shard)
        if writer is None:
            writer = self._writers[shard] = WalWriter(
                self._fs,
                layout.group_dir_in(self._root, shard, self._shards),
                WalIdentity(shard, self._shards, self._boot_id),
                None,
                file_bytes=self._file_bytes,
            )
        return writer


def _old_logs(fs: FileSystem, root: str) -> list[_OldLog]:
    """Return all logs below `root`, flat or sharded. Raise RefusedLog if one of a set is missing."""
    groups = layout.discover_groups(fs, root)
    found: list[_OldLog] = []
    for group in groups:
        try:
            shards = _shards_of(fs, group)
        except NotALogFile as error:
            why = f"its first file is not a log file: {error}; restore it from a copy"
            raise RefusedLog(group.path, why) from error
        if shards is not None:
            found.append(_OldLog(group.shard, shards, group.path))
    paths = {group.path for group in groups}
    for _, shards, path in found:
        for shard in range(shards):
            expected = layout.group_dir_in(root, shard, shards)
            if expected not in paths:
                why = f"the log of shard {shard} is missing ({path} is one of {shards}); restore it"
                raise RefusedLog(expected, why)
    return found


def _shards_of(fs: FileSystem, group: layout.Group) -> int | None:
    """Return the shard count a log was written under, None if it has no file yet."""
    start = read_first_start(fs, group.path)
    return None if start is None else start.shards


def finish_swap(fs: FileSystem, data_dir: str) -> list[str]:
    """Complete or undo the swap of an interrupted run, so that there is one `wal`. Return lines for the operator."""
    root, old_root = layout.wal_dir(data_dir), os.path.join(data_dir, layout.OLD_WAL_NAME)
    if fs.exists(old_root) and not fs.exists(root):
        fs.rename(old_root, root)
        fs.fsync_dir(data_dir)
    _remove_logs(fs, os.path.join(data_dir, layout.NEW_WAL_NAME))
    return _remove_old(fs, data_dir)


def _remove_old(fs: FileSystem, data_dir: str) -> list[str]:
    """Remove `wal.old`. If it has a file that is not part of a log, rename it instead and say so."""
    old_root = os.path.join(data_dir, layout.OLD_WAL_NAME)
    _remove_logs(fs, old_root)
    if not fs.exists(old_root):
        return []
    kept = next(
        path for number in range(1, 1_000_000) if not fs.exists(path := f"{layout.wal_dir(data_dir)}.kept-{number}")
    )
    fs.rename(old_root, kept)
    fs.fsync_dir(data_dir)
    return [f"{kept}: holds files that are not part of a log; move them away, then remove the directory"]


def _remove_logs(fs: FileSystem, root: str) -> None:
    if not fs.exists(root):
        return
    for directory in [*(group.path for group in layout.discover_groups(fs, root) if group.path != root), root]:
        names = fs.listdir(directory)
        ours = [name for name in names if layout.belongs_to_log(name)]
        for name in ours:
            fs.unlink(os.path.join(directory, name))
        if len(ours) == len(names):
            fs.rmdir(directory)
        fs.fsync_dir(os.path.dirname(directory))
