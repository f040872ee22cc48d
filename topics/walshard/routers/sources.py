"""The topics of a shard that routers copy: which shards hear of their changes, and which entries their index keeps.

There is a ring for each ordered pair of shards. Messages arrive in order, each at least once: a message stays in its
ring until it is handled, so a shard that is killed finds it again. Messages that wait for room in a full ring die with
their sender. So nothing may depend on a message alone: every shard looks at all of its sources once a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from topics.core.config import U64_MAX
from topics.core.names import owner_shard
from topics.core.routers import ROUTERS_SHARD
from topics.shm.instance import SharedMemory
from topics.shm.router_memory import RouterBoard, RouterTable
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted

_IDS_PER_MESSAGE: Final = 256


class Changed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Topics of the sender have changed that routers copy into topics of the receiver."""

    names: list[str]


class Ended(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Topic `name` of the sender was deleted, from which the receiver may copy. `head_seq` was its last seq."""

    name: str
    source_topic_id: int
    head_seq: int


class RoutersEnded(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Routers ended with a topic of the sender. The receiver is shard 0."""

    router_ids: list[int]


PeerMessage = Changed | Ended | RoutersEnded

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_NAMES_PER_MESSAGE: Final = 8
"""A name has 255 bytes at most, so any such message fits the smallest ring."""


class Links:
    """One shard's ends of the rings between shards. A message to itself arrives with the next `receive`."""

    def __init__(self, shared: SharedMemory, shard: int) -> None:
        self.shard = shard
        self._out = shared.links[shard]
        self._in = [row[shard] for row in shared.links]
        self._wakes = shared.shard_wakes
        self._waiting: list[deque[PeerMessage]] = [deque() for _ in self._out]
        self._changed: list[dict[str, None]] = [{} for _ in self._out]

    @property
    def shards(self) -> int:
        return len(self._out)

    @property
    def idle(self) -> bool:
        """Return whether no message is to be taken."""
        own = self._waiting[self.shard] or self._changed[self.shard]
        return not own and all(ring is None or ring.empty for ring in self._in)

    @property
    def stuck(self) -> bool:
        """Return whether messages wait for room in the ring of another shard."""
        return any(self._waiting[peer] or self._changed[peer] for peer in range(self.shards) if peer != self.shard)

    def send(self, shard: int, message: PeerMessage) -> None:
        """Send a message with the next `flush`."""
        self._waiting[shard].append(message)

    def changed(self, shard: int, name: str) -> None:
        """Send a Changed with the next `flush`; many of one topic become one."""
        self._changed[shard][name] = None

    def flush(self) -> None:
        """Put into the rings what fits, and wake the peers."""
        for shard, ring in enumerate(self._out):
            waiting, changed = self._waiting[shard], self._changed[shard]
            if ring is None:
                continue
            sent = False
            while waiting and ring.push(_encode(waiting[0])):
                waiting.popleft()
                sent = True
            names = [] if waiting else list(changed)
            for at in range(0, len(names), _NAMES_PER_MESSAGE):
                some = names[at : at + _NAMES_PER_MESSAGE]
                if not ring.push(_encode(Changed(some))):
                    break
                for name in some:
                    del changed[name]
                sent = True
            if sent:
                self._wakes[shard].signal()

    def receive(self, take: Callable[[PeerMessage], None]) -> bool:
        """Hand over all messages that have come. False if there were none."""
        some = False
        changed, self._changed[self.shard] = self._changed[self.shard], {}
        if changed:
            some = True
            take(Changed(list(changed)))
        own = self._waiting[self.shard]
        for _ in range(len(own)):
            some = True
            take(own.popleft())
        for ring in self._in:
            if ring is None or ring.empty:
                continue
            some = True
            for message, position in ring.peek():
                take(_decoder.decode(message))
                ring.consume(position)
        return some


class Sources:
    """One shard's view of the table of routers. It tells the shards of dests when a source on this shard changes, and
    has the source's index keep entries that are yet to be copied. The shard of a dest reads the source itself.
    """

    def __init__(self, catalog: Catalog, table: RouterTable, boards: list[RouterBoard], links: Links) -> None:
        self._catalog = catalog
        self.table = table
        self._boards = boards
        self.links = links
        self._shards_of_dests: dict[str, tuple[int, ...]] = {}
        """Shards of the dests of each source; filled when a source is published."""
        self._ended: set[int] = set()
        """Ids of routers that ended with a topic of this shard, and that the table may still have."""
        self.rerouted: set[str] = set()
        """Names of this shard's topics whose routers have changed since `take_rerouted`."""
        self._kept: dict[int, Hosted] = {}
        """Topics that routers copy, by id: their index keeps what is yet to be copied."""
        self._refresh()  # before anything is evicted

    def take_rerouted(self) -> set[str]:
        """Return the names of this shard's topics whose routers have changed since the last call."""
        self._refresh()
        rerouted, self.rerouted = self.rerouted, set()
        return rerouted

    def _refresh(self) -> None:
        """Take over changes of the table.

        A router that is made or changed concerns its dest alone, so the source tells nobody. The shard of the dest
        reads the table itself, then looks up the head of the source, begins there and gives the dest a turn
        (`Routing._changes`). It hears of all later changes of the source, since `changed`, `created` and `deleted` look
        at the table after the publication. To tell all dests of a source of each new router would take quadratic time.
        But all are told once, when this life of the shard first reads the table: its former life may not have told them
        of its last publications.
        """
        if not self.table.stale:
            return
        is_first = not self.table.was_read
        links, registry = self.links, self.table.registry
        touched = {name for name in self.table.refresh() if owner_shard(name, links.shards) == links.shard}
        for name in touched:
            self._shards_of_dests.pop(name, None)
            hosted = self._catalog.find(name)
            if hosted is not None:
                # A new router begins at the head, so entries kept for other routers are enough for it. A look at all
                # routers of the source with each change would take quadratic time; `sweep` looks at them.
                if not (hosted.topic.id in self._kept and registry.is_source(name)):
                    self._keep(hosted)
                if is_first:
                    self.changed(hosted)
        self.rerouted |= touched

    def changed(self, hosted: Hosted) -> None:
        """Tell the shards that copy a topic that it was published. This is called for each topic of each group."""
        if self.table.stale:
            self._refresh()
        registry = self.table.registry
        name = hosted.topic.name
        if not registry.is_source(name):
            return
        shards = self._shards_of_dests.get(name)
        if shards is None:
            shards = self._shards_of_dests[name] = self._find_shards_of_dests(name)
        for shard in shards:
            self.links.changed(shard, name)

    def _find_shards_of_dests(self, source: str) -> tuple[int, ...]:
        shards: set[int] = set()
        for router in self.table.registry.from_source(source):
            shards.add(owner_shard(router.spec.dest, self.links.shards))
            if len(shards) == self.links.shards:
                break
        return tuple(shards)

    def created(self, hosted: Hosted) -> None:
        """Note that a topic was made: routers may have waited for it, and copy it from its first record on."""
        self._refresh()
        self._keep(hosted)
        hosted.index.drop_before(hosted.topic.earliest_seq)  # its first group may have evicted records
        self.changed(hosted)

    def deleted(self, hosted: Hosted) -> None:
        """Tell the shards of the dests of a deleted topic at which seq it ended, then end its routers."""
        self._refresh()
        topic, registry = hosted.topic, self.table.registry
        for shard in self._find_shards_of_dests(topic.name):
            self.links.send(shard, Ended(topic.name, topic.id, topic.head_seq))
        self.links.flush()
        self._kept.pop(topic.id, None)
        self.changed(hosted)
        self.end(router.id for router in registry.touching(topic.name))

    # -- routers that end with a topic

    def end(self, router_ids: Iterable[int]) -> None:
        """End these routers, and tell shard 0."""
        added = sorted(set(router_ids) - self._ended)
        self._ended.update(added)
        self._tell_ended(added)

    def has_ended(self, router_id: int) -> bool:
        """Return whether a router has ended that the table may still have."""
        return router_id in self._ended

    def sweep(self) -> None:
        """Once a second, tell shard 0 again which routers ended, and drop ring entries of evicted, copied records."""
        if self._ended:
            self._ended &= self.table.registry.by_id.keys()
            self._tell_ended(sorted(self._ended))
        for hosted in list(self._kept.values()):
            if hosted.ring.base_seq < hosted.topic.earliest_seq:
                self._keep(hosted)
                base_seq = hosted.ring.base_seq
                hosted.index.drop_before(hosted.topic.earliest_seq)
                if hosted.ring.base_seq != base_seq:
                    hosted.publish()

    def _tell_ended(self, router_ids: list[int]) -> None:
        for at in range(0, len(router_ids), _IDS_PER_MESSAGE):
            self.links.send(ROUTERS_SHARD, RoutersEnded(router_ids[at : at + _IDS_PER_MESSAGE]))

    # -- what a source keeps

    def _keep(self, hosted: Hosted) -> None:
        """Have the index keep the entries that routers have yet to copy, according to the boards of their shards."""
        routers = self.table.registry.from_source(hosted.topic.name)
        copied_seq = U64_MAX if not routers else hosted.topic.head_seq
        for router in routers:
            progress = self._boards[owner_shard(router.spec.dest, self.links.shards)].find(router.id)
            # Id 0: the router has not seen the topic yet, and will begin with its first record.
            if progress is not None and progress.source_topic_id in (0, hosted.topic.id):
                copied_seq = min(copied_seq, progress.source_seq)
        hosted.index.copied_seq = copied_seq
        if routers:
            self._kept[hosted.topic.id] = hosted
        else:
            self._kept.pop(hosted.topic.id, None)
