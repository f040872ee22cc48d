"""Pins: segments whose files stay because somebody outside of the service reads them. They hold for a time, and for no
longer than the service runs.

    <ram dir>/pins/pin_<22 characters>.<frontend>      JSON of a `Pin`, replaced as a whole

A pin may be renewed or ended by any frontend: each writes a file of its own for it, and nobody writes another's.
Together they say: the pin holds up to the latest `until_ms` of its files, unless one of them says that it has ended.
Only the compactor unlinks segments, so it alone must look here before it does (`Pinned`).

Times are those of the machine's monotonic clock, which all processes of the service share and no clock change moves.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from topics.storage.filesystem import FileSystem, read_all, replace_file
from topics.storage.layout import SegmentName

PINS_NAME: Final = "pins"
PIN_PATTERN: Final = r"pin_[A-Za-z0-9_\-]{22}"
_FILE_NAME: Final = re.compile(rf"({PIN_PATTERN})\.(\d+)")


class Pin(msgspec.Struct, frozen=True):
    """What one file says. `segments` are (first_seq, version)."""

    topic: str
    topic_id: int
    segments: list[tuple[int, int]]
    until_ms: int
    ended: bool = False


Pinned = frozenset[tuple[int, SegmentName]]
"""Topic ids and segments of which no file may go."""
ReadPinned = Callable[[], Pinned]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Pin).decode


def pins_dir(ram_dir: str) -> str:
    return os.path.join(ram_dir, PINS_NAME)


def new_pin_id() -> str:
    return f"pin_{secrets.token_urlsafe(16)}"


def nothing_pinned() -> Pinned:
    """For a compactor whose segments nobody reads but the service."""
    return frozenset()


def read_pinned(fs: FileSystem, directory: str, now_ms: int) -> Pinned:
    """What holds at `now_ms`, which the caller must have taken before the call. Raises OSError."""
    pinned: set[tuple[int, SegmentName]] = set()
    for pin in _read_all(fs, directory).values():
        if not pin.ended and pin.until_ms > now_ms:
            pinned.update((pin.topic_id, SegmentName(*segment)) for segment in pin.segments)
    return frozenset(pinned)


def read_pin(fs: FileSystem, directory: str, pin_id: str, now_ms: int) -> Pin | None:
    """A pin that holds; None when there is none of that id (any more)."""
    pin = _read_all(fs, directory, pin_id).get(pin_id)
    return pin if pin is not None and not pin.ended and pin.until_ms > now_ms else None


class PinFiles:
    """The files of one frontend. They are few and in memory: no call waits for a disk."""

    def __init__(self, fs: FileSystem, directory: str, frontend: int) -> None:
        self._fs = fs
        self._directory = directory
        self._frontend = frontend
        self._until_ms: dict[str, int] | None = None

    def held(self, now_ms: int) -> int:
        """How many this frontend has; those that are over are removed first."""
        mine = self._mine()
        for pin_id in [pin_id for pin_id, until_ms in mine.items() if until_ms <= now_ms]:
            with suppress(FileNotFoundError):
                self._fs.unlink(self._path(pin_id))
            del mine[pin_id]
        return len(mine)

    def put(self, pin_id: str, pin: Pin) -> None:
        """Makes or replaces this frontend's word on a pin."""
        mine = self._mine()
        if not self._fs.exists(self._directory):
            with suppress(FileExistsError):  # another frontend was as fast
                self._fs.mkdir(self._directory)
        replace_file(self._fs, self._path(pin_id), _encode(pin))
        mine[pin_id] = pin.until_ms

    def _mine(self) -> dict[str, int]:
        """A former life of this frontend may have left some."""
        if self._until_ms is None:
            self._until_ms = {}
            for name in self._fs.listdir(self._directory) if self._fs.exists(self._directory) else ():
                match = _FILE_NAME.fullmatch(name)
                if match and int(match[2]) == self._frontend:
                    self._until_ms[match[1]] = _decode(read_all(self._fs, os.path.join(self._directory, name))).until_ms
        return self._until_ms

    def _path(self, pin_id: str) -> str:
        return os.path.join(self._directory, f"{pin_id}.{self._frontend}")


def _read_all(fs: FileSystem, directory: str, only: str | None = None) -> dict[str, Pin]:
    """By id, what the files of each say together."""
    found: dict[str, Pin] = {}
    for name in fs.listdir(directory) if fs.exists(directory) else ():
        match = _FILE_NAME.fullmatch(name)
        if match is None or only not in (None, match[1]):
            continue
        try:
            pin = _decode(read_all(fs, os.path.join(directory, name)))
        except FileNotFoundError:
            continue  # over, and removed meanwhile
        other = found.get(match[1])
        if other is not None:
            until_ms, ended = max(pin.until_ms, other.until_ms), pin.ended or other.ended
            pin = msgspec.structs.replace(pin, until_ms=until_ms, ended=ended)
        found[match[1]] = pin
    return found
