"""Doing a job's effect once, though the job may come twice: what was done is remembered beside the effect.

Delivery is at least once. Where the effect is a record of this service, `job.key` as its `idempotency_key` is enough
(within the window of the topic it goes to). Where it is a row of a local database, it and the memory of it are one
transaction here.
"""

from __future__ import annotations

import sqlite3
import threading
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
    """Keys of finished jobs, in an SQLite file. For any number of threads, one transaction after the other, as SQLite
    writes anyway; several workers may have the same file open.
    """

    def __init__(self, path: str | Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30.0, check_same_thread=False)
        """For tables of the program's own. Threads take turns at `once` and `forget_before`, and not at this."""
        # Re-entered by its own thread, so that a block within a block is SQLite's error and no deadlock.
        self._turn = threading.RLock()
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE IF NOT EXISTS topics_seen_jobs (key TEXT PRIMARY KEY, done_ms INTEGER NOT NULL)")

    def close(self) -> None:
        with self._turn:
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
        of the block, and undone with it if the block raises. Other threads wait for the end of the block, and other
        tasks of an event loop would fail: no `await` in it.
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
                if db.in_transaction:  # some errors of SQLite have ended it themselves
                    db.execute("ROLLBACK")
                raise

    def forget_before(self, done_ms: int) -> int:
        """Drops keys of jobs finished before this time (ms since the epoch); how many."""
        with self._turn:  # outside of another thread's transaction, which may be undone
            return self.db.execute("DELETE FROM topics_seen_jobs WHERE done_ms < ?", (done_ms,)).rowcount
