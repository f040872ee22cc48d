"""Bodies of requests as JSON, without NaN and infinities: the encoder would write `null` for them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from topics.client.errors import NotFiniteError

_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""A number that is not finite, in MessagePack; other bytes may look like one."""


def encode_body(body: object, name: str = "") -> bytes:
    """Return a value as JSON; `name` begins the paths in errors. NotFiniteError for NaN and infinities in it.

    Without a `null` in the JSON this costs a search for it: 100 records of 130 bytes take 23 µs instead of 19 µs. With
    one they are also encoded as MessagePack (35 µs), and only if that has such a number are values searched one by one.
    """
    content = _encode_json(body)
    # `rfind` takes half of the time that `in` takes.
    if content.rfind(b"null") >= 0 and _may_be_infinite(body):
        # The encoder's only other type without a plain form is Raw, which is JSON text.
        for path, value in _numbers(msgspec.to_builtins(body, enc_hook=lambda _raw: None), name):
            if not math.isfinite(value):
                raise NotFiniteError(path.removeprefix("."), value)
    return content


def _may_be_infinite(body: object) -> bool:
    try:
        return _NOT_FINITE.search(_encode_msgpack(body)) is not None
    except (OverflowError, TypeError, ValueError):  # it has no integers of more than 64 bits
        return True


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _numbers(one, f"{path}[{number}]")
