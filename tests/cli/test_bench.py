"""The threads of `topics bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from topics.cli import bench


def test_a_signal_while_threads_start_comes_before_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a thread whose start was broken off: a write of its own would make the deleted topic again."""

    class BrokenOff(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **named: Any) -> Future[Any]:
            future = super().submit(*arguments, **named)
            started.append(future)
            if len(started) == len(works):
                raise SystemExit
            return future

    def work() -> int:
        asked.append(1)
        return 1

    started, asked = list[Future[Any]](), list[int]()
    works: list[Callable[[], int]] = [work] * 4
    monkeypatch.setattr(bench, "ThreadPoolExecutor", BrokenOff)
    with pytest.raises(SystemExit):
        bench.measure("write", works, argparse.Namespace(warm_up_s=0.0, seconds=100.0))
    assert [future.result() for future in started] == [[]] * 4
    assert asked == []
