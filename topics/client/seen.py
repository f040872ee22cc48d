"""A store of keys by which a job has its effect once, though the job may come twice.

Delivery is at least once. If the effect is a record in this service, `job.key` as its `idempotency_key` is enough
(within the idempotency window of its topic). If it is a row in a local database, `SeenJobs` writes the row and the key
in one transaction.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self


class Keyed(Protocol):
    """A job with a key that never changes."""

    @property
    def key(self) -> str: ...


class SeenJobs:
    """Keys of finished jobs in an SQLite file. Threads (one transaction at a time) and several workers may share it."""

    def __init__(self, path: str | Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30.0, check_same_thread=False)
        """The connection, for tables of the program. Only `once` and `forget_before` lock it against other threads."""
        # Re-entrant: `once` within `once` is an error of SQLite then, not a deadlock.
        self._turn = threading.RLock()
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE IF NOT EXISTS topics_seen_jobs (key TEXT PRIMARY KEY, done_ms INTEGER NOT NULL)")

    def close(self) -> None:
        with self._turn:
            self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def once(self, job: Keyed) -> Iterator[sqlite3.Connection | None]:
        """Begin a transaction for the effect of a job; None if the job was done before. The end of the block commits
        it, with the job's key; an exception rolls both back. Other threads wait for the end of the block. Never `await`
        in it: other tasks of the event loop would fail.
        """
        db = self.db
        with self._turn:
            db.execute("BEGIN IMMEDIATE")
            try:
                done_ms = time.time_ns() // 1_000_000
                added = db.execute("INSERT OR IGNORE INTO topics_seen_jobs VALUES (?, ?)", (job.key, done_ms)).rowcount
                yield db if added else None
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # some errors of SQLite end it
                    db.execute("ROLLBACK")
                raise

    def forget_before(self, done_ms: int) -> int:
        """Drop the keys of jobs done before this time (ms since the epoch); return how many."""
        with self._turn:  # not within another thread's transaction, which may be rolled back
            return self.db.execute("DELETE FROM topics_seen_jobs WHERE done_ms < ?", (done_ms,)).rowcount
