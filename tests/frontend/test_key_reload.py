"""A reload of the keys that meets a file which is not there at that moment, or half written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from topics.core.errors import TopicsError
from topics.frontend.asgi import Scope
from topics.frontend.entry.access import Access, KeyLimits, KeyReload
from topics.settings import load, read_keys
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.quotas import KeyCounts

DEADLINE_S = 60.0
FAILED = "keys not reloaded, the former ones stay"


class Frontend:
    """A frontend that reads its keys, beside a supervisor that is the test."""

    def __init__(self, identity: str, file: Path) -> None:
        self.file = file
        self.allow("old", "new")
        settings = load({}, {"data_dir": str(file.parent), "api_keys_file": str(file)})
        shared = SharedMemory.create(identity, 1, 1, 64 * 1024)
        self.header = shared.control.header
        self.cell = shared.control.cell(Role.FRONTEND, 0)
        self.access = Access(read_keys(settings), KeyLimits(KeyCounts(shared.key_counts, 1, 0), settings))
        self.reload = KeyReload(settings, self.access, self.header, self.cell)

    def allow(self, *keys: str) -> None:
        """By another file in the place of the one there was, if any."""
        copy = self.file.with_suffix(".copy")
        copy.write_text("\n".join(keys) + "\n")
        copy.rename(self.file)

    def ask(self, serial: int) -> None:
        """Ask for a reload, as the supervisor does once it has read the file."""
        self.header.set("keys_serial", serial)
        self.reload.request()

    def admits(self, key: str) -> bool:
        scope: Scope = {"headers": [(b"authorization", b"Bearer " + key.encode())]}
        try:
            self.access.authenticate(scope)
        except TopicsError:
            return False
        return True


@pytest.fixture
def frontend(identity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Frontend:
    monkeypatch.setattr("topics.frontend.entry.access.RETRY_S", 0.001)
    return Frontend(identity, tmp_path / "keys")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.0005)


def test_a_file_that_cannot_be_read_is_read_once_it_can_be(frontend: Frontend) -> None:
    """Without any further request: a key that was revoked counts no longer than that."""

    async def test() -> None:
        frontend.file.unlink()
        frontend.ask(1)
        await until(lambda: said)
        assert (frontend.admits("old"), frontend.cell.get("keys_serial")) == (True, 0)
        frontend.file.with_suffix(".new").write_text("new:x:y:z\n")
        frontend.file.with_suffix(".new").rename(frontend.file)
        await until(lambda: len(said) == 2)
        frontend.allow("new")
        await until(lambda: frontend.cell.get("keys_serial") == 1)
        assert [frontend.admits(key) for key in ("old", "new")] == [False, True]
        await until(lambda: frontend.reload._task is None)

    with capture_logs() as said:
        asyncio.run(test())
    assert [line["event"] for line in said] == [FAILED, FAILED, "keys reloaded after a failure"]
    assert said[0]["problems"] != said[1]["problems"], "each is said once"


def test_who_waits_to_try_again_reads_at_once_when_asked(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics.frontend.entry.access.RETRY_S", 10 * DEADLINE_S)

    async def test() -> None:
        frontend.file.unlink()
        frontend.ask(1)
        await until(lambda: said)
        frontend.allow("new")
        frontend.ask(2)
        await until(lambda: frontend.cell.get("keys_serial") == 2)
        assert [frontend.admits(key) for key in ("old", "new")] == [False, True]

    with capture_logs() as said:
        asyncio.run(test())


def test_what_was_not_asked_for_is_not_tried_again(frontend: Frontend) -> None:
    """The keys that count are the newest that the supervisor found to be good."""

    async def test() -> None:
        frontend.file.unlink()
        frontend.reload.request()
        await until(lambda: said)
        await until(lambda: frontend.reload._task is None)
        assert frontend.admits("old")

    with capture_logs() as said:
        asyncio.run(test())
    assert [line["event"] for line in said] == [FAILED]
