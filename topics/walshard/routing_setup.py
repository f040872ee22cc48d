"""Puts together what a shard needs for routers, from what its logs say of them."""

from __future__ import annotations

from topics.core.clock import Clock
from topics.core.routers import RouterState
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.instance import SharedMemory
from topics.shm.router_board import RouterBoardWriter
from topics.shm.router_table import RouterTable, RouterTableWriter
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.walshard.catalog import Catalog
from topics.walshard.group_commit import GroupCommit
from topics.walshard.holdings import Holdings
from topics.walshard.routers import registrar
from topics.walshard.routers.copier import Copier
from topics.walshard.routers.copy_log import CopyLog
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.followers import Followers
from topics.walshard.routers.following import Following
from topics.walshard.routers.links import Links
from topics.walshard.routers.originals import Originals
from topics.walshard.routers.rederiving import Rederiving
from topics.walshard.routers.registrar import Registrar
from topics.walshard.routers.routing import Routing
from topics.walshard.routers.turns import Turns


def make_routing(
    settings: Settings,
    shared: SharedMemory,
    index: int,
    state: RouterState,
    catalog: Catalog,
    holdings: Holdings,
    cell: ProcessCell,
    clock: Clock,
    fs: FileSystem,
    commits: GroupCommit,
) -> Routing:
    """`commits` need not be connected yet: nothing is committed here."""
    originals = Originals(fs, settings, shared, index, catalog, clock.monotonic_ms)
    links = Links(shared, index)
    table = RouterTable(shared.router_table)
    ram_directory = layout.ram_group_dir(shared.ram_dir, index)
    copy_log = CopyLog(fs, ram_directory, commits.commit, commits.show_logged, clock.now_ms)
    feeds = Feeds(RouterBoardWriter(shared.router_boards[index]), copy_log)
    copier = Copier(
        originals, copy_log, commits.show_copied, feeds.show_progress, holdings.claim_bytes, clock.monotonic_ms
    )
    feeds.recovered(state, {hosted.topic.id: hosted for hosted in catalog})
    turns = Turns()
    following = Following(links, originals, feeds, copy_log, turns)
    followers = Followers(catalog, links, table, state, commits.commit_one, clock.now_ms)
    registry: Registrar | None = None
    if index == registrar.SHARD:
        writer = RouterTableWriter(shared.router_table)
        registry = Registrar(writer, state, cell, settings.max_routers, commits.commit_one, clock.now_ms)
    return Routing(
        catalog,
        links,
        table,
        originals,
        feeds,
        copier,
        copy_log,
        followers,
        following,
        turns,
        Rederiving(feeds, copier, originals, table, clock.monotonic_ms),
        registry,
        cell,
        clock.monotonic_ms,
    )
