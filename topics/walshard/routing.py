"""Routers as a shard sees them: those into its topics, which it copies; its topics that others copy; on shard 0, all.

Everything that has to do with routers and is not a topic's own happens here, between the groups of the shard. What is
forwarded is pulled: a source says no more than that it has changed, and the shard of the dest reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics.core.errors import TopicsError
from topics.core.router_state import FeedBody
from topics.log import get_logger
from topics.shm import messages
from topics.shm.control import ProcessCell
from topics.shm.messages import (
    CatchUp,
    CaughtUp,
    DeleteRouter,
    PutRouter,
    RemoveRouters,
    RouterCall,
    SyncRouters,
    SyncRoutersReply,
)
from topics.shm.router_table import RouterTable
from topics.storage.kill_points import reached
from topics.walshard import registrar
from topics.walshard.catalog import Catalog
from topics.walshard.feed import Feed
from topics.walshard.feeds import Feeds
from topics.walshard.followers import Followers
from topics.walshard.hosted import Hosted
from topics.walshard.links import Changed, Follow, Greet, Held, LetGo, Links, PeerMessage, RoutersGone, Unfollow
from topics.walshard.operation import Answer
from topics.walshard.originals import Originals, SourceSight, UnknownError
from topics.walshard.registrar import Registrar

log = get_logger()

PAGES_PER_STEP: Final = 4
"""Between which requests have their turn."""
PAGES_PER_CALL: Final = 64
HELD_WAIT_MS: Final = 1_000
"""So long a feed waits for its source to keep what the log does not have; then it logs every copy at once."""
FAILED_WAIT_MS: Final = 1_000
FOLLOW_AGAIN_SEQS: Final = 1024
DEST_WAIT_MS: Final = 30_000
"""A router whose dest was never made is the remains of a PUT that nobody answered."""
_IDS_PER_MESSAGE: Final = 256


class Routing:
    """One shard's. `registrar` only on shard 0."""

    def __init__(
        self,
        catalog: Catalog,
        links: Links,
        table: RouterTable,
        originals: Originals,
        feeds: Feeds,
        followers: Followers,
        registrar: Registrar | None,
        cell: ProcessCell,
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._links = links
        self._table = table
        self._originals = originals
        self.feeds = feeds
        self._followers = followers
        self._registrar = registrar
        self._cell = cell
        self._monotonic_ms = monotonic_ms
        self._ready: dict[int, None] = {}
        """Dests whose feeds may have something to copy, in the order in which they have their turn."""
        self._waiting: dict[int, None] = {}
        """Dests whose feeds try again at their `retry_ms`."""
        self._let_go: dict[int, int] = {}
        """Dest → up to where its source wants to keep nothing for it any more."""
        self._due: set[str] = set()
        """Dests whose routers are not yet as the table says."""
        self._missing: dict[str, int] = {}
        """Dests that do not exist, and since when."""
        self._dead: set[int] = set()
        """Routers that go with a topic of theirs; shard 0 has been told."""
        self._forwarded_before = cell.get("router_copies")
        self._oversize_before = cell.get("router_oversize")

    # -- told by the shard

    def changed(self, hosted: Hosted) -> None:
        """A topic was published: who copies it is told, and it may have room for copies that wait."""
        self._followers.changed(hosted)
        if self._waiting and hosted.topic.id in self._waiting:
            del self._waiting[hosted.topic.id]
            self._ready[hosted.topic.id] = None

    def came(self, hosted: Hosted) -> None:
        """A topic was made."""
        self._refresh()
        self._followers.came(hosted)
        if self._missing.pop(hosted.topic.name, None) is not None:
            self._due.add(hosted.topic.name)

    def lets_go(self, hosted: Hosted, up_to_seq: int) -> bool:
        """Whether records of a topic may leave the log, up to there; if not, that is seen to: ask again."""
        return self._followers.lets_go(hosted, up_to_seq)

    def before_log(self, hosted: Hosted) -> None:
        """Something is going to be logged for a topic: its copies come first. `503 storage_unavailable` if not."""
        feed = self.feeds.by_dest.get(hosted.topic.id) if self.feeds.by_dest else None
        if feed is not None and not self.feeds.prepare(feed):
            raise TopicsError(
                "storage_unavailable",
                f"what routers copied into topic {hosted.topic.name!r} cannot be logged now; see the service's log",
            )

    def gone(self, hosted: Hosted) -> None:
        """A topic was deleted: its routers go with it."""
        self._refresh()
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is not None:
            self._unfollow(feed)
            self.feeds.forget(feed)
        self._followers.gone(hosted)
        self._bury([router.id for router in self._table.registry.touching(hosted.topic.name)])

    def cursor_at_head(self, dest_topic_id: int) -> FeedBody | None:
        """See `Feeds.cursor_at_head`."""
        return self.feeds.cursor_at_head(dest_topic_id)

    # -- asked by frontends

    def take(self, call: RouterCall, answer: Answer) -> None:
        """Answers. Everything prepared is committed."""
        match call:
            case CatchUp():
                done = self._catch_up(call.dest)
                answer.reply = messages.encode_reply(answer.request_id, CaughtUp(done))
            case SyncRouters():
                answer.reply = messages.encode_reply(answer.request_id, self._sync(call))
            case PutRouter() | DeleteRouter() | RemoveRouters():
                assert self._registrar is not None, "only shard 0 is asked for that"
                if isinstance(call, PutRouter):
                    self._registrar.put(call, answer)
                elif isinstance(call, DeleteRouter):
                    self._registrar.delete(call, answer)
                else:
                    self._registrar.remove(call, answer)

    def _catch_up(self, dest: str) -> bool:
        """Copies everything the source has now; False when that is too much for one go."""
        self._reconcile()
        hosted = self._catalog.find(dest)
        feed = None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)
        if feed is None:
            return True
        return self._copy_all(feed, PAGES_PER_CALL)

    def _sync(self, call: SyncRouters) -> SyncRoutersReply:
        self._reconcile()
        self._turn()
        hosted = self._catalog.find(call.dest)
        feed = None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)
        routers = [] if feed is None else [(router.id, router.version) for router in feed.registered()]
        done = call.dest not in self._due
        return SyncRoutersReply(
            done and (not call.router_id or (call.router_id, call.version) in routers),
            feed is None or feed.held or not feed.source_topic_id or not self._needs_hold(feed),
        )

    # -- between groups

    @property
    def idle(self) -> bool:
        return self._links.idle and not self._ready and not self._let_go and not self._table.stale

    @property
    def stuck(self) -> bool:
        """Something waits that no signal announces, and not for long."""
        return bool(self._waiting) or self._links.stuck

    def pump(self, pages_max: int = PAGES_PER_STEP) -> bool:
        """Takes what others say and copies some pages; True if there was anything to do."""
        worked = self._turn()
        if self._table.stale or self._due:
            self._reconcile()
        if self._waiting:
            now_ms = self._monotonic_ms()
            for dest_id in [dest_id for dest_id in self._waiting if self._retry_ms(dest_id) <= now_ms]:
                del self._waiting[dest_id]
                self._ready[dest_id] = None
        for _ in range(pages_max):
            if not self._ready:
                break
            worked = True
            dest_id = next(iter(self._ready))
            del self._ready[dest_id]
            feed = self.feeds.by_dest.get(dest_id)
            if feed is not None and self._advance_guarded(feed):
                self._ready[dest_id] = None
        if self._let_go:
            self._let_sources_go()
        if worked:
            self.feeds.keep_within_bounds()
            self._cell.set("router_copies", self._forwarded_before + self.feeds.forwarded)
            self._cell.set("router_oversize", self._oversize_before + self.feeds.oversize)
            self._links.flush()
        return worked

    def sweep(self) -> None:
        """Once a second."""
        self._refresh()
        now_ms = self._monotonic_ms()
        for dest, since_ms in list(self._missing.items()):
            if now_ms - since_ms > DEST_WAIT_MS:
                del self._missing[dest]
                self._bury([router.id for router in self._table.registry.into(dest)])
        self._dead &= {router.id for router in self._table.registry.by_name.values()} if self._dead else set()
        self._tell_dead(sorted(self._dead))
        self.feeds.sweep()
        lag = 0
        for feed in list(self.feeds.by_dest.values()):
            self._ready[feed.topic.id] = None
            self._follow(feed)
            lag += max(0, feed.source_head_seq - feed.source_seq)
        self._followers.review()
        self._cell.set("router_lag_records", lag)
        self._cell.set("router_unlogged_bytes", self.feeds.unlogged_bytes)
        self._links.flush()

    def close(self) -> None:
        """A clean end: `ephemeral` dests go on exactly where they are."""
        self.feeds.sweep()

    def rederive(self) -> None:
        """In a new life, before anyone sees it: the copies that were there and are not in the log."""
        some = True
        while some:
            some = False
            for feed in self.feeds.by_dest.values():
                sight = self._sight(feed)
                if sight is not None and self.feeds.advance(feed, sight, rederiving=True):
                    some = True
        for feed in self.feeds.by_dest.values():
            self.feeds.show_progress(feed)
            self._ready[feed.topic.id] = None
        self._refresh()
        self._due.update(router.spec.dest for router in self._table.registry.by_name.values())
        self._due = {dest for dest in self._due if self._originals.owner(dest) == self._links.shard}
        for shard in range(self._links.shards):
            if shard != self._links.shard:
                self._links.send(shard, Greet())
        for feed in self.feeds.by_dest.values():
            self._follow(feed)
        self._links.flush()

    # -- feeds and the table

    def _refresh(self) -> None:
        if self._table.stale:
            own = self._links.shard
            self._due.update(name for name in self._table.refresh() if self._originals.owner(name) == own)

    def _reconcile(self) -> None:
        """Brings the feeds into line with the table."""
        self._refresh()
        for dest in sorted(self._due):
            try:
                if self._reconcile_dest(dest):
                    self._due.discard(dest)
            except UnknownError:
                continue

    def _reconcile_dest(self, dest: str) -> bool:
        """False to be called again; so does UnknownError."""
        wanted = [router for router in self._table.registry.into(dest) if router.id not in self._dead]
        hosted = self._catalog.find(dest)
        if hosted is None:
            if wanted:
                self._missing.setdefault(dest, self._monotonic_ms())
            return True
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is not None and (not wanted or feed.source != wanted[0].spec.source):
            self._copy_all(feed, PAGES_PER_CALL)
            if not self.feeds.stop(feed):
                return False
            self._unfollow(feed)
            feed = None
        if not wanted:
            return True
        source = wanted[0].spec.source
        if feed is None:
            if not self.feeds.start(hosted, source, self._originals.look(source), wanted):
                return False
            self._follow(self.feeds.by_dest[hosted.topic.id])
        elif feed.registered() != wanted:
            # What was acknowledged before is forwarded by the routers as they were.
            self._copy_all(feed, PAGES_PER_CALL)
            if not self.feeds.reroute(feed, self._originals.look(source), wanted):
                return False
        self._ready[hosted.topic.id] = None
        return True

    def _bury(self, router_ids: list[int]) -> None:
        self._dead.update(router_ids)
        self._tell_dead(router_ids)

    def _tell_dead(self, router_ids: list[int]) -> None:
        for at in range(0, len(router_ids), _IDS_PER_MESSAGE):
            self._links.send(registrar.SHARD, RoutersGone(router_ids[at : at + _IDS_PER_MESSAGE]))

    # -- copying

    def _copy_all(self, feed: Feed, pages_max: int) -> bool:
        """False when there is more than so many pages."""
        return not all(self._advance(feed, demanded=True) for _ in range(pages_max))

    def _advance_guarded(self, feed: Feed) -> bool:
        """One router must not take down its shard, nor come back after a restart to do it again."""
        try:
            return self._advance(feed, demanded=False)
        except Exception:
            log.exception("a router failed", source=feed.source, dest=feed.topic.name)
            feed.retry_ms = self._monotonic_ms() + FAILED_WAIT_MS
            self._waiting[feed.topic.id] = None
            return False

    def _advance(self, feed: Feed, demanded: bool) -> bool:
        """A page; True when there may be another. `demanded`: somebody waits for it."""
        feed.retry_ms = 0
        sight = self._sight(feed)
        if sight is None:
            return False
        if not feed.held and not demanded and self._needs_hold(feed, sight):
            now_ms = self._monotonic_ms()
            if feed.asked_ms is None:
                feed.asked_ms = now_ms
            if now_ms - feed.asked_ms < HELD_WAIT_MS:
                feed.retry_ms = feed.asked_ms + HELD_WAIT_MS
                self._waiting[feed.topic.id] = None
                return False
        more = self.feeds.advance(feed, sight)
        if not more and feed.retry_ms:
            self._waiting[feed.topic.id] = None
        return more

    def _sight(self, feed: Feed) -> SourceSight | None:
        """The source, None when there is nothing to copy from it now."""
        try:
            sight = self._originals.look(feed.source)
        except UnknownError:
            feed.retry_ms = self._monotonic_ms() + HELD_WAIT_MS
            self._waiting[feed.topic.id] = None
            return None
        if feed.source_topic_id and (sight is None or sight.topic_id != feed.source_topic_id):
            router_ids = [router.id for router in feed.registered() if router.id not in self._dead]
            if router_ids:
                self._bury(router_ids)
            return None
        if sight is None:
            return None
        if not feed.source_topic_id:
            if not self.feeds.bind(feed, sight):
                return None
            self._follow(feed)
        return sight

    def _needs_hold(self, feed: Feed, sight: SourceSight | None = None) -> bool:
        return feed.topic.config.durability != "ephemeral" and not (sight is not None and sight.ephemeral)

    def _retry_ms(self, dest_id: int) -> int:
        feed = self.feeds.by_dest.get(dest_id)
        return 0 if feed is None else feed.retry_ms

    # -- links

    def _follow(self, feed: Feed) -> None:
        """Tells the source what is to be kept, when that is not what it knows."""
        told, needed = feed.told, (feed.source_topic_id, feed.hold_seq)
        if told is not None and told[0] == needed[0] and feed.held and needed[1] - told[1] < FOLLOW_AGAIN_SEQS:
            return
        if told == needed and not feed.source_topic_id:
            return
        feed.told = needed
        message = Follow(feed.source, feed.topic.id, *needed)
        self._links.send(self._originals.owner(feed.source), message)

    def _let_sources_go(self) -> None:
        """Gets copies into the log whose source asks for it, as soon as it has been copied up to there, or the dest has
        to wait: what is not copied then is read from segments.
        """
        for dest_id, up_to_seq in list(self._let_go.items()):
            feed = self.feeds.by_dest.get(dest_id)
            if feed is not None and feed.source_seq < up_to_seq and dest_id in self._ready:
                continue
            del self._let_go[dest_id]
            if feed is not None and self.feeds.settle(feed):
                reached("copies.settled")
                if feed.source_seq < up_to_seq:
                    feed.released_seq = up_to_seq
                feed.told = None
                self._follow(feed)

    def _unfollow(self, feed: Feed) -> None:
        self._links.send(self._originals.owner(feed.source), Unfollow(feed.source, feed.topic.id))

    def _turn(self) -> bool:
        """Takes what has come from other shards; False when it was nothing."""
        worked = self._links.receive(self._take_message)
        self._links.flush()
        return worked

    def _take_message(self, sender: int, message: PeerMessage) -> None:
        match message:
            case Greet():
                self._followers.forget(sender)
                for feed in self.feeds.by_dest.values():
                    if self._originals.owner(feed.source) == sender:
                        feed.told = None
                        self._follow(feed)
                        self._ready[feed.topic.id] = None
            case Changed():
                for name in message.names:
                    for dest_id in self.feeds.by_source.get(name, ()):
                        self._waiting.pop(dest_id, None)
                        self._ready[dest_id] = None
            case LetGo():
                for dest_id, feed in self.feeds.by_source.get(message.name, {}).items():
                    if feed.source_topic_id == message.source_topic_id:
                        self._let_go[dest_id] = max(message.up_to_seq, self._let_go.get(dest_id, 0))
                        self._waiting.pop(dest_id, None)
                        self._ready[dest_id] = None
            case Follow():
                self._followers.follow(sender, message)
            case Unfollow():
                self._followers.unfollow(message.name, message.dest_topic_id)
            case Held():
                held_feed = self.feeds.by_dest.get(message.dest_topic_id)
                if held_feed is not None and held_feed.source_topic_id == message.source_topic_id:
                    held_feed.held = True
                    self._waiting.pop(message.dest_topic_id, None)
                    self._ready[message.dest_topic_id] = None
            case RoutersGone():
                assert self._registrar is not None, "only shard 0 is told that"
                self._registrar.gone(message.router_ids)
