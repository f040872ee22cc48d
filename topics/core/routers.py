"""Routers (api §6): their specs, the graph they may form, the origin of a copy, and their frames in the log. Pure.

A router forwards from its source to its dest. A dest has one source, so the routers that lead to a topic are a chain,
or a cycle where one is allowed. Only shard 0 has the registry, because all routers together decide whether another may
exist.

`FoldedRouters` folds the frames of routers. Only the log of shard 0 has ROUTER_CREATE, which replaces the router of the
same name, and ROUTER_DELETE. A ROUTER_CURSOR (`FeedFrameBody`) ends the write that holds the copies of one page, so
copies and cursor are in the log together or not at all. The last cursor of a dest counts. A cursor without routers ends
the feed of its dest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice, takewhile
from typing import Any, Final

import msgspec

from topics.api.requests import GivenRouter, Guarantee
from topics.core.errors import TopicsError, invalid, throttled
from topics.core.names import check_router_name, check_topic_name
from topics.core.tags import Match, parse_match

HOPS_MAX: Final = 8
"""The most times that a record passes a cycle, the first time included."""
DEST_ROUTERS_MAX: Final = 256
"""Most routers into one topic: each page of copies passes all of them, and its cursor in the log lists all of them."""
META_KEY: Final = "_topics_router"
"""Key of the origin in the meta of copies that are made exactly once; no client may write it."""
_META_START: Final = b',"meta":{'
_OWN_META: Final = b'"_topics_router":{'
_EPOCH: Final = 1
"""Epoch in the idempotency keys of copies: always the same one, because a topic id is never used again."""


class RouterSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A router as a client describes it. `filter` is as it was given; `core/tags.py` interprets it."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: str | list[str] | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"

    def echo(self) -> dict[str, Any]:
        """Return all fields, as every answer shows them."""
        return {field: getattr(self, field) for field in self.__struct_fields__}

    @property
    def match(self) -> Match | None:
        return None if self.filter is None else parse_match(self.filter)


class Router(msgspec.Struct, frozen=True, omit_defaults=True):
    """A registered router. Its id is never used again. `version` counts changes; `counts_hops` if it closes a cycle."""

    id: int
    version: int
    name: str
    spec: RouterSpec
    counts_hops: bool = False

    def place(self, end: str) -> tuple[str, str]:
        """Return its sort key in a list: its topic at `end` (`source`, `dest`, or "" for no topic), then its name."""
        return getattr(self.spec, end) if end else "", self.name


def parse_router(name: str, given: GivenRouter | dict[str, Any]) -> RouterSpec:
    """Parse a decoded JSON object; `400 invalid_request` names the field at fault."""
    check_router_name(name)
    try:
        fields = given if isinstance(given, GivenRouter) else msgspec.convert(given, GivenRouter)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    check_topic_name(fields.source, "source")
    check_topic_name(fields.dest, "dest")
    if fields.source == fields.dest:
        raise invalid(f"a router's dest must be another topic than its source, not {fields.dest!r}", field="dest")
    if fields.filter is not None:
        parse_match(fields.filter, "filter")
    return RouterSpec(*(getattr(fields, field) for field in RouterSpec.__struct_fields__))


class RouterRegistry:
    """All routers of a service, by name, and the graph they form."""

    def __init__(self) -> None:
        self.by_name: dict[str, Router] = {}
        self.by_id: dict[int, Router] = {}
        self._into: dict[str, dict[str, Router]] = {}
        """Routers by dest, then by name."""
        self._from: dict[str, dict[str, Router]] = {}
        """Routers by source, then by name."""
        self._places: dict[str, Any] = {}
        """SortedList of the places of all routers, by end. The first `named` with an end makes it."""
        self.last_id = 0

    def __len__(self) -> int:
        return len(self.by_name)

    def named(self, prefix: str, after: str, most: int, end: str = "", topic: str = "") -> list[Router]:
        """Return the first routers behind `after` that begin with `prefix`; with `end`, those with `topic` there."""
        if end not in self._places:
            from sortedcontainers import SortedList  # commands parse routers, and a client's packages lack it

            self._places[end] = SortedList(router.place(end) for router in self.by_name.values())
        places = self._places[end].irange((topic, max(prefix, after)), None, (prefix > after, True))
        fitting = takewhile(lambda place: place[0] == topic and place[1].startswith(prefix), places)
        return [self.by_name[name] for _, name in islice(fitting, most)]

    def into(self, dest: str) -> list[Router]:
        """Return the routers that lead into a topic, oldest first; all have one source."""
        return sorted(self._into.get(dest, {}).values(), key=lambda router: router.id)

    def is_source(self, topic: str) -> bool:
        """True if routers copy from this topic."""
        return topic in self._from

    def from_source(self, source: str) -> Collection[Router]:
        """Return the routers from a topic, as a view without a copy: a source may have thousands."""
        return self._from.get(source, {}).values()

    def touching(self, topic: str) -> list[Router]:
        """Return the routers into and from a topic, by name: its deletion deletes them."""
        found = {router.name: router for router in (*self.into(topic), *self.from_source(topic))}
        return [found[name] for name in sorted(found)]

    def source_of(self, dest: str) -> str | None:
        """Return the one topic that is copied into `dest`, if any."""
        found = self._one_into(dest)
        return None if found is None else found.spec.source

    def _one_into(self, dest: str, but: str = "") -> Router | None:
        """Return any router into a topic whose name is not `but`, None without one. All of them have one source."""
        return next((router for router in self._into.get(dest, {}).values() if router.name != but), None)

    def plan(self, name: str, spec: RouterSpec) -> tuple[Router, bool]:
        """Return (the router that `PUT` makes of this spec, whether it is new); call `put` with it once it is logged.
        If nothing changes, that router is the registered object itself. Raise `409 topic_exists_incompatible` for a
        second source of a dest, `409 router_cycle`, and `429 throttled` if DEST_ROUTERS_MAX lead to the dest already.
        """
        old = self.by_name.get(name)
        same_edge = old is not None and (old.spec.source, old.spec.dest) == (spec.source, spec.dest)
        other = self._one_into(spec.dest, but=name)
        if other is not None and other.spec.source != spec.source:
            raise TopicsError(
                "topic_exists_incompatible",
                f"topic {spec.dest!r} already gets copies of {other.spec.source!r} through router {other.name!r};"
                " a dest has only one source",
                {"reason": "router_dest_fan_in", "source": other.spec.source, "router": other.name},
            )
        cycle = self._cycle(name, spec)
        if cycle is not None and not same_edge and not spec.allow_cycle:
            raise TopicsError(
                "router_cycle",
                f"router {name!r} would close the cycle {' > '.join(cycle)}; set allow_cycle to permit it",
                {"cycle": cycle},
            )
        counts_hops = cycle is not None
        if old is not None and same_edge:
            if old.spec == spec and old.counts_hops == counts_hops:
                return old, False
            return Router(old.id, old.version + 1, name, spec, counts_hops), False
        if len(self._into.get(spec.dest, ())) >= DEST_ROUTERS_MAX:
            message = f"{DEST_ROUTERS_MAX} routers lead to topic {spec.dest!r}, the most for one topic; delete some"
            raise throttled(message, limit="dest_routers", max=DEST_ROUTERS_MAX)
        return Router(self.last_id + 1, 1, name, spec, counts_hops), old is None

    def put(self, router: Router) -> None:
        self.remove(router.name)
        self.by_name[router.name] = self.by_id[router.id] = router
        self._into.setdefault(router.spec.dest, {})[router.name] = router
        self._from.setdefault(router.spec.source, {})[router.name] = router
        for end, places in self._places.items():
            places.add(router.place(end))
        self.last_id = max(self.last_id, router.id)

    def remove(self, name: str) -> None:
        """Remove the router of this name, if there is one."""
        router = self.by_name.pop(name, None)
        if router is not None:
            del self.by_id[router.id]
            for index, topic in ((self._into, router.spec.dest), (self._from, router.spec.source)):
                del index[topic][name]
                if not index[topic]:
                    del index[topic]
            for end, places in self._places.items():
                places.remove(router.place(end))

    def upstream(self, dest: str) -> Iterator[str]:
        """Yield `dest`, its source, the source's source and so on, each once."""
        seen: set[str] = set()
        topic: str | None = dest
        while topic is not None and topic not in seen:
            seen.add(topic)
            yield topic
            topic = self.source_of(topic)

    def _cycle(self, name: str, spec: RouterSpec) -> list[str] | None:
        """Return source, dest, …, source if an edge from source to dest closes that path."""
        if not self.is_source(spec.dest):  # so that a chain can grow at its end without a look at all of it
            return None
        path = {spec.source: None}
        topic = spec.source
        while topic != spec.dest:
            before = self._one_into(topic, but=name)
            if before is None or (topic := before.spec.source) in path:
                return None
            path[topic] = None
        return [spec.source, *reversed(path)]


def with_origin(payload: bytes, has_meta: bool, router: str, source: str, source_topic_id: int, seq: int) -> bytes:
    """Return a copy's payload with its origin in its meta. If the original is a copy too, this replaces its origin."""
    key = f"router:{router}:{source_topic_id}:{_EPOCH}:{seq}"
    origin = (
        f'"{META_KEY}":{{"router":"{router}","source_topic":"{source}","source_seq":{seq},"idempotency_key":"{key}"}}'
    ).encode()
    if not has_meta:
        return payload + _META_START + origin + b"}"
    start = payload.rindex(_META_START) + len(_META_START)
    # No JSON string can contain _OWN_META, because its quotes would be escaped. The origin is the last entry of a meta.
    own = payload.rfind(_OWN_META, start)
    kept = payload[start : own if own >= 0 else payload.rindex(b"}")].strip(b", \t\r\n")
    return payload[:start] + kept + (b"," if kept else b"") + origin + b"}"


ROUTERS_SHARD: Final = 0
"""The shard whose log has the routers."""


class FeedRouter(msgspec.Struct, array_like=True):
    """One router of a feed. It forwards the source's records behind `from_seq`; `forwarded_total` counts its copies."""

    router: Router
    from_seq: int
    forwarded_total: int = 0


class FeedFrameBody(msgspec.Struct, omit_defaults=True):
    """The feed of one dest, and its position in the source. `source_topic_id` is 0 until the source exists.

    `trimmed` counts seqs of the dest, up to the frame's own, that stand for records which were not copied. The source
    had lost these records, unless `trim_reason` is another EvictReason. While the feed is `full`, copies wait for room
    in the dest, and records that the source loses or deletes meanwhile are not copied. `revision` counts the cursors of
    a dest over both logs.
    """

    source: str
    source_topic_id: int
    source_seq: int
    routers: list[FeedRouter]
    revision: int = 0
    trimmed: int = 0
    trim_reason: int = 0
    full: bool = False


class FoldedRouters(msgspec.Struct, dict=True):
    """All routers; `feeds` of the durable log and `ram_feeds` of the RAM log, by the topic id of their dest.

    It also keeps the names of `routers` by id, which snapshots leave out.
    """

    routers: dict[str, Router] = {}
    last_id: int = 0
    feeds: dict[int, FeedFrameBody] = {}
    ram_feeds: dict[int, FeedFrameBody] = {}

    def __post_init__(self) -> None:
        self._names = {router.id: name for name, router in self.routers.items()}

    def add_feeds(self, topic_id: int, other: FoldedRouters) -> None:
        """Add the feeds that `other` has of a dest."""
        for own, others in ((self.feeds, other.feeds), (self.ram_feeds, other.ram_feeds)):
            if topic_id in others:
                own[topic_id] = others[topic_id]

    def add_routers(self, other: FoldedRouters) -> None:
        """Add the routers of `other`."""
        for router in other.routers.values():
            self._put(router)
        self.last_id = max(self.last_id, other.last_id)

    def created(self, data: bytes) -> None:
        self._put(_decode_router(data))

    def _put(self, router: Router) -> None:
        former = self.routers.get(router.name)
        if former is not None:
            del self._names[former.id]
        self.routers[router.name] = router
        self._names[router.id] = router.name
        self.last_id = max(self.last_id, router.id)

    def deleted(self, router_id: int) -> None:
        name = self._names.pop(router_id, None)
        if name is not None:
            del self.routers[name]
        self.last_id = max(self.last_id, router_id)

    def find(self, router_id: int) -> Router | None:
        name = self._names.get(router_id)
        return None if name is None else self.routers[name]

    def cursor(self, dest_topic_id: int, feed: FeedFrameBody, in_ram: bool) -> None:
        (self.ram_feeds if in_ram else self.feeds)[dest_topic_id] = feed

    def topic_deleted(self, topic_id: int) -> None:
        self.feeds.pop(topic_id, None)
        self.ram_feeds.pop(topic_id, None)


encode_router = msgspec.msgpack.Encoder().encode
_decode_router = msgspec.msgpack.Decoder(Router).decode
decode_feed = msgspec.msgpack.Decoder(FeedFrameBody).decode
