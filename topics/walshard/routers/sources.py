"""The topics of a shard that routers copy: who is told that they changed, and what their index keeps to be copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from topics.core.config import U64_MAX
from topics.core.names import owner_shard
from topics.shm.router_board import RouterBoard
from topics.shm.router_table import RouterTable
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers import registrar
from topics.walshard.routers.links import Ended, Links, RoutersGone

_IDS_PER_MESSAGE: Final = 256


class Sources:
    """One shard's view of the table of routers, and what it says to the shards of their dests.

    Nothing is copied here: the shard of a dest reads the source itself. It is told so that it need not look.
    """

    def __init__(self, catalog: Catalog, table: RouterTable, boards: list[RouterBoard], links: Links) -> None:
        self._catalog = catalog
        self.table = table
        self._boards = boards
        self.links = links
        self._shards_of_dests: dict[str, tuple[int, ...]] = {}
        """By source, as far as it was asked for."""
        self._ended: set[int] = set()
        """Ids of routers that went with a topic, and that the table may still have."""
        self.rerouted: set[str] = set()
        """Topics of this shard whose routers have changed, until `take_rerouted`."""
        self._kept: dict[int, Hosted] = {}
        """Topics that have routers, by id: their index keeps what is yet to be copied."""
        self._refresh()  # before anything is evicted

    def owns(self, name: str) -> bool:
        """Whether a topic of this name is this shard's."""
        return owner_shard(name, self.links.shards) == self.links.shard

    def take_rerouted(self) -> set[str]:
        """Topics of this shard whose routers have changed since this was asked last."""
        self._refresh()
        rerouted, self.rerouted = self.rerouted, set()
        return rerouted

    def _refresh(self) -> None:
        """Takes over what has changed in the table."""
        if not self.table.stale:
            return
        touched = {name for name in self.table.refresh() if self.owns(name)}
        self._shards_of_dests.clear()
        for name in touched:
            hosted = self._catalog.find(name)
            if hosted is not None:
                self._keep(hosted)
                self.changed(hosted)
        self.rerouted |= touched

    def changed(self, hosted: Hosted) -> None:
        """A topic was published: the shards that copy it are told. Called for each topic of each group."""
        if self.table.stale:
            self._refresh()
        registry = self.table.registry
        name = hosted.topic.name
        if not registry.is_source(name):
            return
        shards = self._shards_of_dests.get(name)
        if shards is None:
            dests = {router.spec.dest for router in registry.from_source(name)}
            shards = tuple({owner_shard(dest, self.links.shards) for dest in dests})
            self._shards_of_dests[name] = shards
        for shard in shards:
            self.links.changed(shard, name)

    def created(self, hosted: Hosted) -> None:
        """A topic was made: routers may have waited for it, and copy it from its first record on."""
        self._refresh()
        self._keep(hosted)
        hosted.index.drop_before(hosted.topic.earliest_seq)  # what its first group evicted
        self.changed(hosted)

    def deleted(self, hosted: Hosted) -> None:
        """A topic was deleted: its routers go with it. The shards of its dests hear where it ended first."""
        self._refresh()
        topic, registry = hosted.topic, self.table.registry
        dests = {router.spec.dest for router in registry.from_source(topic.name)}
        for shard in {owner_shard(dest, self.links.shards) for dest in dests}:
            self.links.send(shard, Ended(topic.name, topic.id, topic.head_seq))
        self.links.flush()
        self._kept.pop(topic.id, None)
        self.changed(hosted)
        self.end(router.id for router in registry.touching(topic.name))

    # -- routers that end with a topic

    def end(self, router_ids: Iterable[int]) -> None:
        """These routers end now; shard 0 is told."""
        added = sorted(set(router_ids) - self._ended)
        self._ended.update(added)
        self._tell_ended(added)

    def has_ended(self, router_id: int) -> bool:
        """Whether the table may still have a router that is no more."""
        return router_id in self._ended

    def sweep(self) -> None:
        """Once a second: shard 0 hears again of routers that it still has, and rings let go of what was copied."""
        if self._ended:
            self._ended &= {router.id for router in self.table.registry.by_name.values()}
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
            self.links.send(registrar.SHARD, RoutersGone(router_ids[at : at + _IDS_PER_MESSAGE]))

    # -- what a source keeps

    def _keep(self, hosted: Hosted) -> None:
        """Has the index keep what its routers have yet to copy, as far as their boards say."""
        routers = self.table.registry.from_source(hosted.topic.name)
        copied_seq = U64_MAX if not routers else hosted.topic.head_seq
        for router in routers:
            progress = self._boards[owner_shard(router.spec.dest, self.links.shards)].find(router.id)
            # 0: its router has not seen yet that it exists, and begins with the first record.
            if progress is not None and progress.source_topic_id in (0, hosted.topic.id):
                copied_seq = min(copied_seq, progress.source_seq)
        hosted.index.copied_seq = copied_seq
        if routers:
            self._kept[hosted.topic.id] = hosted
        else:
            self._kept.pop(hosted.topic.id, None)
