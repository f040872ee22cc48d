"""Names of topics and routers (api §0.3), and which shard owns a topic."""

from __future__ import annotations

import re

import xxhash

from topics.core.errors import invalid

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}")
_ROUTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}")


def check_topic_name(name: str, field: str = "topic") -> str:
    """The name itself, or `400 invalid_request` for the `field` it was given in. Sinks are named like topics."""
    if _TOPIC.fullmatch(name) is None:
        raise invalid(
            f"{field} name {name[:300]!r} is not valid: 1 to 255 of A-Z a-z 0-9 . _ : -, starting with a letter or"
            " digit",
            field=field,
        )
    return name


def check_router_name(name: str) -> str:
    """The name itself, or `400 invalid_request`."""
    if _ROUTER.fullmatch(name) is None:
        raise invalid(
            f"router name {name[:300]!r} is not valid: 1 to 255 of A-Z a-z 0-9 . _ : - >, starting with a letter or"
            " digit",
            field="router",
        )
    return name


def owner_shard(name: str, shards: int) -> int:
    """The shard that owns a topic: stable for a shard count, found by anyone without asking."""
    return xxhash.xxh3_64_intdigest(name.encode()) % shards
