"""Doing a job's effect once, though the job may come twice: what was done is remembered beside the effect.

Delivery is at least once. Where the effect is a record of this service, `job.key` as its `idempotency_key` is enough
(within the window of the topic it goes to). Where it is a row of a local database, it and the memory of it are one
transaction here.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self


class Keyed(Protocol):
    """A job: its key names it for ever."""

    @property
    def key(self) -> str: ...


class SeenJobs:
    """Keys of finished jobs, in an SQLite file. For one thread; several workers may have the same file open."""

    def __init__(self, path: str | Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE IF NOT EXISTS topics_seen_jobs (key TEXT PRIMARY KEY, done_ms INTEGER NOT NULL)")

    def close(self) -> None:
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def once(self, job: Keyed) -> Iterator[sqlite3.Connection | None]:
        """A transaction in which to have the effect, None when it was had before. Committed, with the key, at the end
        of the block, and undone with it if the block raises.
        """
        db = self.db
        db.execute("BEGIN IMMEDIATE")
        try:
            done_ms = time.time_ns() // 1_000_000
            added = db.execute("INSERT OR IGNORE INTO topics_seen_jobs VALUES (?, ?)", (job.key, done_ms)).rowcount
            yield db if added else None
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # some errors of SQLite have ended it themselves
                db.execute("ROLLBACK")
            raise

    def forget_before(self, done_ms: int) -> int:
        """Drops keys of jobs finished before this time (ms since the epoch); how many."""
        return self.db.execute("DELETE FROM topics_seen_jobs WHERE done_ms < ?", (done_ms,)).rowcount
