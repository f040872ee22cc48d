"""`topics create TOPIC FIELD=VALUE…`: a topic, or another configuration for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from topics.cli import shared
from topics.cli.apply import Declaration, carry_out
from topics.cli.shared import UsageError, print_answer
from topics.client import Client

_EXAMPLES: Final = """  topics create audit durability=fsync cap_records=1000000
  topics create mails type=queue max_deliveries=5 dead_letter=mails.dead
  topics create audit durability=fsync cap_records=500000 --yes   # replaces the configuration"""


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Create a topic with a configuration (docs/api.md section 1 has the fields), or replace the one that it has. "
        "Fields that are not given go to their defaults, but for the type, which stays. What would change is shown and "
        "asked for; where nobody can be asked, --yes is needed. The topic is printed as JSON."
    )
    shared.fill(parser, "create", _create, about=about, examples=_EXAMPLES)
    parser.add_argument("topic", metavar="TOPIC")
    add_fields(parser)


def add_fields(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fields", metavar="FIELD=VALUE", nargs="*", help="a value is JSON, or a text as it stands")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _create(client: Client, options: argparse.Namespace) -> int:
    code = carry_out(client, "create", Declaration({options.topic: parse_fields(options.fields)}), options)
    if not code:
        print_answer(client.get_topic(options.topic, touch=False))
    return code


def parse_fields(fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of arguments like `ttl_ms=1000`."""
    given: dict[str, Any] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or name in given:
            raise UsageError(f"{field!r}: give each field once, as FIELD=VALUE, like durability=fsync")
        try:
            given[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            given[name] = value
    return given
