"""`topics apply -f FILE`: topics, routers, cursors as a file declares them. `plan` is pure; `carry_out` asks and does.

The command leaves alone what the file does not declare. With `--prune` it deletes undeclared things that the file is
responsible for: cursors of its topics, routers between them, and all topics and routers with its `prefix`, if given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from topics.api.requests import Consistency
from topics.cli import shared
from topics.cli.shared import EXIT_FOUND, EXIT_REFUSED, UsageError, agreed, print_line, say
from topics.client import Client, NotFoundError, calls
from topics.client.calls import Call
from topics.core.config import TopicConfig, incompatible_type, parse_config
from topics.core.errors import TopicsError
from topics.core.routers import RouterSpec, parse_router
from topics.progress import counted
from topics.terminal import Paint, paint_for

BOUNDS: Final = ("ttl_ms", "cap_records", "cap_bytes")
"""Fields that take records when they get smaller; 0 is no bound."""
_EXAMPLES: Final = """  topics apply -f topics.toml --plan      # exit code 6 when the service differs
  topics apply -f topics.toml
  topics apply -f topics.toml --prune --yes"""
_SIGNS: Final = {"create": ("+", "good"), "change": ("~", "warn"), "delete": ("-", "bad")}


class DeclaredCursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cursor in a file. `from_seq` and `tail` say where a new one begins; they do not move an existing one."""

    consistency: Consistency = "at_least_once"
    persist_every: Annotated[int, msgspec.Meta(ge=1)] = 1
    from_seq: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tail: bool = False

    def __post_init__(self) -> None:
        if self.tail and self.from_seq is not None:
            raise ValueError("from_seq and tail exclude each other")


class Declaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: configurations by topic, routers by name, cursors by topic and name."""

    topics: dict[str, dict[str, Any]] = {}
    routers: dict[str, dict[str, Any]] = {}
    cursors: dict[str, dict[str, DeclaredCursor]] = {}
    prefix: str | None = None


class Deployed(NamedTuple):
    """The fields of everything that a service has: topics by name, routers by name, cursors by topic and name."""

    topics: dict[str, dict[str, Any]]
    routers: dict[str, dict[str, Any]]
    cursors: dict[tuple[str, str], dict[str, Any]]


class Step(NamedTuple):
    """One change of the service: `create`, `change` or `delete`. `changes` say which fields, `call` does it."""

    action: str
    kind: str
    name: str
    changes: list[str]
    call: Call[Any]


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Make topics, routers and cursors those of a TOML file: print what has to change, ask, do it. A second run "
        "does nothing. What the file answers for and does not declare is named, and deleted only with --prune: cursors "
        "of its topics, routers between them, and with `prefix` all topics and routers whose names begin so. Where "
        "nobody can be asked, --yes is needed to change or delete; to create it is not."
    )
    shared.fill(parser, "apply", _apply, about=about, examples=_EXAMPLES)
    parser.add_argument("-f", "--file", metavar="FILE", required=True, help="what there should be: docs/commands.md")
    parser.add_argument("--plan", action="store_true", help="print the plan, do nothing; exit code 6 if there is one")
    parser.add_argument("--prune", action="store_true", help="delete what the file answers for and does not declare")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the plan as NDJSON, a line for each step")


def _apply(client: Client, options: argparse.Namespace) -> int:
    try:
        with open(options.file, "rb") as file:
            manifest = msgspec.toml.decode(file.read(), type=Declaration)
    except OSError as error:
        raise UsageError(f"file {options.file}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:  # such as a number of 5,000 digits
        raise UsageError(f"file {options.file}: {error}; docs/commands.md shows one that is right") from None
    return carry_out(client, "apply", manifest, options)


def carry_out(client: Client, command: str, manifest: Declaration, options: argparse.Namespace) -> int:
    """Print the changes, ask the person, and make them. Only `apply` prints to stdout, and lists undeclared things."""
    plan(manifest, Deployed({}, {}, {}))  # refuses impossible declarations before the service is asked
    steps, undeclared = plan(manifest, deployed(client, manifest, undeclared=command == "apply"))
    if command == "apply" and options.prune:
        # A dest has one source, so an old router must be deleted before a new one is made.
        steps = [step for step in undeclared if step.kind == "router"] + steps
        steps, undeclared = steps + [step for step in undeclared if step.kind != "router"], []
    if command != "apply":
        if any(step.action == "change" for step in steps):
            print(render(steps, [], paint_for(sys.stderr, options.environment)), end="", file=sys.stderr)
    elif options.json:
        for step in steps + undeclared:
            print_line({**step._asdict(), "call": step.call.method, "declared": step not in undeclared})
    else:
        print(render(steps, undeclared, paint_for(sys.stdout, options.environment)), end="", flush=True)
    if not steps or (command == "apply" and options.plan):
        return EXIT_FOUND if steps else 0
    if any(step.action != "create" for step in steps) and not agreed(command, "Do this?", options):
        return EXIT_REFUSED
    for done, step in enumerate(counted(steps, " steps", len(steps))):
        try:
            client.call(step.call)
        except Exception:
            say(command, f"{done} of {len(steps)} steps are done; {step.action} {step.kind} {step.name!r} failed")
            raise
    return 0


def deployed(client: Client, manifest: Declaration, undeclared: bool) -> Deployed:
    """Ask the service for all that the file names. With `undeclared`, also for all that the file is responsible for."""
    names, dests = {*manifest.topics, *manifest.cursors}, sorted(_named(manifest)) if undeclared else []
    routers = [one for dest in counted(dests, " dests", len(dests)) for one in client.list_routers(dest=dest)]
    if manifest.prefix is not None:
        names |= {topic.topic for topic in counted(client.list_topics(manifest.prefix), " topics")}
        routers += client.list_routers(manifest.prefix)
    for name in sorted(manifest.routers.keys() - {one.router for one in routers}):
        with suppress(NotFoundError):
            routers.append(client.get_router(name))
    routers.sort(key=lambda one: one.router)
    now = Deployed({}, {one.router: msgspec.structs.asdict(one) for one in routers}, {})
    for name in counted(sorted(names), " topics", len(names)):
        try:
            now.topics[name] = client.get_topic(name, touch=False).config
            found = {(name, one.cursor): msgspec.structs.asdict(one) for one in client.list_cursors(name)}
        except NotFoundError:
            continue
        now.cursors.update(found)
    return now


def plan(manifest: Declaration, now: Deployed) -> tuple[list[Step], list[Step]]:
    """Return the steps to what the file declares, and the deletions of undeclared things of its responsibility."""
    return list(_declared(manifest, now)), list(_undeclared(manifest, now))


def _declared(manifest: Declaration, now: Deployed) -> Iterator[Step]:
    for name, given in manifest.topics.items():
        config = now.topics.get(name)
        changes = config_changes(name, given, config)
        if config is None or changes:
            yield Step("change" if config else "create", "topic", name, changes, calls.put_topic(name, **given))
    for name, given in manifest.routers.items():
        with _checked(f"router {name!r}", given, RouterSpec.__struct_fields__):
            wanted, router = parse_router(name, given).echo(), now.routers.get(name)
        changes = shared.changes(router or RouterSpec("", "").echo(), wanted)
        if router is None or changes:
            yield Step("change" if router else "create", "router", name, changes, calls.put_router(name, **wanted))
    for topic, cursors in manifest.cursors.items():
        for name, given_cursor in cursors.items():
            cursor, fields = now.cursors.get((topic, name)), msgspec.structs.asdict(given_cursor)
            if cursor is not None:
                del fields["from_seq"], fields["tail"]
            changes = shared.changes(cursor or {}, {field: value for field, value in fields.items() if value})
            if cursor is None or changes:
                call = calls.put_cursor(topic, name, **fields)
                yield Step("change" if cursor else "create", "cursor", f"{topic} {name}", changes, call)


def config_changes(topic: str, given: Mapping[str, Any], now: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each field that a PUT of these fields would change, with a word on those that take records."""
    with _checked(f"topic {topic!r}", given, (*TopicConfig.__struct_fields__, "durable")):
        wanted, has_type = parse_config(dict(given), topic)
        if now is not None and has_type and wanted.type != now["type"]:
            raise incompatible_type(topic, now["type"], wanted.type)
    if now is not None and not has_type:
        wanted = msgspec.structs.replace(wanted, type=now["type"])
    before = msgspec.structs.asdict(TopicConfig()) | dict(now or {})
    takes = {name for name in BOUNDS if 0 < getattr(wanted, name) < (before[name] or float("inf")) and now}
    lines = shared.changes(before, msgspec.structs.asdict(wanted))
    return [line + (" (takes records at once)" if line.partition(":")[0] in takes else "") for line in lines]


@contextmanager
def _checked(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[None]:
    """Refuse unknown fields; make the error of a bad value one of usage."""
    if unknown := sorted(given.keys() - set(known)):
        raise UsageError(f"{what} can have no field {unknown[0]!r}: {', '.join(known)}")
    try:
        yield
    except TopicsError as error:
        raise UsageError(f"{what}: {error.message}") from None


def _undeclared(manifest: Declaration, now: Deployed) -> Iterator[Step]:
    """Yield the deletions of undeclared routers and cursors, then topics. A topic named anywhere counts as declared."""
    named, prefix = _named(manifest), manifest.prefix
    for name, router in now.routers.items():
        ours = {router["source"], router["dest"]} <= named or (prefix is not None and name.startswith(prefix))
        if ours and name not in manifest.routers:
            yield Step("delete", "router", name, [], calls.delete_router(name))
    for topic, name in now.cursors:
        if topic in named and name not in manifest.cursors.get(topic, {}):
            yield Step("delete", "cursor", f"{topic} {name}", [], calls.delete_cursor(topic, name))
    for name in sorted(now.topics.keys() - named):
        if prefix is not None and name.startswith(prefix):
            yield Step("delete", "topic", name, [], calls.delete_topic(name))


def _named(manifest: Declaration) -> set[str]:
    """Return the topics that a declaration names. Undeclared routers may copy into any of them."""
    named = {*manifest.topics, *manifest.cursors, *(given.get("dead_letter") for given in manifest.topics.values())}
    named |= {given[end] for given in manifest.routers.values() for end in ("source", "dest")}
    return {name for name in named if name}


def render(steps: list[Step], undeclared: list[Step], paint: Paint) -> str:
    """Return a plan as text."""
    lines = []
    for action, kind, name, changes, _ in steps:
        sign, style = _SIGNS[action]
        lines += [paint(f"{sign} {kind} {name}", style), *(f"    {change}" for change in changes)]
    lines += [
        paint(f"  {step.kind} {step.name} is not in the file; --prune deletes it", "faint") for step in undeclared
    ]
    counts = {action: sum(step.action == action for step in steps) for action in _SIGNS}
    summary = ", ".join(f"{count} to {action}" for action, count in counts.items() if count)
    return "".join(f"{line}\n" for line in [*lines, summary or "nothing to do: the service is as declared"])
