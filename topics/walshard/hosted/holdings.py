"""What a shard holds: so many topics, records, bytes, sessions; and whether the service may have more of them.

These words of its cell are the shard's part of the whole service's figures: metrics add them up, and so do the caps of
api §11 (`shm/cap.py`). While a group is prepared they also hold what it has claimed; `settle` sets them to what is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sized

from topics.core.config import CLASSES, TopicConfig
from topics.core.errors import TopicsError
from topics.settings import Settings
from topics.shm.cap import Cap
from topics.shm.control import ControlPage, Role, replay_progress


class Holdings:
    """One shard's figures, kept by adding and taking away: nothing here costs the number of topics."""

    def __init__(self, control: ControlPage, shard: int, settings: Settings, sessions: Sized) -> None:
        self._watch_sessions = sessions
        self._cell = cell = control.cell(Role.WALSHARD, shard)
        self._every = [control.cell(Role.WALSHARD, other) for other in range(control.shards)]
        self._topics = Cap("topics", settings.max_topics, "topics", cell, self._every)
        self._sessions = Cap("watch_sessions", settings.max_watch_sessions, "sessions", cell, self._every)
        self._bytes = Cap("total_bytes", settings.max_total_bytes, "bytes_live", cell, self._every)
        self._by_class = Counter(dict.fromkeys(CLASSES, 0))
        self._queues = 0
        self._topics_changed = True
        self._records = 0
        self._leases = 0
        self._live_bytes = 0

    # -- what there is

    def came(self, config: TopicConfig) -> None:
        """A topic of this configuration is there."""
        self._topics_changed = True
        self._by_class[config.durability] += 1
        self._queues += config.type == "queue"

    def left(self, config: TopicConfig) -> None:
        """It is not any more, or not with this configuration."""
        self._topics_changed = True
        self._by_class[config.durability] -= 1
        self._queues -= config.type == "queue"

    def changed(self, records: int, live_bytes: int) -> None:
        """So many more than before, or fewer when negative."""
        self._records += records
        self._live_bytes += live_bytes

    def leased(self, leases: int) -> None:
        """So many more leases than before, or fewer when negative."""
        self._leases += leases
        self._cell.set("leases_in_flight", self._leases)

    def settle(self) -> None:
        """Everything claimed is there or given up: the cell says what is."""
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
                "sessions": len(self._watch_sessions),
            }
        )

    # -- what there may be

    def claim_topic(self) -> None:
        """One more, or `throttled`; to be followed by `settle`, or `release_topic` if it never comes to be."""
        self._claim(self._topics)

    def release_topic(self) -> None:
        self._topics.release()

    def claim_session(self) -> None:
        """As `claim_topic`."""
        self._claim(self._sessions)

    def claim_bytes(self, gross: int, net: Callable[[], int]) -> int:
        """Claim bytes for a write and return how many: `gross` if there is room, else `net()`, by which the service
        grows once the topic's caps have made room. Raises `throttled`.
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

    def _claim(self, cap: Cap) -> None:
        self._require_all_known(cap)
        if not cap.claim():
            raise cap.reached()

    def _require_all_known(self, cap: Cap) -> None:
        """A shard that has not recovered once in this service says nothing of what it holds."""
        if cap.most:
            unknown = [cell for cell in self._every if not cell.get("generation")]
            if unknown:
                raise TopicsError(
                    "not_ready",
                    f"{len(unknown)} of {len(self._every)} shards still replay their log: how much the service holds"
                    " is not known yet",
                    {"replay_progress": replay_progress(self._every)},
                )
