"""What a shard's log says of routers, folded; small enough to be put into a snapshot as it is.

    ROUTER_CREATE   0, seq = id              {"id": u64, "version": u64, "name": str, "spec": {…}, "counts_hops": bool}
    ROUTER_DELETE   0, seq = id              -                      both only in the log of shard 0
    ROUTER_CURSOR   dest, seq = its head     {"source": str, "source_topic_id": u64, "source_seq": u64, …}, see FeedBody

ROUTER_CREATE replaces a router of the same name. A ROUTER_CURSOR ends the write that holds the copies of one page, so
copies and cursor are in the log together or not at all. The last cursor of a dest counts; one without routers says that
nothing is copied into the dest any more.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics.core.routers import Router

ROUTERS_SHARD: Final = 0
"""Whose log has the routers."""


class FeedRouter(msgspec.Struct, array_like=True):
    """A router at work: it forwards what follows `from_seq` of the source, and has made so many copies."""

    router: Router
    from_seq: int
    forwarded_total: int = 0


class FeedBody(msgspec.Struct, omit_defaults=True):
    """How far one dest is with its source. `source_topic_id` is 0 while the source does not exist yet.

    `trimmed` counts the seqs of the dest, up to that of the frame, that stand for records which were not copied: the
    source had lost them, or there is another `trim_reason` (an EvictReason). `full` says that copies wait for room in
    the dest: the source may lose or delete records meanwhile, and then they are not copied. `revision` counts the
    cursors of a dest over both logs.
    """

    source: str
    source_topic_id: int
    source_seq: int
    routers: list[FeedRouter]
    revision: int = 0
    trimmed: int = 0
    trim_reason: int = 0
    full: bool = False


class RouterState(msgspec.Struct):
    """All routers, and the feeds of dests by topic id: `feeds` as the durable log has them, `ram_feeds` as the RAM log
    has those of `ephemeral` dests.
    """

    routers: dict[str, Router] = {}
    last_id: int = 0
    feeds: dict[int, FeedBody] = {}
    ram_feeds: dict[int, FeedBody] = {}

    def takes_over(self, topic_id: int, other: RouterState) -> None:
        """A topic comes here with what `other` says of it as a dest."""
        for own, others in ((self.feeds, other.feeds), (self.ram_feeds, other.ram_feeds)):
            if topic_id in others:
                own[topic_id] = others[topic_id]

    def knows(self, other: RouterState) -> None:
        """The routers of `other` as well."""
        self.routers |= other.routers
        self.last_id = max(self.last_id, other.last_id)

    def created(self, data: bytes) -> None:
        router = _decode_router(data)
        self.routers[router.name] = router
        self.last_id = max(self.last_id, router.id)

    def deleted(self, router_id: int) -> None:
        for name in [name for name, router in self.routers.items() if router.id == router_id]:
            del self.routers[name]
        self.last_id = max(self.last_id, router_id)

    def cursor(self, dest_topic_id: int, feed: FeedBody, in_ram: bool) -> None:
        feeds = self.ram_feeds if in_ram else self.feeds
        feeds[dest_topic_id] = feed

    def topic_deleted(self, topic_id: int) -> None:
        for feeds in (self.feeds, self.ram_feeds):
            feeds.pop(topic_id, None)


encode_router = msgspec.msgpack.Encoder().encode
_decode_router = msgspec.msgpack.Decoder(Router).decode
decode_feed = msgspec.msgpack.Decoder(FeedBody).decode
