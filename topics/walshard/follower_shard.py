"""A shard of a service that follows another one. It reads the leader's log, which the follower's process fetches.

It folds new frames of the log, shows the result, and answers requests that only read. It writes nothing but the RAM
log, for watch sessions. Topics, floors, jobs and routers change only as the leader has logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Final, NamedTuple, NoReturn

from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.fold import Fold
from topics.core.topic import Topic
from topics.shm import queue_messages, topic_messages
from topics.shm.asks import Done
from topics.shm.topic_messages import CatchUp, CaughtUp, Expire
from topics.storage.frame import FrameType
from topics.storage.log_fold import fold_frames
from topics.storage.log_tail import LogTail
from topics.storage.logfile import WalPosition
from topics.walshard.commit.archive_wait import ArchiveWait
from topics.walshard.commit.draft import AloneHandler, Draft, GroupHandler, Steps
from topics.walshard.commit.logs import MOVED_MAX
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers.routing import Routing
from topics.walshard.shard import Handlers, Shard

_READS: Final = frozenset(
    (
        queue_messages.CursorGet,
        queue_messages.Peek,
        topic_messages.Hello,
        topic_messages.SessionAbandon,
        topic_messages.SessionClose,
        topic_messages.SessionGet,
        topic_messages.SessionOpen,
        topic_messages.SessionPut,
        topic_messages.Unwatch,
        topic_messages.Watch,
    )
)
_ROUTERS: Final = bytes((FrameType.ROUTER_CREATE, FrameType.ROUTER_DELETE))


def only_reads(handlers: Handlers) -> Handlers:
    """Return the handlers of a follower's shard: they refuse requests that change anything (`not_leader`)."""

    def refuse(_call: object, _frontend: int, _group: Draft) -> NoReturn:
        raise TopicsError("not_leader", "this service follows another one: send this to that one")

    def refuse_alone(call: object, frontend: int) -> Steps[None]:
        yield from ()  # a handler of this kind yields drafts
        refuse(call, frontend, Draft())

    in_group: dict[type, GroupHandler] = {
        type_: handler if type_ in _READS else refuse for type_, handler in handlers.in_group.items()
    }
    alone: dict[type, AloneHandler] = {
        type_: handler if type_ in _READS else refuse_alone for type_, handler in handlers.alone.items()
    }
    del alone[Expire], alone[CatchUp]
    in_group[Expire] = lambda _call, _frontend, _group: Done()
    in_group[CatchUp] = lambda _call, _frontend, _group: CaughtUp(True, False)
    return handlers._replace(in_group=in_group, alone=alone)


class News(NamedTuple):
    """News of the leader's log: `changed` are topics that are new, have changed, or of which the archive has more.
    `bereft` are the watchers of deleted topics (frontend → token).
    """

    changed: list[Hosted]
    bereft: dict[int, int]


@dataclass(eq=False)
class FollowedLog:
    """The log of one of the leader's shards. It owns the fold of that log, and (with the catalog) the resulting topics.

    `until()` is how far the log may be read, None while that is not known.
    """

    _fold: Fold
    _tail: LogTail
    _until: Callable[[], WalPosition | None]
    _wait: ArchiveWait
    _catalog: Catalog
    _routing: Routing

    def __post_init__(self) -> None:
        self._wait.committed(self._catalog, self._tail.position.word)
        self._configs = {hosted.topic.id: hosted.topic.config for hosted in self._catalog}
        self._due: dict[int, Hosted] = {}
        """Topics with records that came into the archive and are not shown as durable yet, by their ids."""

    @property
    def has_news(self) -> bool:
        until = self._until()
        return (until is not None and until > self._tail.position) or self._wait.is_due or bool(self._due)

    def read(self) -> News:
        """Fold new frames of the log. After TailLost, FoldError, OSError, ArenaFullError the shard must start again."""
        until = self._until()
        if until is None or until <= self._tail.position:
            return News(self._archived([]), {})
        touched: set[int] = set()
        watchers: dict[int, int] = {}
        router_ids: set[int] = set()
        for batch in self._tail.read(until):
            fold_frames(self._fold, batch, in_ram=False)
            touched |= {topic_id for _, topic_id in batch.frames.kinds_and_topics()}
            if batch.frames.of_any(_ROUTERS):
                router_ids |= {seq for _, _, kind, _, _, seq, *_ in batch.frames if kind in _ROUTERS}
        self._fold.apply_pending()
        gone = touched - self._fold.topics.keys()
        for hosted in filter(None, map(self._catalog.find_id, gone)):  # first, since new topics may have their names
            del self._configs[hosted.topic.id]
            self._wait.forget(hosted)
            self._due.pop(hosted.topic.id, None)
            self._catalog.retire(hosted)
            watchers |= hosted.watchers
        changed = [self._take(self._fold.topics[topic_id]) for topic_id in touched - gone]
        self._routing.follow(self._fold.routers, changed, router_ids)
        self._wait.committed(changed, until.word)
        return News(list({id(hosted): hosted for hosted in (*changed, *self._archived(changed))}.values()), watchers)

    def _archived(self, changed: list[Hosted]) -> list[Hosted]:
        """Have what came into the archive count as durable; return those topics, MOVED_MAX of the unchanged at most."""
        self._due |= {hosted.topic.id: hosted for hosted in self._wait.poll()}
        moved = [self._due.pop(hosted.topic.id) for hosted in changed if hosted.topic.id in self._due]
        moved += [self._due.pop(topic_id) for topic_id in list(islice(self._due, MOVED_MAX))]
        for hosted in moved:
            hosted.topic.durable_seq = max(hosted.topic.durable_seq, hosted.topic.archived_seq)
        return moved

    def _take(self, topic: Topic) -> Hosted:
        """Bring the hosted topic up to the state of the fold."""
        former = self._configs.get(topic.id)
        self._configs[topic.id] = topic.config
        hosted = self._catalog.follow(topic)
        if former is not None and former is not topic.config:
            self._configure(hosted, topic, former)
        topic.evict_over_cap()
        topic.logged_floor = topic.evict_floor
        return hosted

    def _configure(self, hosted: Hosted, topic: Topic, former: TopicConfig) -> None:
        """Show another configuration, which the fold has set already."""
        config, topic.config = topic.config, former
        hosted.configured(config, hosted.prepare_config(config))


@dataclass(eq=False)
class FollowerShard(Shard):
    """A follower's shard at work. Instead of copying for routers it reads the leader's log."""

    _: KW_ONLY
    log: FollowedLog

    def copy(self) -> bool:
        changed, bereft = self.log.read()
        self._rings.notify(bereft)
        self._publish(changed)
        for hosted in changed:
            if hosted.watchers:
                self._rings.notify(hosted.watchers)
        if changed or bereft:
            self._finish_group()
        return bool(changed)

    @property
    def is_idle(self) -> bool:
        return not self.log.has_news

    @property
    def is_stuck(self) -> bool:
        return False

    @property
    def next_tick_ms(self) -> int | None:
        return None

    def tick(self) -> None: ...

    def sync_in_background(self) -> bool:
        return False

    def sweep(self) -> None:
        self._time.look()
        self._cell.clock_offset_ms = self._time.trusted_offset_ms
        self._run(self.upkeep.sweep_followed())
        self._holdings.publish()
        self._rings.flush()

    def close(self) -> None: ...
