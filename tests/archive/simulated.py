"""A bucket in memory that does what real ones do: it fails before or after a put, carries one out long after it was
given up, denies, hides what is new from lists, cuts answers short, and is away for a while.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Literal

from topics.storage.frame import Bytes

Trouble = Literal["refused", "denied", "lost_answer", "late", "cut_short", "old_list"]
LATE_REQUESTS = (1, 3, 10, 40)
"""Requests that all make before a put arrives that came too late."""
FIRST_OBJECT = -1
"""The place before the request that makes the next object: where what was looked at before may not be so any more."""
Note = Callable[[], None]
AT: dict[str, SimulatedBucket] = {}
"""The buckets that services find by the places that their notes name."""


def _nothing() -> None: ...


class _Late:
    """A put on its way: its client has given it up."""

    def __init__(self, requests: int, name: str, content: bytes, note: Note) -> None:
        self.requests = requests
        self.name = name
        self.content = content
        self.note = note


class SimulatedBucket:
    """An `ArchiveStore`: the way of one machine to a bucket, which `beside` uses as well. `troubles` happen to the next
    requests that they fit, in order. `sent` is called when an object is put, and what it returns when it is created.
    """

    def __init__(self, beside: SimulatedBucket | None = None) -> None:
        self.objects: dict[str, bytes] = {} if beside is None else beside.objects
        self.troubles: list[Trouble] = []
        self.is_away = False
        self.sent: Callable[[str], Note] = lambda _name: _nothing
        self.late: list[_Late] = [] if beside is None else beside.late
        self.came_late: set[str] = set() if beside is None else beside.came_late
        """Names of objects that were given up when they came."""
        self._lates = 0
        self._listed: dict[str, list[str]] = {}
        self._requests_left = 0
        self._meanwhile: Note = _nothing

    def before(self, nth: int, meanwhile: Note) -> None:
        """Have something happen before the `nth` request from now on, which may be FIRST_OBJECT; 0 for never."""
        self._requests_left, self._meanwhile = nth, meanwhile

    def create(self, name: str, content: Bytes) -> bool:
        if self._requests_left == FIRST_OBJECT:
            self._requests_left = 1
        self._reach("refused", "denied")
        note = self.sent(name)
        if self._is_next("late"):
            self._lates += 1
            requests = LATE_REQUESTS[self._lates % len(LATE_REQUESTS)]
            self.late.append(_Late(requests, name, bytes(content), note))
            raise OSError(errno.ETIMEDOUT, "late", "sim://bucket")
        is_new = self._create(name, bytes(content), note)
        self._fail("lost_answer")
        return is_new

    def _create(self, name: str, content: bytes, note: Note) -> bool:
        if name in self.objects:
            return False
        self.objects[name] = content
        note()
        return True

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Make or replace the object, as real stores do: it may be of a base that was never complete."""
        content = b"".join(pieces)
        if not self.create(name, content) and self.objects[name] != content:
            self.delete(name)
            self.create(name, content)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self._reach("refused")
        found = self._object(name)[offset : offset + length]
        if len(found) != length:
            raise EOFError(f"{name} ends before byte {offset + length}")
        self._fail("cut_short")
        return found

    def delete(self, name: str) -> None:
        self._reach("refused", "denied")
        self.objects.pop(name, None)
        self._fail("lost_answer")

    def list(self, prefix: str) -> list[str]:
        self._reach("refused", "denied")
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

    def _reach(self, *troubles: Trouble) -> None:
        if self._requests_left > 0:
            self._requests_left -= 1
            if not self._requests_left:
                self._meanwhile()
        if self.is_away:
            raise OSError(errno.EHOSTUNREACH, "cannot be reached", "sim://bucket")
        for late in self.late[:]:
            late.requests -= 1
            if late.requests < 0:
                self.late.remove(late)
                self.came_late.add(late.name)
                self._create(late.name, late.content, late.note)
        for trouble in troubles:
            self._fail(trouble)

    def _fail(self, trouble: Trouble) -> None:
        if self._is_next(trouble):
            raise OSError(errno.EACCES if trouble == "denied" else errno.EIO, trouble, "sim://bucket")

    def _is_next(self, trouble: Trouble) -> bool:
        if not self.troubles or self.troubles[0] != trouble:
            return False
        del self.troubles[0]
        return True
