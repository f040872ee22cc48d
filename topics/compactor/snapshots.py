"""The snapshots that a cut makes: a part for each shard, and one file with all parts.

Before that, `forget_ended` removes stage keys of ended batches from the fold, or snapshots would keep them for ever: a
shard forgets such a key when it hears that the batch is over, but logs nothing. The key makes sure that a stage is
published only once. It is needed as long as the stage could be published again: as long as its file exists, or the
sink's file has its batch as decided. Both files are older than the key, so if neither exists, the key is not needed. A
stage's file is removed only when the end of the batch is durable, so a power loss does not bring the decision back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable

from topics.compactor.shard_copy import ShardCopy
from topics.core.topic import Topic
from topics.log import get_logger
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.logfile import WalPosition
from topics.storage.snapshot import ShardPart, Snapshot, encode_part, encode_parts, load_snapshot, save_snapshot
from topics.storage.txn_files import TxnFileDamagedError, read_sink_head, stage_name

log = get_logger()


class Snapshots:
    """The snapshots of one data directory. Owns the number of the newest one, and the position of each log in it."""

    def __init__(self, fs: FileSystem, data_dir: str, shards: int, newest: Snapshot | None) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._shards = shards
        self._newest = None if newest is None else newest.number
        self.size_bytes = 0 if newest is None else os.path.getsize(layout.snapshot_path(data_dir, newest.number))
        """Size of the newest snapshot."""
        self.positions = _positions([] if newest is None else newest.parts)
        """The position up to which the newest snapshot contains each shard's log."""

    def part_of(self, shard_copy: ShardCopy, alive: Callable[[], None]) -> ShardPart:
        """Encode the state of the shard up to the place that the copy has read; call `alive` between topics."""
        forget_ended(self._fs, self._data_dir, shard_copy.fold.topics.values(), alive)
        tail = shard_copy.tail
        return encode_part(shard_copy.shard, self._shards, tail.log_id(), tail.position, shard_copy.fold.state())

    def can_save(self, shards: Collection[int]) -> bool:
        """True if new parts of these shards and old parts of the newest snapshot cover all shards."""
        return bool(shards) and len(self.positions.keys() | set(shards)) == self._shards

    def save(self, parts: dict[int, ShardPart]) -> bool:
        """Write a snapshot. A shard that is not in `parts` keeps its part of the newest one.

        Return True if the former newest snapshot is the fallback now, or there was none. Raise OSError.
        """
        if len(parts) < self._shards:
            newest = load_snapshot(self._fs, self._data_dir)
            assert newest is not None, "this process has saved or loaded it"
            parts = {part.shard: part for part in newest.parts} | parts
        body = encode_parts([parts[shard] for shard in sorted(parts)])
        former = self._newest
        saved = save_snapshot(self._fs, self._data_dir, body, former or 0)
        self._newest = saved.number
        self.size_bytes = len(body)
        self.positions = _positions(parts.values())
        log.debug("snapshot", number=saved.number, size_bytes=len(body))
        if former in (saved.fallback, None):
            return True
        log.error("the former snapshot is damaged, so nothing is removed before the next one", number=former)
        return False


def _positions(parts: Iterable[ShardPart]) -> dict[int, WalPosition]:
    return {part.shard: part.position for part in parts}


def forget_ended(fs: FileSystem, data_dir: str, topics: Iterable[Topic], alive: Callable[[], None]) -> None:
    """Remove the stage keys of batches that are over. Keep keys whose sink's file is unreadable or damaged.

    Read the head of one file for each sink with such keys, and list the stages once. Call `alive` between topics.
    """
    ended: dict[tuple[str, int], bool] = {}
    files: set[str] | None = None
    for topic in topics:
        published = topic.idempotency.published_stages()
        if published:
            alive()
        for sink, batch, stages in published:
            if (sink, batch) not in ended:
                ended[sink, batch] = _is_over(fs, data_dir, sink, batch)
            if not ended[sink, batch]:
                continue
            if files is None:
                try:
                    files = set(fs.listdir(layout.stages_dir(data_dir)))
                except OSError:
                    return
            if not any(stage_name(stage) in files for stage in stages):
                topic.idempotency.forget_stages(sink, batch)


def _is_over(fs: FileSystem, data_dir: str, sink: str, batch: int) -> bool:
    try:
        decided, pending_count = read_sink_head(fs, layout.sinks_dir(data_dir), sink)
    except (OSError, TxnFileDamagedError):
        return False
    return decided != batch or not pending_count
