"""API keys: the syntax of a list of keys, and the rights of a key (api §0.10). Pure.

    entry = key [ ":" scopes [ ":" prefixes ] ]     scopes = scope *( "+" scope )     prefixes = prefix *( "|" prefix )

Only the SHA-256 of a key is kept. No error repeats any part of an entry, not even of a malformed one: a key with a
colon in it looks like a bad scope.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from enum import Flag
from typing import Final

from topics.core.errors import forbidden


class KeyScope(Flag):
    """Rights of a key; api §0.10 has the routes that need them."""

    NONE = 0
    READ = 1
    WRITE = 2
    DELETE = 4
    ADMIN = 8
    ALL = READ | WRITE | DELETE | ADMIN


_NAMES: Final = {str(scope.name).lower(): scope for scope in KeyScope}
_SCOPES: Final = {word: scope for name, scope in _NAMES.items() for word in (name, name[0])}
_SCOPES["rw"] = KeyScope.READ | KeyScope.WRITE
_KEY: Final = re.compile(r"[!-+\--9;-~]+")
"""Visible ASCII without comma and colon: a header carries it unchanged, and a list can hold it."""
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


class KeysError(ValueError):
    """A list of keys cannot be used; `problems` names the entries by their positions, never by their content."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ApiKey:
    """One key: its SHA-256, its scopes, and the name prefixes it is limited to (none: all names)."""

    __slots__ = ("digest", "prefixes", "scopes")

    def __init__(self, digest: bytes, scopes: KeyScope, prefixes: tuple[str, ...]) -> None:
        self.digest = digest
        self.scopes = scopes
        self.prefixes = prefixes

    def __repr__(self) -> str:
        # A key that people made up could be guessed from its digest.
        return f"ApiKey(scopes={self.scopes!r}, prefixes={self.prefixes!r})"

    def has(self, needed: KeyScope) -> bool:
        """True if it has every scope of `needed`."""
        return needed in self.scopes

    def covers(self, name: str) -> bool:
        """True if `name`, of a topic or a router, is within its prefixes."""
        return not self.prefixes or name.startswith(self.prefixes)

    def require(self, needed: KeyScope, names: Iterable[str] = ()) -> None:
        """Raise `403 forbidden` unless the key has all of `needed` and covers all of `names`."""
        if needed not in self.scopes:
            missing = sorted(str(scope.name).lower() for scope in needed if scope not in self.scopes)
            raise forbidden(
                f"this key has no scope {' and '.join(missing)}, which the request needs", missing_scopes=missing
            )
        for name in names:
            if not self.covers(name):
                raise forbidden(f"name {name[:300]!r} is outside the prefixes of this key", name=name[:300])

    def narrowed(self, prefix: str) -> tuple[str, ...]:
        """Return the prefixes of exactly the names that begin with `prefix` and that it covers, none within another."""
        if self.covers(prefix):
            return (prefix,)
        return tuple(own for own in self.prefixes if own.startswith(prefix))


ANYONE: Final = ApiKey(b"", KeyScope.ALL, ())
"""The key of every request while authentication is off."""


class KeyRing:
    """All keys that are valid at one time. `serial` grows with each ring that replaces another."""

    __slots__ = ("keys", "serial")

    def __init__(self, keys: tuple[ApiKey, ...], serial: int = 0) -> None:
        self.keys = keys
        self.serial = serial

    def find(self, key: bytes) -> ApiKey | None:
        """Return the entry of a key as a client sent it. The time is the same for every key: all are compared."""
        return self.with_digest(hashlib.sha256(key).digest())

    def with_digest(self, digest: bytes) -> ApiKey | None:
        """Return the entry of the key with this SHA-256."""
        found = None
        for candidate in self.keys:
            if hmac.compare_digest(candidate.digest, digest):
                found = candidate
        return found


def parse_entries(entries: Iterable[tuple[str, str]]) -> tuple[ApiKey, ...]:
    """Parse (place, entry) pairs; raise KeysError with a problem, led by its place, for each bad one."""
    keys: list[ApiKey] = []
    places: dict[bytes, str] = {}
    problems = []
    for place, entry in entries:
        try:
            key = _parse_entry(entry)
        except ValueError as problem:
            problems.append(f"{place}: {problem}")
            continue
        if key.digest in places:
            problems.append(f"{place}: the same key as {places[key.digest]}; write it once, with all its scopes")
            continue
        places[key.digest] = place
        keys.append(key)
    if problems:
        raise KeysError(problems)
    return tuple(keys)


def parse_list(text: str) -> tuple[ApiKey, ...]:
    """Parse `entry,entry,…`, at least one; raise KeysError."""
    return parse_entries((f"entry {at}", entry) for at, entry in enumerate(text.split(","), 1))


def parse_lines(text: str) -> tuple[ApiKey, ...]:
    """Parse a file: a list in each line. Skip empty lines and those that begin with #. Raise KeysError without keys."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        listed = line.split(",")
        for at, entry in enumerate(listed, 1):
            entries.append((f"line {number}" + (f", entry {at}" if len(listed) > 1 else ""), entry))
    if not entries:
        raise KeysError(["it has no key"])
    return parse_entries(entries)


def _parse_entry(entry: str) -> ApiKey:
    key, _, rest = entry.strip().partition(":")
    scopes, _, prefixes = rest.partition(":")
    if not key:
        raise ValueError("it has no key; an entry is key[:scopes[:prefixes]]")
    if _KEY.fullmatch(key) is None:
        raise ValueError("its key has characters other than visible ASCII without comma and colon")
    return ApiKey(hashlib.sha256(key.encode()).digest(), _parse_scopes(scopes), _parse_prefixes(prefixes))


def _parse_scopes(text: str) -> KeyScope:
    if not text:
        return KeyScope.ALL
    scopes = KeyScope.NONE
    for word in text.split("+"):
        if word not in _SCOPES:
            raise ValueError(f"its scopes must be {', '.join(_SCOPES)}, joined by +, or nothing for all of them")
        scopes |= _SCOPES[word]
    return scopes


def _parse_prefixes(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    prefixes = text.split("|")
    if any(_PREFIX.fullmatch(prefix) is None for prefix in prefixes):
        raise ValueError(
            "its prefixes must be beginnings of names (A-Z a-z 0-9 . _ : > -, no *), joined by |, or nothing for all"
        )
    # A prefix that another one covers is redundant.
    return tuple(
        sorted({own for own in prefixes if not any(own != other and own.startswith(other) for other in prefixes)})
    )
