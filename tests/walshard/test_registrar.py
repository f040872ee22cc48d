"""The registry of a service that follows another one: it takes over what has changed in the leader's log, not all."""

from __future__ import annotations

import random

import pytest

from tests.walshard.rig import Rig
from topics.core.routers import FoldedRouters, Router, RouterSpec, encode_router
from topics.shm.router_memory import RouterTable, RouterTableWriter


@pytest.mark.parametrize("seed", range(4))
def test_what_became_of_routers_is_shown_and_nothing_else_is_written(
    rig: Rig, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, state, last_id = random.Random(seed), FoldedRouters(), 0
    registrar, table = rig.shard.routing.registrar, RouterTable(rig.shared.router_table)
    assert registrar is not None
    monkeypatch.delattr(RouterTableWriter, "store_all")
    for _ in range(200):
        router_ids: set[int] = set()
        for _ in range(chance.randrange(1, 5)):  # frames that are read together
            name = f"r{chance.randrange(9)}"
            known = state.routers.get(name)
            if known is not None and chance.randrange(2):
                state.deleted(known.id)
                router_ids.add(known.id)
                continue
            if known is None or chance.randrange(2):
                last_id += 1
                router = Router(last_id, 1, name, RouterSpec("a", f"d{last_id}"))
            else:
                router = Router(known.id, known.version + 1, name, known.spec)
            state.created(encode_router(router))
            router_ids.add(router.id)
        registrar.follow(state, router_ids)
        table.refresh()
        assert table.registry.by_name == state.routers
        assert rig.cell.get("routers") == len(state.routers)
