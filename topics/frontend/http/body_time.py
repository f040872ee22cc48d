"""How long the body of a request may take, against a clock that is a number (attended time, as `attended` has it)."""

from __future__ import annotations

from topics.frontend.http.http1_parser import HttpLimits


class BodyTime:
    """Of one body. It has `body_timeout_ms` at most, at any moment: waiting for it takes from that, what comes gives
    back, a second for each `body_min_bytes_per_s`. What came fast is no credit for what then comes slowly: a body of
    which all but a little is here is not held for hours.
    """

    __slots__ = ("_came_bytes", "_left_s", "_looked_s", "_rate_bytes_per_s", "_whole_s")

    def __init__(self, limits: HttpLimits) -> None:
        self._whole_s = self._left_s = limits.body_timeout_ms / 1000
        self._rate_bytes_per_s = limits.body_min_bytes_per_s
        self._came_bytes = 0
        self._looked_s = 0.0

    def left_s(self, now_s: float, came_bytes: int, waited: bool) -> float:
        """What is left now that so much has come in all; `waited`: for the client, ever since the last look."""
        if waited:
            self._left_s -= now_s - self._looked_s
        came = came_bytes - self._came_bytes
        self._left_s = min(self._whole_s, self._left_s + came / self._rate_bytes_per_s)
        self._looked_s, self._came_bytes = now_s, came_bytes
        return self._left_s
