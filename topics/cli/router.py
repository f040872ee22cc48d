"""`topics router list|show|create|delete`: copying from topics to topics."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Final

from topics.api.answers import RouterEntry
from topics.cli import shared
from topics.cli.apply import Declaration, carry_out
from topics.cli.create import add_fields, parse_fields
from topics.cli.shared import print_items, printing
from topics.client import Client
from topics.terminal import Cell

_EXAMPLES: Final = """  topics router create 'logs>errors' source=logs dest=errors 'filter=error:*'
  topics router list
  topics router show 'logs>errors'
  topics router delete 'logs>errors'"""
_SHOW: Final = printing(lambda client, options: client.get_router(options.router))


def fill(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"examples:\n{_EXAMPLES}"
    verb = partial(shared.add_verb, parser.add_subparsers(required=True, metavar="VERB"), "router", examples=_EXAMPLES)
    about = "List routers: where each copies from and to, its filter, its copies so far, and the seqs it is behind."
    listing = verb("list", _list, about=about)
    listing.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="beginning of the names (all routers)")
    listing.add_argument("--json", action="store_true", help="as NDJSON")
    show = verb("show", _SHOW, about="Print one router with all its fields, its copies and its lag, as JSON.")
    about = (
        "Create a router, with the fields of docs/api.md section 6; source and dest are needed. If it is there, what "
        "would change is shown and asked for; where nobody can be asked, --yes is needed."
    )
    create = verb("create", _create, about=about)
    deleting = printing(lambda client, options: client.delete_router(options.router))
    delete = verb("delete", deleting, about="Delete a router. Its copies stay.")
    for parser in (show, create, delete):
        parser.add_argument("router", metavar="ROUTER")
    add_fields(create)


def _list(client: Client, options: argparse.Namespace) -> int:
    print_items(client.list_routers(options.prefix), options, "ROUTER FROM TO FILTER COPIES LAG", _row, 4)
    return 0


def _row(one: RouterEntry) -> Sequence[Cell]:
    tags = None if one.filter is None else shared.show(one.filter)
    return (one.router, one.source, one.dest, tags, one.forwarded_total, one.lag)


def _create(client: Client, options: argparse.Namespace) -> int:
    manifest = Declaration(routers={options.router: parse_fields(options.fields)})
    return carry_out(client, "router create", manifest, options) or _SHOW(client, options)
