"""No module imports itself through others. Imports inside functions and under TYPE_CHECKING count."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from tests.test_imports import MODULES

Graph = Mapping[str, set[str]]


def imported(source: str, modules: Iterable[str]) -> set[str]:
    """The modules that `source` imports anywhere."""
    known = set(modules)
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from topics.core import config` names a module, `from topics.core.config import CLASSES` does not.
            found |= {name if name in known else str(node.module) for name in names}
    return found & known


def circles(graph: Graph) -> set[frozenset[str]]:
    """The groups of modules that reach each other: strongly connected components (Kosaraju)."""
    importers: dict[str, set[str]] = {module: set() for module in graph}
    for module, targets in graph.items():
        for target in targets:
            importers[target].add(module)
    seen: set[str] = set()
    finished = [module for start in graph for module in _walk(graph, start, seen)]
    seen.clear()
    groups = [frozenset(_walk(importers, start, seen)) for start in reversed(finished)]
    return {group for group in groups if len(group) > 1 or any(one in graph[one] for one in group)}


def _walk(graph: Graph, start: str, seen: set[str]) -> list[str]:
    """Return what is reached from `start` and was not seen yet, each after all that is reached from it."""
    finished: list[str] = []
    open_modules = [(start, iter(graph[start]))] if start not in seen else []
    seen.add(start)
    while open_modules:
        module, targets = open_modules[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            open_modules.pop()
            finished.append(module)
        else:
            seen.add(target)
            open_modules.append((target, iter(graph[target])))
    return finished


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: imported(path.read_text(), MODULES) for module, path in MODULES.items()}
    found = circles(graph)
    assert not found, "import circles: " + "; ".join(" <-> ".join(sorted(circle)) for circle in found)


def test_circles_are_seen() -> None:
    graph = {
        "a": {"b"},
        "b": {"c"},
        "c": {"a", "d"},
        "d": {"e"},
        "e": {"d"},
        "f": {"a", "g"},
        "g": {"g"},
        "h": set[str](),
    }
    assert circles(graph) == {frozenset("abc"), frozenset("de"), frozenset("g")}


def test_imports_are_seen_wherever_they_are() -> None:
    source = """
import topics.log
from topics.core import config, names
from topics.core.errors import TopicsError
if TYPE_CHECKING:
    from topics.shm.ring import Ring
def f():
    from topics import settings, __version__
"""
    modules = ["topics", "topics.log", "topics.settings", "topics.core", "topics.core.config", "topics.core.errors"]
    assert imported(source, [*modules, "topics.shm.ring", "topics.other"]) == {*modules, "topics.shm.ring"}
