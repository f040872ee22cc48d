"""A probe inside a frontend: what it has left to the garbage collector. `bench.cycles` puts it there and asks it.

The collector is off there, and a signal has it look at everything once. What it finds was in use by nobody, and was not
freed: objects that refer to each other in a circle, and what hangs from them.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any, Final

import uvloop

KINDS_SHOWN: Final = 6
OWNERS_MAX: Final = 4
"""References to a string or the like that only one left object has: that one's, and three of this module."""

Node = int
Graph = dict[Node, list[Node]]


def name_of(one: object) -> str:
    """Return the kind of an object as a line of the table says it."""
    if isinstance(one, CoroutineType | GeneratorType):
        return f"coroutine {one.__qualname__}"
    if isinstance(one, asyncio.Task):
        coroutine: Any = one.get_coro()
        return f"Task({coroutine.__qualname__})"
    if isinstance(one, FrameType):
        return f"frame {one.f_code.co_qualname}"
    if isinstance(one, MethodType):
        return f"method {one.__func__.__qualname__}"
    if isinstance(one, FunctionType):
        return f"function {one.__qualname__}"
    return type(one).__name__


def graph_of(left: Iterable[object]) -> Graph:
    """Return which of these objects refers to which."""
    by_id = {id(one): one for one in left}
    return {node: [id(other) for other in gc.get_referents(one) if id(other) in by_id] for node, one in by_id.items()}


def circles(graph: Graph) -> Iterator[list[Node]]:
    """Return the sets of nodes each of which leads to all others of its set (Tarjan), also one that leads to itself."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    stacked: set[Node] = set()
    for root in graph:
        if root in order:
            continue
        calls: list[tuple[Node, Iterator[Node]]] = []

        def enter(node: Node, calls: list[tuple[Node, Iterator[Node]]] = calls) -> None:
            order[node] = low[node] = len(order)
            stack.append(node)
            stacked.add(node)
            calls.append((node, iter(graph[node])))

        enter(root)
        while calls:
            node, rest = calls[-1]
            for other in rest:
                if other not in order:
                    enter(other)
                    break
                if other in stacked:
                    low[node] = min(low[node], order[other])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[node])
                if low[node] == order[node]:
                    found: list[Node] = []
                    while not found or found[-1] != node:
                        found.append(stack.pop())
                        stacked.remove(found[-1])
                    if len(found) > 1 or node in graph[node]:
                        yield found


def shortest(graph: Graph, circle: list[Node]) -> list[Node]:
    """Return a short way round, from one of the nodes to itself."""
    inside, start = set(circle), circle[-1]
    came_from: dict[Node, Node] = {}
    todo = deque([start])
    while todo:
        node = todo.popleft()
        for other in graph[node]:
            if other == start:
                way = [start, node]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if other in inside and other not in came_from:
                came_from[other] = node
                todo.append(other)
    raise AssertionError("this is no circle")


def label(one: object, other: object) -> str:
    """Return by what name the one has the other."""
    named: dict[Any, Any] = {}
    if isinstance(one, dict):
        named = one
    elif isinstance(one, CellType):
        return "cell_contents"
    elif isinstance(one, FrameType):
        named = one.f_locals
    else:
        slots = [slot for kind in type(one).__mro__ for slot in getattr(kind, "__slots__", ())]
        named = {slot: getattr(one, slot, None) for slot in slots if slot != "__weakref__"}
        named |= getattr(one, "__dict__", {})
    return next((str(name) for name, value in named.items() if value is other), "?")


def described(way: list[Node], by_id: dict[Node, object]) -> str:
    """Return a way round in words."""
    parts = [name_of(by_id[way[0]])]
    for node, other in itertools.pairwise(way):
        parts.append(f".{label(by_id[node], by_id[other])} → {name_of(by_id[other])}")
    return " ".join(parts)


def bytes_of(left: list[Any]) -> int:
    """Return what these objects take, with the strings and numbers that nobody else has."""
    size_bytes = sum(map(sys.getsizeof, left))
    seen: set[int] = set()
    for one in left:
        for other in gc.get_referents(one):
            if not gc.is_tracked(other) and id(other) not in seen and sys.getrefcount(other) <= OWNERS_MAX:
                seen.add(id(other))
                size_bytes += sys.getsizeof(other)
    return size_bytes


def look() -> dict[str, Any]:
    """Collect everything, and return what was left: how much, of which kinds, and in which circles. `threshold` says
    when the collector would look at all by itself.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    left = gc.garbage[:]
    gc.garbage.clear()
    by_id = {id(one): one for one in left}
    graph = graph_of(left)
    ways: Counter[str] = Counter()
    for circle in circles(graph):
        kinds = Counter(name_of(by_id[node]) for node in circle)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(KINDS_SHOWN))
        ways[f"{len(circle)} in a circle: {shown}: {described(shortest(graph, circle), by_id)}"] += 1
    return {
        "threshold": gc.get_threshold()[2],
        "objects": len(left),
        "bytes": bytes_of(left),
        "kinds": Counter(map(name_of, left)).most_common(40),
        "circles": ways.most_common(20),
    }


def install(directory: str) -> None:
    """Have each process with an event loop of uvloop, in this process or those that it forks, answer SIGUSR1 with a
    file in `directory`, whose name is its pid.
    """
    module: Any = uvloop
    make = module.new_event_loop

    def begin(loop: asyncio.AbstractEventLoop) -> None:
        gc.disable()
        loop.add_signal_handler(signal.SIGUSR1, answer)

    def answer() -> None:
        path = Path(directory) / str(os.getpid())
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(look()))
        gc.collect()  # what `look` has kept, to show it
        partial.rename(path)

    def probed() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = make()
        loop.call_soon(begin, loop)
        return loop

    module.new_event_loop = probed
