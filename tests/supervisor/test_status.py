"""Status from outside, of a service in every state, and the commands that show and stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMMAND, clean_environment, poll
from tests.supervisor.conftest import Service, Start
from topics import __version__
from topics.core.clock import SystemClock
from topics.shm import shm_names
from topics.shm.control import HEARTBEAT_STALE_MS, VERSION, ControlPage, ProcessState, Role
from topics.storage.lock import DataDirLock
from topics.supervisor.status import ArchiverStatus, PromotionStatus, Status, StatusReader, render
from topics.terminal import coloured

ROLES = (Role.FRONTEND, Role.WALSHARD, Role.COMPACTOR)


class SteppedClock(SystemClock):
    """The system's, plus what a test adds."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


def command(*arguments: str, data_dir: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *arguments, "--data-dir", str(data_dir)],
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def control_page(service: Service) -> ControlPage:
    return ControlPage.attach(shm_names.shm_name(shm_names.identity(str(service.data_dir)), "control"))


def test_nothing_runs(tmp_path: Path) -> None:
    answer = command("status", data_dir=tmp_path / "none")
    assert (answer.returncode, answer.stdout) == (3, f"topics  stopped  {tmp_path}/none\n")
    answer = command("status", "--json", data_dir=tmp_path)
    assert answer.returncode == 3
    assert json.loads(answer.stdout)["state"] == "stopped"


def test_the_json_of_a_running_service(start: Start) -> None:
    service = start()
    service.wait_state("running")
    answer = command("status", "--json", data_dir=service.data_dir)
    assert answer.returncode == 0, answer.stderr
    status: dict[str, Any] = json.loads(answer.stdout)
    assert status["data_dir"] == str(service.data_dir)
    assert status["pid"] == service.process.pid
    assert status["listen"] == service.port_file.read_text()
    assert status["uptime_ms"] > 0
    assert status["shared_memory_bytes"] > 0
    assert status["write_path"] == "pwritev"
    assert status["supervisor"]["rss_bytes"] > 0
    for process in status["processes"]:
        assert os.readlink(f"/proc/{process['pid']}/exe") == os.readlink(f"/proc/{service.process.pid}/exe")
        assert process["state"] == "ready"
        assert process["rss_bytes"] > 0
        assert process["cpu_seconds"] >= 0
        assert process["heartbeat_age_ms"] >= 0
        assert 0 <= process["pressure"] <= status["pressure"] <= 1
    assert status["deferring"] is False
    assert [(shard["index"], shard["progress"]) for shard in status["shards"]] == [(0, None), (1, None)]
    assert [frontend["requests_per_s"] for frontend in status["frontends"]] == [0, 0]


def test_the_table_shows_the_same(start: Start) -> None:
    service = start()
    status = service.wait_state("running")
    answer = command("status", data_dir=service.data_dir)
    assert answer.returncode == 0
    lines = answer.stdout.splitlines()
    assert f"running  {status.listen}  pid {status.pid}  up " in lines[0]
    assert lines[0].endswith("  writes by pwritev")
    assert lines[1] == str(service.data_dir)
    for process in status.processes:
        (line,) = [line for line in lines if line.startswith(f"{process.role} {process.index} ")]
        assert line.split()[2:4] == [str(process.pid), "ready"]


def test_a_recovering_shard(start: Start) -> None:
    service = start(recovering=1)

    def only_the_shard() -> bool:
        unready = [(p.role, p.index, p.state) for p in service.status().processes if p.state != "ready"]
        return unready == [("walshard", 1, "recovering")]

    poll("all but one to be ready", only_the_shard)
    status = service.wait_state("recovering")
    assert [shard.progress for shard in status.shards] == [None, 0.25]
    answer = command("status", data_dir=service.data_dir)
    assert answer.returncode == 1
    assert "1 recovering 25%" in answer.stdout


def test_a_killed_process_the_supervisor_cannot_see_yet(start: Start) -> None:
    service = start()
    victim = service.wait_state("running").processes[2]
    assert victim.pid
    service.signal(signal.SIGSTOP)
    os.kill(victim.pid, signal.SIGKILL)
    status = service.wait_state("degraded")
    assert [(p.role, p.index, p.pid) for p in status.processes if p.state == "dead"] == [("walshard", 0, None)]
    service.signal(signal.SIGCONT)
    status = service.wait_state("running")
    assert (status.processes[2].restarts, status.processes[2].last_exit) == (1, 137)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ControlPage]:
    """The control page of a service whose processes are all this one; its lock is held."""
    lock = DataDirLock.acquire(str(tmp_path))
    identity = shm_names.identity(str(tmp_path))
    page = ControlPage.create(shm_names.shm_name(identity, "control"), shards=1, frontends=1)
    page.header.set("state", ProcessState.READY)
    for role in ROLES:
        cell = page.cell(role, 0)
        cell.supervisor.set("state", ProcessState.STARTING)
        cell.supervisor.set("pid", os.getpid())
        cell.set("pid", os.getpid())
        cell.set("state", ProcessState.READY)
    yield page
    shm_names.unlink_all(identity)
    lock.release()


def test_what_a_dead_process_said_does_not_count_for_its_successor(page: ControlPage, tmp_path: Path) -> None:
    reader = StatusReader(str(tmp_path), SystemClock())
    assert reader.read().state == "running"
    page.cell(Role.WALSHARD, 0).set("pid", os.getpid() + 1)
    status = reader.read()
    assert (status.state, status.processes[1].state) == ("starting", "starting")


@pytest.mark.parametrize("role", ROLES)
def test_who_has_not_been_started_yet_is_missing(page: ControlPage, tmp_path: Path, role: Role) -> None:
    page.cell(role, 0).supervisor.clear()
    status = StatusReader(str(tmp_path), SystemClock()).read()
    assert (status.state, [p.state for p in status.processes].count("none")) == ("starting", 1)


@pytest.mark.parametrize(
    ("frontend", "shard", "overall"),
    [
        (ProcessState.READY, ProcessState.READY, "running"),
        (ProcessState.STARTING, ProcessState.READY, "starting"),
        (ProcessState.NONE, ProcessState.READY, "starting"),
        (ProcessState.STARTING, ProcessState.RECOVERING, "recovering"),
        (ProcessState.DEGRADED, ProcessState.RECOVERING, "degraded"),
        (ProcessState.READY, ProcessState.DEAD, "degraded"),
        (ProcessState.STOPPED, ProcessState.READY, "degraded"),
    ],
)
def test_the_worst_that_is_true_is_the_state_of_all(
    page: ControlPage, tmp_path: Path, frontend: ProcessState, shard: ProcessState, overall: str
) -> None:
    page.cell(Role.FRONTEND, 0).set("state", frontend)
    page.cell(Role.WALSHARD, 0).set("state", shard)
    assert StatusReader(str(tmp_path), SystemClock()).read().state == overall


@pytest.mark.parametrize(("verb", "code"), [("status", 4), ("reload", 1), ("promote", 1)])
def test_a_service_of_another_release_is_told_from_this_one(
    page: ControlPage, tmp_path: Path, verb: str, code: int
) -> None:
    page.header.set("version", 99)
    answer = command(verb, data_dir=tmp_path)
    assert answer.returncode == code
    assert f"its shared memory has version 99, topics {__version__} knows {VERSION}" in answer.stderr
    assert "use its commands, or restart it" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_page_that_is_none_is_told_likewise(page: ControlPage, tmp_path: Path) -> None:
    """It was a traceback."""
    page.header.set("magic", 1)
    answer = command("status", data_dir=tmp_path)
    assert answer.returncode == 4
    assert "the service is of another release" in answer.stderr


def test_a_page_that_is_being_made_is_a_start(page: ControlPage, tmp_path: Path) -> None:
    page.header.set("magic", 0)
    assert StatusReader(str(tmp_path), SystemClock()).read().state == "starting"


def test_a_process_that_hangs(start: Start) -> None:
    service = start()
    service.wait_state("running")
    clock = SteppedClock()
    reader = StatusReader(str(service.data_dir), clock)
    assert reader.read().state == "running"
    clock.ahead_ms = HEARTBEAT_STALE_MS + 1000
    status = reader.read()
    assert status.state == "degraded"
    assert all((p.heartbeat_age_ms or 0) > HEARTBEAT_STALE_MS for p in status.processes)
    assert render(status).count("  hangs  ") == len(status.processes), "the table says which one it is"


def test_a_supervisor_that_stands_still_is_told(page: ControlPage, tmp_path: Path) -> None:
    """All others are well, so the service was `running`. But nobody would start them again."""
    clock = SteppedClock()
    reader = StatusReader(str(tmp_path), clock)
    page.header.set("heartbeat_ms", clock.now_ms())
    assert reader.read().state == "running"
    clock.ahead_ms = HEARTBEAT_STALE_MS + 1000
    status = reader.read()
    assert status.state == "degraded"
    assert status.supervisor is not None
    assert (status.supervisor.heartbeat_age_ms or 0) > HEARTBEAT_STALE_MS
    assert f"  pid {os.getpid()} hangs  " in render(status).splitlines()[0]


def test_a_supervisor_without_work_beats(start: Start) -> None:
    service = start()
    service.wait_state("running")
    header = control_page(service).header
    beat_ms = header.get("heartbeat_ms")
    poll("it to beat on", lambda: header.get("heartbeat_ms") > beat_ms + 1000)
    assert service.status().state == "running"


def test_a_service_in_a_container_is_not_starting(tmp_path: Path) -> None:
    """Its shared memory is there, and its pid is somebody else's here. It was `starting` for ever."""
    lock = DataDirLock.acquire(str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as stranger:
        Path(lock.path).write_text(f"{stranger.pid}\n")
        answer = command("status", data_dir=tmp_path)
        assert (answer.returncode, answer.stdout) == (4, "")
        assert f"process {stranger.pid} here is not the service: that runs in a container" in answer.stderr
        stranger.kill()
    lock.release()


def test_a_status_whose_reader_is_gone_or_has_no_room(start: Start) -> None:
    service = start()
    service.wait_state("running")
    reader, broken = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    commands = ("run", "check", "status", "reload", "promote", "completion", "stop")
    helps = (["--help"], ["--version"], *([name, "--help"] for name in commands))
    for verb in (["status"], ["check"], ["completion", "bash"], *helps):
        where = ["--data-dir", str(service.data_dir)] if verb in (["status"], ["check"]) else []
        for stdout, code, said in (
            (broken, 141, ""),
            (full, 2, "topics-supervisor: cannot write to stdout: No space left on device\n"),
        ):
            done = subprocess.run(
                [COMMAND, *verb, *where],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env=clean_environment({}),
            )
            assert (done.returncode, done.stderr[: len(said) or None]) == (code, said)
    os.close(broken)
    os.close(full)


def test_a_read_only_shard_is_degraded(start: Start) -> None:
    service = start()
    service.wait_state("running")
    control_page(service).cell(Role.WALSHARD, 1).set("wal_read_only", 1)
    status = service.status()
    assert (status.state, [shard.wal_read_only for shard in status.shards]) == ("degraded", [False, True])
    assert "1 read-only" in render(status)
    assert "\x1b[31mdegraded\x1b[0m" in render(status, coloured)
    assert "\x1b" not in render(status)


def test_what_the_compactor_says_of_itself(start: Start) -> None:
    service = start()
    service.wait_state("running")
    page = control_page(service)
    assert service.status().compactor is not None
    for shard, (written, absorbed) in enumerate([(5_000_000, 1_000_000), (7, 7)]):
        page.cell(Role.WALSHARD, shard).set("wal_bytes_written", written)
        page.cell(Role.COMPACTOR, 0).set(f"absorbed_bytes_{shard:02d}", absorbed)
    page.cell(Role.COMPACTOR, 0).set("snapshots", 3)
    page.cell(Role.COMPACTOR, 0).set("last_snapshot_ms", SystemClock().now_ms() - 60_000)
    status = service.status()
    assert [shard.lag_bytes for shard in status.shards] == [4_000_000, 0]
    assert status.compactor is not None
    assert status.compactor.snapshots == 3
    assert (status.compactor.snapshot_age_ms or 0) >= 60_000
    assert "3.8 MiB" in render(status)
    assert "SNAPSHOTS" in render(status)


def test_rates_come_from_two_samples(start: Start) -> None:
    service = start()
    service.wait_state("running")
    clock = SteppedClock()
    reader = StatusReader(str(service.data_dir), clock)
    assert [frontend.requests_per_s for frontend in reader.read().frontends] == [None, None]
    for _ in range(20):
        service.connect()
    clock.ahead_ms = 10_000_000  # so long that the real time between the samples does not matter
    rates = [frontend.requests_per_s or 0 for frontend in reader.read().frontends]
    assert sum(rates) == pytest.approx(20 / 10_000, rel=0.05)


def test_the_reader_follows_a_service_from_life_to_life(start: Start) -> None:
    service = start()
    first = service.wait_state("running")
    service.process.kill()
    service.process.wait()
    poll("the children to end", lambda: service.status().state == "stopped")
    again = start(data_dir=service.data_dir)
    again.wait_state("running")
    second = service.status()
    assert (second.state, second.pid) == ("running", again.process.pid)
    assert not {p.pid for p in first.processes} & {p.pid for p in second.processes}


def test_stop_waits_for_the_end(start: Start) -> None:
    service = start()
    service.wait_state("running")
    answer = command("stop", data_dir=service.data_dir)
    assert (answer.returncode, answer.stdout) == (0, f"stopped process {service.process.pid}\n")
    assert service.wait_exit() == 0
    answer = command("stop", data_dir=service.data_dir)
    assert (answer.returncode, answer.stdout) == (0, "not running\n")


def test_watch_goes_on_from_state_to_state(start: Start, tmp_path: Path) -> None:
    with subprocess.Popen(
        [str(COMMAND), "status", "--watch", "--json", "--data-dir", str(tmp_path / "data")],
        env=clean_environment({}),
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        lines = watching.stdout
        assert lines
        assert json.loads(lines.readline())["state"] == "stopped"
        service = start()
        service.wait_state("running")
        # Lines come each second; `poll` calls for the next one until it tells of the start.
        poll("the start to be shown", lambda: json.loads(lines.readline())["state"] == "running")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
    assert service.stop() == 0


def test_bad_settings_are_told_before_anything_else(tmp_path: Path) -> None:
    for name in ("run", "check"):
        answer = command(name, "--port", "x", "--wal-shards", "0", data_dir=tmp_path)
        assert answer.returncode == 2
        assert answer.stderr.splitlines() == [
            "topics-supervisor: --port=x: must be an integer from 0 to 65535",
            "topics-supervisor: --wal-shards=0: must be an integer from 1 to 64",
        ]
    assert list(tmp_path.iterdir()) == []


def test_check_as_a_command(start: Start, tmp_path: Path) -> None:
    answer = command("check", "--port", "0", data_dir=tmp_path / "data")
    assert answer.returncode == 0
    assert [line[:4] for line in answer.stdout.splitlines()] == ["ok  "] * 7
    service = start()
    service.wait_state("running")
    answer = command("check", "--port", "0", data_dir=service.data_dir)
    assert answer.returncode == 1
    assert f"FAIL lock: a service holds it (process {service.process.pid})" in answer.stdout
    assert service.stop() == 0


@pytest.mark.parametrize(
    ("lag_ms", "moment_age_ms", "follows", "said"),
    [
        (828, 900, False, "828 ms behind"),
        (0, 900, False, "up to date"),
        (0, None, False, "up to date"),
        (828, None, False, "no moment yet"),
        (828, 900, True, "follows it, 828 ms behind"),
        (0, 900, True, "follows it, up to date"),
        (828, None, True, "follows it, not copied yet"),
    ],
)
def test_the_row_of_the_archive_says_what_its_lag_is(
    lag_ms: int, moment_age_ms: int | None, follows: bool, said: str
) -> None:
    archiver = ArchiverStatus(lag_ms, moment_age_ms, 0, 0, 0, 0, 0, 0, 0, 0, taken_over=False, follows=follows)
    last = render(Status(state="running", data_dir="d", pid=1, archiver=archiver)).splitlines()[-1]
    assert last.startswith(f"{said}  ")


@pytest.mark.parametrize(
    ("promotion", "said"),
    [
        ((90_000, False), "promotion was asked for {}: `topics-supervisor promote --cancel` withdraws it"),
        ((90_000, True), "takeover has begun {}: it goes on by itself"),
    ],
)
def test_a_line_says_that_a_promotion_waits(promotion: tuple[int, bool], said: str) -> None:
    """One that had begun by itself "was asked for"."""
    waits = PromotionStatus(*promotion)
    archiver = ArchiverStatus(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, taken_over=False, follows=True, promotion=waits)
    last = render(Status(state="running", data_dir="d", pid=1, archiver=archiver)).splitlines()[-1]
    assert last == f"a {said.format('1 min 30 s ago and has not come about (the log says why)')}"


def test_a_line_says_that_a_copy_cannot_take_over() -> None:
    archiver = ArchiverStatus(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, taken_over=False, follows=True, takeover_blocked=True)
    last = render(Status(state="running", data_dir="d", pid=1, archiver=archiver)).splitlines()[-1]
    why = "an object that it needs in the archive is damaged, and the log names it"
    assert last == f"this service cannot take over: {why}"
