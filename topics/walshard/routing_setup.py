"""Puts together what a shard needs for routers, from what its logs say of them."""

from __future__ import annotations

from topics.core.clock import Clock
from topics.core.routers import RouterState
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.instance import SharedMemory
from topics.shm.router_board import RouterBoard, RouterBoardWriter
from topics.shm.router_table import RouterTable, RouterTableWriter
from topics.storage.filesystem import FileSystem
from topics.walshard.catalog import Catalog
from topics.walshard.holdings import Holdings
from topics.walshard.room import MakeRoom
from topics.walshard.routers import registrar
from topics.walshard.routers.copier import Copier
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.links import Links
from topics.walshard.routers.originals import Originals
from topics.walshard.routers.registrar import Registrar
from topics.walshard.routers.routing import Routing
from topics.walshard.routers.sources import Sources


def make_routing(
    settings: Settings,
    shared: SharedMemory,
    index: int,
    state: RouterState,
    catalog: Catalog,
    holdings: Holdings,
    make_room: MakeRoom,
    cell: ProcessCell,
    clock: Clock,
    fs: FileSystem,
) -> Routing:
    """The routers of one shard at work; nothing is copied yet."""
    originals = Originals(fs, settings, shared, index, catalog, clock.monotonic_ms)
    boards = [RouterBoard(board) for board in shared.router_boards]
    sources = Sources(catalog, RouterTable(shared.router_table), boards, Links(shared, index))
    feeds = Feeds(RouterBoardWriter(shared.router_boards[index]), clock.now_ms)
    feeds.recovered(state, {hosted.topic.id: hosted for hosted in catalog})
    registry: Registrar | None = None
    if index == registrar.SHARD:
        writer = RouterTableWriter(shared.router_table)
        registry = Registrar(writer, state, cell, settings.max_routers, clock.now_ms)
    copier = Copier(originals, holdings.claim_bytes, cell, clock)
    return Routing(catalog, sources, originals, feeds, copier, make_room, registry, clock)
