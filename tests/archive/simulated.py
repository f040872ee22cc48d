"""A bucket in memory that does what real ones do: it fails before or after a put, throttles, hides what is new from
lists, cuts answers short, and is away for a while.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Literal

from topics.storage.frame import Bytes

Trouble = Literal["refused", "lost_answer", "cut_short", "old_list"]


class SimulatedBucket:
    """An `ArchiveStore`. `troubles` happen to the next requests that they fit, in order; `before_file` is called before
    each put of a segment's file, `created` with the name of each new object.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.troubles: list[Trouble] = []
        self.is_away = False
        self.before_file: Callable[[], None] | None = None
        self.created: Callable[[str], None] = lambda _name: None
        self._listed: dict[str, list[str]] = {}

    def create(self, name: str, content: Bytes) -> bool:
        self._reach("refused")
        is_new = name not in self.objects
        if is_new:
            self.objects[name] = bytes(content)
            self.created(name)
        self._fail("lost_answer")
        return is_new

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        if self.before_file is not None:
            self.before_file()
        content = b"".join(pieces)
        if not self.create(name, content) and self.objects[name] != content:
            raise OSError(errno.EEXIST, "has other bytes", name)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self._reach("refused")
        found = self._object(name)[offset : offset + length]
        if len(found) != length:
            raise EOFError(f"{name} ends before byte {offset + length}")
        self._fail("cut_short")
        return found

    def delete(self, name: str) -> None:
        self._reach("refused")
        self.objects.pop(name, None)
        self._fail("lost_answer")

    def list(self, prefix: str) -> list[str]:
        self._reach("refused")
        before = self._listed.get(prefix, [])
        self._listed[prefix] = found = sorted(name for name in self.objects if name.startswith(prefix))
        if self._is_next("old_list"):
            return [name for name in before if name in self.objects]
        return found

    def exists(self, name: str) -> bool:
        self._reach("refused")
        return name in self.objects

    def len(self, name: str) -> int:
        self._reach("refused")
        return len(self._object(name))

    def place(self, name: str) -> str:
        return f"sim://bucket/{name}"

    def _object(self, name: str) -> bytes:
        found = self.objects.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "is not in the bucket", name)
        return found

    def _reach(self, trouble: Trouble) -> None:
        if self.is_away:
            raise OSError(errno.EHOSTUNREACH, "cannot be reached", "sim://bucket")
        self._fail(trouble)

    def _fail(self, trouble: Trouble) -> None:
        if self._is_next(trouble):
            raise OSError(errno.EIO, trouble, "sim://bucket")

    def _is_next(self, trouble: Trouble) -> bool:
        if not self.troubles or self.troubles[0] != trouble:
            return False
        del self.troubles[0]
        return True
