"""Routers that go with a topic of theirs: shard 0 is told until the table has them no more."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from topics.walshard.routers import registrar
from topics.walshard.routers.links import Links, RoutersGone

_IDS_PER_MESSAGE: Final = 256


class DeadRouters:
    """By id; of one shard."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._ids: set[int] = set()

    def __contains__(self, router_id: object) -> bool:
        return router_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, router_ids: Iterable[int]) -> None:
        """They end now."""
        added = sorted(router_ids)
        self._ids.update(added)
        self._tell(added)

    def tell_again(self, registered: Container[int]) -> None:
        """Of those that the table still has."""
        self._ids = {router_id for router_id in self._ids if router_id in registered}
        self._tell(sorted(self._ids))

    def _tell(self, router_ids: list[int]) -> None:
        for at in range(0, len(router_ids), _IDS_PER_MESSAGE):
            self._links.send(registrar.SHARD, RoutersGone(router_ids[at : at + _IDS_PER_MESSAGE]))
