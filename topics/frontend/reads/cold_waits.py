"""Deliveries that wait for the cold tier: one fetch for all that lack the same, and nobody else waits with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from topics.core.errors import TopicsError
from topics.frontend.reads.cold import ColdMissError
from topics.log import get_logger

Waiter = TypeVar("Waiter")

_log = get_logger()


class ColdWaits(Generic[Waiter]):
    """Who waits for what. Everything is called on one event loop."""

    def __init__(
        self,
        fetch: Callable[[ColdMissError], Awaitable[None]],
        on_fetched: Callable[[Waiter, str | None], None],
    ) -> None:
        """`on_fetched(waiter, failure)` comes once for each waiter; `failure` is a message, None when it is there."""
        self._fetch = fetch
        self._on_fetched = on_fetched
        self._waiters: dict[tuple[str, int, int], list[Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def wait(self, miss: ColdMissError, waiter: Waiter) -> None:
        """Begins to get what is missed, unless that is under way."""
        waiters = self._waiters.get(miss.key)
        if waiters is not None:
            waiters.append(waiter)
            return
        self._waiters[miss.key] = [waiter]
        task = asyncio.get_running_loop().create_task(self._get(miss))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _get(self, miss: ColdMissError) -> None:
        failure = None
        try:
            await self._fetch(miss)
        except TopicsError as error:
            failure = error.message
        except FileNotFoundError as error:
            # Dropped or rewritten meanwhile, most likely: the next look at the topic will not lead there again.
            failure = f"segment {miss.name} is not in the cold tier: {error}"
        except Exception:  # noqa: BLE001 — whoever waits is told in any case
            _log.exception("a segment could not be fetched", segment=miss.name)
            failure = f"segment {miss.name} cannot be read"
        finally:
            waiters = self._waiters.pop(miss.key)
        for waiter in waiters:
            self._on_fetched(waiter, failure)
