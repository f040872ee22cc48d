"""The seam to where sealed segments go when they leave the data directory: a folder today, an object store by the same
six calls.

An object is written once, as a whole, under a name of two parts, `<topic id, 16 hex>/<file name>`, and never changes.
Calls block and may take long or fail, which is a slow disk's or a network's nature: only the compactor and threads made
for it call them, never an event loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from topics.storage.filesystem import FileSystem, make_dirs, write_all
from topics.storage.frame import Bytes
from topics.storage.layout import TMP_SUFFIX


class SegmentStore(Protocol):
    """Calls raise OSError (of a missing object FileNotFoundError); a failed one may be repeated."""

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Makes the object, replacing one of the same name. It is durable when this returns; it is never there in part,
        whenever the caller is killed.
        """
        ...

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly so many bytes; EOFError when the object ends before."""
        ...

    def delete(self, name: str) -> None:
        """Removes the object durably; nothing happens when there is none."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Names of all objects that begin with `prefix`, ascending; an object that is being made is not among them."""
        ...

    def exists(self, name: str) -> bool: ...

    def len(self, name: str) -> int:
        """Bytes of the object."""
        ...


class LocalStore:
    """A folder, on whatever file system is mounted there. `apart_from`: what it must not be by another name: who
    puts an object there removes the file that it was made of.

    `new`: nothing is known to be in it, so the first `put` makes the folder. Later, or if there should be something, a
    folder that is missing is an error: its disk may not be mounted, and what is put in its place would go elsewhere.
    """

    def __init__(self, fs: FileSystem, root: str, apart_from: str | None = None, *, new: bool = True) -> None:
        self._fs = fs
        self._root = root
        self._apart_from = apart_from
        self._new = new

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        fs, path = self._fs, self._path(name)
        directory = os.path.dirname(path)
        if self._new:
            make_dirs(fs, self._root)
        elif not fs.exists(self._root):
            raise FileNotFoundError(
                errno.ENOENT,
                "is missing, and segments were put there: mount its disk or bring it back; only if they are lost for"
                " good, make this folder anew",
                self._root,
            )
        self._new = False
        if not fs.exists(directory):
            with suppress(FileExistsError):  # of a killed `put`
                fs.mkdir(directory)
            fs.fsync_dir(self._root)
        if self._apart_from is not None and os.path.samefile(self._root, self._apart_from):
            raise OSError(errno.EINVAL, f"is {self._apart_from} by another name", self._root)
        tmp_path = path + TMP_SUFFIX
        fd = fs.open(tmp_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            try:
                offset = 0
                for piece in pieces:
                    write_all(fs, fd, piece, offset)
                    offset += len(piece)
                fs.fdatasync(fd)
            finally:
                fs.close(fd)
            fs.rename(tmp_path, path)
        except BaseException:
            # A leftover never counts for anything.
            with suppress(OSError):
                fs.unlink(tmp_path)
            raise
        # All of them, and not only by whoever made them: that one may have been killed before its sync.
        for parent in (directory, self._root, os.path.dirname(self._root)):
            fs.fsync_dir(parent)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        fs, path = self._fs, self._path(name)
        fd = fs.open(path, os.O_RDONLY)
        try:
            pieces = []
            missing = length
            while missing:
                piece = fs.pread(fd, missing, offset + length - missing)
                if not piece:
                    raise EOFError(f"{path} ends before byte {offset + length}")
                pieces.append(piece)
                missing -= len(piece)
        finally:
            fs.close(fd)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def delete(self, name: str) -> None:
        path = self._path(name)
        is_gone = True
        for found in (path, path + TMP_SUFFIX):  # what a killed `put` left goes as well
            with suppress(FileNotFoundError):
                self._fs.unlink(found)
                is_gone = False
        if is_gone:
            return
        directory = os.path.dirname(path)
        self._fs.fsync_dir(directory)
        try:
            self._fs.rmdir(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def list(self, prefix: str) -> list[str]:
        fs = self._fs
        topic_prefix, slash, _ = prefix.partition("/")
        if not fs.exists(self._root):
            return []
        found = []
        for topic in fs.listdir(self._root):
            if topic != topic_prefix if slash else not topic.startswith(topic_prefix):
                continue
            with suppress(FileNotFoundError, NotADirectoryError):
                found += [f"{topic}/{file}" for file in fs.listdir(self._path(topic)) if not file.endswith(TMP_SUFFIX)]
        return sorted(name for name in found if name.startswith(prefix))

    def exists(self, name: str) -> bool:
        return self._fs.exists(self._path(name))

    def len(self, name: str) -> int:
        fd = self._fs.open(self._path(name), os.O_RDONLY)
        try:
            return self._fs.size_bytes(fd)
        finally:
            self._fs.close(fd)

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)
