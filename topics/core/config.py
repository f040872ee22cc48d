"""A topic's configuration (api §1): its fields, defaults and clamps. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, Literal, get_args

import msgspec

from topics.api.requests import U64_MAX as U64_MAX
from topics.api.requests import Durability as Durability
from topics.api.requests import GivenConfig
from topics.core.errors import TopicsError, invalid
from topics.core.names import check_topic_name

CLASSES: Final[tuple[Durability, ...]] = get_args(Durability)
"""Durability classes, in the order of the numbers that stand for them."""
PRIORITY_MAX: Final = 1000
LEASE_MS: Final = (100, 86_400_000)
CLAIM_JITTER_MS_MAX: Final = 5_000
_FIELD: Final = re.compile(r"`\$\.([^`]*)`$")
"""Path of the value at fault, at the end of a msgspec error message."""


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """One topic's whole configuration. 0 turns a bound in milliseconds, bytes or records off."""

    type: Literal["log", "queue"] = "log"
    ttl_ms: int = 0
    cap_records: int = 0
    cap_bytes: int = 0
    discard: Literal["old", "reject"] = "old"
    durability: Durability = "disk"
    priority: int | None = None
    auto_priority: bool = True
    auto_create: bool = True
    idempotency_window_ms: int = 120_000
    dedupe_node: bool = True
    lease_ms: int = 30_000
    claim_jitter_ms: int = 0
    max_deliveries: int = 0
    dead_letter: str | None = None
    leases_durable: bool = False
    on_ack: Literal["delete", "keep"] = "delete"

    @property
    def is_synced(self) -> bool:
        """True if a write is on the disk before it is acknowledged, or seen."""
        return self.durability in ("fsync", "archived")

    def over_caps(self, records: int, size_bytes: int) -> tuple[int, int]:
        """Return by how many records and bytes so much is over the caps; room for so many more if it is negative."""
        return records - (self.cap_records or U64_MAX), size_bytes - (self.cap_bytes or U64_MAX)

    def can_hold(self, records: int, size_bytes: int) -> bool:
        """Return whether the caps allow so much."""
        return max(self.over_caps(records, size_bytes)) <= 0

    def echo(self) -> dict[str, Any]:
        """Return the configuration as every answer shows it: all fields, and `durable`, an alias of the class."""
        shown: dict[str, Any] = {}
        for field in self.__struct_fields__:
            if field == "durability":
                shown["durable"] = self.is_synced
            value = getattr(self, field)
            if field not in _EXTENSIONS or value != _DEFAULTS[field]:
                shown[field] = value
        return shown


_EXTENSIONS: Final = frozenset({"on_ack"})
"""Fields beyond those of api §1, shown only where they are not at their default."""
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(TopicConfig)}
_UNSIGNED: Final = [name for name, default in _DEFAULTS.items() if type(default) is int]


def parse_config(given: Any, topic: str) -> tuple[TopicConfig, bool]:
    """Return (the given configuration, whether it has a `type`). Raise `400`, which names the field at fault."""
    if not isinstance(given, dict | GivenConfig):
        raise invalid("config must be a JSON object", field="config")
    try:
        fields = given if isinstance(given, GivenConfig) else msgspec.convert(given, GivenConfig)
    except msgspec.ValidationError as error:
        at = _FIELD.search(str(error))
        raise invalid(f"config: {error}", **({"field": at[1]} if at else {})) from None
    values = {name: getattr(fields, name) for name in fields.__struct_fields__}
    values = {name: value for name, value in values.items() if value is not msgspec.UNSET}
    for name in _UNSIGNED:
        value = values.get(name, 0)
        if not 0 <= value <= U64_MAX:
            raise invalid(f"config.{name} must be an integer from 0 to 2^64-1, not {value}", field=name)
    durable = values.pop("durable", None)
    if durable is not None and "durability" not in values:
        values["durability"] = "fsync" if durable else "disk"
    if values.get("priority") is not None:
        values["priority"] = max(-PRIORITY_MAX, min(PRIORITY_MAX, values["priority"]))
    if "lease_ms" in values:
        values["lease_ms"] = max(LEASE_MS[0], min(LEASE_MS[1], values["lease_ms"]))
    if "claim_jitter_ms" in values:
        values["claim_jitter_ms"] = min(CLAIM_JITTER_MS_MAX, values["claim_jitter_ms"])
    dead_letter = values.get("dead_letter")
    if dead_letter is not None:
        check_topic_name(dead_letter, "dead_letter")
        if dead_letter == topic:
            raise invalid("config.dead_letter must be another topic than the queue itself", field="dead_letter")
    return TopicConfig(**values), "type" in values


def incompatible_type(topic: str, existing: str, requested: str) -> TopicsError:
    """Return the error for a request that would change the type of an existing topic."""
    return TopicsError(
        "topic_exists_incompatible",
        f"topic {topic!r} is a {existing} and cannot become a {requested}: delete it first, or leave the type out",
        {"existing_type": existing, "requested_type": requested},
    )


def check_room(topic: str, config: TopicConfig, count: int, size_bytes: int, records: int, live_bytes: int) -> None:
    """Refuse a write of `count` records and `size_bytes` if it does not fit a `reject` topic that already holds
    `records` and `live_bytes`.
    """
    caps = ((config.cap_records, count, records, "records"), (config.cap_bytes, size_bytes, live_bytes, "bytes"))
    # First refuse a write that can never fit: its client must not wait for room.
    for cap, write, _held, unit in caps:
        if cap and write > cap:
            raise TopicsError(
                "record_too_large",
                f"a write of {write} {unit} can never fit topic {topic!r}, whose cap_{unit} is {cap}",
                {f"cap_{unit}": cap},
            )
    for cap, write, held, unit in caps:
        if cap and held + write > cap:
            raise TopicsError(
                "topic_full",
                f"topic {topic!r} holds {held} of at most {cap} {unit}, and its discard is 'reject'",
                {f"cap_{unit}": cap},
            )
