"""`topics router list|show|create|delete`: copying from topics to topics."""

from __future__ import annotations

import argparse
from typing import Any, Final

from topics.cli import shared
from topics.cli.shared import Work, agreed, print_answer, print_line, print_table, say
from topics.client import Client, NotFoundError
from topics.core.routers import RouterSpec

_EXAMPLES: Final = """  topics router create 'logs>errors' --from logs --to errors --filter 'error:*'
  topics router list
  topics router show 'logs>errors' --json
  topics router delete 'logs>errors'"""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"examples:\n{_EXAMPLES}"
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    about = "List routers: where each copies from and to, its filter, its copies so far, and the seqs it is behind."
    listing = _verb(verbs, "list", _list, about)
    listing.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="beginning of the names (all routers)")
    listing.add_argument("--json", action="store_true", help="as NDJSON")
    show = _verb(verbs, "show", _show, "Show one router with all its fields.")
    show.add_argument("router", metavar="ROUTER")
    show.add_argument("--json", action="store_true", help="as one line of JSON")
    about = "Create a router; if it is there, show what would change and ask before it is replaced."
    create = _verb(verbs, "create", _create, about)
    create.add_argument("router", metavar="ROUTER")
    create.add_argument("--from", dest="source", metavar="TOPIC", required=True, help="copy from this topic")
    create.add_argument("--to", dest="dest", metavar="TOPIC", required=True, help="copy to this topic")
    create.add_argument("--filter", metavar="GLOB", help="only records with this tag; a star at its end is any text")
    create.add_argument("--exactly-once", action="store_true", help="copies say in their meta where they come from")
    create.add_argument("--allow-cycle", action="store_true", help="let it close a cycle of routers")
    create.add_argument("--no-create", action="store_true", help="refuse if the dest is not there")
    create.add_argument("--yes", action="store_true", help="do not ask")
    delete = _verb(verbs, "delete", _delete, "Delete a router. Its copies stay.")
    delete.add_argument("router", metavar="ROUTER")


def _verb(verbs: Any, name: str, work: Work, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=about)
    examples = [line for line in _EXAMPLES.splitlines() if f" router {name}" in line]
    shared.fill(parser, f"router {name}", work, about=about, examples="\n".join(examples))
    return parser


def _list(client: Client, options: argparse.Namespace) -> int:
    routers = client.list_routers(options.prefix)
    if options.json:
        for router in routers:
            print_line(router)
        return 0
    rows: list[list[Any]] = [["ROUTER", "FROM", "TO", "FILTER", "COPIES", "LAG"]]
    rows += [[one.router, one.source, one.dest, _text(one.filter), one.forwarded_total, one.lag] for one in routers]
    print_table(rows, options, text_columns=4)
    return 0


def _show(client: Client, options: argparse.Namespace) -> int:
    state = client.get_router(options.router)
    if options.json:
        print_answer(state)
        return 0
    fields = ("router", *RouterSpec.__struct_fields__, "forwarded_total", "lag")
    print_table(
        [["FIELD", "VALUE"], *([name, _text(getattr(state, name))] for name in fields)], options, text_columns=2
    )
    return 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _create(client: Client, options: argparse.Namespace) -> int:
    wanted = RouterSpec(
        options.source,
        options.dest,
        filter=options.filter,
        create_dest=not options.no_create,
        allow_cycle=options.allow_cycle,
        guarantee="exactly_once" if options.exactly_once else "at_least_once",
    )
    try:
        now = client.get_router(options.router)
    except NotFoundError:
        now = None
    if now is not None:
        changes = shared.changes({name: getattr(now, name) for name in wanted.__struct_fields__}, wanted.echo())
        for line in changes:
            say("router", line)
        if changes and not agreed("router", f"Replace router {options.router!r}?", options):
            return shared.EXIT_REFUSED
    print_answer(client.put_router(options.router, **wanted.echo()))
    return 0


def _delete(client: Client, options: argparse.Namespace) -> int:
    print_answer(client.delete_router(options.router))
    return 0
