"""Pins keep the files of segments that a program outside of the service reads. A pin holds for a time, and no longer
than the service runs.

    <ram dir>/pins/pin_<22 characters>.<frontend>      JSON of a `Pin`, replaced as a whole

Any frontend may renew or end a pin. Each writes a file of its own for the pin, and nobody writes another's file. The
pin holds up to the latest `until_ms` of its files, unless one of them has `ended`. Only the compactor unlinks segments,
and it reads the pins before it does (`Pinned`).

A file with `ended` stays as long as another frontend has a file of that pin: without it the pin would hold again.

Times are on the machine's monotonic clock, which all processes of the service share and no clock change moves.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from topics.core.segment_list import SegmentKey
from topics.storage.filesystem import FileSystem, names_in, read_all, replace_file

PINS_NAME: Final = "pins"
PIN_PATTERN: Final = r"pin_[A-Za-z0-9_\-]{22}"
_FILE_NAME: Final = re.compile(rf"({PIN_PATTERN})\.(\d+)")


class Pin(msgspec.Struct, frozen=True):
    """The content of one file. `segments` are (first_seq, version)."""

    topic: str
    topic_id: int
    segments: list[tuple[int, int]]
    until_ms: int
    ended: bool = False


Pinned = frozenset[SegmentKey]
"""Segments of which no file may be unlinked."""
ReadPinned = Callable[[], Pinned]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Pin).decode


def pins_dir(ram_dir: str) -> str:
    return os.path.join(ram_dir, PINS_NAME)


def new_pin_id() -> str:
    return f"pin_{secrets.token_urlsafe(16)}"


def read_pinned(fs: FileSystem, directory: str, now_ms: int) -> Pinned:
    """Return the segments that are pinned at `now_ms`; the caller reads that time before the call. Raise OSError."""
    pinned: set[SegmentKey] = set()
    for pin in _read_all(fs, directory).values():
        if not pin.ended and pin.until_ms > now_ms:
            pinned.update(SegmentKey(pin.topic_id, *segment) for segment in pin.segments)
    return frozenset(pinned)


def read_pin(fs: FileSystem, directory: str, pin_id: str, now_ms: int) -> Pin | None:
    """Return a pin that holds; None if there is none of that id."""
    pin = _read_all(fs, directory, pin_id).get(pin_id)
    return pin if pin is not None and not pin.ended and pin.until_ms > now_ms else None


class PinFiles:
    """The pin files of one frontend. They are few and on a RAM disk: no call waits for a disk."""

    def __init__(self, fs: FileSystem, directory: str, frontend: int) -> None:
        self._fs = fs
        self._directory = directory
        self._frontend = frontend
        self._own: dict[str, Pin] | None = None

    def held(self, now_ms: int) -> int:
        """Remove the pins of this frontend whose time is over; count the others that, as far as it knows, hold."""
        mine = self._mine()
        for pin_id in [pin_id for pin_id, pin in mine.items() if pin.until_ms <= now_ms]:
            self._remove(pin_id)
        return sum(not pin.ended for pin in mine.values())

    def remove_ended(self) -> None:
        """Remove this frontend's pins that were ended through another frontend: `held` still counts them."""
        mine = self._mine()
        for pin_id, frontend, path in _files(self._fs, self._directory):
            own = mine.get(pin_id)
            if frontend == self._frontend or own is None or own.ended:
                continue
            with suppress(FileNotFoundError):  # over, and removed meanwhile
                if _decode(read_all(self._fs, path)).ended:
                    self._remove(pin_id)

    def put(self, pin_id: str, pin: Pin) -> None:
        """Make or replace this frontend's file of a pin."""
        mine = self._mine()
        if not self._fs.exists(self._directory):
            with suppress(FileExistsError):  # another frontend was as fast
                self._fs.mkdir(self._directory)
        replace_file(self._fs, self._path(pin_id), _encode(pin))
        mine[pin_id] = pin
        if pin.ended:
            # Look at all ended pins, so that such files never outnumber the pins that other frontends have.
            others = {of for of, frontend, _ in _files(self._fs, self._directory) if frontend != self._frontend}
            for needless in [of for of, own in mine.items() if own.ended and of not in others]:
                self._remove(needless)

    def _remove(self, pin_id: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self._path(pin_id))
        del self._mine()[pin_id]

    def _mine(self) -> dict[str, Pin]:
        if self._own is None:
            self._own = {}
            # This frontend may have left some before a restart.
            for pin_id, frontend, path in _files(self._fs, self._directory):
                if frontend == self._frontend:
                    self._own[pin_id] = _decode(read_all(self._fs, path))
        return self._own

    def _path(self, pin_id: str) -> str:
        return os.path.join(self._directory, f"{pin_id}.{self._frontend}")


def _files(fs: FileSystem, directory: str) -> Iterator[tuple[str, int, str]]:
    """Yield (id, frontend, path) of each file; some may be removed by now."""
    for name in names_in(fs, directory):
        match = _FILE_NAME.fullmatch(name)
        if match is not None:
            yield match[1], int(match[2]), os.path.join(directory, name)


def _read_all(fs: FileSystem, directory: str, only: str | None = None) -> dict[str, Pin]:
    """Return the pins by id, each the sum of its files."""
    found: dict[str, Pin] = {}
    for pin_id, _, path in _files(fs, directory):
        if only not in (None, pin_id):
            continue
        try:
            pin = _decode(read_all(fs, path))
        except FileNotFoundError:
            continue  # over, and removed meanwhile
        other = found.get(pin_id)
        if other is not None:
            until_ms, ended = max(pin.until_ms, other.until_ms), pin.ended or other.ended
            pin = msgspec.structs.replace(pin, until_ms=until_ms, ended=ended)
        found[pin_id] = pin
    return found
