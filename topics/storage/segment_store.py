"""The seam to objects outside of the data directory: sealed segments and the archive (`archive_objects.py`). They are
in a folder or in a bucket (`bucket_store.py`), and nothing above this seam knows in which.

An object is written once, as a whole, under a name of two parts (a segment's is `<topic id, 16 hex>/<file name>`), and
never changes. Calls block, and slow disks and networks make them long or let them fail. So only the compactor, the
archiver and dedicated threads make such calls, never an event loop.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol

from topics.storage import layout
from topics.storage.bucket_store import BucketStore
from topics.storage.filesystem import FileSystem, make_dirs, new_file, opened, read_up_to, write_all
from topics.storage.frame import Bytes
from topics.storage.layout import TMP_SUFFIX

WHOLE_OBJECT_MS: Final = 300_000
"""Time-out of a request to a bucket that may carry a whole segment."""
DRAFT_S: Final = 86_400
MOUNT: Final = "mount its disk or restore it"
"""The advice in an error about a missing folder that must have objects."""


class SegmentSource(Protocol):
    """The calls that only read. They raise OSError (FileNotFoundError for a missing object). The caller may repeat a
    failed call.
    """

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes. Raise EOFError if the object ends before."""

    def exists(self, name: str) -> bool: ...

    def len(self, name: str) -> int:
        """Return the size of the object in bytes."""

    def place(self, name: str) -> str:
        """Return where the object is, for messages: a path or a URL."""


class SegmentStore(SegmentSource, Protocol):
    """All calls, also those that write. They raise OSError, and the caller may repeat a failed call."""

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Make or replace the object. It is durable when this returns, and never there in part, even after a kill."""

    def delete(self, name: str) -> None:
        """Remove the object durably, if there is one."""

    def list(self, prefix: str) -> list[str]:
        """Return the names of all objects that begin with `prefix`, ascending, without unfinished ones."""


def open_store(
    fs: FileSystem,
    place: str,
    timeout_ms: int = WHOLE_OBJECT_MS,
    *,
    apart_from: str | None = None,
    new: bool = True,
    owner: Callable[[], str] | None = None,
) -> SegmentStore:
    """Return the store of the segments in `place`, a directory or a bucket's URL. The first call opens it. `timeout_ms`
    bounds a request to a bucket. `BucketStore` explains `owner`, `LocalStore` the others.
    """
    if "://" in place:
        return BucketStore(f"{place.rstrip('/')}/{os.path.basename(layout.topics_dir(place))}", timeout_ms, owner)
    return LocalStore(fs, layout.topics_dir(place), apart_from, new=new)


@dataclass(eq=False)
class LocalStore:
    """A store in a folder, on whatever file system is mounted there. It must not be the folder `apart_from` under
    another name: after a `put` the caller removes the file that the object was made of.

    `new` says that the store has no objects yet, so the first `put` makes the folder. If it is not `new`, or once it
    was seen, a missing folder is an error with `way_out`: its disk may not be mounted, and a `put` would write to
    another disk.
    """

    fs: FileSystem
    root: str
    apart_from: str | None = None
    _: KW_ONLY
    new: bool = True
    way_out: str = f"{MOUNT}; only if they are lost for good, create this folder again and restart the service"

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        path = self._path(name)
        self._make_directory(os.path.dirname(path))
        with new_file(self.fs, path, os.O_WRONLY) as fd:
            self._write(fd, pieces)
        self._sync_directories(os.path.dirname(path))

    def create(self, name: str, content: Bytes) -> bool:
        """Make the object durably. Return False, and leave it alone, if there is one already. This takes no lock, so a
        process that is stopped in the middle holds up nobody.
        """
        path, own = self._path(name), f"{secrets.token_hex(8)}{TMP_SUFFIX}"
        try:
            return self._create(path, self._path(f"drafts/{own}"), content)
        except PermissionError:  # the folder of drafts belongs to another user
            return self._create(path, f"{path}.{own}", content)

    def _create(self, path: str, draft: str, content: Bytes) -> bool:
        for made in (draft, path):
            self._make_directory(os.path.dirname(made))
        try:
            with opened(self.fs, draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                self._write(fd, [content])
                _give(fd, os.path.dirname(path))  # before the file gets its name: later another file might have it
                self.fs.fdatasync(fd)
            if os.path.dirname(draft) != os.path.dirname(path):
                self._remove_old_drafts(draft)
            try:
                self.fs.link(draft, path)  # if two processes make the same object, only the first one succeeds
            except FileNotFoundError:  # a `delete` has just removed the empty directory
                self._make_directory(os.path.dirname(path))
                self.fs.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.filename == draft:
                error.filename = path  # the same for every draft, so that a caller can log a repeated error once
            raise
        finally:
            with suppress(OSError):
                self.fs.unlink(draft)
        self._sync_directories(os.path.dirname(path))
        return True

    def _make_directory(self, directory: str) -> None:
        fs = self.fs
        if self.new and not fs.exists(self.root):
            make_dirs(fs, self.root)
            _give(self.root, os.path.dirname(self.root))
        self._is_there()
        if not fs.exists(directory):
            with suppress(FileExistsError):  # a killed `put` made it
                fs.mkdir(directory)
                _give(directory, self.root)
            fs.fsync_dir(self.root)
        if self.apart_from is not None and os.path.samefile(self.root, self.apart_from):
            raise OSError(errno.EINVAL, f"is {self.apart_from} by another name", self.root)

    def _is_there(self) -> bool:
        """Return whether the folder is there. Raise FileNotFoundError if it should be."""
        is_there = _is_found(self.fs, self.root)
        if not is_there and not self.new:
            reason = f"is missing, and objects were put there: {self.way_out}"
            raise FileNotFoundError(errno.ENOENT, reason, self.root)
        self.new &= not is_there
        return is_there

    def _remove_old_drafts(self, draft: str) -> None:
        """Remove drafts of `create` calls that were killed a day ago. A call that was only stopped then fails."""
        directory, made_s = os.path.dirname(draft), os.stat(draft).st_mtime
        for name in os.listdir(directory):
            with suppress(OSError):
                if made_s - os.stat(path := os.path.join(directory, name)).st_mtime > DRAFT_S:
                    self.fs.unlink(path)

    def _write(self, fd: int, pieces: Iterable[Bytes]) -> None:
        offset = 0
        for piece in pieces:
            write_all(self.fs, fd, piece, offset)
            offset += len(piece)

    def _sync_directories(self, directory: str) -> None:
        """Sync all of them, also those that exist: another `put` may have been killed before its sync."""
        for parent in (directory, self.root, os.path.dirname(self.root)):
            self.fs.fsync_dir(parent)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        path = self._path(name)
        with opened(self.fs, path, os.O_RDONLY) as fd:
            found = read_up_to(self.fs, fd, length, offset)
        if len(found) != length:
            raise EOFError(f"{path} ends before byte {offset + length}")
        return found

    def delete(self, name: str) -> None:
        path = self._path(name)
        was_there = False
        for found in (path, path + TMP_SUFFIX):  # with the leftover of a killed `put`
            with suppress(FileNotFoundError):
                self.fs.unlink(found)
                was_there = True
        if not was_there:
            return
        directory = os.path.dirname(path)
        self.fs.fsync_dir(directory)
        try:
            self.fs.rmdir(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def list(self, prefix: str) -> list[str]:
        fs = self.fs
        topic_prefix, slash, _ = prefix.partition("/")
        if not self._is_there():
            return []
        found = []
        for topic in fs.listdir(self.root):
            if topic != topic_prefix if slash else not topic.startswith(topic_prefix):
                continue
            with suppress(FileNotFoundError, NotADirectoryError):
                found += [f"{topic}/{file}" for file in fs.listdir(self._path(topic)) if not file.endswith(TMP_SUFFIX)]
        return sorted(name for name in found if name.startswith(prefix))

    def exists(self, name: str) -> bool:
        return self._is_there() and _is_found(self.fs, self._path(name))

    def len(self, name: str) -> int:
        with opened(self.fs, self._path(name), os.O_RDONLY) as fd:
            return self.fs.size_bytes(fd)

    def place(self, name: str) -> str:
        return self._path(name)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)


def _is_found(fs: FileSystem, path: str) -> bool:
    """Return whether the path exists. Raise OSError if nobody can tell."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return fs.exists(path) or bool(os.stat(path))
    return False


def _give(made: str | int, folder: str) -> None:
    """Give a directory or an open file that root has made to the owner of the folder, so that this user can use it. If
    a link has taken its place meanwhile, do not follow the link.
    """
    if os.geteuid() == 0:
        with suppress(OSError):
            owner = os.stat(folder)
            os.chown(made, owner.st_uid, owner.st_gid, follow_symlinks=isinstance(made, int))
