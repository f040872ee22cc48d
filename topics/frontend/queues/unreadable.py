"""Jobs whose records cannot be read now: a corrupt segment, a cold directory that does not answer (api §9).

Such a job is put aside, so that it is in nobody's way: it waits, and counts no delivery, since it came to nobody. It is
said once, not each time that it comes round.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from topics.core.errors import TopicsError
from topics.log import get_logger

ASIDE_MS: Final = 30_000
"""How long it waits before it is tried again."""
_SAID_MAX: Final = 10_000

_log = get_logger()


class UnreadableJobs:
    """What was said of them; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, int], None] = OrderedDict()

    def concerns(self, name: str, seq: int, error: TopicsError) -> bool:
        """Whether it is this job that cannot be read, which is logged; False: it is no job's fault."""
        if error.code != "storage_unavailable":
            return False
        if (name, seq) not in self._said:
            self._said[name, seq] = None
            if len(self._said) > _SAID_MAX:
                self._said.popitem(last=False)
            _log.error(
                "a job cannot be read and is put aside", topic=name, seq=seq, retry_ms=ASIDE_MS, reason=error.message
            )
        return True
