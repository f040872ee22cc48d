"""A pytest plugin: writes what became of a run's tests to a file, for `tests/suite.py`.

    pytest -p tests.outcomes --outcomes FILE tests/core

The file is written when the run has ended in order. After a crash of pytest there is none.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest


class Outcomes(msgspec.Struct):
    """Tests by node id. A test with a failure in a fixture is in `errors`, even if its own code failed, too."""

    selected: int = 0
    finished: int = 0
    failed: list[str] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    """Failures of modules that could not be collected and of fixtures."""
    skipped: list[str] = msgspec.field(default_factory=list)


def read(path: Path) -> Outcomes | None:
    """Return what the run wrote; None if it did not end in order."""
    return msgspec.json.decode(path.read_bytes(), type=Outcomes) if path.exists() else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="file to write to when the run has ended")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("outcomes")))


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = Outcomes()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._seen.errors.append(report.nodeid)
        elif report.skipped:
            self._seen.skipped.append(report.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._seen.selected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self._seen.failed if report.when == "call" else self._seen.errors).append(report.nodeid)
        elif report.skipped:
            self._seen.skipped.append(report.nodeid)
        if report.when == "teardown":
            self._seen.finished += 1

    def pytest_sessionfinish(self) -> None:
        seen = self._seen
        seen.failed = [test for test in dict.fromkeys(seen.failed) if test not in seen.errors]
        self._path.write_bytes(msgspec.json.encode(seen))
