"""Counts of what a shard holds (topics, records, bytes, sessions), and claims against the service's quotas.

The shard publishes its counts in its cell. Metrics and the quotas of api §11 (`shm/quotas.py`) add up the cells of all
shards. While a group is prepared, a cell also contains the group's claims; `publish` replaces them by the new counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from topics.core.config import CLASSES, TopicConfig
from topics.settings import Settings
from topics.shm.control import ControlPage, Role, not_ready
from topics.shm.quotas import Quota


class Holdings:
    """Owns one shard's counts. It only adds and subtracts, so no call takes longer with more topics."""

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
        """Add to the counts of live records and their bytes; negative numbers subtract."""
        self._records += records
        self._live_bytes += live_bytes

    def count_leases(self, leases: int) -> None:
        """Add to the count of leases; a negative number subtracts."""
        self._leases += leases
        self._cell.set("leases_in_flight", self._leases)

    def publish(self) -> None:
        """Publish the counts in the cell. Claims of the group are in the counts by now, or were given up."""
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
        """Claim one more topic; raises `throttled` unless `admitted`. `release_topic` gives it back."""
        if admitted:
            self._topics.release(-1)  # claims it even if there is no room
        else:
            self._claim(self._topics)

    def release_topic(self) -> None:
        """Give a claimed topic back."""
        self._topics.release()

    def claim_session(self) -> None:
        """Claim one more watch session; raises `throttled`."""
        self._claim(self._sessions)

    def claim_bytes(self, gross: int, net: Callable[[], int]) -> int:
        """Claim bytes for a write and return how many. It claims the write's `gross` bytes if there is room, else
        `net()`: the growth once the topic's caps have evicted old records. Raise `throttled`.
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
        """Raise `not_ready` while some shard has not recovered yet in this service, since its counts are unknown."""
        if quota.most:
            unknown = [cell for cell in self._every if not cell.get("generation")]
            if unknown:
                what = f"{len(unknown)} of {len(self._every)} shards still replay their log"
                raise not_ready(self._every, f"{what}: how much the service holds is not known yet")
