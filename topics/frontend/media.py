"""What an Accept header allows (RFC 9110 §12.5.1)."""

from __future__ import annotations


def weight(accept: bytes, media_type: bytes) -> float:
    """How much the client wants `media_type`, 0 (not at all) to 1: its most specific range that covers it decides."""
    main = media_type.partition(b"/")[0]
    ranges = {b"*/*": 1, main + b"/*": 2, media_type: 3}
    best, wanted = 0, 0.0
    for part in accept.lower().split(b","):
        media_range, *parameters = (piece.strip() for piece in part.split(b";"))
        specificity = ranges.get(media_range, 0)
        if specificity > best:
            given = next((value for value in parameters if value.startswith(b"q=")), b"q=1")
            try:
                best, wanted = specificity, min(1.0, max(0.0, float(given[2:])))
            except ValueError:
                best, wanted = specificity, 1.0
    return wanted
