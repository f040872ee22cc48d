"""Messages to a service manager, by the protocol of sd_notify(3)."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import posix_ipc
import pytest

from tests.harness import poll
from tests.supervisor.conftest import Start
from tests.walshard.rig import TestClock
from topics.core.clock import SystemClock
from topics.shm.control import HEARTBEAT_STALE_MS, ControlPage, ProcessState, Role
from topics.supervisor.notify import EVERY_MS, Announcements, Notify

NOW_MS = 1_700_000_000_000


@pytest.fixture
def page() -> Iterator[ControlPage]:
    name = f"/topics-test-notify-{os.getpid()}"
    yield ControlPage.create(name, shards=2, frontends=1)
    posix_ipc.unlink_shared_memory(name)


def live(page: ControlPage, role: Role, index: int, state: ProcessState, heartbeat_ms: int = NOW_MS) -> None:
    cell = page.cell(role, index)
    cell.supervisor.set("pid", 100 * role + index)
    cell.set("pid", 100 * role + index)
    cell.set("heartbeat_ms", heartbeat_ms)
    cell.set("state", state)


def all_ready(page: ControlPage) -> None:
    for role, index in page.cells:
        live(page, role, index, ProcessState.READY)


def test_a_start_is_told_as_it_gets_on(page: ControlPage) -> None:
    announcements = Announcements(watched=False)
    extended = "EXTEND_TIMEOUT_USEC=60000000"
    assert announcements.lines(page, NOW_MS) == [
        extended,
        "STATUS=waiting for frontend 0, walshard 0, walshard 1, compactor 0",
    ]
    live(page, Role.FRONTEND, 0, ProcessState.READY)
    live(page, Role.WALSHARD, 0, ProcessState.READY)
    live(page, Role.WALSHARD, 1, ProcessState.RECOVERING)
    page.cell(Role.WALSHARD, 1).set("progress_ppm", 250_000)
    assert announcements.lines(page, NOW_MS) == [extended, "STATUS=reading logs: shard 1 25 %"]
    assert announcements.lines(page, NOW_MS) == [], "a start that does not get on is given no more time"
    page.cell(Role.WALSHARD, 1).set("progress_ppm", 250_001)
    assert announcements.lines(page, NOW_MS) == [extended]
    live(page, Role.WALSHARD, 1, ProcessState.READY)
    lines = announcements.lines(page, NOW_MS)
    assert lines == ["READY=1", "STATUS=waiting for compactor 0"], "it serves nobody, and reads as much as the shards"
    all_ready(page)
    assert announcements.lines(page, NOW_MS) == ["STATUS=running: 2 shards, 1 frontend"]
    assert announcements.lines(page, NOW_MS) == []


def test_a_change_of_the_shard_count_is_told(page: ControlPage) -> None:
    page.header.set("state", ProcessState.RECOVERING)
    page.header.set("reshard_ppm", 420_000)
    (_, status) = Announcements(watched=False).lines(page, NOW_MS)
    assert status == "STATUS=preparing the logs, 42 %"


def test_who_dies_is_told_and_no_reason_to_be_silent(page: ControlPage) -> None:
    announcements = Announcements(watched=True)
    all_ready(page)
    assert announcements.lines(page, NOW_MS)[:2] == ["WATCHDOG=1", "READY=1"]
    shard = page.cell(Role.WALSHARD, 1)
    shard.supervisor.set("pid", 0)
    shard.supervisor.set("state", ProcessState.DEAD)
    later_ms = NOW_MS + HEARTBEAT_STALE_MS
    assert announcements.lines(page, later_ms) == ["WATCHDOG=1", "STATUS=waiting for walshard 1"]
    shard.supervisor.set("pid", 999)  # its successor has not said anything yet
    assert announcements.lines(page, later_ms) == ["WATCHDOG=1"]


def test_who_hangs_is_a_reason_to_be_silent_until_it_goes_on(page: ControlPage) -> None:
    announcements = Announcements(watched=True)
    all_ready(page)
    announcements.lines(page, NOW_MS)
    hangs_ms = NOW_MS + HEARTBEAT_STALE_MS + 1
    for role, index in page.cells:
        live(page, role, index, ProcessState.READY, hangs_ms)
    live(page, Role.COMPACTOR, 0, ProcessState.READY, NOW_MS)
    assert announcements.lines(page, hangs_ms) == ["WATCHDOG=1"], "it may be at one long sync"
    live(page, Role.WALSHARD, 0, ProcessState.READY, NOW_MS)
    assert announcements.lines(page, hangs_ms) == ["STATUS=no heartbeat of walshard 0"]
    assert announcements.lines(page, hangs_ms) == []
    live(page, Role.WALSHARD, 0, ProcessState.READY, hangs_ms)
    assert announcements.lines(page, hangs_ms) == ["WATCHDOG=1", "STATUS=running: 2 shards, 1 frontend"]


def test_a_drain_is_told_once(page: ControlPage) -> None:
    announcements = Announcements(watched=True)
    all_ready(page)
    announcements.lines(page, NOW_MS)
    assert announcements.stopping()[0] == "STOPPING=1"
    live(page, Role.FRONTEND, 0, ProcessState.DRAINING)
    assert announcements.lines(page, NOW_MS) == ["WATCHDOG=1"]


def test_a_reload_ends_when_every_frontend_uses_the_new_keys(page: ControlPage) -> None:
    announcements = Announcements(watched=False)
    assert announcements.reload(5) == [], "the start is not over yet"
    all_ready(page)
    announcements.lines(page, NOW_MS)
    assert announcements.reload(5) == ["RELOADING=1", "MONOTONIC_USEC=6000"]
    page.header.set("keys_serial", 7)
    page.cell(Role.FRONTEND, 0).supervisor.set("state", ProcessState.READY)
    assert announcements.lines(page, NOW_MS) == []
    page.cell(Role.FRONTEND, 0).set("keys_serial", 7)
    assert announcements.lines(page, NOW_MS) == ["READY=1"]
    assert announcements.lines(page, NOW_MS) == []
    announcements.stopping()
    assert announcements.reload(9) == []


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_hears_a_whole_life(start: Start, tmp_path: Path, abstract: bool) -> None:
    name = f"@topics-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name[1:]}" if abstract else name)
        manager.settimeout(30)
        heard: list[str] = []

        def hear(line: str) -> None:
            while line not in heard:
                heard.extend(manager.recv(4096).decode().splitlines())

        def stop() -> None:
            """Nobody else empties the queue, which holds ten: what is said at the end needs room in it."""
            manager.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    manager.recv(4096)
            manager.settimeout(30)
            service.signal(signal.SIGTERM)
            hear("STOPPING=1")
            assert service.wait_exit() == 0

        watched = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "900000"}  # each 300 ms
        service = start(environ=watched, recovering=1)
        hear("STATUS=reading logs: shard 1 25 %")
        assert "READY=1" not in heard
        stop()
        heard.clear()
        service = start(environ=watched)
        hear("READY=1")
        assert {p.state for p in service.status().processes if p.role != "compactor"} == {"ready"}
        hear("STATUS=running: 2 shards, 2 frontends")
        assert service.status().state == "running"
        heard.clear()
        hear("WATCHDOG=1")
        began_us = time.monotonic_ns() // 1000
        service.signal(signal.SIGHUP)
        hear("RELOADING=1")
        (reload_us,) = [int(line.partition("=")[2]) for line in heard if line.startswith("MONOTONIC_USEC=")]
        assert began_us <= reload_us <= time.monotonic_ns() // 1000 + 1000
        stop()


def test_a_manager_that_has_gone_keeps_nobody_from_running(start: Start, tmp_path: Path) -> None:
    service = start(environ={"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "30000"})
    service.wait_state("running")
    event = "the service manager could not be notified, which will be repeated"
    poll("a word about it", lambda: service.log(event))
    assert service.stop() == 0
    assert len(service.log(event)) == 1


def test_what_the_manager_had_no_room_for_is_said_again(page: ControlPage, tmp_path: Path) -> None:
    all_ready(page)
    clock = TestClock()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as others:
            filled = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    others.sendto(b"RELOADING=1", str(tmp_path / "notify"))
                    filled += 1
        notify = Notify(str(tmp_path / "notify"), 30_000, clock)
        notify.tell(page)
        for _ in range(filled):
            manager.recv(100)
        clock.ms += EVERY_MS
        notify.tell(page)
        assert manager.recv(1000).decode().splitlines() == [
            "READY=1",
            "STATUS=running: 2 shards, 1 frontend",
            "WATCHDOG=1",
        ]


def test_a_machine_without_descriptors_ends_no_service(page: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> socket.socket:
        raise OSError(errno.ENFILE, "Too many open files in system")

    monkeypatch.setattr(socket, "socket", none_left)
    Notify("/run/notify", None, TestClock()).tell(page)


@pytest.mark.parametrize(
    ("watchdog", "every_ms"),
    [
        ({}, EVERY_MS),
        ({"WATCHDOG_USEC": "30000000"}, EVERY_MS),
        ({"WATCHDOG_USEC": "900000"}, 300),
        ({"WATCHDOG_USEC": "900000", "WATCHDOG_PID": str(os.getpid())}, 300),
        ({"WATCHDOG_USEC": "900000", "WATCHDOG_PID": "1"}, EVERY_MS),  # for another process
        ({"WATCHDOG_USEC": "0"}, EVERY_MS),
    ],
)
def test_how_often_it_is_told_and_nothing_for_the_children(
    page: ControlPage, tmp_path: Path, watchdog: dict[str, str], every_ms: int
) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "HOME": "/", **watchdog}
    clock = SystemClock()
    notify = Notify.of(environ, clock)
    assert environ == {"HOME": "/"}
    before_ms = clock.monotonic_ms()
    notify.tell(page)
    assert notify.due_ms is not None
    assert before_ms + every_ms <= notify.due_ms <= clock.monotonic_ms() + every_ms


def test_without_a_manager_nothing_is_due() -> None:
    assert Notify.of({}, SystemClock()).due_ms is None
