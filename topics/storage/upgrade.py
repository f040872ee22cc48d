"""The format mark of a data directory: by it a release recognizes data that it must not use.

The first start makes the mark `meta/format.json`, before any shard runs. Version 2 means that a router's copies are in
the log of their dest before a reader sees them. Data without the mark are new, or come from release 0.1.0. That release
kept copies in RAM, logged only the cursor of their dest, and made the copies behind the cursor again at each start.
This release does not make them again, so it would give the seqs of copies that readers have seen to other records.
Therefore it starts on data of 0.1.0 only if the cursor of every dest is at the head of its source: then all copies are
in the logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from topics.core.fold import FoldError
from topics.core.routers import FeedFrameBody
from topics.core.shard_state import ShardState
from topics.storage import layout
from topics.storage.filesystem import FileSystem, ReadOnlyFileSystem, boot_id, read_all
from topics.storage.log_fold import OfflineFold
from topics.storage.logfile import NotALogFile, RefusedLog, WalIdentity, read_first_start
from topics.storage.notes import note_path, write_note_file
from topics.storage.recovery import Recovery
from topics.storage.snapshot import load_snapshot

VERSION: Final = 2


class _Mark(msgspec.Struct):
    version: int


def write_mark(fs: FileSystem, data_dir: str) -> None:
    """Make the mark of this release durably. Raise OSError."""
    write_note_file(fs, data_dir, layout.FORMAT_NAME, msgspec.json.encode(_Mark(VERSION)))


def has_mark(fs: FileSystem, data_dir: str) -> bool:
    """True if the mark allows this release to use the data, False if they have no mark. Raise RefusedLog if this
    release must never use them, OSError.
    """
    path = note_path(data_dir, layout.FORMAT_NAME)
    if not fs.exists(path):
        return False
    try:
        version = msgspec.json.decode(read_all(fs, path), type=_Mark).version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedLog(path, f"cannot be decoded: {error}; restore it from a copy") from error
    if version != VERSION:
        raise RefusedLog(
            path,
            f"format version {version} is unknown (this release knows version {VERSION}); start the release that wrote "
            f"it, or point TOPICS_DATA_DIR elsewhere",
        )
    return True


class RoutedCopies:
    """The copies of routers in the logs of a data directory. Add the state of every log, then ask for a problem."""

    def __init__(self) -> None:
        self._source_heads: dict[int, int] = {}
        """Heads by topic id, without `ephemeral` topics: no log has their heads."""
        self._feeds: dict[str, FeedFrameBody] = {}
        """Feeds by the name of their dest, as the logs have them."""

    def add(self, state: ShardState) -> None:
        """Add one log."""
        feeds = state.routers.feeds
        for topic in state.topics:
            if topic.config.durability == "ephemeral":
                continue
            self._source_heads[topic.id] = topic.head_seq
            if topic.id in feeds:
                self._feeds[topic.name] = feeds[topic.id]

    def problem(self) -> str | None:
        """Return why this release must not start on the data, and the way out; None if it may."""
        names = sorted(name for name, feed in self._feeds.items() if not self._is_copied(feed))
        if not names:
            return None
        return (
            f"version 0.1.0 has left copies of routers that are in no log, of {len(names)} topics, the "
            f"first is {names[0]!r}: start version 0.1.0 on the directory once more, write nothing for two checkpoint "
            f"intervals (2 minutes by default), stop it with SIGTERM, then start this version"
        )

    def _is_copied(self, feed: FeedFrameBody) -> bool:
        # 0.1.0 logged the copies of a full dest at once, and made no more while it was full.
        if not feed.routers or feed.full or not feed.source_topic_id:
            return True
        return self._source_heads.get(feed.source_topic_id, feed.source_seq) == feed.source_seq


def check_upgrade(data_dir: str, accept_data_loss: bool, progress: Callable[[float], None]) -> None:
    """Check the logs and change nothing; `progress` gets the share that is done, 0 to 1. No change of the shard count
    may be under way. Raise RefusedLog if this release must not use the data, UnknownSnapshotVersion, OSError.
    """
    fs = ReadOnlyFileSystem()
    copies = RoutedCopies()
    groups = layout.discover_groups(fs, layout.wal_dir(data_dir))
    snapshot = load_snapshot(fs, data_dir)
    for done, group in enumerate(groups):
        try:
            first = read_first_start(fs, group.path)
            if first is None:
                continue
            part = None if snapshot is None else snapshot.part_of(first.log_id)
            fold = OfflineFold(part)
            identity = WalIdentity(group.shard, first.shards, boot_id())
            start = None if part is None else part.position
            recovery = Recovery(fs, group.path, identity, accept_data_loss, start=start)
            for batch in recovery:
                fold.add(batch)
                progress((done + recovery.progress) / len(groups))
            copies.add(fold.state())
        except NotALogFile as error:
            if not accept_data_loss:
                raise RefusedLog(group.path, f"not a log: {error}; restore it from a copy") from error
        except (FoldError, msgspec.DecodeError) as error:
            raise RefusedLog(group.path, f"{error}; restore the data directory from a copy") from error
    progress(1.0)
    if problem := copies.problem():
        raise RefusedLog(data_dir, problem)
