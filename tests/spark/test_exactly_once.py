"""Driver, executors and service are killed at random while a query writes: the rows are the oracle's, each once.

make spark       # 200 batches, some 40 kills
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.harness import Service, poll
from tests.spark.processes import Driver, sigkill
from topics.client import Client, NewRecord, Record

BATCHES = int(os.environ.get("TOPICS_SPARK_BATCHES", "10"))
KILLS = int(os.environ.get("TOPICS_SPARK_KILLS", str(max(2, BATCHES // 5))))
RECORDS_PER_BATCH = 50
ATTEMPTS_MAX = 3
"""Attempts at a query that is over before it has had half of its kills: the killer may be held up for as long as a
query takes.
"""

WHAT = ("driver", "executor", "service", "walshard", "executor", "frontend")


def test_the_rows_are_the_oracles_whatever_is_killed(topic: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("TOPICS_SEED", str(random.randrange(2**32))))
    print(f"TOPICS_SEED={seed}")
    chance = random.Random(seed)
    total = BATCHES * RECORDS_PER_BATCH
    with Service(shards=2, frontends=2) as service, Client(service.url) as client:
        client.append(topic, [NewRecord({"n": n}, tag=str(n % 5)) for n in range(total)])
        for attempt in range(ATTEMPTS_MAX):
            directory = tmp_path / str(attempt)
            directory.mkdir()
            sink = f"{topic}-out{attempt}"
            kills = _copy(service, topic, sink, directory, chance)
            found = Counter(item.data["n"] for item in client.read(sink) if isinstance(item, Record))
            assert found == Counter(range(total))
            if kills.total() >= KILLS / 2:
                return
    pytest.fail("the query ended before half of its kills: give it more batches")


def _copy(service: Service, source: str, sink: str, directory: Path, chance: random.Random) -> Counter[str]:
    """The whole of a query, started again as often as it must; what was killed meanwhile."""
    started_s = time.monotonic()
    arguments = [service.url, source, sink, str(directory / "checkpoint")]
    driver = Driver("tests.spark.copy_query", arguments, directory / "driver.log", directory)
    driver.start()
    kills: Counter[str] = Counter()
    # All kinds, each as often as the others, in any order.
    deck = [kind for _ in range(KILLS) for kind in chance.sample(WHAT, len(WHAT))][:KILLS]
    starts = 0
    try:
        while driver.exit_code != 0:
            if driver.exit_code is not None:
                starts += 1
                assert starts <= 3 * KILLS, "the query fails by itself"
                driver.start()  # as a scheduler does when the query has failed or was killed
            if deck:
                batches = chance.randrange(1, max(2, BATCHES // (KILLS + 1) + 1))  # all kills fit in
                _wait_for_progress(service, driver, sink, batches)
                time.sleep(chance.random() * 0.3)  # anywhere in a batch
                if _kill(deck[-1], service, driver, chance):
                    kills[deck.pop()] += 1
            else:
                time.sleep(0.1)
    except BaseException as error:
        error.add_note(f"{dict(kills)}\n{driver.log()}")
        raise
    finally:
        driver.kill()
    print(f"{BATCHES} batches, {starts + 1} drivers, {time.monotonic() - started_s:.0f} s, kills: {dict(kills)}")
    return kills


def _wait_for_progress(service: Service, driver: Driver, topic: str, batches: int) -> None:
    def head_seq() -> int:
        answer = service.client.get(f"/v0/topics/{topic}", params={"touch": "false"})
        return int(answer.json()["head_seq"]) if answer.status_code == 200 else 0

    wanted = head_seq() + batches * RECORDS_PER_BATCH
    poll("progress of the query", lambda: driver.exit_code is not None or head_seq() >= wanted, 240, 0.05)


def _kill(what: str, service: Service, driver: Driver, chance: random.Random) -> bool:
    """False when there was nothing of it to kill."""
    if driver.exit_code is not None:
        return False
    if what == "driver":
        driver.kill()
    elif what == "executor":
        task = poll("a task", lambda: driver.at_work(service.port) or driver.exit_code is not None, 240, 0.05)
        return isinstance(task, psutil.Process) and sigkill(task)
    elif what == "service":
        service.kill_group()
        service.start()
    else:
        service.kill(what, chance.randrange(2))
    return True
