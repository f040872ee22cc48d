"""The dests of routers on one shard: which there are, from which source each, and up to where it is copied.

What begins, changes or ends a feed is logged before it counts. How a page is copied is in `copier.py`, how copies and
cursors get into the logs in `copy_log.py`.
"""

from __future__ import annotations

from topics.core.routers import FeedBody, FeedRouter, Router, RouterState
from topics.log import get_logger
from topics.shm.router_board import RouterBoardWriter, RouterProgress
from topics.storage.frame import Bytes
from topics.walshard.hosted import Hosted
from topics.walshard.routers.copy_log import CopyLog
from topics.walshard.routers.feed import Feed
from topics.walshard.routers.originals import SourceSight

log = get_logger()


class Feeds:
    """One shard's feeds. What returns a bool returns False when it could not be logged: nothing has changed then."""

    def __init__(self, board: RouterBoardWriter, copy_log: CopyLog) -> None:
        self._board = board
        self._copy_log = copy_log
        self.by_dest: dict[int, Feed] = {}
        self.by_source: dict[str, dict[int, Feed]] = {}

    def recovered(self, state: RouterState, hosted: dict[int, Hosted]) -> None:
        """The feeds that the logs speak of, before anything is copied."""
        for topic_id in state.feeds.keys() | state.ram_feeds.keys():
            dest = hosted.get(topic_id)
            body = state.feeds.get(topic_id)
            in_ram = state.ram_feeds.get(topic_id)
            if dest is None or body is None:
                continue
            ephemeral = dest.topic.config.durability == "ephemeral"
            if ephemeral and in_ram is not None and in_ram.revision > body.revision:
                body = in_ram
            if body.routers:
                feed = Feed(dest, body)
                self._note_seen(feed)
                self._add(feed)
                # Copies are derived of what exists, for a dest that has room.
                dest.rederiving = bool(not ephemeral and body.source_topic_id and not body.full)

    def _note_seen(self, feed: Feed) -> None:
        """What readers may have seen of it before this life."""
        for one in feed.routers:
            progress = self._board.former.get(one.router.id)
            if progress is not None and progress.source_topic_id == feed.source_topic_id:
                feed.seen_source_seq = max(feed.seen_source_seq, progress.source_seq)
                feed.seen_totals[one.router.id] = progress.forwarded_total

    def start(self, hosted: Hosted, source: str, sight: SourceSight | None, routers: list[Router]) -> bool:
        """A dest that nothing was copied into so far. Logged, so that it begins there and nowhere else."""
        head_seq = 0 if sight is None else sight.head_seq
        body = FeedBody(
            source, 0 if sight is None else sight.topic_id, head_seq, [FeedRouter(one, head_seq) for one in routers]
        )
        feed = Feed(hosted, body)
        if not self._copy_log.log_cursor(feed, sync=True):
            return False
        self._add(feed)
        self.show_progress(feed)
        return True

    def bind(self, feed: Feed, sight: SourceSight) -> bool:
        """The source exists now: it is copied from its first record on."""
        if feed.source_topic_id:
            return True
        feed.source_topic_id = sight.topic_id
        if not self._copy_log.log_cursor(feed, sync=True):
            feed.source_topic_id = 0
            return False
        self.show_progress(feed)
        return True

    def reroute(self, feed: Feed, sight: SourceSight | None, routers: list[Router]) -> bool:
        """Other routers, or changed ones, into the same dest from the same source. New ones begin at its head."""
        if not self._copy_log.log_copies(feed):
            return False
        head_seq = 0 if sight is None else sight.head_seq
        known = {one.router.id: one for one in feed.routers}
        former = feed.routers
        feed.routers = [
            FeedRouter(router, known[router.id].from_seq, known[router.id].forwarded_total)
            if router.id in known
            else FeedRouter(router, head_seq)
            for router in routers
        ]
        if not self._copy_log.log_cursor(feed, sync=True):
            feed.routers = former
            return False
        for router_id in known.keys() - {router.id for router in routers}:
            self._board.remove(router_id)
        feed.forget_matches()
        feed.no_room_for = 0, 0, 0
        self.show_progress(feed)
        return True

    def stop(self, feed: Feed) -> bool:
        """Nothing is copied into the dest any more; what was stays."""
        if not self._copy_log.log_copies(feed):
            return False
        former, feed.routers = feed.routers, []
        if not self._copy_log.log_cursor(feed, sync=True):
            feed.routers = former
            return False
        self.forget(feed, former)
        return True

    def forget(self, feed: Feed, routers: list[FeedRouter] | None = None) -> None:
        """The dest is gone, or nothing is copied into it any more."""
        for one in feed.routers if routers is None else routers:
            self._board.remove(one.router.id)
        self._copy_log.forget(feed)
        del self.by_dest[feed.topic.id]
        siblings = self.by_source[feed.source]
        del siblings[feed.topic.id]
        if not siblings:
            del self.by_source[feed.source]

    def _add(self, feed: Feed) -> None:
        self.by_dest[feed.topic.id] = feed
        self.by_source.setdefault(feed.source, {})[feed.topic.id] = feed

    def show_progress(self, feed: Feed) -> None:
        """The board says how far its routers are; after the copies can be read."""
        for one in feed.routers:
            router = one.router
            try:
                self._board.show(
                    RouterProgress(
                        router.id, router.version, feed.source_topic_id, feed.source_seq, one.forwarded_total
                    )
                )
            except OSError as error:
                log.error("a router cannot be shown", router=router.name, error=str(error))

    def ram_frames(self, now_ms: int) -> list[Bytes]:
        """Cursors of `ephemeral` dests, to be repeated where older files of the RAM log go."""
        feeds = [feed for feed in self.by_dest.values() if feed.topic.config.durability == "ephemeral"]
        return [feed.cursor_frame(feed.body(), feed.topic.head_seq, now_ms) for feed in feeds]
