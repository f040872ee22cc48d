"""After a commit: everybody who is to know of a topic is told, once, and in one order."""

from __future__ import annotations

from collections.abc import Iterable

from topics.walshard.commit.draft import Draft
from topics.walshard.handlers.queues import Queues
from topics.walshard.handlers.watchers import Watchers
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers.routing import Routing


class Publisher:
    """Shows what a commit changed: in the arena first, then to queues, watchers and routers of one shard."""

    def __init__(self, watchers: Watchers, queues: Queues, routing: Routing, holdings: Holdings) -> None:
        self._watchers = watchers
        self._queues = queues
        self._routing = routing
        self._holdings = holdings

    def show(self, draft: Draft) -> None:
        """Shows the topics of a draft that the commit is done with."""
        for hosted in draft.created:
            self._routing.created(hosted)
        self.show_topics(draft.touched.values())
        for hosted in draft.deleted:
            self._routing.deleted(hosted)
            self._queues.topic_deleted(hosted)
            self._watchers.notify(hosted)

    def show_topics(self, changed: Iterable[Hosted]) -> None:
        """Shows topics as they are now."""
        for hosted in changed:
            hosted.publish()
            self._queues.changed(hosted)
            self._watchers.notify(hosted)
            self._routing.changed(hosted)

    def show_figures(self) -> None:
        """Shows in the control page how much the shard holds: claims of requests that failed are given up by it."""
        self._holdings.settle()
