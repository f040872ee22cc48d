"""Routers into the topics of one shard: this decides which feeds exist, and which may copy next.

Copies are pulled: the shard of the dest reads the source from shared memory and files. It copies a few pages at a time,
after the writes that clients wait for. Methods that return `draft.Steps` yield the drafts to be committed.
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
"""Dests that one step copies into, in one write to the log, before requests have their turn again."""
RECORDS_PER_STEP: Final = PAGE_RECORDS
"""Source records, or PAGE_BYTES of copies, after which a step begins no other page. A step is short, since a writer may
have to wait for it: four pages of 1,024 records gave writers 1.4 times the p99, and no more copies.
"""
LOOKED_AT_PER_STEP: Final = 256
"""Feeds that one step checks for being behind, after a `sweep`, before requests have their turn again."""
PAGES_PER_CATCH_UP: Final = 8
"""Pages that one `CatchUp` of a reader copies at most, before other requests have their turn again."""
DESTS_PER_STEP: Final = 32
"""Dests whose routers one step changes, before requests have their turn again. One source may have thousands."""
ENDED_PER_STEP: Final = 256
"""Routers of deleted topics that one step removes, before requests have their turn again."""
PAGES_BEFORE_CHANGE: Final = 128
"""Pages at most that the old routers of a dest still copy before new ones replace them."""
FAILED_WAIT_MS: Final = 1_000
UNKNOWN_WAIT_MS: Final = 1_000
"""Wait before the next look for a source whose shard has not recovered."""
DEST_WAIT_MS: Final = 30_000
"""Time after which a router ends if its dest does not exist: a PUT has failed between registering it and making the
dest.
"""


@dataclass(eq=False)
class Routing:
    """Keeps one shard's feeds in line with the table of routers, and gives each its turn. Shard 0 has a `registrar`."""

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
    """Names of dests whose feed is not in line with the table yet."""
    _round: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Dests of `_due` that this round has yet to try, in order."""
    _missing: dict[str, int] = field(default_factory=dict)
    """Dests that do not exist, and the monotonic ms since when they are missed."""
    _ended_ids: list[int] = field(default_factory=list)
    """On shard 0: ids of routers that ended with a topic, to be removed from the registry."""
    _unlooked: list[Feed] = field(default_factory=list)
    """Feeds that have yet to be checked for being behind since the last sweep."""
    _are_feeds_compared: bool = False
    """True once all recovered feeds were made due: routers may have ended while this shard did not run."""

    def __post_init__(self) -> None:
        for dest_id in self.feeds.by_dest:
            self._turns.line_up(dest_id)

    # -- told by the shard

    def changed(self, hosted: Hosted) -> None:
        """Note that a topic was published: tell the shards that copy it, and wake its feed, which may wait for room."""
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
        """Log the cursor of an `ephemeral` dest durably before its class changes. False if the log refuses that."""
        feed = self.feeds.by_dest.get(hosted.topic.id)
        if feed is None or not feed.is_ephemeral or feed.logged_source_seq == feed.source_seq:
            return True
        return (yield from self.feeds.log_cursor(feed))

    def follow(self, state: FoldedRouters, changed: Iterable[Hosted], router_ids: set[int]) -> None:
        """Take over these routers, and the feeds into `changed`, from the leader's log, and show them."""
        if router_ids and self.registrar is not None:
            self.registrar.follow(state, router_ids)
        self.feeds.follow(state, changed)

    # -- asked by frontends

    def catch_up(self, call: CatchUp, _frontend: int) -> Steps[CaughtUp]:
        """Copy what the source of a dest has now, up to PAGES_PER_CATCH_UP pages. The frontend asks again for more."""
        feed = yield from self._current_feed(call.name)
        # True if the feed is still not in line: the log refused the change, or a source cannot be looked at.
        pending = call.name in self._due
        if feed is None:
            return CaughtUp(True, pending)
        if (yield from self._copy_all(feed, PAGES_PER_CATCH_UP)) == PAGES_PER_CATCH_UP:
            return CaughtUp(False, False)
        pending |= feed.hindrance != Hindrance.NONE
        return CaughtUp(feed.hindrance != Hindrance.SOURCE, pending)

    def sync(self, call: SyncRouters, _frontend: int) -> Steps[SyncRoutersReply]:
        """Bring the routers of one dest into line with the table."""
        feed = yield from self._current_feed(call.name)
        routers = [] if feed is None else [(router.id, router.version) for router in feed.registered()]
        begun = not call.router_id or (call.router_id, call.version) in routers
        return SyncRoutersReply(call.name not in self._due and begun)

    def _current_feed(self, dest: str) -> Steps[Feed | None]:
        """Take messages of other shards, bring the feed of a dest into line with the table, and return it."""
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
        """Return whether there is nothing to do now."""
        sources = self.sources
        return sources.links.idle and not self._turns and not sources.table.stale and not sources.rerouted

    @property
    def stuck(self) -> bool:
        """Return whether something waits, not for long, for an event that no signal announces."""
        return self._turns.some_wait or self.sources.links.stuck

    @property
    def lag_records(self) -> int:
        """Number of records of sources that are yet to be copied."""
        return sum(feed.uncopied for feed in self.feeds.by_dest.values())

    def pump(self) -> Steps[bool]:
        """Take one step: take messages of other shards, reconcile, copy. Return whether there was anything to do."""
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
        """Once a second, look for changes that no message announced; `pump` then checks the feeds step by step."""
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
        """Check some feeds, and give a turn to those that are behind."""
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
        """Bring some feeds into line with the table, that of `asked` first. True if more are to be tried at once. While
        names of topics are being learned most feeds could not begin, so only `asked` is tried.
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
                # The old routers still copy the records that were acknowledged before the change.
                pages = yield from self._copy_all(feed, PAGES_BEFORE_CHANGE)
            try:
                for write in self._changes(dest, wanted):
                    writes.append(write)
                done.append(dest)
            except UnknownError:
                pass  # the dest stays due; a write that stops its old feed is in `writes` already
            if pages:
                break  # copying has taken enough time for one step
        draft = Draft(writes)  # one sync for all dests: a source may have thousands
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
        """Yield the writes that bring a dest's feed into line. After UnknownError some writes must follow later."""
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
        """Take up to `most` feeds whose turn it is, each once."""
        feeds: list[Feed] = []
        while self._turns and len(feeds) < most:
            feed = self.feeds.by_dest.get(self._turns.take())
            if feed is not None:
                feeds.append(feed)
        return feeds

    def _copy_all(self, feed: Feed, pages_max: int) -> Steps[int]:
        """Copy up to `pages_max` pages of the source. Return the number of pages."""
        for pages in range(pages_max):
            if not (yield from self._copy_some([feed])):
                return pages
        return pages_max

    def _copy_some(self, feeds: list[Feed]) -> Steps[bool]:
        """Copy a page for each of these feeds, all in one write to the logs. When the step is long enough, the other
        feeds get the next turns. False when none had anything to copy, or the log refused all.
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
            # One bad router must not stop the shard for all others, and again after each restart.
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
        """Return the feed's source, None when there is nothing to copy now. End the feed if its source was deleted."""
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
        """Log a gap for records of a deleted source that were not copied, then end its routers."""
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
