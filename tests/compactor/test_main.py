"""The compactor's process gives way to those who answer requests, where it may."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from topics.compactor import main


def test_it_gives_way() -> None:
    program = "import os; from topics.compactor.main import *; give_way(); print(os.nice(0), os.sched_getscheduler(0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == [str(os.nice(0) + main.NICENESS), str(os.SCHED_BATCH)]


def test_a_sandbox_that_forbids_it_keeps_no_compactor_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "nice", forbidden)
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    main.give_way()
