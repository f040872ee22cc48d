"""Reading many objects of an archive: in order, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from topics.archive.directory_copy import marked
from topics.storage.archive_objects import Archive, FileRef, read_whole

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


def fetched_files(archive: Archive, refs: Iterable[FileRef]) -> Iterator[tuple[FileRef, bytes]]:
    """Yield files of a base as they are to be in a data directory: data have the deletions of their index. Raise
    ArchiveDamagedError, OSError.
    """
    idx = b""
    for ref, content in fetched_ahead(lambda ref: read_whole(archive.store, ref.name), refs):
        archive.check_file(ref, content)
        if ref.path.endswith(".idx"):
            idx = content
        yield ref, marked(content, idx) if ref.path.endswith(".data") else content
