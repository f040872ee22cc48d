"""The side of a shard whose topics are dests: what it has the sources keep for it, the other end of `followers.py`.

A source keeps what the log of a dest does not hold, once it has been asked and has said so (`Held`). When it wants to
let go of records that are needed for a copy (`LetGo`), their copies are logged first.
"""

from __future__ import annotations

from typing import Final

from topics.storage.kill_points import reached
from topics.walshard.routers.copy_log import CopyLog
from topics.walshard.routers.feed import Feed
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.links import Ended, Follow, Held, LetGo, Links, Unfollow
from topics.walshard.routers.originals import Originals, SourceSight
from topics.walshard.routers.turns import Turns

HELD_WAIT_MS: Final = 1_000
"""So long a feed waits for its source to keep what the log does not have; then it logs every copy at once."""
FOLLOW_AGAIN_SEQS: Final = 1024


class Following:
    """Of one shard's feeds."""

    def __init__(self, links: Links, originals: Originals, feeds: Feeds, copy_log: CopyLog, turns: Turns) -> None:
        self._links = links
        self._originals = originals
        self._feeds = feeds
        self._copy_log = copy_log
        self._turns = turns
        self._let_go: dict[int, int] = {}
        """Dest → up to where its source wants to keep nothing for it any more."""

    def follow(self, feed: Feed) -> None:
        """Tells the source what is to be kept, when that is not what it knows."""
        told, needed = feed.told, (feed.source_topic_id, feed.hold_seq)
        if told is not None and told[0] == needed[0] and feed.held and needed[1] - told[1] < FOLLOW_AGAIN_SEQS:
            return
        if told == needed and not feed.source_topic_id:
            return
        feed.told = needed
        message = Follow(feed.source, feed.topic.id, *needed)
        self._links.send(self._originals.owner(feed.source), message)

    def follow_again(self, shard: int) -> None:
        """That shard has begun a new life: it knows nothing of what it was told."""
        for feed in self._feeds.by_dest.values():
            if self._originals.owner(feed.source) == shard:
                feed.told = None
                self.follow(feed)
                self._turns.give(feed.topic.id)

    def follow_anew(self) -> None:
        """Other shards were greeted: what they were told before, as in answer to a greeting of theirs, they forget."""
        for feed in self._feeds.by_dest.values():
            feed.told, feed.held = None, False
            self.follow(feed)

    def unfollow(self, feed: Feed) -> None:
        """Nothing need be kept for it."""
        self._links.send(self._originals.owner(feed.source), Unfollow(feed.source, feed.topic.id))

    # -- what the source keeps

    def held(self, message: Held) -> None:
        """The source keeps what it was asked to keep."""
        feed = self._feeds.by_dest.get(message.dest_topic_id)
        if feed is not None and feed.source_topic_id == message.source_topic_id:
            feed.held = True
            self._turns.give(message.dest_topic_id)

    def may_log_later(self, feed: Feed) -> bool:
        """Whether copies need not be logged one by one: their source keeps the originals, or is not asked to."""
        return feed.held or not feed.source_topic_id or not _needs_hold(feed)

    def waits_until_ms(self, feed: Feed, sight: SourceSight, now_ms: int) -> int:
        """Until when a feed whose source does not keep what it copies had better wait for that; 0 if it need not."""
        if sight.ephemeral or not _needs_hold(feed):
            return 0
        if feed.asked_ms is None:
            feed.asked_ms = now_ms
        until_ms = feed.asked_ms + HELD_WAIT_MS
        return until_ms if now_ms < until_ms else 0

    def ended(self, message: Ended) -> None:
        """A source was deleted: so far it was to be copied."""
        for dest_id, feed in self._feeds.by_source.get(message.name, {}).items():
            if feed.source_topic_id == message.source_topic_id:
                feed.source_head_seq = max(feed.source_head_seq, message.head_seq)
                self._turns.give(dest_id)

    # -- what it wants to let go of

    @property
    def lets_go(self) -> bool:
        """Whether a source waits for `let_sources_go`."""
        return bool(self._let_go)

    def let_go(self, message: LetGo) -> None:
        """A source asks for it."""
        for dest_id, feed in self._feeds.by_source.get(message.name, {}).items():
            if feed.source_topic_id == message.source_topic_id:
                self._let_go[dest_id] = max(message.up_to_seq, self._let_go.get(dest_id, 0))
                self._turns.give(dest_id)

    def let_sources_go(self) -> None:
        """Gets copies into the log whose source asks for it, as soon as it has been copied up to there, or the dest has
        to wait: what is not copied then is read from segments.
        """
        for dest_id, up_to_seq in list(self._let_go.items()):
            feed = self._feeds.by_dest.get(dest_id)
            if feed is not None and feed.source_seq < up_to_seq and dest_id in self._turns:
                continue
            del self._let_go[dest_id]
            if feed is not None and feed.hosted.rederiving:
                continue  # a segment may lack what was copied: it asks again
            if feed is not None and self._copy_log.settle(feed):
                reached("copies.settled")
                if feed.source_seq < up_to_seq:
                    feed.released_seq = up_to_seq
                feed.told = None
                self.follow(feed)


def _needs_hold(feed: Feed) -> bool:
    """An `ephemeral` dest has its cursor beside its copies."""
    return feed.topic.config.durability != "ephemeral"
