"""The supervisor over real children: start, restart, drain, refuse."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import is_running, poll
from tests.supervisor.conftest import Service, Start
from topics.shm import shm_names
from topics.shm.control import ControlPage, Role
from topics.storage.lock import holder_pid
from topics.supervisor.promote import promote
from topics.supervisor.supervision import SAME_STOP_MS

GRACE_MS = 400


def restarted(service: Service, role: str, index: int, dead_pid: int) -> int:
    """The pid that took the place of `dead_pid`, once it is ready."""

    def successor() -> int | None:
        child = service.child(role, index)
        return child.pid if child.state == "ready" and child.pid != dead_pid else None

    return poll(f"{role} {index} to be ready again", successor)


def positions(journal: list[str], *events: str) -> list[int]:
    return [journal.index(event) for event in events]


def test_starts_everything_and_says_where(start: Start) -> None:
    service = start()
    status = service.wait_state("running")
    assert [(p.role, p.index, p.restarts, p.last_exit) for p in status.processes] == [
        ("frontend", 0, 0, None),
        ("frontend", 1, 0, None),
        ("walshard", 0, 0, None),
        ("walshard", 1, 0, None),
        ("compactor", 0, 0, None),
    ]
    assert service.connect() in {p.pid for p in status.processes if p.role == "frontend"}
    assert service.port_file.read_text() == status.listen
    (line,) = service.log("starting")
    assert line["settings"]["data_dir"] == str(service.data_dir)
    assert line["settings"]["wal_shards"] == 2
    assert line["role"] == "supervisor"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drains_frontends_then_the_compactor_then_shards_and_leaves_nothing(
    start: Start, number: signal.Signals
) -> None:
    service = start()
    family = [service.wait_state("running").pid, *service.family()]
    service.signal(number)
    assert service.wait_exit() == 0
    journal = service.journal()
    frontends = positions(journal, "frontend 0 stopping", "frontend 1 stopping")
    shards = positions(journal, "walshard 0 stopping", "walshard 1 stopping")
    (compactor_begins, compactor_ends) = positions(journal, "compactor 0 stopping", "compactor 0 stopped")
    assert max(frontends) < compactor_begins < compactor_ends < min(shards)
    assert not any(is_running(pid) for pid in family if pid)
    assert service.shared_memory() == []
    assert not service.port_file.exists()
    assert holder_pid(str(service.data_dir)) is None
    assert service.status().state == "stopped"


@pytest.mark.parametrize(("role", "index"), [("frontend", 1), ("walshard", 0), ("compactor", 0)])
def test_what_is_killed_is_restarted_and_the_others_go_on(start: Start, role: str, index: int) -> None:
    service = start()
    before = {(p.role, p.index): p.pid for p in service.wait_state("running").processes}
    victim = before[role, index]
    assert victim
    os.kill(victim, signal.SIGKILL)
    pid = restarted(service, role, index, victim)
    status = service.wait_state("running")
    after = {(p.role, p.index): p.pid for p in status.processes}
    assert after == before | {(role, index): pid}
    child = service.child(role, index)
    assert (child.restarts, child.last_exit) == (1, 128 + signal.SIGKILL)
    assert f"{role} {index} started 2" in service.journal()
    assert service.connect() in after.values()
    assert service.stop() == 0


def test_an_unasked_exit_is_a_death_even_with_code_0(start: Start) -> None:
    service = start(leaving=1)
    service.wait_state("running")
    poll("the second life", lambda: "walshard 1 started 2" in service.journal())
    assert service.child("walshard", 1).last_exit == 0
    assert service.stop() == 0


def test_a_crash_loop_backs_off_and_is_seen(start: Start) -> None:
    service = start(crashing=0)
    poll("five deaths", lambda: len(service.log("process died")) >= 5)
    deaths = service.log("process died")
    assert [death["restart_in_ms"] for death in deaths[:5]] == [0, 50, 100, 200, 400]
    assert {(death["process"], death["index"], death["exit"]) for death in deaths} == {("walshard", 0, "70")}
    starts = [line["timestamp"] for line in service.log("process crashed")]
    assert len(starts) >= 5  # each with its traceback
    assert "RuntimeError: planned" in service.log("process crashed")[0]["exception"]
    service.wait_state("degraded")
    poll(
        "the frontends to be ready",
        lambda: {p.state for p in service.status().processes if p.role == "frontend"} == {"ready"},
    )
    assert service.stop() == 0


def test_a_shard_that_dies_while_frontends_drain_is_still_restarted(start: Start) -> None:
    service = start({"TOPICS_SHUTDOWN_GRACE_MS": "600000"}, stubborn="frontend")
    victim = service.wait_state("running").processes[2].pid
    assert victim
    service.signal(signal.SIGTERM)
    service.wait_state("draining")
    os.kill(victim, signal.SIGKILL)
    poll("the shard's second life", lambda: "walshard 0 started 2" in service.journal())
    assert service.insist() == 4


def test_hangup_reloads_the_keys_and_ends_nobody(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    service = start({"TOPICS_API_KEYS_FILE": str(file)})
    family = [p.pid for p in service.wait_state("running").processes]
    file.write_text("one\ntwo\n")
    service.signal(signal.SIGHUP)
    poll("the log line", lambda: bool(service.log("keys reloaded")))
    assert [line["keys"] for line in service.log("keys reloaded")] == [2]
    for pid in family:
        assert pid
        os.kill(pid, signal.SIGHUP)  # as a terminal does to everybody when it is closed
    file.write_text("one:nonsense\n")
    service.signal(signal.SIGHUP)
    poll("the refusal", lambda: bool(service.log("keys not reloaded, the former ones stay")))
    (line,) = service.log("keys not reloaded, the former ones stay")
    assert "line 1: its scopes must be" in line["problems"][0]
    status = service.wait_state("running")
    assert [p.pid for p in status.processes] == family
    assert service.stop() == 0


def start_all_again(service: Service, again: Path) -> None:
    """Have a shard want that, as a promotion does."""
    pid = service.child("walshard", 0).pid
    assert pid
    again.touch()
    os.kill(pid, signal.SIGTERM)

    def shards() -> set[int | None]:
        return {process.pid for process in service.status().processes if process.role == "walshard" and process.pid}

    poll("the next life", lambda: len(shards() - {pid}) == 2)  # in the former one nothing takes the place of that shard
    service.wait_state("running")


def test_all_start_again_without_the_memory_of_the_former_life(start: Start, tmp_path: Path) -> None:
    again = tmp_path / "again"
    service = start(again=again)
    service.wait_state("running")
    for _ in range(2):
        start_all_again(service, again)
        identity = shm_names.identity(str(service.data_dir))
        for pid in service.family():
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            assert [line for line in maps if identity in line]
            assert not [line for line in maps if identity in line and "(deleted)" in line]
    assert service.stop() == 0


def test_all_start_again_with_the_keys_as_they_were_reloaded(start: Start, tmp_path: Path) -> None:
    file, again = tmp_path / "keys", tmp_path / "again"
    file.write_text("one\nrevoked\n")
    service = start({"TOPICS_API_KEYS_FILE": str(file)}, again=again)
    service.wait_state("running")
    file.write_text("one\n")
    service.signal(signal.SIGHUP)
    poll("the log line", lambda: bool(service.log("keys reloaded")))
    file.unlink()  # a life that read it again could not begin
    start_all_again(service, again)
    page = ControlPage.attach(shm_names.shm_name(shm_names.identity(str(service.data_dir)), "control"))
    assert [page.cell(Role.FRONTEND, index).get("records_in") for index in range(page.frontends)] == [1, 1]
    assert service.stop() == 0


def test_a_stop_while_all_are_to_start_again_waits_for_them_and_is_told(start: Start, tmp_path: Path) -> None:
    again, gate = tmp_path / "again", tmp_path / "gate"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        service = start({"NOTIFY_SOCKET": str(tmp_path / "notify")}, again=again, slow_to_drain=gate)
        service.wait_state("running")
        again.touch()
        pid = service.child("walshard", 0).pid
        assert pid
        os.kill(pid, signal.SIGTERM)
        poll("the other shard's turn", lambda: "walshard 1 stopping" in service.journal())
        began_s = time.monotonic()
        poll("a drain longer than what counts as one stop", lambda: time.monotonic() - began_s > SAME_STOP_MS / 1000)
        service.signal_at_once(signal.SIGTERM, signal.SIGINT)
        poll("the word", lambda: b"STOPPING=1" in manager.recv(4096))
        gate.touch()
        assert service.wait_exit() == 0
    assert service.journal().count("walshard 1 started 1") == 1


def test_a_wish_to_start_again_comes_too_late_for_a_service_that_stops(start: Start, tmp_path: Path) -> None:
    again = tmp_path / "again"
    service = start({"TOPICS_SHUTDOWN_GRACE_MS": "4000"}, again=again, stubborn="frontend")
    service.wait_state("running")
    pid = service.child("walshard", 0).pid
    assert pid
    service.signal(signal.SIGTERM)
    poll("the stop", lambda: bool(service.log("stopping")))
    again.touch()
    os.kill(pid, signal.SIGTERM)
    assert service.wait_exit() == 4
    assert service.journal().count("walshard 0 started 1") == 1


def test_a_promotion_is_over_when_the_service_is(start: Start, tmp_path: Path) -> None:
    service = start({"TOPICS_FOLLOW": (tmp_path / "archive").as_uri()})
    service.wait_state("running")
    with ThreadPoolExecutor(1) as helper:
        promotion = helper.submit(promote, str(service.data_dir), 60_000)
        poll("the request, which ends this follower", lambda: bool(service.log("process died")))
        assert service.stop() == 0
        with pytest.raises(OSError, match="the service has stopped; its log says why"):
            promotion.result()


def test_a_keys_file_that_cannot_be_used_is_no_start(start: Start, tmp_path: Path) -> None:
    service = start({"TOPICS_API_KEYS_FILE": str(tmp_path / "none")})
    assert service.wait_exit() == 1  # of the tests' program; the command's is 2
    assert "cannot be read: No such file or directory" in service.log_text()
    assert not service.data_dir.exists()


@pytest.mark.parametrize(("role", "processes"), [("frontend", 2), ("walshard", 2), ("compactor", 1)])
def test_what_does_not_stop_in_time_is_killed(start: Start, role: str, processes: int) -> None:
    service = start({"TOPICS_SHUTDOWN_GRACE_MS": str(GRACE_MS)}, stubborn=role)
    family = [pid for pid in [service.wait_state("running").pid, *service.family()] if pid]
    assert service.stop() == 4
    # Those behind them have little time left, and may have been killed for a moment in which the machine stood still.
    killed = [line["process"] for line in service.log("process did not stop in time, killing it")]
    assert killed.count(role) == processes
    assert not any(is_running(pid) for pid in family)
    assert service.shared_memory() == []


def test_a_second_signal_does_not_wait(start: Start) -> None:
    service = start({"TOPICS_SHUTDOWN_GRACE_MS": "600000"}, stubborn="walshard")
    service.wait_state("running")
    service.signal(signal.SIGTERM)
    poll("the shards' turn", lambda: len(service.log("process stopped")) == 3)
    assert service.insist() == 4
    assert service.shared_memory() == []


def test_a_stop_that_comes_twice_at_once_is_one_stop(start: Start) -> None:
    service = start()
    service.wait_state("running")
    service.signal_at_once(signal.SIGINT, signal.SIGTERM)
    assert service.wait_exit() == 0
    assert len(service.log("stopping")) == 1


def test_a_service_whose_shared_memory_was_removed_starts_again(start: Start) -> None:
    """systemd-logind does that when a user logs out. The next process that died could not work with the others."""
    service = start()
    first = service.wait_state("running")
    for name in sorted(service.shared_memory(), key=lambda name: name.endswith("control")):  # by which it is noticed
        path = Path("/dev/shm", name)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    poll("it to be noticed", lambda: bool(service.log("stopping")))
    again = service.wait_state("running")
    assert "removed its shared memory" in service.log("stopping")[0]["reason"]
    assert again.pid == first.pid
    assert not {p.pid for p in first.processes} & {p.pid for p in again.processes}
    assert service.stop() == 0
    assert service.shared_memory() == []


def test_a_refused_log_stops_the_service_with_its_own_code(start: Start) -> None:
    service = start(refusing=1)
    victim = service.wait_state("running").processes[3].pid
    assert victim
    os.kill(victim, signal.SIGKILL)
    assert service.wait_exit() == 78
    journal = service.journal()
    assert "walshard 1 started 2" in journal
    assert "walshard 1 started 3" not in journal
    assert "walshard 0 stopped" in journal  # drained, not killed
    (line,) = service.log("stopping")
    assert "walshard 1 refuses" in line["reason"]
    assert service.shared_memory() == []


def test_reshards_behind_serving_frontends_before_any_shard(start: Start) -> None:
    service = start(reshard="works")
    service.wait_state("running")
    journal = service.journal()
    done = journal.index("reshard done")
    assert all(journal.index(f"walshard {index} started 1") > done for index in range(2))
    assert service.stop() == 0


def test_a_resharding_that_is_killed_is_repeated(start: Start) -> None:
    service = start(reshard="crashes")
    service.wait_state("running")
    assert service.journal().count("reshard started") == 2
    assert service.stop() == 0


def test_a_resharding_that_refuses_stops_the_service(start: Start) -> None:
    service = start(reshard="refuses")
    assert service.wait_exit() == 78
    assert not any(line.startswith("walshard") for line in service.journal())


def test_frontends_answer_and_status_tells_while_resharding(start: Start) -> None:
    service = start(reshard="endless")

    def halfway() -> bool:
        status = service.status()
        return status.reshard_progress == 0.5 and status.processes[0].state == "ready"

    poll("half of it done", halfway)
    status = service.status()
    assert status.state == "recovering"
    assert [p.state for p in status.processes if p.role == "walshard"] == ["none", "none"]
    assert service.connect() in {p.pid for p in status.processes}
    assert service.stop() == 0


def test_without_its_supervisor_nothing_goes_on_and_the_next_start_works(start: Start) -> None:
    service = start()
    family = service.wait_state("running").processes
    service.process.kill()
    service.process.wait()
    poll("the children to end", lambda: not any(is_running(p.pid) for p in family if p.pid))
    stopped = [line for line in service.journal() if line.endswith("stopping")]
    assert len(stopped) == 5  # asked to, not torn down
    assert service.shared_memory() != []
    leftover = f"topics-{shm_names.identity(str(service.data_dir))}-from-another-life"
    with open(f"{shm_names.SHM_ROOT}/{leftover}", "w") as file:
        file.write("stale")

    again = start(data_dir=service.data_dir)
    again.wait_state("running")
    assert leftover not in again.shared_memory()
    (line,) = again.log("removed shared memory of a service that was killed")
    assert leftover in line["objects"]
    assert again.stop() == 0
    assert again.shared_memory() == []


def test_a_start_waits_for_the_orphans_of_a_killed_supervisor(start: Start) -> None:
    service = start(slow_to_drain=str(os.devnull) + "-not-there-yet")
    orphans = [p.pid for p in service.wait_state("running").processes if p.role == "walshard" and p.pid]
    service.process.kill()
    service.process.wait()
    again = start(data_dir=service.data_dir)
    poll("the wait", lambda: bool(again.log("waiting for the processes of a killed service to end")))
    assert service.status().state == "draining"
    assert again.journal() == []
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    again.wait_state("running")
    assert again.stop() == 0


def test_a_second_start_is_refused_and_names_the_first(start: Start) -> None:
    first = start()
    before = first.wait_state("running")
    second = start(data_dir=first.data_dir)
    assert second.wait_exit() == 1
    assert f"in use by process {first.process.pid}" in second.log_text()
    after = first.status()
    assert [p.pid for p in after.processes] == [p.pid for p in before.processes]
    assert first.connect() in {p.pid for p in after.processes}
    assert first.stop() == 0


def test_a_second_start_while_the_first_drains_is_refused(start: Start) -> None:
    first = start({"TOPICS_SHUTDOWN_GRACE_MS": "600000"}, stubborn="walshard")
    first.wait_state("running")
    first.signal(signal.SIGTERM)
    first.wait_state("draining")
    second = start(data_dir=first.data_dir)
    assert second.wait_exit() == 1
    assert f"in use by process {first.process.pid}" in second.log_text()
    assert first.insist() == 4


@pytest.mark.long
def test_idle_costs_nothing(start: Start) -> None:
    service = start()
    service.wait_state("running")
    supervisor = service.status().supervisor
    assert supervisor
    before = voluntary_switches(service.process.pid)
    time.sleep(0.3)  # an interval to count in, not a wait for anything
    assert voluntary_switches(service.process.pid) - before <= 3
    assert service.stop() == 0


def voluntary_switches(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        (line,) = [line for line in file if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])
