"""Query parameters, checked as strictly as bodies are."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Final

from starlette.datastructures import QueryParams
from xxhash import xxh32_digest

from topics.core.config import U64_MAX
from topics.core.errors import TopicsError, invalid

PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000
_CURSOR_MARK: Final = b"after:"
_CHECKSUM_LEN: Final = 4
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def flag(query: QueryParams, name: str, default: bool) -> bool:
    """Return `?name=true|false` (or 1, 0); the first one counts. Raise `400 invalid_request`."""
    values = query.getlist(name)
    if not values:
        return default
    try:
        return _FLAGS[values[0]]
    except KeyError:
        raise invalid(f"?{name} must be true or false, not {values[0][:100]!r}", field=name) from None


def count(query: QueryParams, name: str, default: int) -> int:
    """Return `?name=<u64>`; the first one counts. Raise `400 invalid_request`."""
    values = query.getlist(name)
    if not values:
        return default
    text = values[0]
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= U64_MAX):
        raise invalid(f"?{name} must be an integer from 0 to 2^64-1, not {text[:100]!r}", field=name)
    return int(text)


def page_size(query: QueryParams) -> int:
    """Return the `?page_size` of a list (api §0.8)."""
    return min(count(query, "page_size", PAGE_SIZE_DEFAULT) or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)


def name_cursor(name: str) -> str:
    """Return the cursor of a list that continues after `name`: base64 of "after:", the name, and XXH32 of both."""
    content = _CURSOR_MARK + name.encode()
    return base64.urlsafe_b64encode(content + xxh32_digest(content)).decode().rstrip("=")


def name_after(cursor: str | None, check_name: Callable[[str], str]) -> str:
    """Return the name in a list cursor, "" without a cursor. Raise `400` for one that `name_cursor` did not make."""
    if cursor is None:
        return ""
    try:
        content = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        name = check_name(content[len(_CURSOR_MARK) : -_CHECKSUM_LEN].decode())
    except (ValueError, binascii.Error, TopicsError):
        name = ""
    # Another text may decode to the same name, so the whole cursor is compared.
    if not name or name_cursor(name) != cursor:
        raise invalid("?cursor did not come from a list: send next_cursor unchanged", field="cursor")
    return name
