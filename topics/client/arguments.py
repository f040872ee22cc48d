"""Arguments that programs give: each is checked once, where it comes in. What is sent on, the service checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

import msgspec


def require(fits: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError unless the argument fits."""
    if not fits:
        raise ValueError(f"{name}={value!r}: give {allowed}")


def require_counts(**given: int) -> None:
    """Raise ValueError for an argument that is no integer from 1."""
    for name, value in given.items():
        require(isinstance(value, SupportsIndex) and value > 0, name, value, "a whole number from 1")


class Numbers(msgspec.Struct, frozen=True):
    """Numbers from 0; those of type int are whole. ValueError for anything else."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value, whole = getattr(self, field.name), field.type is int
            kinds: Any = SupportsIndex if whole else (float, SupportsIndex)
            fits = isinstance(value, kinds) and value >= 0
            allowed = f"a {'whole ' if whole else ''}number from 0"
            require(fits, f"{type(self).__name__}.{field.name}", value, allowed)


def require_known(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError for a name that is not known."""
    for name in given:
        if name not in (names := sorted(known)):
            raise TypeError(f"{what} has no {name!r}: it has {', '.join(names)}")
