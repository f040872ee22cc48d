"""What one API key may have open at once, over all frontends together (api §11). Without keys nothing is counted:
nobody can be told from anybody.
"""

from __future__ import annotations

from typing import Final

from topics.core.errors import TopicsError
from topics.core.keys import ApiKey
from topics.settings import Settings
from topics.shm.cap import Counted, KeyCounts

_NAMES: Final = {Counted.STREAMS: "sse_connections_per_key", Counted.REQUESTS: "inflight_per_key"}


class KeyLimits:
    """What `take` granted is given back by `give_back`, once."""

    def __init__(self, counts: KeyCounts, settings: Settings) -> None:
        self._counts = counts
        self._most = {
            Counted.STREAMS: settings.max_sse_connections_per_key,
            Counted.REQUESTS: settings.max_inflight_per_key,
        }

    def take(self, key: ApiKey, what: Counted) -> None:
        """`429 throttled` when the key has as many as it may."""
        most = self._most[what]
        if most and key.digest and not self._counts.claim(key.digest, what, most):
            limit = _NAMES[what]
            raise TopicsError(
                "throttled",
                f"{most} at once are all that a key may have: wait for one to end or raise TOPICS_MAX_{limit.upper()}",
                {"limit": limit, "max": most},
            )

    def give_back(self, key: ApiKey, what: Counted) -> None:
        if self._most[what] and key.digest:
            self._counts.release(key.digest, what)
