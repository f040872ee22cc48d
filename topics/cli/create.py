"""`topics create TOPIC FIELD=VALUE…`: a topic, or another configuration for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from topics.cli import shared
from topics.cli.shared import EXIT_REFUSED, UsageError, agreed, print_answer, say
from topics.client import Client, NotAllowedError, NotFoundError
from topics.core.config import TopicConfig, incompatible_type, parse_config
from topics.core.errors import TopicsError

BOUNDS: Final = ("ttl_ms", "cap_records", "cap_bytes")
"""Fields that take records when they get smaller; 0 is no bound."""
_EXAMPLES: Final = """  topics create audit durability=fsync cap_records=1000000
  topics create mails type=queue max_deliveries=5 dead_letter=mails.dead
  topics create audit durability=fsync cap_records=500000 --yes   # replaces the configuration"""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Create a topic with a configuration, or replace the one that it has. Fields that are not given go to their "
        "defaults, but for the type, which stays. What would change is shown first and asked for; where nobody can be "
        "asked, --yes is needed. The answer is printed as JSON."
    )
    shared.fill(parser, "create", _create, about=about, examples=_EXAMPLES)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "fields", metavar="FIELD=VALUE", nargs="*", help="fields of the configuration, as in docs/api.md, section 1"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _create(client: Client, options: argparse.Namespace) -> int:
    given = parse_fields(options.fields)
    try:
        now = client.get_topic(options.topic, touch=False).config
    except (NotFoundError, NotAllowedError):
        now = None  # a key may be allowed to configure, and not to read
    wanted = configuration(options.topic, given, now)
    changes = [] if now is None else changes_of(now, wanted)
    for line in changes:
        say("create", line)
    if changes and not agreed("create", f"Replace the configuration of topic {options.topic!r}?", options):
        return EXIT_REFUSED
    print_answer(client.put_topic(options.topic, **given))
    return 0


def parse_fields(fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of arguments like `ttl_ms=1000`. A value is JSON, or a text as it stands."""
    given: dict[str, Any] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name in given:
            raise UsageError(f"{field!r}: give each field once, as FIELD=VALUE, like durability=fsync")
        try:
            given[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            given[name] = value
    return given


def configuration(topic: str, given: Mapping[str, Any], now: Mapping[str, Any] | None) -> TopicConfig:
    """Return the whole configuration that a PUT of these fields would leave."""
    unknown = sorted(given.keys() - set(TopicConfig.__struct_fields__) - {"durable"})
    if unknown:
        raise UsageError(f"topic {topic!r}: a configuration has no field {unknown[0]!r}; docs/api.md section 1 has all")
    try:
        config, has_type = parse_config(dict(given), topic)
        if now is not None and has_type and config.type != now["type"]:
            raise incompatible_type(topic, now["type"], config.type)
    except TopicsError as error:
        raise UsageError(f"topic {topic!r}: {error.message}") from None
    return config if now is None or has_type else msgspec.structs.replace(config, type=now["type"])


def changes_of(now: Mapping[str, Any], wanted: TopicConfig) -> list[str]:
    """Return a line for each field that would change, and say of those that take records at once that they do."""
    lines = []
    for field in msgspec.structs.fields(TopicConfig):
        before, value = now.get(field.name, field.default), getattr(wanted, field.name)
        takes = field.name in BOUNDS and 0 < value < (before or float("inf"))
        changed = shared.changes({field.name: before}, {field.name: value})
        lines += [line + (" (takes records at once)" if takes else "") for line in changed]
    return lines
