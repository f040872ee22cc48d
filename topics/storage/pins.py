"""Pins: segments whose files stay because somebody outside of the service reads them. They hold for a time, and for no
longer than the service runs.

    <ram dir>/pins/pin_<22 characters>.<frontend>      JSON of a `Pin`, replaced as a whole

A pin may be renewed or ended by any frontend: each writes a file of its own for it, and nobody writes another's.
Together they say: the pin holds up to the latest `until_ms` of its files, unless one of them says that it has ended.
Only the compactor unlinks segments, so it alone must look here before it does (`Pinned`).

The word that a pin has ended stays while another frontend has a file of that pin, which would make it hold again.

Times are those of the machine's monotonic clock, which all processes of the service share and no clock change moves.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

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


class _Word(NamedTuple):
    """What a file of our own says."""

    until_ms: int
    ended: bool


class PinFiles:
    """The files of one frontend. They are few and in memory: no call waits for a disk."""

    def __init__(self, fs: FileSystem, directory: str, frontend: int) -> None:
        self._fs = fs
        self._directory = directory
        self._frontend = frontend
        self._words: dict[str, _Word] | None = None

    def held(self, now_ms: int) -> int:
        """How many this frontend has, without those it knows to have ended; those that are over are removed first."""
        mine = self._mine()
        for pin_id in [pin_id for pin_id, word in mine.items() if word.until_ms <= now_ms]:
            self._remove(pin_id)
        return sum(not word.ended for word in mine.values())

    def remove_ended(self) -> None:
        """Those that other frontends were told have ended: `held` counts them until then. Reads what others say of all
        that this one has.
        """
        mine = self._mine()
        for pin_id, frontend, path in _files(self._fs, self._directory):
            word = mine.get(pin_id)
            if frontend == self._frontend or word is None or word.ended:
                continue
            with suppress(FileNotFoundError):  # over, and removed meanwhile
                if _decode(read_all(self._fs, path)).ended:
                    self._remove(pin_id)

    def put(self, pin_id: str, pin: Pin) -> None:
        """Makes or replaces this frontend's word on a pin."""
        mine = self._mine()
        if not self._fs.exists(self._directory):
            with suppress(FileExistsError):  # another frontend was as fast
                self._fs.mkdir(self._directory)
        replace_file(self._fs, self._path(pin_id), _encode(pin))
        mine[pin_id] = _Word(pin.until_ms, pin.ended)
        if pin.ended:
            self._remove_needless()

    def _remove_needless(self) -> None:
        """Of pins that have ended, what no other frontend has a file of. Also of those that ended before: what another
        had may be gone by now, so there are never more of them than others have pins.
        """
        others = {pin_id for pin_id, frontend, _ in _files(self._fs, self._directory) if frontend != self._frontend}
        mine = self._mine()
        for pin_id in [pin_id for pin_id, word in mine.items() if word.ended and pin_id not in others]:
            self._remove(pin_id)

    def _remove(self, pin_id: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.unlink(self._path(pin_id))
        del self._mine()[pin_id]

    def _mine(self) -> dict[str, _Word]:
        """A former life of this frontend may have left some."""
        if self._words is None:
            self._words = {}
            for pin_id, frontend, path in _files(self._fs, self._directory):
                if frontend == self._frontend:
                    pin = _decode(read_all(self._fs, path))
                    self._words[pin_id] = _Word(pin.until_ms, pin.ended)
        return self._words

    def _path(self, pin_id: str) -> str:
        return os.path.join(self._directory, f"{pin_id}.{self._frontend}")


def _files(fs: FileSystem, directory: str) -> Iterator[tuple[str, int, str]]:
    """(id, frontend, path) of each; some may be gone by now."""
    for name in fs.listdir(directory) if fs.exists(directory) else ():
        match = _FILE_NAME.fullmatch(name)
        if match is not None:
            yield match[1], int(match[2]), os.path.join(directory, name)


def _read_all(fs: FileSystem, directory: str, only: str | None = None) -> dict[str, Pin]:
    """By id, what the files of each say together."""
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
