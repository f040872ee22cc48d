"""Parsers for the values of settings: numbers, bytes with units, hosts, origins, keys.

A value is text when it comes from a flag or the environment; from a TOML file it has its TOML type.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from topics.core.keys import parse_list

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
PIB: Final = 1024 * 1024 * GIB
COUNT_MAX: Final = 1_000_000_000
LIKE_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|file:")
"""The beginning of a URL, also of a misspelled one. No path may begin so: it would be a directory of that name here."""

NumberT = TypeVar("NumberT", int, float)
WordT = TypeVar("WordT")


class Variable(NamedTuple):
    """The reader of one setting: `parse` raises ValueError for a value that is not `allowed`."""

    parse: Callable[[object], Any]
    allowed: str
    help: str


def integer(minimum: int, maximum: int, help: str) -> Variable:
    return Variable(
        lambda raw: _within(_to_int(raw), minimum, maximum), f"an integer from {minimum} to {maximum}", help
    )


def count(help: str) -> Variable:
    return integer(0, COUNT_MAX, help)


def byte_size(minimum: int, maximum: int, help: str) -> Variable:
    allowed = f"a number of bytes from {show_bytes(minimum)} to {show_bytes(maximum)}, plain or with KiB, MiB or GiB"
    return Variable(lambda raw: _within(_to_bytes(raw), minimum, maximum), allowed, help)


def choice(*values: str, help: str) -> Variable:
    words = {value: value for value in values}
    return Variable(lambda raw: _word(raw, words), " or ".join((", ".join(values[:-1]), values[-1])), help)


def flag(help: str) -> Variable:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return Variable(lambda raw: _word(raw, words), "1 or 0 (also true/false, yes/no, on/off)", help)


def path_name(help: str) -> Variable:
    def parse(raw: object) -> str:
        if not raw or "\0" in (text := _text(raw)) or LIKE_URL.match(text):
            raise ValueError
        return os.path.abspath(text)

    return Variable(parse, "a path, not a URL", help)


class RefusedValueError(ValueError):
    """A value that no message may repeat. The text says what is wrong with it."""


def bucket_url(help: str) -> Variable:
    def parse(raw: object) -> str:
        text = _text(raw)
        if "@" in text or "?" in text or "#" in text:
            raise RefusedValueError(
                "has credentials or options in the URL, where logs and command lines would show them; keep the URL to"
                " scheme, bucket and prefix, and put credentials into the provider's variables (AWS_ACCESS_KEY_ID, …)"
            )
        if not _BUCKET_URL.fullmatch(text):
            raise ValueError
        return text.rstrip("/")

    return Variable(parse, "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory", help)


def overlap(data_dir: str, place: str) -> str | None:
    """Return why the archive in `place` cannot outlive the data directory: one lies inside the other, also through
    symbolic links. None if not, and for a bucket.
    """
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    if "://" in place:
        return None
    data, store = os.path.realpath(data_dir), os.path.realpath(os.path.join(os.path.abspath(place), "archive"))
    common = os.path.commonpath((data, store))
    if common == store:
        relation = f"which has the data directory {data} inside"
    elif common == data:
        relation = f"inside the data directory {data}"
    else:
        return None
    return f"its files would be in {store}, {relation}; name a place apart from it, best on another disk"


def http_url(help: str) -> Variable:
    def parse(raw: object) -> str:
        text = _text(raw).rstrip("/")
        if not _HTTP_URL.fullmatch(text):
            raise ValueError
        return text

    return Variable(parse, "http://host:port or https://host[:port], without a path", help)


def ratio(help: str) -> Variable:
    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        return _within(float(raw), 0, 1)

    return Variable(parse, "a number from 0 to 1", help)


def address(help: str) -> Variable:
    """Parse a host to (host, port or None)."""
    return Variable(_split_host, "a host name or address, with or without :port", help)


def origins(help: str) -> Variable:
    allowed = (
        "origins such as https://app.example or http://localhost:8080 (no path, no slash at the end), separated by"
        " commas, or * for all"
    )
    return Variable(lambda raw: _split(raw, _ORIGIN), allowed, help)


def hosts(help: str) -> Variable:
    allowed = "host names without ports, separated by commas, or * for all"
    return Variable(lambda raw: _split(raw, _HOST_NAME), allowed, help)


def keys(help: str) -> Variable:
    return Variable(lambda raw: parse_list(_text(raw)), "text: key[:scopes[:prefixes]],…", help)


def secret(help: str) -> Variable:
    def parse(raw: object) -> str:
        text = _text(raw)
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError
        return text

    return Variable(parse, "one key, in visible ASCII", help)


def kill_point(help: str) -> Variable:
    def parse(raw: object) -> str:
        victim, _, point = str(raw).partition(":")
        if victim not in ("process", "service") or not point:
            raise ValueError
        return str(raw)

    return Variable(parse, "process: or service: and the name of a kill point", help)


def show_bytes(count: int) -> str:
    """Return `64 MiB` or the like, in the largest unit that divides `count`."""
    for suffix, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count and count % factor == 0:
            return f"{count // factor} {suffix}"
    return f"{count} bytes"


def _word(raw: object, words: Mapping[str, WordT]) -> WordT:
    try:
        return words[str(raw).lower()]
    except KeyError:
        raise ValueError from None


def _to_int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError
    if isinstance(raw, str) and not (raw.isascii() and raw.isdigit()):
        raise ValueError
    return int(raw)


def _to_bytes(raw: object) -> int:
    for suffix, factor in (("KiB", KIB), ("MiB", MIB), ("GiB", GIB)):
        if isinstance(raw, str) and raw.endswith(suffix):
            return _to_int(raw.removesuffix(suffix).rstrip()) * factor
    return _to_int(raw)


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    return raw


def _within(value: NumberT, minimum: NumberT, maximum: NumberT) -> NumberT:
    if not minimum <= value <= maximum:
        raise ValueError
    return value


def _split_host(raw: object) -> tuple[str, int | None]:
    """Split `host`, `host:port`, `::1`, `[::1]` or `[::1]:port` into (host, port or None)."""
    text = _text(raw)
    if not text or any(c.isspace() or c in "/@\0" for c in text):
        raise ValueError
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError
        return str(ipaddress.IPv6Address(host)), _within(_to_int(rest[1:]), 0, 65535) if rest else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        if not host:
            raise ValueError
        return host, _within(_to_int(port), 0, 65535)
    return (str(ipaddress.IPv6Address(text)) if ":" in text else text), None


_HTTP_URL: Final = re.compile(r"https?://(?:[A-Za-z0-9._~-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._~-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_HOST_NAME: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_BUCKET_URL: Final = re.compile(r"(?:(?:s3|gs|az)://[A-Za-z0-9._-]+|file://)(?:/[^/\s]+)*/?")


def _split(raw: object, like: re.Pattern[str]) -> tuple[str, ...]:
    """Split a list of names that all match `like`, or of `*` alone. Raise ValueError."""
    names = tuple(part.strip().lower() for part in raw.split(",")) if isinstance(raw, str) else ()
    if names != ("*",) and not (names and all(map(like.fullmatch, names))):
        raise ValueError
    return names
