"""Executors for the helpers of shards and compactors, so that a test decides when their work is done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Inline(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        finish(future, lambda: fn(*args, **kwargs))
        return future


class Hanging(Executor):
    """Runs nothing while it `hangs`, and all of it once it goes on."""

    def __init__(self) -> None:
        self.hangs = False
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        if not self.hangs:
            self.go_on()
        return future

    def go_on(self) -> None:
        self.hangs = False
        while self._waiting:
            finish(*self._waiting.pop(0))


def finish(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - any executor hands it on
        future.set_exception(error)
