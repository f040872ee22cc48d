"""Members of Hypercorn that this service relies on are listed, and were read in the version that is installed."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest

from topics.frontend import http
from topics.frontend.http.hypercorn_patches import CHECKED_VERSIONS, RELIED_ON, Reliance

LISTED = {reliance.member.__qualname__.split(".")[0] for reliance in RELIED_ON}


@pytest.mark.parametrize("package", CHECKED_VERSIONS)
def test_the_version_is_the_one_it_was_checked_against(package: str) -> None:
    installed = importlib.metadata.version(package)
    assert installed == CHECKED_VERSIONS[package], f"read what {package} {installed} changed in RELIED_ON"


@pytest.mark.parametrize("reliance", RELIED_ON, ids=lambda reliance: reliance.member.__qualname__)
def test_no_member_has_changed(reliance: Reliance) -> None:
    digest = hashlib.sha256(inspect.getsource(reliance.member).encode()).hexdigest()[:12]
    assert digest == reliance.source_digest, f"{reliance.member.__qualname__} has changed: {reliance.why}"


def hypercorn_names(tree: ast.Module) -> set[str]:
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hypercorn")
        for alias in node.names
    }


@pytest.mark.parametrize("path", sorted(Path(http.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_subclass_and_every_patch_is_listed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bases = {
        base.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    assert bases & hypercorn_names(tree) <= LISTED
    if path.stem != "hypercorn_patches":
        patched = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "vars"
        ]
        assert not patched, "modules are patched in hypercorn_patches alone"
