"""Answers that wait for the archive: a write to a topic of class `archived` counts once its log is there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from topics.core.config import TopicConfig
from topics.core.errors import TopicsError, invalid, storage_unavailable
from topics.core.names import owner_shard
from topics.shm.control import ControlPage, ProcessCell, Role

LOOK_S: Final = 0.005


class ArchiveAcks:
    """The answers of one frontend that wait for the archive. It owns the word `archive_waits`, which makes the archiver
    ship sooner.
    """

    def __init__(self, control: ControlPage, cell: ProcessCell, wait_ms: int) -> None:
        self._control = control
        self._cell = cell
        self._wait_ms = wait_ms
        self._shards = [control.cell(Role.WALSHARD, shard) for shard in range(control.shards)]
        self._waiting: list[deque[tuple[int, asyncio.Future[None]]]] = [deque() for _ in self._shards]
        """Futures by shard, each with the `committed` word that the archive has to reach; ascending."""
        self._timer: asyncio.TimerHandle | None = None

    def check(self, config: TopicConfig) -> None:
        """Raise `400` for a configuration that needs an archive if the service has none."""
        if config.durability == "archived" and not self._control.has_archiver:
            raise invalid(
                'class "archived" needs an archive: set TOPICS_ARCHIVE_URL, or choose "fsync"', field="durability"
            )

    def of_topics(self) -> list[int]:
        """Return the shards that have topics of class `archived`."""
        return [shard for shard, cell in enumerate(self._shards) if cell.get("topics_archived")]

    async def wait_for_topic(self, name: str) -> None:
        """Wait until the archive has all that the shard of this topic has committed so far."""
        await self.wait_for([owner_shard(name, len(self._shards))])

    async def wait_for(self, shards: Iterable[int]) -> None:
        """Wait until the archive has all that these shards have committed so far. Raise `503` after the longest wait:
        the records are on this machine's disk, but the archive may never get them.
        """
        words = [(shard, self._shards[shard].get("committed")) for shard in set(shards)]
        if words and not self._control.has_archiver:
            raise self._refused("this service has no archive any more: set TOPICS_ARCHIVE_URL, or choose a class")
        if behind := [(shard, word) for shard, word in words if self._control.shipped(shard) < word]:
            await self._wait(behind)

    async def _wait(self, behind: list[tuple[int, int]]) -> None:
        loop = asyncio.get_running_loop()
        reached = [loop.create_future() for _ in behind]
        for (shard, word), one in zip(behind, reached, strict=True):
            self._waiting[shard].append((word, one))
        self._cell.add("archive_waits")
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)
        try:
            async with asyncio.timeout(self._wait_ms / 1000):
                await asyncio.gather(*reached)
        except TimeoutError:
            raise self._refused(
                f"the archive has not had it within {self._wait_ms} ms (TOPICS_ARCHIVE_WAIT_MS); it is on the disk of"
                " the service, and will be in the archive if that comes back before the machine is lost"
            ) from None
        finally:
            self._cell.add("archive_waits", -1)

    def _look(self) -> None:
        """End the waits whose logs the archive has."""
        for shard, waiting in enumerate(self._waiting):
            shipped = self._control.shipped(shard) if waiting else 0
            while waiting and (waiting[0][0] <= shipped or waiting[0][1].done()):
                _, reached = waiting.popleft()
                if not reached.done():
                    reached.set_result(None)
        again = any(self._waiting)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look) if again else None

    def _refused(self, message: str) -> TopicsError:
        detail = {"cause": "archive", "read_only": False, "archive_wait_ms": self._wait_ms}
        return storage_unavailable(message, **detail)
