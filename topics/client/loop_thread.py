"""An event loop for programs without one: it keeps leases while their own threads work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own. Its end closes the context managers entered in it, last first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="topics-queue", daemon=True)
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._open:
                self.run(self._open.pop().__aexit__(None, None, None))
        finally:
            self.call(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result; this thread waits."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    async def enter(self, manager: Any) -> Any:
        """Enter a context manager, which the end of the loop exits."""
        entered = await manager.__aenter__()
        self._open.append(manager)
        return entered
