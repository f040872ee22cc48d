"""The words for what is wrong with a text that msgspec does not take as JSON (api §0.2)."""

from __future__ import annotations

import re
from typing import Final

_SURROGATES: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_PAIR_LEN: Final = 12
_CUT_PAIR: Final = re.compile(rb"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
"""A second half of a pair that the body's end cuts short."""
_POSITION: Final = re.compile(r"^(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?$")


def why_refused(text: bytes, error: Exception) -> str:
    """Return what to say of a text that msgspec refuses with a DecodeError or a RecursionError."""
    if isinstance(error, RecursionError):
        return "is not accepted: its JSON is nested too deeply"
    return why_not_json(text, str(error))[0]


def why_not_json(text: bytes, reason: str) -> tuple[str, int]:
    """Return what to say of a text that msgspec refuses for this reason, and the byte position of the fault."""
    match = _POSITION.match(reason)
    assert match is not None
    position = len(text) if match[2] is None else int(match[2])
    at = _unpaired_surrogate(text, position)
    if at is not None:
        found = f"an unpaired surrogate escape ({text[at : at + 6].decode()}) at byte {at}"
        return f"is not accepted: {found}, which stands for no character", at
    return f"is not JSON: {match[1]} at byte {position}", position


def _unpaired_surrogate(body: bytes, position: int) -> int | None:
    """Return the position of the unpaired surrogate escape behind an error at `position`; None if it has another cause.
    The parser expects the second half after the first, and reports what stands there instead.
    """
    # The search starts far enough back to see a whole pair as one.
    for found in _SURROGATES.finditer(body, max(0, position - 2 * _PAIR_LEN)):
        at = found.start()
        if at >= position:
            break
        if len(found[0]) == _PAIR_LEN or at < position - _PAIR_LEN:
            continue
        backslashes = at - len(body[:at].rstrip(b"\\"))
        if backslashes % 2 == 0 and not _CUT_PAIR.fullmatch(body, found.end()):
            return at
    return None
