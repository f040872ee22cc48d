"""The composite cursor of a watch (api §7): the position of a stream in each of its topics, as text.

A client gets it as the `id` of a frame and sends it back as `Last-Event-ID`. Only this module knows its format:
base64url, without padding, of the JSON map from topic to position.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Set
from typing import Annotated

import msgspec

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(dict[str, Annotated[int, msgspec.Meta(ge=0)]]).decode
_STANDARD = bytes.maketrans(b"-_", b"+/")
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def encode(positions: Mapping[str, int]) -> bytes:
    """Return the cursor of these positions (seqs, exclusive lower bounds)."""
    return binascii.b2a_base64(_encode_json(positions), newline=False).translate(_URL_SAFE).rstrip(b"=")


def size_max_bytes(topics: int) -> int:
    """Return the greatest length of a cursor: `"<name>":<seq>,` of 255 and 20 characters, four for three in base64."""
    return 4 * (topics * (255 + 20 + 4) + 2) // 3 + 4


def decode(cursor: bytes) -> dict[str, int] | None:
    """Return the positions of a cursor; None if it is malformed."""
    try:
        text = binascii.a2b_base64(cursor.translate(_STANDARD) + b"=" * (-len(cursor) % 4), strict_mode=True)
        return _decode_json(text)
    except (ValueError, RecursionError):  # binascii.Error and msgspec's errors are ValueErrors
        return None


def resume(
    names: Set[str], stored: Mapping[str, int], seen: Mapping[str, int] | None, exact: bool, heads: Mapping[str, int]
) -> dict[str, int]:
    """Return the position from which each topic of a session continues, without those whose end the client has seen.

    `names` are the session's topics, `stored` its own positions, `seen` the client's, if it sent any. The client may
    rewind the session, and bring back a topic whose end it has not seen. It may move the session forward, up to the
    head, only if `exact` is false: the process that served the last stream died, so its end is not known.
    """
    positions = dict(stored)
    for name, seq in (seen or {}).items():
        if name in names:
            known = positions.get(name)
            if known is None or seq < known or (not exact and seq <= heads.get(name, 0)):
                positions[name] = seq
    return positions
