"""Routers (api §6): what one says, which may exist beside each other, and what a copy is. Pure.

The registry is one place of the service (shard 0): whether a router may exist depends on all others. A router
forwards from its source to its dest; a dest has one source, so what leads to a topic is a chain, or a cycle where one
is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from topics.api.requests import GivenRouter, Guarantee
from topics.core.errors import TopicsError, invalid
from topics.core.names import check_router_name, check_topic_name
from topics.core.tags import Match, parse_match

HOPS_MAX: Final = 8
"""A record passes a cycle at most so often, the first time included."""
META_KEY: Final = "_topics_router"
"""In the meta of copies that are made exactly once; no client may write it."""
_META_START: Final = b',"meta":{'
_OWN_META: Final = b'"_topics_router":{'
_EPOCH: Final = 1
"""A topic id is never used again, so each has one epoch."""


class RouterSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client says a router is. `filter` as it was given; what it means says `core/tags.py`."""

    source: str
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: str | list[str] | None = None
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"

    def echo(self) -> dict[str, Any]:
        """All fields, as every answer shows them."""
        return {field: getattr(self, field) for field in self.__struct_fields__}

    @property
    def match(self) -> Match | None:
        return None if self.filter is None else parse_match(self.filter)


class Router(msgspec.Struct, frozen=True, omit_defaults=True):
    """A router as it is registered. `id` is never used again; `version` counts its changes. `counts_hops`: it closes
    a cycle, so what passes it is one time around nearer to its end.
    """

    id: int
    version: int
    name: str
    spec: RouterSpec
    counts_hops: bool = False


def parse_router(name: str, given: dict[str, Any]) -> RouterSpec:
    """From a decoded JSON object; `400 invalid_request` names what is wrong."""
    check_router_name(name)
    try:
        fields = msgspec.convert(given, GivenRouter)
    except msgspec.ValidationError as error:
        raise invalid(f"router: {error}") from None
    check_topic_name(fields.source, "source")
    check_topic_name(fields.dest, "dest")
    if fields.source == fields.dest:
        raise invalid(f"a router's dest must be another topic than its source, not {fields.dest!r}", field="dest")
    if fields.filter is not None:
        parse_match(fields.filter, "filter")
    return RouterSpec(*(getattr(fields, field) for field in RouterSpec.__struct_fields__))


class RouterRegistry:
    """All routers of a service, by name, and the graph they make."""

    def __init__(self) -> None:
        self.by_name: dict[str, Router] = {}
        self._into: dict[str, dict[str, Router]] = {}
        """dest → its routers by name."""
        self._from: dict[str, dict[str, Router]] = {}
        self.last_id = 0

    def __len__(self) -> int:
        return len(self.by_name)

    def into(self, dest: str) -> list[Router]:
        """The routers that lead into a topic, oldest first; all of one source."""
        return sorted(self._into.get(dest, {}).values(), key=lambda router: router.id)

    def is_source(self, topic: str) -> bool:
        """Whether routers copy from this topic."""
        return topic in self._from

    def from_source(self, source: str) -> list[Router]:
        return list(self._from.get(source, {}).values())

    def touching(self, topic: str) -> list[Router]:
        """Those that go with a topic when it is deleted, by name."""
        found = {router.name: router for router in (*self.into(topic), *self.from_source(topic))}
        return [found[name] for name in sorted(found)]

    def source_of(self, dest: str) -> str | None:
        """The one topic that is copied into `dest`, if any."""
        return next((router.spec.source for router in self._into.get(dest, {}).values()), None)

    def plan(self, name: str, spec: RouterSpec) -> tuple[Router, bool]:
        """(the router that `PUT` makes of this, whether it is new); to be given to `put` once it is logged.

        The very router that is there when nothing changes. `409 topic_exists_incompatible` for a second source of a
        dest, `409 router_cycle`.
        """
        old = self.by_name.get(name)
        same_edge = old is not None and (old.spec.source, old.spec.dest) == (spec.source, spec.dest)
        for other in self.into(spec.dest):
            if other.name != name and other.spec.source != spec.source:
                raise TopicsError(
                    "topic_exists_incompatible",
                    f"topic {spec.dest!r} already gets copies of {other.spec.source!r} through router {other.name!r}:"
                    " a dest has one source",
                    {"reason": "router_dest_fan_in", "source": other.spec.source, "router": other.name},
                )
        cycle = self._cycle(name, spec)
        if cycle is not None and not same_edge and not spec.allow_cycle:
            raise TopicsError(
                "router_cycle",
                f"router {name!r} would close the cycle {' > '.join(cycle)}; allow_cycle permits that",
                {"cycle": cycle},
            )
        counts_hops = cycle is not None
        if old is not None and same_edge:
            if old.spec == spec and old.counts_hops == counts_hops:
                return old, False
            return Router(old.id, old.version + 1, name, spec, counts_hops), False
        return Router(self.last_id + 1, 1, name, spec, counts_hops), old is None

    def put(self, router: Router) -> None:
        self.remove(router.name)
        self.by_name[router.name] = router
        self._into.setdefault(router.spec.dest, {})[router.name] = router
        self._from.setdefault(router.spec.source, {})[router.name] = router
        self.last_id = max(self.last_id, router.id)

    def remove(self, name: str) -> Router | None:
        """The router that was there."""
        router = self.by_name.pop(name, None)
        if router is not None:
            for index, topic in ((self._into, router.spec.dest), (self._from, router.spec.source)):
                del index[topic][name]
                if not index[topic]:
                    del index[topic]
        return router

    def upstream(self, dest: str) -> Iterator[str]:
        """`dest`, its source, the source's source and so on; each once."""
        seen: set[str] = set()
        topic: str | None = dest
        while topic is not None and topic not in seen:
            seen.add(topic)
            yield topic
            topic = self.source_of(topic)

    def _cycle(self, name: str, spec: RouterSpec) -> list[str] | None:
        """source, dest, …, source if an edge from source to dest closes that path."""
        path = [spec.source]
        topic = spec.source
        while topic != spec.dest:
            sources = {router.spec.source for router in self.into(topic) if router.name != name}
            if not sources or (topic := sources.pop()) in path:
                return None
            path.append(topic)
        return [spec.source, *reversed(path)]


def with_origin(payload: bytes, has_meta: bool, router: str, source: str, source_topic_id: int, seq: int) -> bytes:
    """A copy's payload (`"data":…` or `"data":…,"meta":{…}`) with where it comes from in its meta, in place of where
    its original comes from if that is a copy as well.
    """
    key = f"router:{router}:{source_topic_id}:{_EPOCH}:{seq}"
    origin = (
        f'"{META_KEY}":{{"router":"{router}","source_topic":"{source}","source_seq":{seq},"idempotency_key":"{key}"}}'
    ).encode()
    if not has_meta:
        return payload + _META_START + origin + b"}"
    start = payload.rindex(_META_START) + len(_META_START)
    # No JSON string can contain it, for its quotes would be escaped; and we write it last.
    own = payload.rfind(_OWN_META, start)
    kept = payload[start : own if own >= 0 else payload.rindex(b"}")].strip(b", \t\r\n")
    return payload[:start] + kept + (b"," if kept else b"") + origin + b"}"
