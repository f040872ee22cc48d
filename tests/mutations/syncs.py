"""A check of the tests: each call that puts something on the disk for good is taken out in turn. Which test notices?

`make mutants`, or `python -m tests.mutations.syncs [part of a path] ...`. Prints a line for each call, and ends with 1
when one is missed by all the tests that are asked: those in `NOTICED_BY`. Everything happens in a copy.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("storage", "compactor", "walshard", "supervisor", "archive")
CALLS: Final = frozenset(("fdatasync", "fsync_dir", "sync_all", "fsync", "rename"))
SYNC_OF: Final = frozenset(("writer", "active", "_logs"))
"""Names of objects whose `sync()` is such a call, too."""
TIMEOUT_S: Final = 300

NOTICED_BY: Final[dict[str, Sequence[str]]] = {
    "archive/directory_copy.py": ("archive/test_every_sync.py",),
    "archive/promoting.py": ("archive/test_every_sync.py",),
    "archive/replica.py": ("archive/test_every_sync.py",),
    "archive/restoring.py": ("archive/test_every_sync.py",),
    "compactor/checkpoints.py": (
        *("walshard/test_every_sync.py", "compactor/test_cut_failures.py", "compactor/test_durable_marks.py"),
    ),
    "compactor/rewriting.py": ("storage/test_every_sync.py",),
    "compactor/segment_building.py": ("storage/test_every_sync.py", "walshard/test_every_sync.py"),
    "storage/filesystem.py": (
        *("storage/test_every_sync.py", "storage/test_txn_files.py", "storage/test_clock_file.py"),
        "storage/test_wal.py",
    ),
    "storage/logfile.py": ("storage/test_every_sync.py", "storage/test_wal.py", "storage/test_wal_faults.py"),
    "storage/recovery.py": ("storage/test_every_sync.py", "storage/test_recovery.py", "storage/test_wal_faults.py"),
    "storage/reshard.py": ("storage/test_every_sync.py", "storage/test_reshard.py"),
    "storage/segment_deletes.py": ("storage/test_every_sync.py",),
    "storage/segment_store.py": ("storage/test_every_sync.py", "storage/test_segment_store.py"),
    "storage/segment_writer.py": ("storage/test_every_sync.py", "storage/test_segment.py"),
    "storage/snapshot.py": ("storage/test_every_sync.py",),
    "storage/wal.py": ("storage/test_every_sync.py", "storage/test_wal.py", "storage/test_wal_faults.py"),
    "supervisor/listeners.py": ("supervisor/test_real_service.py",),
    "walshard/handlers/segment_handover.py": ("walshard/test_every_sync.py",),
    "walshard/commit/logs.py": (
        "walshard/test_every_sync.py",
        "walshard/test_disk_faults.py",
        "walshard/test_shard.py",
    ),
    "walshard/handlers/named_cursors.py": ("walshard/test_every_sync.py",),
    "walshard/commit/marks.py": ("walshard/test_every_sync.py", "walshard/test_ram_log.py"),
    "walshard/handlers/sinks.py": ("walshard/test_sinks.py",),
    "walshard/handlers/topic_calls.py": ("walshard/test_every_sync.py",),
    "walshard/routers/feeds.py": ("walshard/test_every_sync.py",),
    "walshard/routers/registrar.py": ("walshard/test_every_sync.py",),
}
"""Tests that see the calls of a file, quick ones first."""


class Mutant(NamedTuple):
    """`line` of `path`, with `text` at the byte offsets start..end replaced by `without`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    without: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.without.encode() + source[self.end :]


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """Each call of `source` that syncs or renames, taken out; each `sync=True` made False."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def cut(node: ast.expr, without: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        return Mutant(path, node.lineno, start, end, " ".join(source[start:end].decode().split()), without)

    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute):
            called, of = node.func.attr, node.func.value
            owner = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            if called in CALLS or (called == "sync" and owner in SYNC_OF):
                yield cut(node, "True")
        for keyword in node.keywords:
            if keyword.arg == "sync" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                yield cut(keyword.value, "False")._replace(text="sync=True")


def all_mutants() -> Iterator[Mutant]:
    for package in PACKAGES:
        for file in sorted((ROOT / "topics" / package).rglob("*.py")):
            path = str(file.relative_to(ROOT / "topics"))
            yield from sorted(mutants(path, file.read_bytes()), key=lambda mutant: mutant.start)


def first_to_notice(copy: Path, tests: Sequence[str]) -> str | None:
    """The first of these that fails; None when all pass."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for test in tests:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if ended.returncode == 1:
            failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED ")]
            return failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else test
        if ended.returncode != 0:
            raise SystemExit(f"{test}: pytest ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return None


def main(wanted: Sequence[str]) -> int:
    """All of them, or those of which a part of the path is in `wanted`. Returns the exit code."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="topics-mutants-") as root:
        copy = Path(root)
        for part in ("topics", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for mutant in all_mutants():
            if wanted and not any(part in mutant.path for part in wanted):
                continue
            target = copy / "topics" / mutant.path
            source = target.read_bytes()
            target.write_bytes(mutant.applied(source))
            try:
                noticed = first_to_notice(copy, NOTICED_BY.get(mutant.path, ()))
            finally:
                target.write_bytes(source)
            missed += noticed is None
            print(f"{mutant.path}:{mutant.line}: {mutant.text}: {noticed or 'NOBODY'}", flush=True)
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
