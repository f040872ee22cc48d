"""SIGHUP: this frontend reads the keys again. The supervisor has read them before it says so, and found them good; but
the file may be changed again, or not be there for a moment, when it is read here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from topics.frontend.access import Access
from topics.keys import read_keys
from topics.log import get_logger
from topics.settings import Settings, SettingsError
from topics.shm.control import Cell, ProcessCell

RETRY_S: Final = 1.0
"""As long as older keys count here than what was asked for: one of them may have been revoked."""

_log = get_logger()


class KeyReload:
    """`header` has the serial of the newest ring; `cell` says which one counts here."""

    def __init__(self, settings: Settings, access: Access, header: Cell, cell: ProcessCell) -> None:
        self._settings = settings
        self._access = access
        self._header = header
        self._cell = cell
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: list[str] = []
        """Problems that are in the log, and last."""
        cell.set("keys_serial", access.serial)

    def request(self) -> None:
        """Reads the keys soon; once more if it is just doing so, for they may have changed again. If that fails it is
        repeated until these keys or newer ones count here.
        """
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def _is_behind(self) -> bool:
        return self._access.serial < self._header.get("keys_serial")

    async def _run(self) -> None:
        try:
            while self._wanted.is_set() or self._is_behind:
                self._wanted.clear()
                if not await self._reload() and self._is_behind:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(RETRY_S):
                            await self._wanted.wait()
        finally:
            self._task = None

    async def _reload(self) -> bool:
        # Before the file: what is read later is at least as new as what this serial stands for.
        serial = self._header.get("keys_serial")
        try:
            ring = await asyncio.to_thread(read_keys, self._settings, serial)
        except SettingsError as error:
            if error.problems != self._said:
                _log.error("keys not reloaded, the former ones stay", problems=error.problems)
            self._said = error.problems
            return False
        if self._said:
            _log.info("keys reloaded, which had failed")
            self._said = []
        self._access.replace(ring)
        self._cell.set("keys_serial", serial)
        return True
