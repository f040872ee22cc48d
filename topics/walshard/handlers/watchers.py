"""Which frontends watch which topics, and telling them that something changed."""

from __future__ import annotations

from collections.abc import Callable

from topics.shm.topic_messages import Unwatch, Watch
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted


class Watchers:
    """Knows which frontends watch which topics of one shard. A notice is no more than the frontend's token of a topic.

    `notify(frontend, token)` sends one, `forget(frontend)` drops those that were not sent.
    """

    def __init__(self, catalog: Catalog, notify: Callable[[int, int], None], forget: Callable[[int], None]) -> None:
        self._catalog = catalog
        self._notify = notify
        self._forget = forget

    def watch(self, call: Watch, frontend: int) -> None:
        """From now on; at once when the topic is not what the frontend has seen. Everything prepared is committed."""
        hosted = self._catalog.find(call.name)
        if hosted is None:
            self._notify(frontend, call.token)
            return
        hosted.watchers[frontend] = call.token
        if (hosted.topic.id, hosted.topic.head_seq) != (call.seen_topic_id, call.seen_head_seq):
            self._notify(frontend, call.token)

    def unwatch(self, call: Unwatch, frontend: int) -> None:
        """Unless it watches again, with another token."""
        hosted = self._catalog.find(call.name)
        if hosted is not None and hosted.watchers.get(frontend) == call.token:
            del hosted.watchers[frontend]

    def frontend_died(self, frontend: int) -> None:
        for hosted in self._catalog:
            hosted.watchers.pop(frontend, None)
        self._forget(frontend)

    def notify(self, hosted: Hosted) -> None:
        for frontend, token in hosted.watchers.items():
            self._notify(frontend, token)
