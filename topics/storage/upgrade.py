"""The check of data that release 0.1.0 has written, before this release goes on with them.

0.1.0 kept copies of routers in RAM, behind the cursor in the log of their dest, and made them again at each start. This
release does not: it would give the seqs of copies that readers have seen to other records. So it goes on only if the
cursor of every dest is at the head of its source, and all copies are in the logs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from topics.core.fold import FoldError
from topics.core.routers import FeedFrameBody
from topics.core.shard_state import ShardState
from topics.storage import layout
from topics.storage.filesystem import LookOnlyFileSystem, boot_id
from topics.storage.log_fold import Folding
from topics.storage.logfile import NotALogFile, RefusedLog, WalIdentity, read_first_start
from topics.storage.recovery import recover_group
from topics.storage.snapshot import load


class _Dest(NamedTuple):
    name: str
    feed: FeedFrameBody


class RoutedCopies:
    """How far the logs of a data directory have the copies of routers. It is given what each log says, then asked."""

    def __init__(self) -> None:
        self._source_heads: dict[int, int] = {}
        """By topic id. Topics that are `ephemeral` are left out: their heads are in no log."""
        self._dests: list[_Dest] = []

    def add(self, state: ShardState) -> None:
        """Takes in one log."""
        feeds = state.routers.feeds
        for topic in state.topics:
            if topic.config.durability == "ephemeral":
                continue
            self._source_heads[topic.id] = topic.head_seq
            if topic.id in feeds:
                self._dests.append(_Dest(topic.name, feeds[topic.id]))

    def problem(self, data_dir: str) -> str | None:
        """Says why this release must not start on the data, and the way out; None when it may."""
        names = sorted(dest.name for dest in self._dests if not self._is_settled(dest.feed))
        if not names:
            return None
        return (
            f"{data_dir}: version 0.1.0 has left copies of routers that are in no log, of {len(names)} topics, the "
            f"first is {names[0]!r}: start version 0.1.0 on the directory once more, write nothing for two checkpoint "
            f"intervals (2 minutes by default), stop it with SIGTERM, then start this version"
        )

    def _is_settled(self, feed: FeedFrameBody) -> bool:
        # 0.1.0 logged the copies of a full dest at once, and had no more of them while it was full.
        if not feed.routers or feed.full or not feed.source_topic_id:
            return True
        return self._source_heads.get(feed.source_topic_id, feed.source_seq) == feed.source_seq


def check_upgrade(data_dir: str, accept_data_loss: bool, progress: Callable[[float], None]) -> None:
    """Reads the logs and changes nothing; `progress` hears of the share that is done, 0 to 1. No move to another shard
    count may be under way.

    Raises RefusedLog when this release must not go on with the data, UnknownSnapshotVersion, OSError.
    """
    fs = LookOnlyFileSystem()
    copies = RoutedCopies()
    groups = layout.discover_groups(fs, layout.wal_dir(data_dir))
    snapshot = load(fs, data_dir)
    for done, group in enumerate(groups):
        try:
            first = read_first_start(fs, group.path)
            if first is None:
                continue
            part = None if snapshot is None else snapshot.part_of(first.log_id)
            folding = Folding(part)
            identity = WalIdentity(group.shard, first.shards, boot_id())
            start = None if part is None else part.position
            recovery = recover_group(fs, group.path, identity, accept_data_loss, start=start)
            for batch in recovery:
                folding.add(batch)
                progress((done + recovery.progress) / len(groups))
            copies.add(folding.state())
        except NotALogFile as error:
            if not accept_data_loss:
                raise RefusedLog(group.path, f"{group.path}: not a log: {error}; restore it from a copy") from error
        except (FoldError, msgspec.DecodeError) as error:
            raise RefusedLog(group.path, f"{group.path}: {error}; restore the data directory from a copy") from error
    progress(1.0)
    if problem := copies.problem(data_dir):
        raise RefusedLog(data_dir, problem)
