"""The shape of the code stays simple: few collaborators, objects that are whole once made, one place that commits."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_import_circles import imported
from tests.test_imports import MODULES

LINES_MAX = 62_151
"""All lines of `topics/`, docstrings included. A commit that needs more says why."""
COLLABORATORS_MAX = 8
SHARED_FILE_NAMES = {"__init__.py", "main.py", "errors.py"}
"""File names that may occur in more than one folder."""
WALSHARD = "topics.walshard"
WALSHARD_DEPTH_MAX = 9
MADE_BY_OTHERS = {"BoundedBuffer"}
"""Classes whose constructors are called by a library, which cannot hand over all that they need."""
PLAIN_DATA = {"NamedTuple", "Struct", "Protocol", "TypedDict"}
GONE = r"\b(rederiving|unlogged_seq|hold_seq|before_log|ROUTER_COPY|http_protocol)\b"
GONE_FROM_SHARDS = r"\b(followers|following)\b"
"""Ordinary words elsewhere."""
REACHES_MAX = 45
"""Most places in tests that touch a private attribute. It only ever falls."""
PUBLIC_OF_OTHERS = {"_replace", "_make", "_fields", "_asdict", "_exit"}
"""Names with an underscore that are documented parts of named tuples and of `os`."""
TESTS = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def classes() -> tuple[tuple[str, ast.ClassDef], ...]:
    """All classes, each with its module."""
    found = [(module, node) for module in MODULES for node in ast.walk(tree(module))]
    return tuple((module, node) for module, node in found if isinstance(node, ast.ClassDef))


@cache
def parents() -> dict[str, set[str]]:
    """Parents of all classes, by name."""
    found: dict[str, set[str]] = {}
    for _module, node in classes():
        found.setdefault(node.name, set()).update(bases(node))
    return found


def bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def is_plain_data(node: ast.ClassDef, parents: dict[str, set[str]]) -> bool:
    """Return whether a class only holds data, also by a parent of it."""
    names, seen = bases(node), set[str]()
    while names:
        if names & PLAIN_DATA:
            return True
        seen |= names
        names = {parent for name in names for parent in parents.get(name, ())} - seen
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def own_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """All classes but those that only hold data."""
    return ((module, node) for module, node in classes() if not is_plain_data(node, parents()))


def methods(node: ast.ClassDef) -> list[Function]:
    return [item for item in node.body if isinstance(item, Function)]


def too_many_collaborators(node: ast.ClassDef) -> bool:
    for method in methods(node):
        arguments = method.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
        if method.name == "__init__" and len(given) > COLLABORATORS_MAX:
            return True
    return False


def late_collaborators(node: ast.ClassDef) -> list[str]:
    """`connect` and `begin`, where they keep what they are given and the constructor has said nothing of it."""
    made = {target for method in methods(node) if method.name == "__init__" for target, _ in assigned(method)}
    found = []
    for method in methods(node):
        given = {argument.arg for argument in [*method.args.args, *method.args.kwonlyargs]}
        if method.name in ("connect", "begin"):
            found += [target for target, value in assigned(method) if value in given and target not in made]
    return found


def assigned(method: Function) -> list[tuple[str, str]]:
    """(attribute, value) of all assignments to attributes."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for statement in ast.walk(method):
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found.append((statement.target, statement.value))
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    found += zip(target.elts, statement.value.elts, strict=False)
                else:
                    found.append((target, statement.value))
    return [(ast.unparse(target), ast.unparse(value)) for target, value in found if isinstance(target, ast.Attribute)]


def declared_without_value(node: ast.ClassDef) -> list[str]:
    """Attributes that somebody has to set before the object is whole."""
    found = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.value is None]
    for method in methods(node):
        found += [
            item
            for item in ast.walk(method)
            if isinstance(item, ast.AnnAssign) and item.value is None and isinstance(item.target, ast.Attribute)
        ]
    return [ast.unparse(item.target) for item in found]


def part(module: str) -> str:
    """The folder or the module of a shard: `topics.walshard.commit.logs` → `commit`."""
    return module.removeprefix(f"{WALSHARD}.").split(".")[0]


def parts_below() -> dict[str, set[str]]:
    """Return the parts that each part of a shard imports of the others."""
    below: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module.startswith(f"{WALSHARD}."):
            targets = {name for name in imported(path.read_text(), MODULES) if name.startswith(f"{WALSHARD}.")}
            below.setdefault(part(module), set()).update({part(name) for name in targets} - {part(module)})
    return below


def longest_chain(start: str, below: dict[str, set[str]], passed: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest way down that passes no part twice."""
    passed = (*passed, start)
    chains = [longest_chain(target, below, passed) for target in below[start] if target not in passed]
    return max(chains, key=len, default=passed)


def test_no_constructor_takes_many_collaborators() -> None:
    found = {f"{module}.{node.name}" for module, node in own_classes() if too_many_collaborators(node)}
    assert not found, f"more than {COLLABORATORS_MAX} parameters"


def test_no_collaborator_comes_late() -> None:
    found = [f"{module}.{node.name}: {name}" for module, node in own_classes() for name in late_collaborators(node)]
    assert not found, "hand collaborators to the constructor"


def test_no_attribute_is_declared_without_a_value() -> None:
    found = [
        f"{module}.{node.name}: {name}"
        for module, node in own_classes()
        for name in declared_without_value(node)
        if node.name not in MADE_BY_OTHERS
    ]
    assert not found, "set attributes in the constructor"


def test_nothing_that_is_gone_comes_back() -> None:
    found = []
    for module, path in MODULES.items():
        source = path.read_text()
        words = {match.group() for match in re.finditer(GONE, source)}
        if module.startswith(WALSHARD):
            words |= {match.group() for match in re.finditer(GONE_FROM_SHARDS, source)}
            words |= set(re.findall(GONE_FROM_SHARDS, module))
        found += [f"{module}: {word}" for word in sorted(words)]
    assert not found


def test_only_the_pipeline_commits() -> None:
    """Handlers draft, `Shard` commits."""
    found = {
        module
        for module in MODULES
        if module.startswith(f"{WALSHARD}.")
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and re.search(r"\bcommits\.commit$", ast.unparse(node.func).replace("_", ""))
    }
    assert found == {f"{WALSHARD}.shard"}
    holders = {module for module in MODULES if f"{WALSHARD}.commit.commits" in imported_by(module)}
    assert holders == {f"{WALSHARD}.shard", f"{WALSHARD}.setup"}


def test_handlers_know_nothing_of_what_comes_after_them() -> None:
    """They return what is to be logged and said. Notices and jobs that they push go through a callable."""
    later = {f"{WALSHARD}.{name}" for name in ("shard", "publisher", "upkeep", "commit.commits", "commit.shard_rings")}
    found = {
        module: sorted(imported_by(module) & later)
        for module in MODULES
        if module.startswith(f"{WALSHARD}.handlers.") and imported_by(module) & later
    }
    assert not found


@cache
def imported_by(module: str) -> set[str]:
    return imported(MODULES[module].read_text(), MODULES)


def test_a_shard_has_few_floors() -> None:
    below = parts_below()
    chain = max((longest_chain(start, below) for start in below), key=len)
    assert len(chain) <= WALSHARD_DEPTH_MAX, " → ".join(chain)


def test_each_class_name_means_one_thing() -> None:
    names = Counter(node.name for _module, node in classes())
    found = {name: sorted({module for module, node in classes() if node.name == name}) for name in repeated(names)}
    assert not found, "give each class a name of its own"


def test_each_file_name_means_one_thing() -> None:
    found = set(repeated(Counter(path.name for path in MODULES.values()))) - SHARED_FILE_NAMES
    assert not found, "give each module a name of its own"


def repeated(names: Counter[str]) -> list[str]:
    return sorted(name for name, times in names.items() if times > 1)


def test_the_package_keeps_its_size() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in MODULES.values())
    assert lines <= LINES_MAX, "delete or merge something first"


def private_reaches(source: str) -> list[str]:
    """Return the places that touch a private attribute of another object: `line: expression`."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC_OF_OTHERS
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_tests_rarely_reach_into_private_attributes() -> None:
    """The bound only falls: test by public behaviour, or make the attribute public where others need it."""
    paths = sorted(TESTS.rglob("*.py"))
    found = [f"{path.relative_to(TESTS)}:{reach}" for path in paths for reach in private_reaches(path.read_text())]
    assert len(found) <= REACHES_MAX, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a._b", ["1: a._b"]),
        ("a.b._c.d", ["1: a.b._c"]),
        ("super()._b()", ["1: super()._b"]),
        ("self._b, cls._b", []),
        ("self.a._b", ["1: self.a._b"]),
        ("a.__class__", []),
        ("a._replace(b=1), os._exit(0)", []),
    ],
)
def test_private_reaches_are_seen(source: str, found: list[str]) -> None:
    assert private_reaches(source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A:\n def __init__(self, a, b, c, d, e, f, g, h): pass", []),
        ("class A:\n def __init__(self, a, b, c, d, e, f, g, *, h, i): pass", ["collaborators"]),
        ("class A:\n def connect(self, b): self._b = b", ["late"]),
        ("class A:\n def begin(self, b, c): self._b, self.x.c = b, c", ["late"]),
        ("class A:\n def begin(self, b): self._words[0] = b", []),
        ("class A:\n def __init__(self): self._b = None\n def begin(self, b): self._b = b", []),
        ("class A:\n x: int", ["declared"]),
        ("class A:\n x: int = 1", []),
        ("class A:\n def __init__(self):\n  self.x: int", ["declared"]),
        ("class A(NamedTuple):\n x: int", []),
        ("class A(msgspec.Struct, frozen=True):\n x: int", []),
        ("class A(Own):\n x: int", []),
        ("@dataclass(frozen=True)\nclass A:\n x: int", []),
    ],
)
def test_each_of_these_is_seen(source: str, found: list[str]) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    seen = []
    if not is_plain_data(node, {"Own": {"Struct"}}):
        seen += ["collaborators"] * too_many_collaborators(node)
        seen += ["late"] * bool(late_collaborators(node)) + ["declared"] * bool(declared_without_value(node))
    assert seen == found


def test_the_longest_chain_is_found() -> None:
    below = {"a": {"b", "d"}, "b": {"c"}, "c": set[str](), "d": {"b", "a"}}
    assert longest_chain("a", below) == ("a", "d", "b", "c")
