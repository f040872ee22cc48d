"""A job's effect is had once, however often the job comes."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from topics.client import SeenJobs


class Job(NamedTuple):
    key: str


@pytest.fixture
def seen(tmp_path: Path) -> SeenJobs:
    seen = SeenJobs(tmp_path / "jobs.db")
    seen.db.execute("CREATE TABLE effects (job TEXT)")
    return seen


def have_effect(seen: SeenJobs, key: str) -> bool:
    with seen.once(Job(key)) as db:
        if db is not None:
            db.execute("INSERT INTO effects VALUES (?)", (key,))
        return db is not None


def effects(seen: SeenJobs) -> list[str]:
    return [row[0] for row in seen.db.execute("SELECT job FROM effects ORDER BY job")]


def test_the_second_delivery_has_no_effect(seen: SeenJobs) -> None:
    assert [have_effect(seen, key) for key in ("q:1:1", "q:1:1", "q:1:2", "q:2:1")] == [True, False, True, True]
    assert effects(seen) == ["q:1:1", "q:1:2", "q:2:1"]


def test_what_failed_is_done_again(seen: SeenJobs) -> None:
    def fail() -> None:
        with seen.once(Job("a")) as db:
            assert db is not None
            db.execute("INSERT INTO effects VALUES ('half')")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert effects(seen) == []
    assert have_effect(seen, "a")


def test_what_could_not_be_committed_is_undone_and_the_next_job_is_done(seen: SeenJobs) -> None:
    seen.db.execute("PRAGMA foreign_keys = ON")
    seen.db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    seen.db.execute("CREATE TABLE bills (of INTEGER REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)")

    def bill() -> None:
        with seen.once(Job("a")) as db:
            assert db is not None
            db.execute("INSERT INTO bills VALUES (7)")

    with pytest.raises(sqlite3.IntegrityError):
        bill()
    assert have_effect(seen, "b")
    assert have_effect(seen, "a")


def test_a_block_that_ended_its_transaction_says_its_own_error(seen: SeenJobs) -> None:
    def fail() -> None:
        with seen.once(Job("a")) as db:
            assert db is not None
            db.execute("ROLLBACK")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert have_effect(seen, "a")


def test_two_workers_at_the_same_job_have_one_effect(seen: SeenJobs, tmp_path: Path) -> None:
    won: list[bool] = []
    start = threading.Barrier(4)

    def work() -> None:
        with SeenJobs(tmp_path / "jobs.db") as mine:
            start.wait()
            won.extend(have_effect(mine, f"job-{number}") for number in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 80
    assert sum(won) == len(effects(seen)) == 20


def test_threads_share_one_and_what_fails_in_one_of_them_is_undone_alone(seen: SeenJobs) -> None:
    have_effect(seen, "old")
    in_block, followed = threading.Event(), threading.Event()
    outcomes: dict[str, object] = {}

    def fail() -> None:
        try:
            with seen.once(Job("a")) as db:
                assert db is not None
                db.execute("INSERT INTO effects VALUES ('half')")
                in_block.set()
                assert not followed.wait(0.2)  # the other one waits for the end of the block
                raise KeyError
        except KeyError as error:
            outcomes["failed"] = error

    def follow() -> None:
        assert in_block.wait(20)
        outcomes["forgotten"] = seen.forget_before(1 << 60)
        followed.set()
        outcomes["b"] = have_effect(seen, "b")

    threads = [threading.Thread(target=work) for work in (fail, follow)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(outcomes.pop("failed"), KeyError)
    assert outcomes == {"forgotten": 1, "b": True}
    assert effects(seen) == ["b", "old"]
    assert [have_effect(seen, key) for key in ("a", "b", "old")] == [True, False, True]


def test_a_block_within_a_block_is_an_error_and_ends_neither_in_a_deadlock(seen: SeenJobs) -> None:
    with seen.once(Job("a")) as db:
        assert db is not None
        with pytest.raises(sqlite3.OperationalError, match="within a transaction"):
            have_effect(seen, "b")
    assert [have_effect(seen, key) for key in ("a", "b")] == [False, True]


def test_it_remembers_over_a_restart_and_forgets_when_told(seen: SeenJobs, tmp_path: Path) -> None:
    have_effect(seen, "a")
    seen.close()
    with pytest.raises(sqlite3.ProgrammingError):
        effects(seen)
    with SeenJobs(tmp_path / "jobs.db") as again:
        assert not have_effect(again, "a")
        assert again.forget_before(1 << 60) == 1
        assert have_effect(again, "a")
