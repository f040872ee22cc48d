"""Routers into the topics of one shard: which feeds there are to be, and whose turn it is to copy.

A copy is pulled: the shard of the dest reads the source from shared memory and files. Copying comes behind the writes
that clients wait for, some pages at a time. Handlers here yield what they want committed (`operation.Steps`).
"""

from __future__ import annotations

from typing import Final

from topics.core.clock import Clock
from topics.log import get_logger
from topics.shm.topic_messages import CatchUp, CaughtUp, SyncRouters, SyncRoutersReply
from topics.walshard.commit.draft import AloneHandler, Draft, Steps
from topics.walshard.handlers.removals import Removals
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers.copier import Copier, Write
from topics.walshard.routers.feeds import Feed, Feeds, Hindrance
from topics.walshard.routers.links import Changed, Ended, PeerMessage, RoutersGone
from topics.walshard.routers.originals import Originals, SourceSight, UnknownError
from topics.walshard.routers.page import PAGE_BYTES, PAGE_RECORDS
from topics.walshard.routers.registrar import Registrar
from topics.walshard.routers.sources import Sources
from topics.walshard.routers.turns import FeedTurns

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
    """Keeps the feeds of one shard as the table of routers says, and gives each its turn. `registrar` is that of
    shard 0.
    """

    def __init__(
        self,
        catalog: Catalog,
        sources: Sources,
        originals: Originals,
        feeds: Feeds,
        copier: Copier,
        removals: Removals,
        registrar: Registrar | None,
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self.sources = sources
        self._originals = originals
        self.feeds = feeds
        self._copier = copier
        self._removals = removals
        self.registrar = registrar
        self._clock = clock
        self._turns = FeedTurns()
        for dest_id in feeds.by_dest:
            self._turns.give(dest_id)
        self._due: set[str] = set()
        """Dests whose routers are not yet as the table says."""
        self._missing: dict[str, int] = {}
        """Dests that do not exist, and since when (monotonic ms)."""
        self._gone_ids: list[int] = []
        """On shard 0: routers whose topic is no more, as their shards say."""

    @property
    def alone_routes(self) -> dict[type, AloneHandler]:
        """The requests that are handled here by themselves."""
        routes: dict[type, AloneHandler] = {CatchUp: self.catch_up, SyncRouters: self.sync}
        return routes if self.registrar is None else routes | self.registrar.alone_routes

    # -- told by the shard

    def changed(self, hosted: Hosted) -> None:
        """A topic was published: shards that copy it are told, and it may have room for copies that wait."""
        self.sources.changed(hosted)
        self._turns.wake(hosted.topic.id)

    def created(self, hosted: Hosted) -> None:
        """A topic was made."""
        self.sources.created(hosted)
        if self._missing.pop(hosted.topic.name, None) is not None:
            self._due.add(hosted.topic.name)

    def deleted(self, hosted: Hosted) -> None:
        """A topic was deleted: its routers go with it."""
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is not None:
            self.feeds.forget(feed)
        self.sources.deleted(hosted)

    def log_feed(self, hosted: Hosted) -> Steps[bool]:
        """The cursor of an `ephemeral` dest gets into the durable log. False if that cannot be written."""
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is None or not feed.is_ephemeral or feed.logged_source_seq == feed.source_seq:
            return True
        return (yield from self.feeds.log_cursor(feed, feed.body()))

    # -- asked by frontends

    def catch_up(self, call: CatchUp, _frontend: int) -> Steps[CaughtUp]:
        """Copies everything the source has now, as far as that goes."""
        yield from self._receive()
        yield from self._reconcile()
        hosted = self._catalog.find(call.dest)
        feed = None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)
        # Routers that are not yet as the table says: it cannot be logged, or a source cannot be looked at.
        pending = call.dest in self._due
        if feed is None:
            return CaughtUp(True, pending)
        if not (yield from self._copy_all(feed)):
            return CaughtUp(False, False)
        pending |= feed.hindrance != Hindrance.NONE
        return CaughtUp(feed.hindrance != Hindrance.SOURCE, pending)

    def sync(self, call: SyncRouters, _frontend: int) -> Steps[SyncRoutersReply]:
        """Does what the table says of one dest."""
        yield from self._receive()
        yield from self._reconcile()
        hosted = self._catalog.find(call.dest)
        feed = None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)
        routers = [] if feed is None else [(router.id, router.version) for router in feed.registered()]
        begun = not call.router_id or (call.router_id, call.version) in routers
        return SyncRoutersReply(call.dest not in self._due and begun)

    # -- between groups

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done now."""
        sources = self.sources
        return sources.links.idle and not self._turns and not sources.table.stale and not sources.rerouted

    @property
    def has_work(self) -> bool:
        """Whether `pump` may have something to do."""
        return not self.idle or self.stuck or bool(self._due)

    @property
    def stuck(self) -> bool:
        """Whether something waits that no signal announces, and not for long."""
        return self._turns.anybody_waits or self.sources.links.stuck

    @property
    def lag_records(self) -> int:
        """How many records of sources are yet to be copied."""
        return sum(feed.uncopied for feed in self.feeds.by_dest.values())

    def pump(self, pages_max: int = PAGES_PER_STEP) -> Steps[bool]:
        """Takes what other shards say and copies some pages; True if there was anything to do."""
        worked = yield from self._receive()
        if self.sources.table.stale or self.sources.rerouted or self._due:
            yield from self._reconcile()
        if self._turns.anybody_waits:
            self._turns.look(self._clock.monotonic_ms())
        pages = 0
        while pages < pages_max and self._turns:
            worked = True
            feeds = self._take_turns(pages_max - pages)
            pages += len(feeds)
            yield from self._copy_some(feeds)
        if worked:
            self.sources.links.flush()
        return worked

    def sweep(self) -> Steps[None]:
        """Once a second: what may have been missed is looked at again."""
        self._due |= self.sources.take_rerouted()
        now_ms = self._clock.monotonic_ms()
        for dest, since_ms in list(self._missing.items()):
            if now_ms - since_ms > DEST_WAIT_MS:
                del self._missing[dest]
                self.sources.end(router.id for router in self.sources.table.registry.into(dest))
        self.sources.sweep()
        yield from self.feeds.log_ephemeral()
        for feed in self.feeds.by_dest.values():
            self._turns.give(feed.topic.id)
        self.sources.links.flush()

    def close(self) -> Steps[None]:
        """A clean end: `ephemeral` dests go on exactly where they are."""
        yield from self.feeds.log_ephemeral()

    # -- feeds and the table

    def _reconcile(self) -> Steps[None]:
        """Brings the feeds into line with the table."""
        self._due |= self.sources.take_rerouted()
        for dest in sorted(self._due):
            try:
                if (yield from self._reconcile_dest(dest)):
                    self._due.discard(dest)
            except UnknownError:
                continue

    def _reconcile_dest(self, dest: str) -> Steps[bool]:
        """False to be called again; so does UnknownError."""
        registry = self.sources.table.registry
        wanted = [router for router in registry.into(dest) if not self.sources.has_ended(router.id)]
        hosted = self._catalog.find(dest)
        if hosted is None:
            if wanted:
                self._missing.setdefault(dest, self._clock.monotonic_ms())
            return True
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is not None and feed.registered() != wanted:
            # What was acknowledged before is forwarded by the routers as they were.
            yield from self._copy_all(feed)
        if feed is not None and (not wanted or feed.source != wanted[0].spec.source):
            if not (yield from self.feeds.stop(feed)):
                return False
            feed = None
        if not wanted:
            return True
        source = wanted[0].spec.source
        if feed is None:
            if not (yield from self.feeds.start(hosted, source, self._originals.look(source), wanted)):
                return False
        elif feed.registered() != wanted and not (
            yield from self.feeds.reroute(feed, self._originals.look(source), wanted)
        ):
            return False
        self._turns.give(hosted.topic.id)
        return True

    # -- copying

    def _take_turns(self, most: int) -> list[Feed]:
        """The feeds whose turn it is, at most so many, each once."""
        feeds: list[Feed] = []
        while self._turns and len(feeds) < most:
            feed = self.feeds.by_dest.get(self._turns.take())
            if feed is not None:
                feeds.append(feed)
        return feeds

    def _copy_all(self, feed: Feed) -> Steps[bool]:
        """Copies what the source has; False when there is more than PAGES_PER_CALL pages."""
        for _ in range(PAGES_PER_CALL):
            if not (yield from self._copy_some([feed])):
                return True
        return False

    def _copy_some(self, feeds: list[Feed]) -> Steps[bool]:
        """A page for each of these, all in one group of the logs. False when none had anything to copy."""
        writes: list[Write] = []
        for feed in feeds:
            write = yield from self._next_write(feed)
            if write is not None:
                writes.append(write)
        durable = [operation for write in writes for operation in write.durable]
        ram = [operation for write in writes for operation in write.ram]
        if durable or ram:
            yield Draft(durable, ram, [write.feed.hosted for write in writes if write.moves_head])
        for feed in feeds:
            if feed.retry_ms:
                self._turns.wait(feed.topic.id, feed.retry_ms)
        for write in writes:
            self.feeds.show_progress(write.feed)
            if not write.feed.retry_ms:
                self._turns.give(write.feed.topic.id)
        return any(not write.feed.retry_ms for write in writes)

    def _next_write(self, feed: Feed) -> Steps[Write | None]:
        """One router must not take down its shard, nor come back after a restart to do it again."""
        feed.retry_ms = 0
        try:
            sight = yield from self._look(feed)
            if sight is None:
                return None
            yield from self._removals.expire(feed.hosted, PAGE_RECORDS, PAGE_BYTES)
            write = self._copier.next_write(feed, sight)
            if feed.has_no_room():
                _, records, size_bytes = feed.no_room_for
                yield from self._removals.give_way(feed.hosted, records, size_bytes)
                if not feed.has_no_room():
                    feed.retry_ms = 0
                    write = self._copier.next_write(feed, sight)
        except Exception:
            log.exception("a router failed", source=feed.source, dest=feed.topic.name)
            feed.hindrance = Hindrance.LASTING
            feed.retry_ms = self._clock.monotonic_ms() + FAILED_WAIT_MS
            return None
        return write

    def _look(self, feed: Feed) -> Steps[SourceSight | None]:
        """The source as it is, None when there is nothing to copy from it now."""
        feed.hindrance = Hindrance.NONE
        try:
            sight = self._originals.look(feed.source)
        except UnknownError:
            feed.hindrance = Hindrance.SOURCE
            feed.retry_ms = self._clock.monotonic_ms() + UNKNOWN_WAIT_MS
            return None
        if feed.source_topic_id and (sight is None or sight.topic_id != feed.source_topic_id):
            yield from self._source_ended(feed)
            return None
        if sight is not None and not feed.source_topic_id and not (yield from self.feeds.bind(feed, sight)):
            feed.hindrance = Hindrance.LASTING
            feed.retry_ms = self._clock.monotonic_ms() + FAILED_WAIT_MS
            return None
        return sight

    def _source_ended(self, feed: Feed) -> Steps[None]:
        """The source was deleted: what was not copied is a gap, then its routers end."""
        write = self._copier.source_ended(feed)
        if write is not None:
            draft = Draft(write.durable, write.ram, [feed.hosted])
            yield draft
            if not draft.committed:
                feed.hindrance = Hindrance.LASTING
                return
            self.feeds.show_progress(feed)
        if feed.retry_ms:
            return
        self.sources.end(router.id for router in feed.registered())

    # -- what other shards say

    def _receive(self) -> Steps[bool]:
        """Takes what has come from other shards; False when it was nothing."""
        worked = self.sources.links.receive(self._take_message)
        if self._gone_ids:
            assert self.registrar is not None, "only shard 0 is told of routers that are gone"
            gone_ids, self._gone_ids = self._gone_ids, []
            yield from self.registrar.gone(gone_ids)
        self.sources.links.flush()
        return worked

    def _take_message(self, _sender: int, message: PeerMessage) -> None:
        match message:
            case Changed():
                for name in message.names:
                    for dest_id in self.feeds.by_source.get(name, ()):
                        self._turns.give(dest_id)
            case Ended():
                for dest_id, feed in self.feeds.by_source.get(message.name, {}).items():
                    if feed.source_topic_id == message.source_topic_id:
                        feed.source_head_seq = max(feed.source_head_seq, message.head_seq)
                        self._turns.give(dest_id)
            case RoutersGone():
                self._gone_ids += message.router_ids
