"""A topic's configuration (api §1): the fields, their defaults, their clamps."""

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
"""In this order wherever a number stands for one."""
PRIORITY_MAX: Final = 1000
LEASE_MS: Final = (100, 86_400_000)
CLAIM_JITTER_MS_MAX: Final = 5_000


_FIELD: Final = re.compile(r"`\$\.([^`]*)`$")
"""Where a value does not fit, as msgspec says it."""


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """One topic's whole configuration. Milliseconds and bytes, 0 = off."""

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

    def echo(self) -> dict[str, Any]:
        """The configuration as every answer shows it: all fields, `durable` as an alias of the class."""
        shown: dict[str, Any] = {}
        for field in self.__struct_fields__:
            if field == "durability":
                shown["durable"] = self.durability == "fsync"
            value = getattr(self, field)
            if field not in _EXTENSIONS or value != _DEFAULTS[field]:
                shown[field] = value
        return shown


_EXTENSIONS: Final = frozenset({"on_ack"})
"""Ours, beyond the fields of api §1: shown only where they are not at their default."""
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(TopicConfig)}


_UNSIGNED = (
    "ttl_ms",
    "cap_records",
    "cap_bytes",
    "idempotency_window_ms",
    "lease_ms",
    "claim_jitter_ms",
    "max_deliveries",
)


def parse_config(given: Any, topic: str) -> tuple[TopicConfig, bool]:
    """(configuration, whether `type` was given) from a decoded JSON object; `400` names the field at fault.

    `topic` is the name it is for: a queue may not be its own dead-letter topic.
    """
    if not isinstance(given, dict):
        raise invalid("config must be a JSON object", field="config")
    try:
        fields = msgspec.convert(given, GivenConfig)
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
    """A topic keeps the type it was created with."""
    return TopicsError(
        "topic_exists_incompatible",
        f"topic {topic!r} is a {existing}, it cannot become a {requested}",
        {"existing_type": existing, "requested_type": requested},
    )
