"""Feeds: a feed is a dest of this shard with the routers into it, their source, and how far they have copied.

All routers into a dest share one source, and so one cursor. A feed begins, changes or ends only once that is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Final

from topics.core.clock import Clock
from topics.core.config import U64_MAX
from topics.core.routers import FeedFrameBody, FeedRouter, FoldedRouters, Router, encode_router
from topics.core.topic import Topic
from topics.log import LastingFailures
from topics.shm.arena import TopicView
from topics.shm.router_memory import RouterBoardWriter, RouterProgress
from topics.storage.frame import FrameType
from topics.storage.topic_frames import control_frame
from topics.walshard.commit.draft import Draft, LogWrite, Steps
from topics.walshard.hosted.hosted import Hosted

_NOT_SHOWN: Final = "a router cannot be shown"


class Hindrance(Enum):
    """The reason why a dest did not get all records of its source at the last try."""

    NONE = 0
    """The dest got all, or has no room for more."""
    SOURCE = 1
    """The source could not be looked at, or read, at that moment. The next try may succeed."""
    LASTING = 2
    """Anything else: a log that cannot be written, a source whose bytes cannot be read."""


class Feed:
    """One dest and its routers. It owns the cursor: one write to the log moves `source_seq` and has the copies."""

    def __init__(self, hosted: Hosted, body: FeedFrameBody) -> None:
        self.hosted = hosted
        self.source = body.source
        self.source_topic_id = body.source_topic_id
        self.source_seq = body.source_seq
        self.routers = body.routers
        self.revision = body.revision
        self.logged_source_seq = body.source_seq
        """`source_seq` of the last cursor in the durable log."""
        self.full = body.full
        """True once the dest or the service had no room for the next record, until the feed has caught up. Records that
        the source evicts meanwhile become a gap; those that it deletes are left out.
        """
        self.no_room_for = 0, 0, 0
        """(source seq before the record that did not fit, its copies, their bytes); zeros without one."""
        self.lost_to_seq: int | None = None
        """Last source seq of the last gap that has one seq for any number of lost records."""
        self.source_head_seq = 0
        """Head of the source at the last look."""
        lost_tail_seq = hosted.topic.lost_tail_seq
        self.repeats_to_seq = U64_MAX if lost_tail_seq and lost_tail_seq == hosted.topic.head_seq else 0
        """Last source seq whose copy the dest may have lost; U64_MAX until the source is looked at."""
        self.hindrance = Hindrance.NONE
        self.retry_ms = 0
        self.failures = 0
        """Number of times in a row that the feed had to wait."""

    @property
    def topic(self) -> Topic:
        return self.hosted.topic

    @property
    def is_ephemeral(self) -> bool:
        """Return whether copies and cursor are in the RAM log."""
        return self.topic.config.durability == "ephemeral"

    @property
    def uncopied(self) -> int:
        """Number of the source's records that are yet to be copied, as far as this life of the shard has seen."""
        return max(0, self.source_head_seq - self.source_seq)

    def has_all(self, sight: TopicView | None) -> bool:
        """Return whether the feed has copied and logged all of its source `sight`, which is None without a source."""
        if sight is None:
            return not self.source_topic_id
        is_there = self.source_topic_id == sight.topic_id and self.source_seq == sight.head_seq
        return is_there and self.logged_source_seq == self.source_seq and not self.full

    def has_no_room(self) -> bool:
        """Return whether the next record is known not to fit into the dest, from an earlier try to copy it."""
        source_seq, records, size_bytes = self.no_room_for
        is_known = records and source_seq == self.source_seq
        if not is_known or not self.topic.config.can_hold(records, size_bytes):
            return False
        room_records, room_bytes = self.topic.room()
        return records > room_records or size_bytes > room_bytes

    def body(self, source_seq: int | None = None, full: bool | None = None) -> FeedFrameBody:
        """Return the body of the next cursor: the current state of the feed, with these values if they are given."""
        source_seq = self.source_seq if source_seq is None else source_seq
        full = self.full if full is None else full
        routers = [FeedRouter(one.router, one.from_seq, one.forwarded_total) for one in self.routers]
        return FeedFrameBody(self.source, self.source_topic_id, source_seq, routers, self.revision + 1, full=full)

    def cursor_frame(self, body: FeedFrameBody, head_seq: int, ts: int) -> bytes:
        """Return a ROUTER_CURSOR frame, the last frame of a write or its only one."""
        return control_frame(FrameType.ROUTER_CURSOR, self.topic.id, ts, encode_router(body), seq=head_seq)

    def logged(self, body: FeedFrameBody, in_ram: bool = False) -> None:
        """Take over a cursor that is in the log."""
        self.source_topic_id, self.source_seq, self.routers = body.source_topic_id, body.source_seq, body.routers
        self.revision, self.full = body.revision, body.full
        if not in_ram:
            self.logged_source_seq = body.source_seq

    def registered(self) -> list[Router]:
        """Return its routers as they are registered."""
        return [one.router for one in self.routers]

    def cursor_write(self, body: FeedFrameBody, now_ms: int, *, sync: bool = False) -> LogWrite:
        """Return the write of a cursor alone, for the durable log."""
        cursor = self.cursor_frame(body, self.topic.head_seq + body.trimmed, now_ms)
        return LogWrite([cursor], partial(self.logged, body), sync=sync)


class Feeds:
    """Owns one shard's feeds, by dest and by source, and the board that shows their progress. Its writes take effect
    once they are logged.
    """

    def __init__(self, board: RouterBoardWriter, clock: Clock) -> None:
        self._board = board
        self._now_ms = clock.now_ms
        self._lasting = LastingFailures(lambda: clock.monotonic_ms() / 1000)
        self.by_dest: dict[int, Feed] = {}
        self.by_source: dict[str, dict[int, Feed]] = {}

    def recovered(self, state: FoldedRouters, hosted: dict[int, Hosted]) -> None:
        """Take over the feeds that are in the logs."""
        for topic_id, body in state.feeds.items():
            dest = hosted.get(topic_id)
            if dest is None:
                continue
            in_ram = state.ram_feeds.get(topic_id)
            ephemeral = dest.topic.config.durability == "ephemeral"
            feed = Feed(dest, body)
            if ephemeral and in_ram is not None and _is_later(in_ram, body):
                feed.logged(in_ram, in_ram=True)
            if feed.routers:
                self._pass_over(feed)
                self._add(feed)
                self.show_progress(feed)

    def follow(self, state: FoldedRouters, dests: Iterable[Hosted]) -> None:
        """Take over the feeds of these dests from the leader's log, and show their progress."""
        for dest in dests:
            feed, body = self.by_dest.get(dest.topic.id), state.feeds.get(dest.topic.id)
            if body is None or not body.routers:
                if feed is not None:
                    self.forget(feed)
                continue
            if feed is None:
                feed = Feed(dest, body)
                self._add(feed)
            for router_id in {one.router.id for one in feed.routers} - {kept.router.id for kept in body.routers}:
                self._board.remove(router_id)
            feed.logged(body)
            self.show_progress(feed)

    def _pass_over(self, feed: Feed) -> None:
        """Skip records that no router let pass, as the board of the former life says. Copies are never skipped: each
        has a cursor in the log.
        """
        for one in feed.routers:
            former = self._board.former.get(one.router.id)
            if former is not None and former.source_topic_id == feed.source_topic_id:
                feed.source_seq = max(feed.source_seq, former.source_seq)

    def start(self, hosted: Hosted, source: str, sight: TopicView | None, routers: list[Router]) -> LogWrite:
        """Return the write that begins a feed behind the head of its source. It has that place for a restart."""
        topic_id, head_seq = (0, 0) if sight is None else (sight.topic_id, sight.head_seq)
        body = FeedFrameBody(source, topic_id, head_seq, [FeedRouter(one, head_seq) for one in routers])
        feed = Feed(hosted, body)

        def begun() -> None:
            self._add(feed)
            self.show_progress(feed)

        return self._write(feed, feed.body(), begun)

    def bind(self, feed: Feed, sight: TopicView) -> Steps[bool]:
        """Begin to copy a source that exists only now, from its first record on. False if the log refuses that."""
        body = feed.body()
        body.source_topic_id = sight.topic_id
        draft = Draft([self._write(feed, body, partial(self.show_progress, feed))])
        yield draft
        return draft.committed

    def reroute(self, feed: Feed, sight: TopicView | None, routers: list[Router]) -> LogWrite:
        """Return the write that replaces a feed's routers by others from its source. New ones begin at its head."""
        head_seq = 0 if sight is None else sight.head_seq
        known = {one.router.id: (one.from_seq, one.forwarded_total) for one in feed.routers}
        body = feed.body()
        body.routers = [FeedRouter(router, *known.get(router.id, (head_seq, 0))) for router in routers]

        def rerouted() -> None:
            self.show_progress(feed)
            for router_id in known.keys() - {router.id for router in routers}:
                self._board.remove(router_id)
            feed.no_room_for = 0, 0, 0

        return self._write(feed, body, rerouted)

    def stop(self, feed: Feed) -> LogWrite:
        """Return the write that ends a feed. The copies in its dest stay."""
        body, former = feed.body(), feed.routers
        body.routers = []

        def stopped() -> None:
            feed.routers = former
            self.forget(feed)

        return self._write(feed, body, stopped)

    def forget(self, feed: Feed) -> None:
        """Forget a feed whose dest was deleted, or into which nothing is copied any more."""
        for one in feed.routers:
            self._board.remove(one.router.id)
        del self.by_dest[feed.topic.id]
        siblings = self.by_source[feed.source]
        del siblings[feed.topic.id]
        if not siblings:
            del self.by_source[feed.source]

    def log_cursor(self, feed: Feed) -> Steps[bool]:
        """Log how far a feed is, in the durable log. False if that fails."""
        draft = Draft([feed.cursor_write(feed.body(), self._now_ms())])
        yield draft
        return draft.committed

    def log_ephemeral(self) -> Steps[None]:
        """Log how far feeds into `ephemeral` dests are: a restart loses their copies, and must not copy them again."""
        behind = [one for one in self.by_dest.values() if one.is_ephemeral and one.logged_source_seq != one.source_seq]
        if behind:
            yield Draft([feed.cursor_write(feed.body(), self._now_ms()) for feed in behind])

    def show_progress(self, feed: Feed) -> None:
        """Show on the board how far the routers of a feed are, once the copies can be read."""
        for one in feed.routers:
            router, total = one.router, one.forwarded_total
            progress = RouterProgress(router.id, router.version, feed.source_topic_id, feed.source_seq, total)
            try:
                self._board.show(progress)
                self._lasting.over(_NOT_SHOWN, router=router.name)
            except OSError as error:
                self._lasting.failed(_NOT_SHOWN, error, router=router.name)  # each page of copies shows it again

    def ram_frames(self, now_ms: int) -> list[bytes]:
        """Return cursor frames of `ephemeral` dests, to be repeated before older files of the RAM log are removed."""
        frames: list[bytes] = []
        for feed in self.by_dest.values():
            if feed.is_ephemeral:
                body = feed.body()
                body.revision = feed.revision
                frames.append(feed.cursor_frame(body, feed.topic.head_seq, now_ms))
        return frames

    def _write(self, feed: Feed, body: FeedFrameBody, then: Callable[[], None]) -> LogWrite:
        def logged() -> None:
            feed.logged(body)
            then()

        write = feed.cursor_write(body, self._now_ms(), sync=True)
        write.apply = logged
        return write

    def _add(self, feed: Feed) -> None:
        self.by_dest[feed.topic.id] = feed
        self.by_source.setdefault(feed.source, {})[feed.topic.id] = feed


def _is_later(in_ram: FeedFrameBody, durable: FeedFrameBody) -> bool:
    """Return whether the RAM log has a later cursor of the same feed than the durable log. An old feed that was stopped
    may have a higher revision, but not the same routers in the same versions.
    """
    same = [one.router for one in in_ram.routers] == [one.router for one in durable.routers]
    return same and in_ram.revision > durable.revision
