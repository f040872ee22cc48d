"""SIGHUP: this frontend reads the keys again. The supervisor has read them before it says so, and found them good."""

from __future__ import annotations

import asyncio

from topics.frontend.access import Access
from topics.keys import read_keys
from topics.log import get_logger
from topics.settings import Settings, SettingsError
from topics.shm.control import Cell, ProcessCell

_log = get_logger()


class KeyReload:
    """`header` has the serial of the newest ring; `cell` says which one counts here."""

    def __init__(self, settings: Settings, access: Access, header: Cell, cell: ProcessCell) -> None:
        self._settings = settings
        self._access = access
        self._header = header
        self._cell = cell
        self._wanted = False
        self._task: asyncio.Task[None] | None = None
        cell.set("keys_serial", access.serial)

    def request(self) -> None:
        """Reads the keys soon; once more if it is just doing so, for they may have changed again."""
        self._wanted = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._wanted:
                self._wanted = False
                await self._reload()
        finally:
            self._task = None

    async def _reload(self) -> None:
        # Before the file: what is read later is at least as new as what this serial stands for.
        serial = self._header.get("keys_serial")
        try:
            ring = await asyncio.to_thread(read_keys, self._settings, serial)
        except SettingsError as error:
            _log.error("keys not reloaded, the former ones stay", problems=error.problems)
            return
        self._access.replace(ring)
        self._cell.set("keys_serial", serial)
