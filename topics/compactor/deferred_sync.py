"""Many files, one sync: the file system as a cut of many topics sees it."""

from __future__ import annotations

from typing import Any, cast

from topics.storage.filesystem import FileSystem


def deferring_syncs(fs: FileSystem) -> FileSystem:
    """`fs`, but nothing is synced: whoever uses it calls `sync_all` on `fs` itself when everything is written."""
    return cast(FileSystem, _DeferringSyncs(fs))


class _DeferringSyncs:
    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def fdatasync(self, fd: int) -> None:
        """Put off."""

    def fsync_dir(self, path: str) -> None:
        """Put off."""
