"""Which frontends watch which topics, and telling them that something changed."""

from __future__ import annotations

from topics.shm.watch_messages import Unwatch, Watch
from topics.walshard.commit.outbox import Outbox
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted


class Watchers:
    """Of one shard's topics. A notice names a topic by the frontend's own token and says no more."""

    def __init__(self, catalog: Catalog, outbox: Outbox) -> None:
        self._catalog = catalog
        self._outbox = outbox

    def watch(self, call: Watch, frontend: int) -> None:
        """From now on; at once when the topic is not what the frontend has seen. Everything prepared is committed."""
        hosted = self._catalog.find(call.name)
        if hosted is None:
            self._outbox.notify(frontend, call.token)
            return
        hosted.watchers[frontend] = call.token
        if (hosted.topic.id, hosted.topic.head_seq) != (call.seen_topic_id, call.seen_head_seq):
            self._outbox.notify(frontend, call.token)

    def unwatch(self, call: Unwatch, frontend: int) -> None:
        """Unless it watches again, with another token."""
        hosted = self._catalog.find(call.name)
        if hosted is not None and hosted.watchers.get(frontend) == call.token:
            del hosted.watchers[frontend]

    def frontend_died(self, frontend: int) -> None:
        for hosted in self._catalog:
            hosted.watchers.pop(frontend, None)
        self._outbox.forget_notices(frontend)

    def notify(self, hosted: Hosted) -> None:
        for frontend, token in hosted.watchers.items():
            self._outbox.notify(frontend, token)
