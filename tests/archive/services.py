"""Services that are backed up and restored, and the records that a reader finds in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests import harness
from tests.contract.asking import diff
from tests.forks import TOPICS
from tests.harness import Service, clean_environment, poll

COMMAND = Path(sys.executable).with_name("topics")
SMALL = {"TOPICS_CHECKPOINT_INTERVAL_MS": "100", "TOPICS_SEGMENT_MAX_EVENTS": "40"}
"""Settings with which records are in segments soon."""


_PATCHED = """#!{python}
import sys
{patches}
from topics.supervisor.command import main
sys.exit(main())
"""


def patched(path: Path, *patches: str) -> Path:
    """Make a command for services whose constants are others, by lines of Python; return its path."""
    path.write_text(_PATCHED.format(python=sys.executable, patches="\n".join(patches)))
    path.chmod(0o755)
    return path


def run(*arguments: object, code: int | None = 0, env: Mapping[str, str] | None = None) -> str:
    """Run `topics …`; return its output, or its errors if it should fail. `code` None: it may do either."""
    assert harness.forks is not None
    command = [TOPICS, *map(str, arguments)]
    done = harness.forks.run(command, env=clean_environment(env or {}), cwd=Path.cwd(), timeout=120)
    assert code is None or done.returncode == code, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def backup(service: Service, place: object, *more: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run("backup", "--data-dir", service.data_dir, "--to", place, "--json", *more, env=env)
    )
    return found


@contextmanager
def restored(
    place: object, data_dir: Path, *to: object, env: Mapping[str, str] | None = None, shards: int = 2
) -> Iterator[Service]:
    """Restore, check the directory byte for byte, and run a service on it."""
    run("restore", place, "--data-dir", data_dir, *to, env=env)
    run("verify", data_dir, env=env)  # what is borrowed is read in the archive
    with Service(data_dir=data_dir, env=env, shards=shards) as service:
        yield service


def read(client: httpx.Client, topic: str, from_seq: int = 0) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """Return (data by seq, tombstones) of a whole topic."""
    records: dict[int, Any] = {}
    tombstones: list[dict[str, Any]] = []
    while True:
        page = diff(client, topic, from_seq=from_seq, limit=500)
        records |= {record["$seq"]: record["data"] for record in page["records"]}
        tombstones += [page["tombstone"]] if page["tombstone"] else []
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return records, tombstones


def cut(service: Service) -> None:
    """Wait for a snapshot that has everything written before."""

    def is_cut() -> bool:
        return all(shard["lag_bytes"] == 0 for shard in service.status()["shards"])

    poll("a snapshot of everything", is_cut, every_s=0.05)
