"""Messages to the service manager (systemd, or another one that sets `NOTIFY_SOCKET`), see sd_notify(3).

    READY=1               once, when every frontend and shard is ready: the logs are replayed
    STATUS=…              in words, whenever they change
    EXTEND_TIMEOUT_USEC=  whenever the start makes progress: it takes longer the longer the log is
    RELOADING=1           when the keys are read again; READY=1 follows when every frontend uses them
    WATCHDOG=1            regularly, as long as no frontend or shard hangs
    STOPPING=1            once, when the service drains

A dead process does not stop the watchdog messages, because the supervisor restarts it. A frontend or shard that hangs
stops them, because only a restart of the whole service helps. A compactor or archiver that hangs does not: no client
waits for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Final

from topics.core.clock import Clock
from topics.log import get_logger
from topics.shm.control import BESIDE, HEARTBEAT_STALE_MS, ControlPage, ProcessState, Role
from topics.terminal import plural

if TYPE_CHECKING:
    from topics.supervisor.start_bar import StartBar  # with its library, which only a terminal needs

EVERY_MS: Final = 1000
WATCHDOG_SHARE: Final = 3
"""Number of watchdog messages within the time that systemd waits for one."""
EXTENDED_BY_MS: Final = 60_000
"""Time by which each progress extends the start: no replay goes that long without progress, even on a slow disk."""

RELOAD_EVERY_MS: Final = 20

log = get_logger()


class Announcements:
    """The lines for systemd, derived from the control page. Remembers what was said."""

    def __init__(self, watched: bool) -> None:
        self._watched = watched
        self.is_ready = False
        self._draining = False
        self.reloading = False
        self._status = ""
        self._progress = -1

    def stopping(self) -> list[str]:
        """Return the lines for the begin of a drain. From then on `lines` returns nothing but watchdog messages."""
        self._draining = True
        return ["STOPPING=1", "STATUS=stopping: finishing the requests in flight"]

    def reload(self, now_ms: int) -> list[str]:
        """Return the lines for the begin of a reload, at `now_ms` (monotonic). None before the service is ready."""
        if self._draining or not self.is_ready:
            return []
        self.reloading = True
        # systemd ignores a time before its own signal, and a rounded-down time may be one. So round up.
        return ["RELOADING=1", f"MONOTONIC_USEC={(now_ms + 1) * 1000}"]

    def lines(self, page: ControlPage, now_ms: int) -> list[str]:
        """Return lines for the changes since the last call. `now_ms` is wall-clock time, like heartbeats."""
        states = {key: cell.present_state for key, cell in page.cells.items()}
        lines = []
        hanging = _hanging(page, states, now_ms)
        if self._watched and not hanging:
            lines.append("WATCHDOG=1")
        if self._draining:
            return lines
        if not self.is_ready:
            self.is_ready = all(
                state is ProcessState.READY for (role, _), state in states.items() if role not in BESIDE
            )
            if self.is_ready:
                lines.append("READY=1")
            elif (progress := _progress(page, states)) != self._progress:
                self._progress = progress
                lines.append(f"EXTEND_TIMEOUT_USEC={EXTENDED_BY_MS * 1000}")
        elif self.reloading and page.all_use_newest_keys():
            self.reloading = False
            lines.append("READY=1")
        status = f"no heartbeat of {', '.join(hanging)}" if hanging else _words(page, states)
        if status != self._status:
            self._status = status
            lines.append(f"STATUS={status}")
        return lines


class Notify:
    """Sends the lines to the service manager, and draws the `bar` of a start at a terminal. It does nothing if it has
    neither. `due_ms` (monotonic) is the time for the next `tell`.
    """

    def __init__(self, address: str | None, watchdog_ms: int | None, clock: Clock, bar: StartBar | None = None) -> None:
        self._address = f"\0{address[1:]}" if address and address.startswith("@") else address
        self._clock = clock
        self._announcements = Announcements(watched=watchdog_ms is not None)
        self._every_ms = EVERY_MS if watchdog_ms is None else max(1, min(EVERY_MS, watchdog_ms // WATCHDOG_SHARE))
        self._refused = False
        self._unsaid: dict[str, str] = {}
        """Lines that could not be sent, by their names. The next message has them too."""
        self._bar = bar
        self.due_ms: int | None = clock.monotonic_ms() if address or bar else None

    @classmethod
    def of(cls, environ: MutableMapping[str, str], clock: Clock, bar: StartBar | None = None) -> Notify:
        """Create it from the environment, and remove the manager's variables from there: children must not notify."""
        address = environ.pop("NOTIFY_SOCKET", None)
        watchdog_us, watched_pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watchdog_ms = None
        if watchdog_us.isdecimal() and int(watchdog_us) and watched_pid in ("", str(os.getpid())):
            watchdog_ms = int(watchdog_us) // 1000
        return cls(address, watchdog_ms, clock, bar)

    def tell(self, page: ControlPage) -> None:
        now_ms = self._clock.monotonic_ms()
        if self.due_ms is None or now_ms < self.due_ms:
            return
        lines = self._announcements.lines(page, self._clock.now_ms())
        self.due_ms = now_ms + (RELOAD_EVERY_MS if self._announcements.reloading else self._every_ms)
        self._send(lines)
        if self._bar is not None:
            self._bar.show(page)
            if self._announcements.is_ready:
                self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            if self._address is None:
                self.due_ms = None

    def stopping(self) -> None:
        self._end_bar()
        if self.due_ms is not None:
            self._send(self._announcements.stopping())

    def reloading(self) -> None:
        """Say that the service reads its keys again. `tell` says when every frontend uses them."""
        if self.due_ms is not None:
            self.due_ms = self._clock.monotonic_ms()
            self._send(self._announcements.reload(self.due_ms))

    def _send(self, lines: list[str]) -> None:
        if self._address is None:
            return
        by_name = self._unsaid | {line.partition("=")[0]: line for line in lines}
        if not by_name:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
                end.sendto("\n".join(by_name.values()).encode(), self._address)
        except OSError as error:
            by_name.pop("WATCHDOG", None)  # a watchdog message is true at its own moment only
            self._unsaid = by_name
            if not self._refused:
                log.warning("the service manager could not be notified, which will be repeated", reason=str(error))
            self._refused = True
        else:
            self._unsaid = {}
            self._refused = False


def _progress(page: ControlPage, states: dict[tuple[Role, int], ProcessState]) -> int:
    """Return a number that changes whenever the start makes progress."""
    ready = sum(state is ProcessState.READY for state in states.values())
    replayed = sum(page.cell(role, index).get("progress_ppm") for role, index in states if role is Role.WALSHARD)
    return ready * 10**9 + replayed + page.header.get("reshard_ppm")


def _words(page: ControlPage, states: dict[tuple[Role, int], ProcessState]) -> str:
    if page.header.get("state") == ProcessState.RECOVERING:
        return f"preparing the logs, {page.header.get('reshard_ppm') // 10_000} %"
    recovering = [
        f"shard {index} {page.cell(role, index).get('progress_ppm') // 10_000} %"
        for (role, index), state in states.items()
        if role is Role.WALSHARD and state is ProcessState.RECOVERING
    ]
    if recovering:
        return f"reading logs: {', '.join(recovering)}"
    unready = [
        f"{page.name_of(role)} {index}" for (role, index), state in states.items() if state is not ProcessState.READY
    ]
    if unready:
        return f"waiting for {', '.join(unready)}"
    what = "following" if page.follows else "running"
    return f"{what}: {plural(page.shards, 'shard')}, {plural(page.frontends, 'frontend')}"


def _hanging(page: ControlPage, states: dict[tuple[Role, int], ProcessState], now_ms: int) -> list[str]:
    return [
        f"{page.name_of(role)} {index}"
        for (role, index), state in states.items()
        if role not in BESIDE and state is ProcessState.READY
        if now_ms - page.cell(role, index).get("heartbeat_ms") > HEARTBEAT_STALE_MS
    ]
