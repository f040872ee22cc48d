"""The bar of a start: on a terminal, until the service is ready."""

from __future__ import annotations

import os
import pty
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.harness import poll
from tests.supervisor.test_notify import all_ready, live
from tests.supervisor.test_notify import page as page
from tests.walshard.rig import TestClock
from topics import progress
from topics.shm.control import ControlPage, ProcessState, Role
from topics.supervisor.notify import EVERY_MS, Notify
from topics.supervisor.start_bar import StartBar


@contextmanager
def terminal() -> Iterator[int]:
    """Make a terminal stderr, where bars begin at once. (Not a fixture: pytest sets stderr after those.)"""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "w") as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "AFTER_S", 0)
        patch.setattr(sys, "stderr", stderr)
        yield ours
    os.close(ours)


def test_a_start_is_shown_until_all_are_ready(page: ControlPage) -> None:
    with terminal() as end:
        _start(page, end)


def _start(page: ControlPage, end: int) -> None:
    clock = TestClock()
    notify = Notify.of({}, clock, StartBar())
    drawn = bytearray()

    def shows(text: bytes) -> None:
        notify.tell(page)
        clock.ms += EVERY_MS

        def found() -> bool:
            with suppress(BlockingIOError):  # a terminal passes on in its own time
                drawn.extend(os.read(end, 10_000))
            return text in drawn

        poll(f"{text!r}", found)

    page.header.set("state", ProcessState.RECOVERING)
    page.header.set("reshard_ppm", 500_000)
    shows(b"preparing the logs:  50%")
    page.header.set("state", ProcessState.READY)
    for index in range(page.shards):
        live(page, Role.WALSHARD, index, ProcessState.RECOVERING)
    page.cell(Role.WALSHARD, 1).set("progress_ppm", 500_000)
    shows(b"reading the logs:  25%")
    all_ready(page)
    notify.tell(page)
    assert notify.due_ms is None, "without a service manager nothing is left to tell"
    notify.stopping()


def test_a_stop_before_it_is_ready_ends_the_bar(page: ControlPage) -> None:
    with terminal():
        notify = Notify.of({}, TestClock(), StartBar())
        notify.tell(page)
        notify.stopping()
    assert notify.due_ms is None
