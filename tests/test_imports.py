"""Imports go one way: api ← core ← storage, shm ← processes that do not import each other; the supervisor forks them
all. The client is built on api alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import topics

ROOT = Path(topics.__file__).parent
# Modules that everybody above them may use and that use nothing of ours but each other's betters.
BASE = {"topics", "topics.settings", "topics.setting_values", "topics.log", "topics.terminal", "topics.progress"}
PROCESSES = {"topics.walshard", "topics.frontend", "topics.compactor", "topics.archive"}
SHARED = BASE | {"topics.api", "topics.core", "topics.storage", "topics.shm"}
MAY_IMPORT = {
    "topics": set[str](),
    "topics.api": set[str](),
    "topics.core": {"topics.api"},
    "topics.setting_values": {"topics.core"},
    "topics.settings": {"topics.core", "topics.setting_values"},
    "topics.log": set[str](),
    "topics.terminal": set[str](),
    "topics.progress": set[str](),
    "topics.storage": {"topics.core"},
    "topics.shm": {"topics.core"},
    "topics.archive": SHARED,
    "topics.walshard": SHARED,
    "topics.frontend": SHARED,
    "topics.compactor": SHARED,
    "topics.supervisor": SHARED | PROCESSES,
    "topics.cli": SHARED | {"topics.client", "topics.archive"},
    "topics.client": {"topics.api"},
    "topics.spark": {"topics.api", "topics.core", "topics.setting_values", "topics.storage", "topics.client"},
}


def module_name(path: Path) -> str:
    parts = ["topics", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(module: str) -> str:
    """`topics.shm.ring` → `topics.shm`."""
    return ".".join(module.split(".")[:2])


def imports(source: str, of: str) -> set[str]:
    """Packages of ours that `source` (module `of`) imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{of}: relative import"
            # `from topics import log` names a module or something of the package itself.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {package_or_root(name) for name in found if name.split(".")[0] == "topics"}


def package_or_root(name: str) -> str:
    return package(name) if package(name) in MAY_IMPORT else "topics"


def violations(source: str, module: str) -> set[str]:
    own = package(module)
    return imports(source, module) - MAY_IMPORT[own] - {own, "topics"}


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def test_imports_go_one_way() -> None:
    assert {package(module) for module in MODULES} <= MAY_IMPORT.keys(), "each package has a place in the map"
    found = {module: violations(path.read_text(), module) for module, path in MODULES.items()}
    assert not {module: packages for module, packages in found.items() if packages}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("topics.core.topic", "from topics.storage.frame import encode", {"topics.storage"}),
        ("topics.client.calls", "from topics.core.keys import KeyScope", {"topics.core"}),
        ("topics.storage.wal", "import topics.shm.ring", {"topics.shm"}),
        ("topics.frontend.app", "def f():\n    from topics.walshard import main", {"topics.walshard"}),
        ("topics.walshard.main", "from topics import supervisor", {"topics.supervisor"}),
        ("topics.frontend.app", "from topics.core.errors import invalid\nfrom topics import log, __version__", set()),
        ("topics.supervisor.command", "from topics.frontend import main", set()),
    ],
)
def test_the_guard_sees(module: str, source: str, expected: set[str]) -> None:
    assert violations(source, module) == expected


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
    }
    # Whether spark-submit started a job is said nowhere else; `topics` hands it on to the command that it runs; what a
    # bucket needs comes by its provider's own variables.
    allowed = {"topics.supervisor.command", "topics.spark.jobs.program", "topics.cli.main"}
    assert readers <= allowed | {"topics.storage.bucket_store"}
