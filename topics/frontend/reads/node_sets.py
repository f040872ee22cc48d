"""The sets of writers whose records readers leave out (api §4). Equal sets are shared, long ones have a common bound.

    node_set ─▶ equal to a living set: that one
        └─▶ new, and room for it: counted ─▶ its readers keep it ─▶ freed after the last one: no longer counted
                 └─▶ no room: 429 throttled

A stream keeps its set for as long as it is open, and a set may be as long as a body of a MiB. No reader knows when the
last one ends, so a set is counted until it is freed.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Final
from weakref import ref

from topics.core.errors import invalid
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget

NODES_MAX: Final = 10_000
NODES_MAX_BYTES: Final = 1 << 20
"""Bounds of the set of one reader."""
COUNTED_FROM_BYTES: Final = 4096
"""Size in memory from which a set is counted, about thirty names."""
_NAME_OVERHEAD_BYTES: Final = sys.getsizeof(b"") + 15
"""The most that a name takes beside its own bytes: malloc allocates in steps of 16 bytes."""

Nodes = frozenset[bytes]


class NodeSets:
    """The counted sets of one process. All calls are on its event loop; any thread may free a set."""

    def __init__(self) -> None:
        self._sets: dict[ref[Nodes], tuple[ref[Nodes], int]] = {}
        self._freed: deque[ref[Nodes]] = deque()
        self.budget = Budget(limits.NODE_SETS)

    @property
    def held_bytes(self) -> int:
        """The memory of all counted sets that live."""
        self._count_freed()
        return self.budget.held_bytes

    def _count_freed(self) -> None:
        while self._freed:
            _, size_bytes = self._sets.pop(self._freed.popleft(), (None, 0))  # a refused set is not in it
            self.budget.release(size_bytes)

    def keep(self, nodes: Nodes, admitted: bool = False) -> Nodes:
        """Count a set, and return the one to keep instead. Raise `throttled`, unless it was `admitted` before."""
        size_bytes = sys.getsizeof(nodes) + sum(map(len, nodes)) + len(nodes) * _NAME_OVERHEAD_BYTES
        if size_bytes < COUNTED_FROM_BYTES:
            return nodes
        self._count_freed()
        key = ref(nodes, self._freed.append)
        known = self._sets.get(key)
        found = None if known is None else known[0]()
        if found is not None:
            return found
        if not admitted and not self.budget.fits(size_bytes):
            raise self.budget.refused(
                f"the writers that readers name in node take up all of the {self.budget.most_bytes} bytes for them;"
                " name fewer, or ask again later"
            )
        self._sets[key] = key, size_bytes
        self.budget.held_bytes += size_bytes
        return nodes


node_sets: Final = NodeSets()
"""The counted sets of this process, which has one event loop that all routes share."""


def node_set(node: str | list[str] | None) -> Nodes | None:
    """Return the set that a client names; None for an empty one. Raise `invalid_request`, `throttled`."""
    if not node:
        return None
    nodes = frozenset([node.encode()] if isinstance(node, str) else [one.encode() for one in node])
    if len(nodes) > NODES_MAX or sum(map(len, nodes)) > NODES_MAX_BYTES:
        raise invalid(f"node names at most {NODES_MAX} writers, with {NODES_MAX_BYTES} bytes in all", field="node")
    return node_sets.keep(nodes)
