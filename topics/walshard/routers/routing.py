"""Routers as a shard sees them: those into its topics, which it copies; its topics that others copy; on shard 0, all.

Everything that has to do with routers and is not a topic's own happens here, between the groups of the shard. What is
forwarded is pulled: a source says no more than that it has changed, and the shard of the dest reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from topics.core.errors import TopicsError
from topics.log import get_logger
from topics.shm import messages
from topics.shm.control import ProcessCell
from topics.shm.router_table import RouterTable
from topics.shm.topic_messages import (
    CatchUp,
    CaughtUp,
    DeleteRouter,
    PutRouter,
    RemoveRouters,
    RouterCall,
    SyncRouters,
    SyncRoutersReply,
)
from topics.walshard.catalog import Catalog
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer
from topics.walshard.routers.copier import Copier
from topics.walshard.routers.copy_log import CopyLog
from topics.walshard.routers.dead_routers import DeadRouters
from topics.walshard.routers.feed import Feed, Hindrance
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.followers import Followers
from topics.walshard.routers.following import Following
from topics.walshard.routers.links import (
    Changed,
    Ended,
    Follow,
    Greet,
    Held,
    LetGo,
    Links,
    PeerMessage,
    RoutersGone,
    Unfollow,
)
from topics.walshard.routers.originals import Originals, SourceSight, UnknownError
from topics.walshard.routers.rederiving import Rederiving
from topics.walshard.routers.registrar import Registrar
from topics.walshard.routers.turns import Turns

log = get_logger()

PAGES_PER_STEP: Final = 4
"""Between which requests have their turn."""
PAGES_PER_CALL: Final = 64
FAILED_WAIT_MS: Final = 1_000
UNKNOWN_WAIT_MS: Final = 1_000
"""Until a source is looked for again whose shard has not recovered."""
DEST_WAIT_MS: Final = 30_000
"""A router whose dest was never made is the remains of a PUT that nobody answered."""


class Routing:
    """One shard's. `registrar` only on shard 0."""

    def __init__(
        self,
        catalog: Catalog,
        links: Links,
        table: RouterTable,
        originals: Originals,
        feeds: Feeds,
        copier: Copier,
        copy_log: CopyLog,
        followers: Followers,
        following: Following,
        turns: Turns,
        rederiving: Rederiving,
        registrar: Registrar | None,
        cell: ProcessCell,
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._links = links
        self._table = table
        self._originals = originals
        self.feeds = feeds
        self._copier = copier
        self.copy_log = copy_log
        self._followers = followers
        self._following = following
        self._turns = turns
        self.rederiving = rederiving
        self._registrar = registrar
        self._cell = cell
        self._monotonic_ms = monotonic_ms
        self._due: set[str] = set()
        """Dests whose routers are not yet as the table says."""
        self._missing: dict[str, int] = {}
        """Dests that do not exist, and since when."""
        self._dead = DeadRouters(links)
        self._forwarded_before = cell.get("router_copies")
        self._left_out_before = cell.get("router_oversize")

    # -- told by the shard

    def begin(
        self, expire_for: Callable[[Hosted, int, int], bool], give_way: Callable[[Hosted, int, int], bool]
    ) -> None:
        """The shard is at work (`Copier.expire_for`, `give_way`)."""
        self._copier.expire_for, self._copier.give_way = expire_for, give_way

    def changed(self, hosted: Hosted) -> None:
        """A topic was published: who copies it is told, and it may have room for copies that wait."""
        self._followers.changed(hosted)
        self._turns.wake(hosted.topic.id)

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
        if feed is not None and not self.copy_log.prepare(feed):
            raise TopicsError(
                "storage_unavailable",
                f"what routers copied into topic {hosted.topic.name!r} cannot be logged now; see the service's log",
            )

    def gone(self, hosted: Hosted) -> None:
        """A topic was deleted: its routers go with it."""
        self._refresh()
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is not None:
            self._following.unfollow(feed)
            self.feeds.forget(feed)
        self._followers.gone(hosted)
        self._dead.add(router.id for router in self._table.registry.touching(hosted.topic.name))

    # -- asked by frontends

    def take(self, call: RouterCall, answer: Answer) -> None:
        """Answers. Everything prepared is committed."""
        match call:
            case CatchUp():
                answer.reply = messages.encode_reply(answer.request_id, self._catch_up(call.dest))
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

    def _catch_up(self, dest: str) -> CaughtUp:
        """Copies everything the source has now, as far as that goes."""
        self._turn()
        self._reconcile()
        hosted = self._catalog.find(dest)
        feed = None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)
        # Routers that are not yet as the table says: it cannot be logged, or a source cannot be looked at.
        pending = dest in self._due
        if feed is None:
            return CaughtUp(True, pending)
        if not self._copy_all(feed, PAGES_PER_CALL):
            return CaughtUp(False, False)
        pending |= feed.hindrance != Hindrance.NONE
        return CaughtUp(feed.hindrance != Hindrance.SOURCE, pending)

    def _sync(self, call: SyncRouters) -> SyncRoutersReply:
        self._turn()
        self._reconcile()
        self._turn()
        hosted = self._catalog.find(call.dest)
        feed = None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)
        routers = [] if feed is None else [(router.id, router.version) for router in feed.registered()]
        done = call.dest not in self._due
        return SyncRoutersReply(
            done and (not call.router_id or (call.router_id, call.version) in routers),
            feed is None or self._following.may_log_later(feed),
        )

    # -- between groups

    @property
    def idle(self) -> bool:
        return self._links.idle and not self._turns and not self._following.lets_go and not self._table.stale

    @property
    def stuck(self) -> bool:
        """Something waits that no signal announces, and not for long."""
        return self._turns.anybody_waits or self._links.stuck

    def pump(self, pages_max: int = PAGES_PER_STEP) -> bool:
        """Takes what others say and copies some pages; True if there was anything to do."""
        worked = self._turn()
        if self._table.stale or self._due:
            self._reconcile()
        if self._turns.anybody_waits:
            self._turns.look(self._monotonic_ms())
        for _ in range(pages_max):
            if not self._turns:
                break
            worked = True
            dest_id = self._turns.take()
            feed = self.feeds.by_dest.get(dest_id)
            if feed is not None and self._advance_guarded(feed):
                self._turns.give(dest_id)
        if self._following.lets_go:
            self._following.let_sources_go()
        if worked:
            self.copy_log.keep_within_bounds()
            self._cell.set("router_copies", self._forwarded_before + self.copy_log.written)
            self._cell.set("router_oversize", self._left_out_before + self._copier.left_out)
            self._links.flush()
        return worked

    def sweep(self) -> None:
        """Once a second."""
        self._refresh()
        now_ms = self._monotonic_ms()
        for dest, since_ms in list(self._missing.items()):
            if now_ms - since_ms > DEST_WAIT_MS:
                del self._missing[dest]
                self._dead.add(router.id for router in self._table.registry.into(dest))
        if self._dead:
            self._dead.tell_again({router.id for router in self._table.registry.by_name.values()})
        self.copy_log.sweep(self.feeds.by_dest.values())
        lag = 0
        for feed in list(self.feeds.by_dest.values()):
            self._turns.give(feed.topic.id)
            self._following.follow(feed)
            lag += max(0, feed.source_head_seq - feed.source_seq)
        self._followers.review()
        self._cell.set("router_lag_records", lag)
        self._cell.set("router_unlogged_bytes", self.copy_log.unlogged_bytes)
        self._links.flush()

    def close(self) -> None:
        """A clean end: `ephemeral` dests go on exactly where they are."""
        self.copy_log.sweep(self.feeds.by_dest.values())

    def rederive(self) -> None:
        """In a new life, before anyone sees it: the copies that were there and are not in the log. Those of a source
        that cannot be seen now, or that waits itself, come later: no shard waits for another one.
        """
        self._turn()  # a source may have ended since
        self.rederiving.copy_all(self._sight)
        for feed in self.feeds.by_dest.values():
            self.feeds.show_progress(feed)
            self._turns.give(feed.topic.id)
        self._refresh()
        self._due.update(router.spec.dest for router in self._table.registry.by_name.values())
        self._due = {dest for dest in self._due if self._originals.owner(dest) == self._links.shard}
        for shard in range(self._links.shards):
            if shard != self._links.shard:
                self._links.send(shard, Greet())
        self._following.follow_anew()
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
        if feed is not None and feed.registered() != wanted:
            # What was acknowledged before is forwarded by the routers as they were.
            copied = self._copy_all(feed, PAGES_PER_CALL)
            if hosted.rederiving and (feed.rederive_seq is None or not copied):
                return False
        if feed is not None and (not wanted or feed.source != wanted[0].spec.source):
            if not self.feeds.stop(feed):
                return False
            self._copier.made_again(feed)  # or never: its source cannot be read
            self._following.unfollow(feed)
            feed = None
        if not wanted:
            return True
        source = wanted[0].spec.source
        if feed is None:
            if not self.feeds.start(hosted, source, self._originals.look(source), wanted):
                return False
            self._following.follow(self.feeds.by_dest[hosted.topic.id])
        elif feed.registered() != wanted and not self.feeds.reroute(feed, self._originals.look(source), wanted):
            return False
        self._turns.give(hosted.topic.id)
        return True

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
            self._turns.wait(feed.topic.id, self._monotonic_ms() + FAILED_WAIT_MS)
            return False

    def _advance(self, feed: Feed, demanded: bool) -> bool:
        """A page; True when there may be another. `demanded`: somebody waits for it."""
        dest_id = feed.topic.id
        self._turns.wake(dest_id)
        sight = self._sight(feed)
        if sight is None:
            return False
        if not (demanded or feed.held):
            until_ms = self._following.waits_until_ms(feed, sight, self._monotonic_ms())
            if until_ms:
                self._turns.wait(dest_id, until_ms)
                return False
        feed.retry_ms = 0
        more = self.rederiving.copy_page(feed, sight)
        if not more and feed.retry_ms:
            self._turns.wait(dest_id, feed.retry_ms)
        return more

    def _sight(self, feed: Feed) -> SourceSight | None:
        """The source, None when there is nothing to copy from it now."""
        feed.hindrance = Hindrance.NONE
        try:
            sight = self._originals.look(feed.source)
        except UnknownError:
            self._wait_for_source(feed)
            return None
        if feed.source_topic_id and (sight is None or sight.topic_id != feed.source_topic_id):
            if not self._copier.source_ended(feed):
                feed.hindrance = Hindrance.LASTING
                self._turns.wait(feed.topic.id, self._monotonic_ms() + FAILED_WAIT_MS)
                return None
            self._copier.made_again(feed)
            self._dead.add(router.id for router in feed.registered() if router.id not in self._dead)
            return None
        if sight is None:
            return None
        if not feed.source_topic_id:
            if not self.feeds.bind(feed, sight):
                feed.hindrance = Hindrance.LASTING
                return None
            self._following.follow(feed)
        if self.rederiving.is_less(feed, sight):
            self._wait_for_source(feed)
            return None
        return sight

    def _wait_for_source(self, feed: Feed) -> None:
        feed.hindrance, feed.unreadable_ms = Hindrance.SOURCE, None
        self._turns.wait(feed.topic.id, self._monotonic_ms() + UNKNOWN_WAIT_MS)

    # -- links

    def _turn(self) -> bool:
        """Takes what has come from other shards; False when it was nothing."""
        worked = self._links.receive(self._take_message)
        self._links.flush()
        return worked

    def _take_message(self, sender: int, message: PeerMessage) -> None:
        match message:
            case Greet():
                self._followers.forget(sender)
                self._following.follow_again(sender)
            case Changed():
                for name in message.names:
                    for dest_id in self.feeds.by_source.get(name, ()):
                        self._turns.give(dest_id)
            case LetGo():
                self._following.let_go(message)
            case Ended():
                self._following.ended(message)
            case Follow():
                self._followers.follow(sender, message)
            case Unfollow():
                self._followers.unfollow(message.name, message.dest_topic_id)
            case Held():
                self._following.held(message)
            case RoutersGone():
                assert self._registrar is not None, "only shard 0 is told that"
                self._registrar.gone(message.router_ids)
