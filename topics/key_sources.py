"""Reads the valid API keys: those of the settings, and those that the keys file has now."""

from __future__ import annotations

import os
import stat
from typing import Final

from topics.core.keys import ApiKey, KeyRing, KeysError, parse_lines
from topics.settings import PREFIX, Settings, SettingsError

FILE_BYTES_MAX: Final = 1 << 20


def read_keys(settings: Settings, serial: int = 0) -> KeyRing:
    """Returns all keys, none when nobody has to authenticate. `serial` becomes the ring's.

    Raises SettingsError when the file cannot be used, or repeats a key of TOPICS_API_KEYS.
    """
    listed = settings.api_keys or ()
    path = settings.api_keys_file
    if path is None:
        return KeyRing(listed, serial)
    place = f"{PREFIX}API_KEYS_FILE={path}"
    try:
        filed = parse_lines(_read(path))
    except OSError as error:
        raise SettingsError([f"{place}: cannot be read: {error.strerror}"]) from None
    except KeysError as error:
        raise SettingsError([f"{place}: {problem}" for problem in error.problems]) from None
    except ValueError as error:
        raise SettingsError([f"{place}: {error}"]) from None
    return KeyRing((*listed, *_others(filed, listed, place)), serial)


def _read(path: str) -> str:
    # Non-blocking: opening a FIFO of that name would wait for a writer.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"has more than {FILE_BYTES_MAX} bytes")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError as error:
        # The decoder's own message would show bytes of the keys.
        raise ValueError(f"has a byte that is not ASCII at offset {error.start}") from None


def _others(filed: tuple[ApiKey, ...], listed: tuple[ApiKey, ...], place: str) -> tuple[ApiKey, ...]:
    known = {key.digest for key in listed}
    if any(key.digest in known for key in filed):
        raise SettingsError([f"{place}: has a key that is in {PREFIX}API_KEYS, too; keep it in one of them"])
    return filed
