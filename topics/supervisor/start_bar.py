"""The bar of a start at a terminal."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from topics.progress import progress
from topics.shm.control import ControlPage, ProcessState, Role, replay_progress


class StartBar:
    """Shows progress, rate and ETA of a start that lasts longer than a second: logs are prepared, then read."""

    def __init__(self) -> None:
        tqdm.monitor_interval = 0  # else tqdm starts a thread, and this process forks
        self._bar: tqdm[Any] | None = None
        self._doing = ""

    def show(self, page: ControlPage) -> None:
        if page.header.get("state") == ProcessState.RECOVERING:
            doing, share = "preparing the logs", page.header.get("reshard_ppm") / 1_000_000
        else:
            shards = [page.cell(Role.WALSHARD, index) for index in range(page.shards)]
            doing, share = "reading the logs", replay_progress(shards)
        if self._bar is None or doing != self._doing:
            self.close()
            self._bar, self._doing = progress("%", 100, desc=doing, mininterval=0, miniters=0), doing
        self._bar.update(100 * share - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
