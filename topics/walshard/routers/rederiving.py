"""Dests that are less than their readers know them, because copies that no log has are yet to be made again.

In a new life of a shard its dests are copied up to where their sources are, before anybody sees them. A source that
cannot be seen then is not waited for; its dest is `Hosted.rederiving` until it was, and all of it was copied: meanwhile
nothing else may get its seqs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics.core.errors import TopicsError
from topics.log import get_logger
from topics.shm.router_table import RouterTable
from topics.walshard.hosted import Hosted
from topics.walshard.routers.copier import Copier
from topics.walshard.routers.feed import Feed, Hindrance, room
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.originals import Originals, SourceSight

log = get_logger()

UNREADABLE_MAX_MS: Final = 30_000
"""So long a dest takes no writes because the bytes of its source cannot be read."""


class Rederiving:
    """Of one shard's feeds."""

    def __init__(
        self, feeds: Feeds, copier: Copier, originals: Originals, table: RouterTable, monotonic_ms: Callable[[], int]
    ) -> None:
        self._feeds = feeds
        self._copier = copier
        self._originals = originals
        self._table = table
        self._monotonic_ms = monotonic_ms

    def require_over(self, hosted: Hosted) -> None:
        """Something is going to get seqs of a topic, or to count on its head. `503 not_ready` while those behind its
        head belong to copies that readers may have seen.
        """
        if hosted.rederiving:
            feed = self._feeds.by_dest[hosted.topic.id]
            name, source = feed.topic.name, feed.source
            raise TopicsError(
                "not_ready",
                f"topic {name!r} waits for copies that it had before this start: {self._why(feed)}",
                {"topic": name, "source": source, "replay_progress": self._originals.replay_progress},
            )

    def _why(self, feed: Feed) -> str:
        match feed.hindrance:
            case Hindrance.UNREADABLE:
                return (
                    f"its source {feed.source!r} cannot be read, see the service's log; after"
                    f" {UNREADABLE_MAX_MS // 1000} s it goes on without them"
                )
            case Hindrance.LASTING:
                return "they cannot be made again now, see the service's log; whoever deletes its router gives them up"
        owner = self._originals.owner(feed.source)
        return f"its source {feed.source!r} of shard {owner} is not all there yet"

    def copy_all(self, sight_of: Callable[[Feed], SourceSight | None]) -> None:
        """What can be copied before the shard is at work; all of a chain that is on this shard."""
        some = True
        while some:
            some = False
            for feed in self._feeds.by_dest.values():
                waited = feed.hosted.rederiving
                sight = sight_of(feed)
                more = sight is not None and self.copy_page(feed, sight, before_begin=True)
                some |= more or waited != feed.hosted.rederiving
        for feed in self._feeds.by_dest.values():
            if feed.hosted.rederiving:
                log.info("copies are yet to be made again", topic=feed.topic.name, source=feed.source)
                feed.hosted.publish()

    def copy_page(self, feed: Feed, sight: SourceSight, before_begin: bool = False) -> bool:
        """As `Copier.advance`; the dest is itself again when it has all that its source had, or has no room."""
        if feed.rederive_seq is None:
            feed.rederive_seq = sight.head_seq
        more = self._copier.advance(feed, sight, before_begin)
        if feed.hosted.rederiving and (feed.full or feed.source_seq >= feed.rederive_seq or min(room(feed.topic)) <= 0):
            self._copier.made_again(feed)
        if self._is_unreadable(feed) and feed.hosted.rederiving:
            log.error(
                "copies that readers may have seen are not made again, since the source of a router cannot be read:"
                " their seqs go to what is written next",
                topic=feed.topic.name,
                source=feed.source,
                source_seq=feed.source_seq,
            )
            self._copier.made_again(feed)
        return more

    def _is_unreadable(self, feed: Feed) -> bool:
        """Whether its source has been for so long that nobody waits for it any more. A log that cannot be written is no
        such thing: no write gets into that one either.
        """
        if feed.hindrance != Hindrance.UNREADABLE:
            feed.unreadable_ms = None
            return False
        now_ms = self._monotonic_ms()
        if feed.unreadable_ms is None:
            feed.unreadable_ms = now_ms
        return now_ms - feed.unreadable_ms >= UNREADABLE_MAX_MS

    def is_less(self, feed: Feed, sight: SourceSight) -> bool:
        """Whether the source is less than it was, and is to be waited for. Not in a cycle, where it may wait for this
        very dest: its records up to there are copied, and the dest waits for no more.
        """
        if not sight.rederiving:
            return False
        if feed.topic.name not in self._table.registry.upstream(feed.source):
            return True
        if feed.source_seq > sight.head_seq:
            self._copier.made_again(feed)
            return True
        return False
