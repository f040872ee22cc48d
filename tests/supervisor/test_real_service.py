"""The supervisor with its real children, where what matters crosses the border between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.harness import COMMAND, START_DEADLINE_S, Service, is_running, poll
from topics.shm import shm_names
from topics.shm.control import ControlPage, Role
from topics.storage.filesystem import OsFileSystem
from topics.storage.notes import read_clock, write_clock

pytestmark = pytest.mark.long


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(env={"TOPICS_SHARD_WAIT_MS": "30000"})
    yield made
    made.close()


def write(service: Service, topic: str, count: int) -> None:
    for number in range(count):
        answer = service.client.post(
            f"/v0/topics/{topic}", json={"records": [{"data": number}], "config": {"durability": "fsync"}}
        )
        assert answer.status_code in (200, 201), answer.text


def read(service: Service, topic: str) -> list[int]:
    answer = service.client.post(f"/v0/topics/{topic}/diff", json={"limit": 1000})
    assert answer.status_code == 200, answer.text
    return [record["data"] for record in answer.json()["records"]]


def refusal(service: Service) -> str:
    """Return why the log was refused, after a start that ended with 78."""
    answer = service.run("run")
    assert answer.returncode == 78, answer.stderr
    lines = [json.loads(line) for line in answer.stderr.splitlines()]
    assert "the time for the last cut is over" not in {line.get("reason") for line in lines}, "nobody waits for it"
    (reason,) = {line["reason"] for line in lines if line["event"] == "the log cannot be used as it is"}
    assert not service.shared_memory()
    return str(reason)


def start_accepting_data_loss(service: Service) -> None:
    """Such a start, until the service is ready, and its stop."""
    with subprocess.Popen(
        [str(COMMAND), "run", "--accept-data-loss"], env=service.environment(), stderr=subprocess.DEVNULL
    ) as process:
        poll("the service to run", lambda: service.status()["state"] == "running", START_DEADLINE_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(service.stop_deadline_s) == 0


def test_every_topic_survives_every_change_of_the_shard_count(service: Service) -> None:
    service.start()
    topics = [f"topic-{number}" for number in range(8)]
    for topic in topics:
        write(service, topic, 3)
    for shards in (3, 1, 2):
        service.stop()
        service.shards = shards
        service.start()
        assert [len(service.status()["shards"])] == [shards]
        assert [read(service, topic) for topic in topics] == [[0, 1, 2]] * len(topics)


def test_damage_in_the_middle_of_a_log_stops_the_service_until_somebody_decides(service: Service) -> None:
    service.shards = 1
    service.start()
    write(service, "a", 20)
    service.kill_group()  # a stop would leave nothing in the log that is not in segments as well
    log = service.data_dir / "wal" / "wal-00000000000000000001.log"
    content = bytearray(log.read_bytes())
    at = content.index(b'"data":10')
    content[at + 7] ^= 0xFF
    log.write_bytes(content)

    reason = refusal(service)
    assert str(log) in reason
    assert "--accept-data-loss" in reason
    assert log.read_bytes() == content  # refusing changes nothing

    start_accepting_data_loss(service)
    service.start()  # the decision was made once, and holds
    assert read(service, "a") == list(range(10))
    service.stop()


def test_a_reader_and_a_writer_live_through_the_death_of_a_shard(service: Service) -> None:
    service.shards = 1
    service.start()
    write(service, "a", 5)
    pid = service.pid_of("walshard")
    os.kill(pid, signal.SIGKILL)
    assert read(service, "a") == [0, 1, 2, 3, 4]
    write(service, "a", 1)
    assert read(service, "a") == [0, 1, 2, 3, 4, 0]
    (process,) = [p for p in service.wait_healed(pid)["processes"] if p["role"] == "walshard"]
    assert (process["restarts"], process["last_exit"]) == (1, 137)
    service.stop()


def test_a_supervisor_killed_under_load_leaves_nothing_that_hinders_the_next(service: Service) -> None:
    service.start()
    write(service, "a", 5)
    family = service.family()
    service.kill_supervisor()
    poll("its children to end", lambda: not any(is_running(pid) for pid in family))
    service.start()
    assert read(service, "a") == [0, 1, 2, 3, 4]
    service.stop()


def test_a_service_whose_log_nobody_reads_any_more_goes_on(service: Service) -> None:
    """The next line ended all processes, in `topics-supervisor run 2>&1 | tee log` once tee was gone."""
    with subprocess.Popen([str(COMMAND), "run"], env=service.environment(), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        poll("the service to run", lambda: service.status()["state"] == "running", START_DEADLINE_S)
        process.stderr.close()
        pid = service.pid_of("walshard")
        os.kill(pid, signal.SIGKILL)
        service.wait_healed(pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(service.stop_deadline_s) == 0


@pytest.mark.parametrize("trusted_ms", [None, -5, 0])
def test_a_process_that_starts_again_knows_the_clock_that_its_former_life_trusted(
    service: Service, trusted_ms: int | None
) -> None:
    """The wall clock seems to be put forward while the service was down: by a day, or from `trusted_ms` ahead of the
    uptime, which is where a clock is that was never set.
    """
    day_ms = 86_400_000
    service.shards = service.frontends = 1
    service.start()
    service.client.put("/v0/topics/t", json={"ttl_ms": 1}).raise_for_status()
    control = ControlPage.attach(shm_names.shm_name(shm_names.identity(str(service.data_dir)), "control"))
    for role in (Role.FRONTEND, Role.WALSHARD):
        cell = control.cell(role, 0)
        poll("the clock to be looked at", lambda: cell.clock_offset_ms is not None)
        pid = service.pid_of(role.name.lower())
        os.kill(pid, signal.SIGSTOP)  # it writes its cell no more
        assert cell.clock_offset_ms is not None
        cell.clock_offset_ms = cell.clock_offset_ms - day_ms if trusted_ms is None else trusted_ms
        os.kill(pid, signal.SIGKILL)
        service.wait_healed(pid)
    write(service, "t", 1)
    written_ms = time.time() * 1000
    poll("its ttl to pass", lambda: time.time() * 1000 > written_ms + 50)
    for _ in range(2):
        assert read(service, "t") == [0]
        # The sweep of the shard, after which it says so.
        poll("both to warn", lambda: service.log_tail().count("the wall clock was put forward") >= 2)
    for role in (Role.FRONTEND, Role.WALSHARD):
        cell = control.cell(role, 0)
        beat_ms = cell.get("heartbeat_ms")
        poll("it to beat on", lambda: cell.get("heartbeat_ms") > beat_ms + 300)
        assert cell.supervisor.get("restarts") == 1
    service.stop()


@pytest.mark.parametrize("ahead_ms", [0, 86_400_000])
@pytest.mark.parametrize("same_boot", [True, False])
def test_a_service_that_starts_again_knows_the_clock_that_the_former_one_trusted(
    service: Service, same_boot: bool, ahead_ms: int
) -> None:
    """The wall clock seems to be put forward while there was no service. If it was not, expired records are gone."""
    service.shards = service.frontends = 1
    service.start()
    service.client.put("/v0/topics/t", json={"ttl_ms": 1}).raise_for_status()
    control = ControlPage.attach(shm_names.shm_name(shm_names.identity(str(service.data_dir)), "control"))
    shard = control.cell(Role.WALSHARD, 0)
    poll("the clock to be looked at", lambda: shard.clock_offset_ms is not None)
    service.stop()
    last = read_clock(OsFileSystem(), str(service.data_dir))
    assert last is not None
    last = last._replace(wall_ms=last.wall_ms - ahead_ms)
    write_clock(OsFileSystem(), str(service.data_dir), last if same_boot else last._replace(boot_id="another"))
    service.start()
    write(service, "t", 1)
    written_ms = time.time() * 1000
    poll("its ttl to pass", lambda: time.time() * 1000 > written_ms + 50)
    assert read(service, "t") == ([0] if ahead_ms else [])
    if ahead_ms:
        poll("both to warn", lambda: service.log_tail().count("the wall clock was put forward") >= 2)
        assert read(service, "t") == [0]
    assert ("the clock is ahead" in service.log_tail()) == bool(ahead_ms)
    service.stop()
