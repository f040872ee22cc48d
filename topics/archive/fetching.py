"""Reading many objects of an archive: in order, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

FETCHED_AHEAD: Final = 8

_Wanted = TypeVar("_Wanted")
_Got = TypeVar("_Got")


def fetched_ahead(fetch: Callable[[_Wanted], _Got], wanted: Iterable[_Wanted]) -> Iterator[tuple[_Wanted, _Got]]:
    """Yield (wanted, fetched) in order, FETCHED_AHEAD at a time: most of the time of a bucket is waiting."""
    underway: deque[tuple[_Wanted, Future[_Got]]] = deque()
    with ThreadPoolExecutor(FETCHED_AHEAD, "fetch") as pool:
        try:
            for one in wanted:
                underway.append((one, pool.submit(fetch, one)))
                if len(underway) == FETCHED_AHEAD:
                    first, work = underway.popleft()
                    yield first, work.result()
            for first, work in underway:
                yield first, work.result()
        finally:
            pool.shutdown(cancel_futures=True)
