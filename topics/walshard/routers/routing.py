"""Routers into the topics of one shard: which feeds there are to be, and whose turn it is to copy.

A copy is pulled: the shard of the dest reads the source from shared memory and files. Copying comes after the writes
that clients wait for, some pages at a time. Handlers here yield what they want committed (`draft.Steps`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from topics.core.clock import Clock
from topics.core.routers import FoldedRouters, Router
from topics.log import get_logger
from topics.shm.arena import TopicView
from topics.shm.topic_messages import CatchUp, CaughtUp, SyncRouters, SyncRoutersReply
from topics.walshard.commit.draft import Draft, LogWrite, Steps
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers.cold_reads import UnknownError
from topics.walshard.routers.copier import Copier, CopyWrite
from topics.walshard.routers.feed_turns import FeedTurns
from topics.walshard.routers.feeds import Feed, Feeds, Hindrance
from topics.walshard.routers.originals import Originals
from topics.walshard.routers.page import PAGE_BYTES, PAGE_RECORDS
from topics.walshard.routers.registrar import Registrar
from topics.walshard.routers.sources import Changed, Ended, PeerMessage, RoutersEnded, Sources

log = get_logger()

FEEDS_PER_STEP: Final = 8
"""Dests that are copied into, in one write of the log, before requests have their turn again."""
RECORDS_PER_STEP: Final = PAGE_RECORDS
"""Once a step has looked at so many records of sources, or copied PAGE_BYTES, it begins no other page. A step is what a
writer may have to wait for, so it is short: four pages of 1,024 records gave writers 1.4 times the p99, and no more
copies.
"""
LOOKED_AT_PER_STEP: Final = 256
"""Feeds of which `sweep` has one look at whether they are behind before requests have their turn again."""
PAGES_PER_CATCH_UP: Final = 8
"""Pages that a dest copies for who reads it, before other requests have their turn again."""
DESTS_PER_STEP: Final = 32
"""Dests whose routers are changed before requests have their turn again. One source may have thousands."""
ENDED_PER_STEP: Final = 256
"""Routers of a deleted topic that are removed before requests have their turn again."""
PAGES_BEFORE_CHANGE: Final = 128
"""Pages at most that the routers of a dest copy as they were, before they change."""
FAILED_WAIT_MS: Final = 1_000
UNKNOWN_WAIT_MS: Final = 1_000
"""Wait before a source whose shard has not recovered is looked for again."""
DEST_WAIT_MS: Final = 30_000
"""A router whose dest is not made in this time is the remains of a PUT that nobody answered."""


@dataclass(eq=False)
class Routing:
    """Keeps one shard's feeds as the table of routers says, and gives each its turn. Shard 0 has a `registrar`."""

    _catalog: Catalog
    sources: Sources
    _originals: Originals
    feeds: Feeds
    _copier: Copier
    _deletes: Deletes
    registrar: Registrar | None
    _clock: Clock
    _turns: FeedTurns = field(default_factory=FeedTurns)
    _due: set[str] = field(default_factory=set)
    """Dests whose routers are not yet as the table says."""
    _round: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The order in which those of them are tried that are left of this round."""
    _missing: dict[str, int] = field(default_factory=dict)
    """Dests that do not exist, and since when (monotonic ms)."""
    _ended_ids: list[int] = field(default_factory=list)
    """On shard 0: routers that ended with a topic, as the topic's shard says."""
    _unlooked: list[Feed] = field(default_factory=list)
    """Feeds at which this sweep has yet to look."""
    _are_feeds_compared: bool = False
    """True once all feeds of the log are due: routers may have ended while this shard did not look."""

    def __post_init__(self) -> None:
        for dest_id in self.feeds.by_dest:
            self._turns.line_up(dest_id)

    # -- told by the shard

    def changed(self, hosted: Hosted) -> None:
        """Note that a topic was published: tell shards that copy it, and wake it if it waits for room for copies."""
        self.sources.changed(hosted)
        self._turns.wake(hosted.topic.id)

    def created(self, hosted: Hosted) -> None:
        """Note that a topic was made."""
        self.sources.created(hosted)
        if self._missing.pop(hosted.topic.name, None) is not None:
            self._make_due([hosted.topic.name])

    def deleted(self, hosted: Hosted) -> None:
        """Note that a topic was deleted: its routers end."""
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is not None:
            self.feeds.forget(feed)
        self.sources.deleted(hosted)

    def log_feed(self, hosted: Hosted) -> Steps[bool]:
        """Log the cursor of an `ephemeral` dest in the durable log, before its class changes. False if that fails."""
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is None or not feed.is_ephemeral or feed.logged_source_seq == feed.source_seq:
            return True
        return (yield from self.feeds.log_cursor(feed))

    def follow(self, state: FoldedRouters, changed: Iterable[Hosted], router_ids: set[int]) -> None:
        """Show routers, and how far those into `changed` are, as the log of another service has them."""
        if router_ids and self.registrar is not None:
            self.registrar.follow(state, router_ids)
        self.feeds.follow(state, changed)

    # -- asked by frontends

    def catch_up(self, call: CatchUp, _frontend: int) -> Steps[CaughtUp]:
        """Copy everything that the source has now, as far as that goes."""
        feed = yield from self._current_feed(call.dest)
        # Routers that are not yet as the table says: it cannot be logged, or a source cannot be looked at.
        pending = call.dest in self._due
        if feed is None:
            return CaughtUp(True, pending)
        if (yield from self._copy_all(feed, PAGES_PER_CATCH_UP)) == PAGES_PER_CATCH_UP:
            return CaughtUp(False, False)
        pending |= feed.hindrance != Hindrance.NONE
        return CaughtUp(feed.hindrance != Hindrance.SOURCE, pending)

    def sync(self, call: SyncRouters, _frontend: int) -> Steps[SyncRoutersReply]:
        """Bring the routers of one dest into line with the table."""
        feed = yield from self._current_feed(call.dest)
        routers = [] if feed is None else [(router.id, router.version) for router in feed.registered()]
        begun = not call.router_id or (call.router_id, call.version) in routers
        return SyncRoutersReply(call.dest not in self._due and begun)

    def _current_feed(self, dest: str) -> Steps[Feed | None]:
        """Hear what other shards say, reconcile, and return the feed of a dest."""
        yield from self._receive()
        self._make_due(self.sources.take_rerouted())
        if dest in self._due:
            yield from self._reconcile(dest)
        return self._feed_into(dest)

    # -- between groups

    @property
    def has_work(self) -> bool:
        """Return whether `pump` may have something to do."""
        waits = self._due or self._ended_ids or self._originals.unlearned or self._unlooked
        return not self.idle or self.stuck or bool(waits)

    @property
    def idle(self) -> bool:
        """Return whether nothing is to be done now."""
        sources = self.sources
        return sources.links.idle and not self._turns and not sources.table.stale and not sources.rerouted

    @property
    def stuck(self) -> bool:
        """Return whether something waits that no signal announces, and not for long."""
        return self._turns.some_wait or self.sources.links.stuck

    @property
    def lag_records(self) -> int:
        """Number of records of sources that are yet to be copied."""
        return sum(feed.uncopied for feed in self.feeds.by_dest.values())

    def pump(self) -> Steps[bool]:
        """Hear what other shards say and copy for a moment. True if there was anything to do."""
        worked = yield from self._receive()
        if self._originals.unlearned:
            worked = True
            if self._originals.learn_some():
                self._wake_for_sources()
        self._make_due(self.sources.take_rerouted())
        if not self._are_feeds_compared and self.sources.table.known:
            self._are_feeds_compared = True
            self._make_due([feed.topic.name for feed in self.feeds.by_dest.values()])
        if self._due and not self._originals.unlearned:
            worked |= yield from self._reconcile()
        self._turns.wake_due(self._clock.monotonic_ms())
        if self._unlooked:
            worked = True
            self._look_at_some()
        if self._turns:
            worked = True
            yield from self._copy_some(self._take_turns(FEEDS_PER_STEP))
        self.sources.links.flush()
        return worked

    def sweep(self) -> Steps[None]:
        """Look again, once a second, at what may have been missed; `pump` looks at the feeds."""
        self._make_due(self.sources.take_rerouted())
        now_ms = self._clock.monotonic_ms()
        for dest, since_ms in list(self._missing.items()):
            if now_ms - since_ms > DEST_WAIT_MS:
                del self._missing[dest]
                self.sources.end(router.id for router in self.sources.table.registry.into(dest))
        self.sources.sweep()
        yield from self.feeds.log_ephemeral()
        self._unlooked = list(self.feeds.by_dest.values())
        self.sources.links.flush()

    def _look_at_some(self) -> None:
        """Give a turn to some feeds, if they are behind."""
        sights: dict[str, TopicView | None] = {}
        for feed in self._unlooked[-LOOKED_AT_PER_STEP:]:
            try:
                if feed.source not in sights:
                    sights[feed.source] = self._originals.look(feed.source)
                has_all = feed.has_all(sights[feed.source])
            except Exception:  # noqa: BLE001 — its turn has the same trouble, and tells of it
                has_all = False
            if not has_all:
                self._turns.line_up(feed.topic.id)
        del self._unlooked[-LOOKED_AT_PER_STEP:]

    # -- feeds and the table

    def _make_due(self, dests: Collection[str]) -> None:
        """Have these dests brought into line with the table."""
        self._due.update(dests)
        self._round.update(dict.fromkeys(sorted(dests)))

    def _reconcile(self, asked: str | None = None) -> Steps[bool]:
        """Bring some feeds into line with the table, that of `asked` first. True if others are to be tried at once.
        While names of topics are learned most could not begin, so only who asks has a try: its routers may end.
        """
        if not self._round:
            self._make_due(list(self._due))
        others = () if self._originals.unlearned else islice(self._round, DESTS_PER_STEP)
        dests = dict.fromkeys([*([] if asked is None else [asked]), *others])
        writes: list[LogWrite] = []
        done: list[str] = []
        for dest in dests:
            self._round.pop(dest, None)
            wanted, feed = self._wanted(dest), self._feed_into(dest)
            pages = 0
            if feed is not None and feed.registered() != wanted:
                # The routers as they were forward what was acknowledged before.
                pages = yield from self._copy_all(feed, PAGES_BEFORE_CHANGE)
            try:
                for write in self._changes(dest, wanted):
                    writes.append(write)
                done.append(dest)
            except UnknownError:
                pass  # it stays due; a feed that stops meanwhile has stopped
            if pages:
                break  # that was enough for one step
        draft = Draft(writes)  # one sync for all of them: a source may have thousands
        if writes:
            yield draft
        if not writes or draft.committed:
            self._due.difference_update(done)
        return bool(self._round)

    def _wanted(self, dest: str) -> list[Router]:
        return [router for router in self.sources.table.registry.into(dest) if not self.sources.has_ended(router.id)]

    def _feed_into(self, dest: str) -> Feed | None:
        hosted = self._catalog.find(dest)
        return None if hosted is None else self.feeds.by_dest.get(hosted.topic.id)

    def _changes(self, dest: str, wanted: list[Router]) -> Iterator[LogWrite]:
        """Yield the writes that bring the feed into a dest into line. Raise UnknownError if they are not all."""
        hosted, feed = self._catalog.find(dest), self._feed_into(dest)
        if hosted is None:
            if wanted:
                self._missing.setdefault(dest, self._clock.monotonic_ms())
            return
        if feed is not None and (not wanted or feed.source != wanted[0].spec.source):
            yield self.feeds.stop(feed)
            feed = None
        if not wanted or (feed is not None and feed.registered() == wanted):
            return
        source = wanted[0].spec.source
        sight = self._originals.look(source)
        self._turns.line_up(hosted.topic.id)
        if feed is None:
            yield self.feeds.start(hosted, source, sight, wanted)
        else:
            yield self.feeds.reroute(feed, sight, wanted)

    # -- copying

    def _take_turns(self, most: int) -> list[Feed]:
        """Return the feeds whose turn it is, at most so many, each once."""
        feeds: list[Feed] = []
        while self._turns and len(feeds) < most:
            feed = self.feeds.by_dest.get(self._turns.take())
            if feed is not None:
                feeds.append(feed)
        return feeds

    def _copy_all(self, feed: Feed, pages_max: int) -> Steps[int]:
        """Copy what the source has, `pages_max` pages of it. Return the number of pages."""
        for pages in range(pages_max):
            if not (yield from self._copy_some([feed])):
                return pages
        return pages_max

    def _copy_some(self, feeds: list[Feed]) -> Steps[bool]:
        """Copy a page for each of these, all in one group of the logs, as far as one step goes: the others are next in
        the step after it. False when none had anything to copy.
        """
        writes: list[CopyWrite] = []
        records = size_bytes = 0
        for at, feed in enumerate(feeds):
            if records >= RECORDS_PER_STEP or size_bytes >= PAGE_BYTES:
                self._turns.give_back([left.topic.id for left in feeds[at:]])
                feeds = feeds[:at]
                break
            write = yield from self._next_write(feed)
            if write is not None:
                writes.append(write)
                records += write.records
                size_bytes += write.size_bytes
        durable = [one for write in writes for one in write.durable]
        ram = [one for write in writes for one in write.ram]
        if durable or ram:
            yield Draft(durable, ram, [write.feed.hosted for write in writes if write.moves_head])
        for feed in feeds:
            if feed.retry_ms:
                self._turns.defer(feed.topic.id, feed.retry_ms)
        for write in writes:
            self.feeds.show_progress(write.feed)
            if write.feed.uncopied or write.feed.full:
                if not write.feed.retry_ms:
                    self._turns.line_up(write.feed.topic.id)
            else:
                write.feed.failures = 0
        return any(not write.feed.retry_ms for write in writes)

    def _next_write(self, feed: Feed) -> Steps[CopyWrite | None]:
        feed.retry_ms = 0
        try:
            sight = yield from self._look(feed)
            if sight is None:
                return None
            yield from self._deletes.expire_for(feed.hosted, PAGE_RECORDS, PAGE_BYTES)
            write = self._copier.next_write(feed, sight)
            if feed.has_no_room():
                _, records, size_bytes = feed.no_room_for
                yield from self._deletes.drop_done_jobs(feed.hosted, records, size_bytes)
                if not feed.has_no_room():
                    feed.retry_ms = 0
                    write = self._copier.next_write(feed, sight)
        except Exception:
            # One router must not end its shard, nor do so again after a restart.
            log.exception("a router failed", source=feed.source, dest=feed.topic.name)
            self._hold(feed, Hindrance.LASTING, FAILED_WAIT_MS)
            return None
        return write

    def _wake_for_sources(self) -> None:
        """Give turns to the feeds whose source could not be looked at."""
        for dest_id, feed in self.feeds.by_dest.items():
            if feed.hindrance is Hindrance.SOURCE:
                self._turns.wake(dest_id)

    def _hold(self, feed: Feed, hindrance: Hindrance, wait_ms: int) -> None:
        feed.hindrance = hindrance
        feed.retry_ms = self._clock.monotonic_ms() + wait_ms

    def _look(self, feed: Feed) -> Steps[TopicView | None]:
        """Return the source as it is, None when there is nothing to copy from it now."""
        feed.hindrance = Hindrance.NONE
        try:
            sight = self._originals.look(feed.source)
        except UnknownError:
            self._hold(feed, Hindrance.SOURCE, UNKNOWN_WAIT_MS)
            return None
        if feed.source_topic_id and (sight is None or sight.topic_id != feed.source_topic_id):
            yield from self._source_ended(feed)
            return None
        if sight is not None and not feed.source_topic_id and not (yield from self.feeds.bind(feed, sight)):
            self._hold(feed, Hindrance.LASTING, FAILED_WAIT_MS)
            return None
        return sight

    def _source_ended(self, feed: Feed) -> Steps[None]:
        """Log what was not copied from a deleted source as a gap, then end its routers."""
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

    # -- other shards

    def _receive(self) -> Steps[bool]:
        """Take the messages of other shards. False when there were none."""
        worked = self.sources.links.receive(self._take_message)
        if self._ended_ids:
            assert self.registrar is not None, "only shard 0 is told of routers that ended"
            ended_ids = self._ended_ids[:ENDED_PER_STEP]
            del self._ended_ids[:ENDED_PER_STEP]
            yield from self.registrar.ended(ended_ids)
        self.sources.links.flush()
        return worked or bool(self._ended_ids)

    def _take_message(self, message: PeerMessage) -> None:
        match message:
            case Changed():
                for name in message.names:
                    for dest_id in self.feeds.by_source.get(name, ()):
                        self._turns.line_up(dest_id)
            case Ended():
                for dest_id, feed in self.feeds.by_source.get(message.name, {}).items():
                    if feed.source_topic_id == message.source_topic_id:
                        feed.source_head_seq = max(feed.source_head_seq, message.head_seq)
                        self._turns.line_up(dest_id)
            case RoutersEnded():
                self._ended_ids += message.router_ids
