"""The writers whose records readers do not want back (api §4): equal sets are one, and the long ones have a bound
together.

    node_set ─▶ equal to one that lives: that one
        └─▶ new, and room for it: counted ─▶ whoever reads with it keeps it ─▶ nobody does any more: counted no longer
                 └─▶ no room: 429 throttled

A long poll keeps its set for half a minute, a stream for as long as it is open, and each is worth a body of a MiB. How
long one lives is nobody's to say: it is counted until it is freed.
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
"""Of one reader."""
COUNTED_FROM_BYTES: Final = 4096
"""In memory. What is shorter is not counted: about thirty names."""
_NAME_OVERHEAD_BYTES: Final = sys.getsizeof(b"") + 15
"""Of an object of bytes, at most: malloc deals in 16 bytes."""

Nodes = frozenset[bytes]


class NodeSets:
    """Of one process. Called on its event loop; sets may be freed by any thread."""

    def __init__(self) -> None:
        self._sets: dict[ref[Nodes], tuple[ref[Nodes], int]] = {}
        self._freed: deque[ref[Nodes]] = deque()
        self.budget = Budget(limits.NODE_SETS)

    @property
    def held_bytes(self) -> int:
        """Memory of all that is counted and lives."""
        self._count_freed()
        return self.budget.held_bytes

    def _count_freed(self) -> None:
        while self._freed:
            _, size_bytes = self._sets.pop(self._freed.popleft(), (None, 0))  # one that was refused is not there
            self.budget.release(size_bytes)

    def keep(self, nodes: Nodes, admitted: bool = False) -> Nodes:
        """The one that is to be kept instead. Raises `throttled` when there is no room for it, unless it was `admitted`
        before: then it counts, and others are refused.
        """
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
                f"the writers that readers name in node fill all of the {self.budget.most_bytes} bytes that they may;"
                " name fewer of them, or ask again later"
            )
        self._sets[key] = key, size_bytes
        self.budget.held_bytes += size_bytes
        return nodes


node_sets: Final = NodeSets()
"""Of this process: there is one event loop, and all routes share it."""


def node_set(node: str | list[str] | None) -> Nodes | None:
    """As a client names them; None for nobody. Raises `invalid_request`, `throttled`."""
    if not node:
        return None
    nodes = frozenset([node.encode()] if isinstance(node, str) else [one.encode() for one in node])
    if len(nodes) > NODES_MAX or sum(map(len, nodes)) > NODES_MAX_BYTES:
        raise invalid(f"node names at most {NODES_MAX} writers, with {NODES_MAX_BYTES} bytes in all", field="node")
    return node_sets.keep(nodes)
