"""The side of a shard whose topics are copied: who wants to hear of which topic, and what is kept for them.

A copy that is not in the log of its dest must be makeable again from the source, whatever the source has evicted or
deleted meanwhile. So the index of a source holds what its followers have not logged yet, and the log says so
(ROUTER_SOURCE): a shard that reads it again holds the same from there on, before it knows of any follower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from topics.core.config import U64_MAX
from topics.core.names import owner_shard
from topics.core.routers import RouterState
from topics.shm.router_table import RouterTable
from topics.storage import frame
from topics.storage.frame import FrameType
from topics.walshard.catalog import Catalog
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation
from topics.walshard.routers.links import Ended, Follow, Held, LetGo, Links

LOG_AGAIN_SEQS: Final = 16_384
"""How far a hold may have moved before the log is told: so many entries more are held when it is read again."""


class _Follower(NamedTuple):
    shard: int
    source_topic_id: int
    hold_seq: int


class Followers:
    """Of one shard's topics, by name and dest. `commit` gets an operation into the durable log, or returns False."""

    def __init__(
        self,
        catalog: Catalog,
        links: Links,
        table: RouterTable,
        state: RouterState,
        commit: Callable[[Operation], bool],
        now_ms: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._links = links
        self._table = table
        self._commit = commit
        self._now_ms = now_ms
        self._by_name: dict[str, dict[int, _Follower]] = {}
        self._logged = dict(state.holds)
        self._early: set[int] = set()
        """Topics that are held though the log does not say so."""

    def changed(self, hosted: Hosted) -> None:
        """Tells those who copy this topic. Called for every topic of every group: it must cost next to nothing."""
        followers = self._by_name.get(hosted.topic.name) if self._by_name else None
        if followers:
            for shard in {follower.shard for follower in followers.values()}:
                self._links.changed(shard, hosted.topic.name)

    def lets_go(self, hosted: Hosted, up_to_seq: int) -> bool:
        """Whether nobody needs records up to there in the log. If not, those who may are asked to see to it: soon the
        answer is another one.
        """
        if hosted.ring.hold_seq > up_to_seq:
            return True
        self._adjust(hosted)
        if hosted.ring.hold_seq > up_to_seq:
            return True
        topic = hosted.topic
        for shard in {one.shard for one in self._by_name.get(topic.name, {}).values() if one.hold_seq <= up_to_seq}:
            self._links.send(shard, LetGo(topic.name, topic.id, up_to_seq))
        self._links.flush()
        return False

    def came(self, hosted: Hosted) -> None:
        """A topic was made. Who is to copy it has yet to learn of it, and may not come too late for its first records;
        until the log says what is held, copies are logged at once.
        """
        if self._table.registry.from_source(hosted.topic.name):
            hosted.index.hold(1)
            self._early.add(hosted.topic.id)
        self.changed(hosted)

    def gone(self, hosted: Hosted) -> None:
        """A topic was deleted. Those who copy it, and there may be some that have not come forward, hear where it ended
        before anybody else hears of its end: what they have not copied is lost.
        """
        topic = hosted.topic
        dests = {router.spec.dest for router in self._table.registry.from_source(topic.name)}
        for shard in {owner_shard(dest, self._links.shards) for dest in dests}:
            self._links.send(shard, Ended(topic.name, topic.id, topic.head_seq))
        self._links.flush()
        self._logged.pop(hosted.topic.id, None)
        self._early.discard(hosted.topic.id)
        self.changed(hosted)

    def follow(self, shard: int, message: Follow) -> None:
        """Notes or renews; answers Held once the log says what is held."""
        name = message.name
        self._by_name.setdefault(name, {})[message.dest_topic_id] = _Follower(
            shard, message.source_topic_id, message.hold_seq
        )
        hosted = self._catalog.find(name)
        if hosted is None or hosted.topic.id != message.source_topic_id:
            self._links.changed(shard, name)
            return
        self._adjust(hosted)
        if hosted.topic.id in self._logged:
            self._links.send(shard, Held(message.dest_topic_id, hosted.topic.id))

    def unfollow(self, name: str, dest_topic_id: int) -> None:
        followers = self._by_name.get(name)
        if followers is None or followers.pop(dest_topic_id, None) is None:
            return
        if not followers:
            del self._by_name[name]
        hosted = self._catalog.find(name)
        if hosted is not None:
            self._adjust(hosted)

    def forget(self, shard: int) -> None:
        """That shard has started again; who is still to be told will say so."""
        for name in list(self._by_name):
            followers = {dest: one for dest, one in self._by_name[name].items() if one.shard != shard}
            if followers:
                self._by_name[name] = followers
            else:
                del self._by_name[name]

    def review(self) -> None:
        """Now and then: releases what is held for routers that are no more."""
        held = self._logged.keys() | self._early
        if held and self._table.known:
            for hosted in [hosted for hosted in self._catalog if hosted.topic.id in held]:
                self._adjust(hosted)

    def _adjust(self, hosted: Hosted) -> None:
        """Holds what the followers need. Nothing is released while one that the table knows has not come forward, nor
        while the table is not known: a shard may hear of followers before it hears of routers.
        """
        topic, ring = hosted.topic, hosted.ring
        followers = self._by_name.get(topic.name, {})
        needed = [one.hold_seq for one in followers.values() if one.source_topic_id == topic.id]
        expected = {router.spec.dest for router in self._table.registry.from_source(topic.name)}
        logged_seq = self._logged.get(topic.id)
        if not self._table.known or self._table.stale or len(needed) < len(expected):
            hold_seq = min([ring.hold_seq, *needed])
        elif needed:
            hold_seq = min(needed)
        else:
            hold_seq = U64_MAX
        # What is in segments, is held by nobody: who follows had let go of it, or will copy it from there.
        hold_seq = max(hold_seq, hosted.index.segments.last_seq + 1)
        if hold_seq == U64_MAX or topic.id in self._logged:
            self._early.discard(topic.id)
        if hold_seq == U64_MAX:
            if logged_seq is not None and not expected and self._log(hosted, 0):
                del self._logged[topic.id]
        elif (logged_seq is None or hold_seq < logged_seq or hold_seq - logged_seq >= LOG_AGAIN_SEQS) and self._log(
            hosted, hold_seq
        ):
            self._logged[topic.id] = hold_seq
        if hold_seq != ring.hold_seq:
            hosted.index.hold(hold_seq)
            ring.drop_before(topic.earliest_seq)
            hosted.publish()

    def _log(self, hosted: Hosted, hold_seq: int) -> bool:
        note = frame.encode(FrameType.ROUTER_SOURCE, 0, hosted.topic.id, hold_seq, self._now_ms(), b"", b"", b"")
        return self._commit(Operation([note], lambda _file_no, _offset: None))
