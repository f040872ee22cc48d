"""The compactor in a running service: logs stay short, starts read little, disk space comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_kill_points import everything_left, verify
from tests.harness import Service, poll, size_bytes
from topics.core.clock import SystemClock
from topics.supervisor.status import CompactorStatus, StatusReader
from topics.walshard.commit.logs import SYNC_INTERVAL_MS

MIB = 1 << 20
EAGER = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": "50",
    "TOPICS_CHECKPOINT_WAL_BYTES": "64KiB",
    "TOPICS_SEGMENT_MAX_EVENTS": "100",
}
DEADLINE_S = 30.0


def compactor(service: Service) -> CompactorStatus:
    found = StatusReader(str(service.data_dir), SystemClock()).read().compactor
    assert found is not None
    return found


def write(client: httpx.Client, topic: str, values: list[str], tag: str | None = None) -> None:
    records = [{"data": value} | ({"tag": tag} if tag else {}) for value in values]
    client.post(f"/v0/topics/{topic}", json={"records": records}).raise_for_status()


def quiet(service: Service) -> None:
    """Everything is in segments, nothing waits to be removed."""

    def still() -> bool:
        status = StatusReader(str(service.data_dir), SystemClock()).read()
        return status.state == "running" and all(shard.lag_bytes == 0 for shard in status.shards)

    poll("the compactor to have nothing to do", still, DEADLINE_S)


def data_files(root: Path) -> list[Path]:
    return sorted(root.glob("topics/*/seg-*.data"))


def recovered(service: Service) -> list[dict[str, Any]]:
    """The log lines of all recoveries so far."""
    return [line for line in service.said() if line["event"] == "recovered"]


def test_the_log_stays_short_and_a_start_reads_none_of_what_was_absorbed() -> None:
    with Service(shards=1, frontends=1, env=EAGER) as service:
        values = [f"{n:06d}" + "x" * 2000 for n in range(6000)]
        for first in range(0, len(values), 50):
            write(service.client, "t", values[first : first + 50])

        def is_short() -> bool:
            # Files of 1 MiB each: the one being written, a spare, and what the snapshot before the newest begins with.
            return size_bytes((service.data_dir / "wal").glob("wal-*.log")) <= 4 * MIB

        poll("the log of 12 MB to become short", is_short, DEADLINE_S)
        assert everything_left(service.client, "t") == values
        quiet(service)
        service.restart()
        assert recovered(service)[-1]["frames"] < 100
        assert everything_left(service.client, "t") == values
        write(service.client, "t", ["one more"])
        service.kill_group()
        verify(service.data_dir)
        service.start()
        assert recovered(service)[-1]["frames"] < 100
        assert everything_left(service.client, "t") == [*values, "one more"]


@pytest.mark.parametrize("env", [EAGER, {}], ids=["cuts come at once", "cuts come late"])
def test_an_idle_service_comes_to_rest(env: dict[str, str]) -> None:
    with Service(shards=2, frontends=1, env=env) as service:
        for durability in ("ephemeral", "disk", "fsync"):
            service.client.put(f"/v0/topics/{durability}", json={"durability": durability}).raise_for_status()
            write(service.client, durability, ["a record"])
        service.client.put("/v0/routers/r", json={"source": "disk", "dest": "copies"}).raise_for_status()
        service.client.put("/v0/topics/jobs", json={"type": "queue"}).raise_for_status()
        write(service.client, "jobs", ["a job"])

        def work() -> list[int]:
            """Return counts that would grow each second in a service that marks, syncs or saves something every
            second.
            """
            status = StatusReader(str(service.data_dir), SystemClock()).read()
            assert status.compactor is not None
            return [
                status.compactor.snapshots,
                *(n for shard in status.shards for n in (shard.wal_offset, shard.fsyncs)),
            ]

        def rests() -> bool:
            before = work()
            time.sleep(3 * SYNC_INTERVAL_MS / 1000)
            return work() == before

        poll("nothing to be written, synced or saved for a while", rests, DEADLINE_S)


def test_what_is_evicted_or_deleted_leaves_the_disk() -> None:
    with Service(shards=2, frontends=1, env=EAGER) as service:
        client = service.client
        client.put("/v0/topics/capped", json={"cap_records": 150}).raise_for_status()
        for topic in ("capped", "cut", "gone"):
            for first in range(0, 1000, 100):
                write(client, topic, [f"{n}" for n in range(first, first + 100)])
        quiet(service)
        assert compactor(service).checkpointed_records >= 2150  # of the capped ones those that are left at least
        client.post("/v0/topics/cut/delete", json={"before_seq": 801}).raise_for_status()
        client.delete("/v0/topics/gone").raise_for_status()
        poll("the files to go", lambda: len(data_files(service.data_dir)) <= 4, DEADLINE_S)
        poll("the directory to go", lambda: len(list(service.data_dir.glob("topics/*"))) == 2, DEADLINE_S)
        assert everything_left(client, "capped") == [f"{n}" for n in range(850, 1000)]
        assert everything_left(client, "cut") == [f"{n}" for n in range(800, 1000)]
        service.restart()
        assert everything_left(service.client, "cut") == [f"{n}" for n in range(800, 1000)]
        service.stop()
        verify(service.data_dir)


def test_a_segment_of_mostly_deleted_records_is_rewritten() -> None:
    with Service(shards=1, frontends=1, env=EAGER) as service:
        client = service.client
        for first in range(0, 1000, 100):
            write(client, "t", [f"{n}" + "x" * 500 for n in range(first, first + 60)], "drop")
            write(client, "t", [f"{n}" + "x" * 500 for n in range(first + 60, first + 100)])
        poll("all of it in segments", lambda: compactor(service).checkpointed_records >= 1000, DEADLINE_S)
        before = size_bytes(data_files(service.data_dir))
        client.post("/v0/topics/t/delete", json={"match": "drop"}).raise_for_status()
        poll("rewriting", lambda: compactor(service).segments_rewritten >= 10, DEADLINE_S)

        def smaller() -> bool:
            return size_bytes(data_files(service.data_dir)) < before * 0.5

        poll("the old versions to go", smaller, DEADLINE_S)
        kept = [f"{n}" + "x" * 500 for n in range(1000) if n % 100 >= 60]
        assert everything_left(client, "t") == kept
        service.kill_group()
        verify(service.data_dir)
        service.start()
        assert everything_left(service.client, "t") == kept


def test_older_segments_go_to_the_cold_directory(tmp_path: Path) -> None:
    cold = {"TOPICS_COLD_DIR": str(tmp_path), "TOPICS_HOT_RETAIN_SEGMENTS": "2"}
    with Service(shards=1, frontends=1, env=EAGER | cold) as service:
        client = service.client
        values = [f"{n}" for n in range(1050)]
        for first in range(0, len(values), 50):
            write(client, "t", values[first : first + 50], "even" if first % 100 else "odd")
        poll("relocation", lambda: compactor(service).segments_relocated >= 8, DEADLINE_S)
        poll("the hot copies to go", lambda: len(data_files(service.data_dir)) == 3, DEADLINE_S)
        assert len(data_files(tmp_path)) == 8
        assert everything_left(client, "t") == values
        client.post("/v0/topics/t/delete", json={"match": "odd"}).raise_for_status()
        even = [value for value in values if int(value) // 50 % 2]
        assert everything_left(client, "t") == even
        service.restart()
        assert everything_left(service.client, "t") == even
        service.client.delete("/v0/topics/t").raise_for_status()
        poll("the cold copies to go", lambda: not data_files(tmp_path), DEADLINE_S)


def test_a_cold_directory_that_cannot_be_written_holds_up_nothing_else(tmp_path: Path) -> None:
    obstacle = tmp_path / "cold"
    obstacle.write_text("not a directory")
    cold = {"TOPICS_COLD_DIR": str(obstacle), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    with Service(shards=1, frontends=1, env=EAGER | cold) as service:
        values = [f"{n}" for n in range(1000)]
        for first in range(0, 1000, 50):
            write(service.client, "t", values[first : first + 50])
        poll("a failure", lambda: compactor(service).failures > 0, DEADLINE_S)
        write(service.client, "t", ["more"])
        poll("checkpoints", lambda: compactor(service).checkpointed_records == 1001, DEADLINE_S)
        assert everything_left(service.client, "t") == [*values, "more"]
        assert len(data_files(service.data_dir)) == 11
        obstacle.unlink()
        service.restart()
        poll("relocation", lambda: len(data_files(obstacle)) == 9, DEADLINE_S)


def test_a_cold_directory_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """Its disk may not be mounted: nothing goes to another one, neither while the service runs nor by a start."""
    cold, elsewhere = tmp_path / "cold", tmp_path / "elsewhere"
    env = EAGER | {"TOPICS_COLD_DIR": str(cold), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    with Service(shards=1, frontends=1, env=env) as service:
        values = [f"{n}" for n in range(1050)]

        def write_on(count: int) -> None:
            values.extend(f"{n}" for n in range(len(values), len(values) + count))
            for first in range(len(values) - count, len(values), 50):
                write(service.client, "t", values[first : first + 50])

        def said(event: str, reason: str) -> bool:
            return any(line["event"].startswith(event) and reason in line["reason"] for line in service.said())

        for first in range(0, 1050, 50):
            write(service.client, "t", values[first : first + 50])
        poll("relocation", lambda: len(data_files(cold)) == 9, DEADLINE_S)
        quiet(service)
        cold.rename(elsewhere)
        write_on(300)
        poll("a copy to fail", lambda: said("a segment could not be relocated", "mount its disk"), DEADLINE_S)
        service.restart()
        poll("the start to say it", lambda: said("segments are in the cold tier", str(cold)), DEADLINE_S)
        failures = compactor(service).failures
        write_on(300)
        poll("another copy to fail", lambda: compactor(service).failures > failures, DEADLINE_S)
        assert not cold.exists()
        service.stop()
        elsewhere.rename(cold)
        service.start()
        poll("relocation to go on", lambda: len(data_files(cold)) == 15, DEADLINE_S)
        assert everything_left(service.client, "t") == values


def test_an_ephemeral_topic_stays_in_memory_until_it_is_durable() -> None:
    with Service(shards=1, frontends=1, env=EAGER) as service:
        client = service.client
        client.put("/v0/topics/t", json={"durability": "ephemeral"}).raise_for_status()
        write(client, "t", [f"{n}" for n in range(100)])
        write(client, "other", ["1"])
        poll("the other one in a segment", lambda: compactor(service).checkpointed_records == 1, DEADLINE_S)
        client.put("/v0/topics/t", json={"durability": "disk"}).raise_for_status()
        write(client, "t", ["durable"])
        poll("both in segments", lambda: compactor(service).checkpointed_records == 102, DEADLINE_S)
        service.restart()
        assert everything_left(service.client, "t") == [*(f"{n}" for n in range(100)), "durable"]


def test_what_was_ephemeral_outlives_everything_once_the_change_is_answered() -> None:
    with Service(shards=1, frontends=1) as service:
        client = service.client
        client.put("/v0/topics/t", json={"durability": "ephemeral"}).raise_for_status()
        values = [f"{n}" + "x" * 100_000 for n in range(30)]
        for value in values:
            write(client, "t", [value])
        client.put("/v0/topics/t", json={"durability": "disk"}).raise_for_status()
        service.kill_group()
        service.start()
        assert everything_left(service.client, "t") == values


def test_many_topics_in_one_cut_are_synced_at_once_and_come_back() -> None:
    count = 1500
    env = EAGER | {"TOPICS_CHECKPOINT_INTERVAL_MS": "60000", "TOPICS_CHECKPOINT_WAL_BYTES": "1GiB"}
    env |= {"TOPICS_SHUTDOWN_GRACE_MS": "200000"}  # the compactor gives up after a quarter of it
    with Service(shards=2, frontends=1, env=env) as service:
        for n in range(count):
            write(service.client, f"t{n}", [f"{n}"])
        service.restart()
        # What a shard reads behind the snapshot are its marks of that cut, one for each topic.
        assert sum(line["frames"] for line in recovered(service)[2:]) <= count
        for n in range(0, count, 97):
            assert everything_left(service.client, f"t{n}") == [f"{n}"]
        assert len(data_files(service.data_dir)) == count
        service.stop()
        verify(service.data_dir)


def test_the_snapshot_before_takes_the_place_of_a_damaged_one() -> None:
    with Service(shards=1, frontends=1, env=EAGER) as service:
        values = [f"{n}" + "x" * 300 for n in range(3000)]
        for first in range(0, 3000, 50):
            write(service.client, "t", values[first : first + 50])
        service.client.post("/v0/topics/t/delete", json={"before_seq": 1001}).raise_for_status()
        quiet(service)
        service.stop()
        newest = max((service.data_dir / "meta").iterdir())
        newest.write_bytes(newest.read_bytes()[:-1])
        service.start()
        assert everything_left(service.client, "t") == values[1000:]
        write(service.client, "t", ["goes on"])
        quiet(service)
        service.kill_group()
        service.start()
        assert everything_left(service.client, "t") == [*values[1000:], "goes on"]


def test_what_a_killed_service_left_in_its_log_is_behind_until_it_is_cut() -> None:
    never = {"TOPICS_CHECKPOINT_INTERVAL_MS": "86400000", "TOPICS_CHECKPOINT_WAL_BYTES": str(2 * MIB)}
    with Service(shards=1, frontends=1, env=never) as service:
        # Too little for a cut, each time; what is there after the last kill is enough for one.
        for number in range(3):
            os.kill(service.pid_of("compactor"), signal.SIGSTOP)  # the kill may come late, and is to come before a cut
            write(service.client, "t", ["x" * 1000] * 900)
            service.kill_group()
            service.start()
            (shard,) = service.status()["shards"]
            assert compactor(service).snapshots or shard["lag_bytes"] >= (number + 1) * 900_000
        poll("a cut", lambda: compactor(service).snapshots > 0, DEADLINE_S)
        # Its own marks are behind it.
        poll("nothing but marks", lambda: service.status()["shards"][0]["lag_bytes"] < 10_000, DEADLINE_S)
