"""Counts of what a shard holds: topics, records, bytes, sessions; and claims of more of them.

These words of its cell are the shard's part of the whole service's figures: metrics add them up, and so do the quotas
of api §11 (`shm/quotas.py`). While a group is prepared they also contain its claims, until `settle`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from topics.core.config import CLASSES, TopicConfig
from topics.core.errors import TopicsError
from topics.settings import Settings
from topics.shm.control import ControlPage, Role, replay_progress
from topics.shm.quotas import Quota


class Holdings:
    """One shard's figures, kept by adding and subtracting: no call costs the number of topics."""

    def __init__(self, control: ControlPage, shard: int, settings: Settings) -> None:
        self._cell = cell = control.cell(Role.WALSHARD, shard)
        self._every = [control.cell(Role.WALSHARD, other) for other in range(control.shards)]
        self._topics = Quota("topics", settings.max_topics, "topics", cell, self._every)
        self._sessions = Quota("watch_sessions", settings.max_watch_sessions, "sessions", cell, self._every)
        self._bytes = Quota("total_bytes", settings.max_total_bytes, "bytes_live", cell, self._every)
        self._by_class = Counter(dict.fromkeys(CLASSES, 0))
        self._queues = 0
        self._topics_changed = True
        self._records = 0
        self._leases = 0
        self._live_bytes = 0
        self.sessions = 0

    # -- counts

    def count_topic(self, config: TopicConfig, change: int) -> None:
        """Count one topic of this configuration more (1) or fewer (-1)."""
        self._topics_changed = True
        self._by_class[config.durability] += change
        self._queues += change if config.type == "queue" else 0

    def count_records(self, records: int, live_bytes: int) -> None:
        """Count so many more than before, or fewer when negative."""
        self._records += records
        self._live_bytes += live_bytes

    def count_leases(self, leases: int) -> None:
        """Count so many more leases than before, or fewer when negative."""
        self._leases += leases
        self._cell.set("leases_in_flight", self._leases)

    def settle(self) -> None:
        """Set the cell to the counts. Claims are counted by now, or given up."""
        cell = self._cell
        if self._topics_changed:
            self._topics_changed = False
            for durability, topics in self._by_class.items():
                cell.set(f"topics_{durability}", topics)
            cell.set("queue_topics", self._queues)
        cell.set_all(
            {
                "topics": self._by_class.total(),
                "leases_in_flight": self._leases,
                "records_live": self._records,
                "bytes_live": self._live_bytes,
                "sessions": self.sessions,
            }
        )

    # -- claims

    def claim_topic(self, admitted: bool) -> None:
        """Claim one more topic; raises `throttled`. `release_topic` gives it back if the topic is never hosted."""
        if admitted:
            self._topics.release(-1)  # it is counted, even if there is no room
        else:
            self._claim(self._topics)

    def release_topic(self) -> None:
        """Give a claimed topic back."""
        self._topics.release()

    def claim_session(self) -> None:
        """Claim one more watch session; raises `throttled`."""
        self._claim(self._sessions)

    def claim_bytes(self, gross: int, net: Callable[[], int]) -> int:
        """Claim bytes for a write and return how many: `gross` if there is room, else `net()`, by which the service
        grows once the topic's caps have made room. Raise `throttled`.
        """
        if not self._bytes.most:
            return gross
        self._require_all_known(self._bytes)
        if self._bytes.claim(gross):
            return gross
        growth = net()
        if growth < gross and self._bytes.claim(growth):
            return growth
        raise self._bytes.reached()

    def _claim(self, quota: Quota) -> None:
        self._require_all_known(quota)
        if not quota.claim():
            raise quota.reached()

    def _require_all_known(self, quota: Quota) -> None:
        """Raise `not_ready` while some shard has not recovered once in this service: its counts are unknown."""
        if quota.most:
            unknown = [cell for cell in self._every if not cell.get("generation")]
            if unknown:
                raise TopicsError(
                    "not_ready",
                    f"{len(unknown)} of {len(self._every)} shards still replay their log: how much the service holds"
                    " is not known yet",
                    {"replay_progress": replay_progress(self._every)},
                )
