"""What a shard's log says of routers, folded; small enough to be put into a snapshot as it is.

    ROUTER_CREATE   0, seq = id              {"id": u64, "version": u64, "name": str, "spec": {…}, "counts_hops": bool}
    ROUTER_DELETE   0, seq = id              -                      both only in the log of shard 0
    ROUTER_CURSOR   dest, seq = its head     {"source": str, "source_topic_id": u64, "source_seq": u64, …}, see FeedBody
    ROUTER_SOURCE   source, seq or 0         -                      records from seq on are needed for copies; 0: none

ROUTER_CREATE replaces a router of the same name. A ROUTER_CURSOR stands for everything that is copied into one dest,
and the last one counts: without routers, nothing is. Copies behind it are not in the log: they are made again from the
source, each source record in turn for each router in the order of ids, and so get the seqs they had.
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
    """How far one dest is with its source. `source_topic_id` 0: the source does not exist yet. `trimmed`: so many seqs
    of dest, the last of them that of the frame, stand for records that were not copied: the source had lost them, or
    for another `trim_reason` (an EvictReason). `full`: copies wait for room in dest, none is derived behind this
    cursor, and what the source has lost or deleted by the time there is room is not copied. `revision` counts the
    cursors of a dest, whichever log they are in.
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
    """`holds`: source topic → what its index keeps, as ROUTER_SOURCE says. `ram_feeds`: cursors of `ephemeral` dests,
    in the RAM log; the other feeds are those of the durable one.
    """

    routers: dict[str, Router] = {}
    last_id: int = 0
    feeds: dict[int, FeedBody] = {}
    ram_feeds: dict[int, FeedBody] = {}
    holds: dict[int, int] = {}

    def takes_over(self, topic_id: int, other: RouterState) -> None:
        """A topic comes here with what `other` says of it as a dest and as a source."""
        for own, others in ((self.feeds, other.feeds), (self.ram_feeds, other.ram_feeds)):
            if topic_id in others:
                own[topic_id] = others[topic_id]
        if topic_id in other.holds:
            self.holds[topic_id] = other.holds[topic_id]

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

    def source(self, topic_id: int, hold_seq: int) -> None:
        if hold_seq:
            self.holds[topic_id] = hold_seq
        else:
            self.holds.pop(topic_id, None)

    def topic_deleted(self, topic_id: int) -> None:
        for by_topic in (self.feeds, self.ram_feeds, self.holds):
            by_topic.pop(topic_id, None)


encode_router = msgspec.msgpack.Encoder().encode
_decode_router = msgspec.msgpack.Decoder(Router).decode
decode_feed = msgspec.msgpack.Decoder(FeedBody).decode
