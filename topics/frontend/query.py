"""Query parameters, checked as strictly as bodies are."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from topics.core.config import U64_MAX
from topics.core.errors import invalid

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def flag(query: QueryParams, name: str, default: bool) -> bool:
    """`?name=true|false` (or 1, 0); the first of several counts."""
    values = query.getlist(name)
    if not values:
        return default
    try:
        return _FLAGS[values[0]]
    except KeyError:
        raise invalid(f"?{name} must be true or false, not {values[0][:100]!r}", field=name) from None


def count(query: QueryParams, name: str, default: int) -> int:
    """`?name=<u64>`."""
    values = query.getlist(name)
    if not values:
        return default
    text = values[0]
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= U64_MAX):
        raise invalid(f"?{name} must be an integer from 0 to 2^64-1, not {text[:100]!r}", field=name)
    return int(text)
