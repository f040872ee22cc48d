"""`topics apply -f FILE`: topics, routers and cursors as a file declares them. `plan` is pure; `_apply` asks and does.

What the file does not declare is left alone, and deleted only with `--prune`. The file answers for what hangs on its
topics: their cursors, the routers between them, and, if it has a `prefix`, all topics and routers whose names begin so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from topics.api.requests import Consistency
from topics.cli import shared
from topics.cli.create import changes_of, configuration
from topics.cli.shared import EXIT_FOUND, EXIT_REFUSED, UsageError, agreed, print_line, put, say
from topics.client import Client, CursorState, NotFoundError, calls
from topics.client.calls import Call
from topics.core.errors import TopicsError
from topics.core.routers import RouterSpec, parse_router
from topics.terminal import Paint, paint_for

_EXAMPLES: Final = """  topics apply -f topics.toml --plan      # exit code 6 when the service differs
  topics apply -f topics.toml
  topics apply -f topics.toml --prune --yes"""
_SIGNS: Final = {"create": ("+", "good"), "change": ("~", "warn"), "delete": ("-", "bad")}


class DeclaredCursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cursor in a file. `from_seq` and `tail` say where a new one begins, and move no other."""

    consistency: Consistency = "at_least_once"
    persist_every: int = 1
    from_seq: int = 0
    tail: bool = False


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: configurations by topic, routers by name, cursors by topic and name."""

    topics: dict[str, dict[str, Any]] = {}
    routers: dict[str, dict[str, Any]] = {}
    cursors: dict[str, dict[str, DeclaredCursor]] = {}
    prefix: str | None = None


class Deployed(NamedTuple):
    """The part of a service that a file answers for, or names: configurations by topic, routers, cursors."""

    topics: Mapping[str, Mapping[str, Any]]
    routers: Mapping[str, RouterSpec]
    cursors: Mapping[tuple[str, str], CursorState]


class Step(NamedTuple):
    """One change of the service. `changes` say which fields, `call` does it."""

    action: Literal["create", "change", "delete"]
    kind: Literal["topic", "router", "cursor"]
    name: str
    changes: list[str]
    call: Call[Any]


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Make topics, routers and cursors those of a TOML file: print what has to change, ask, do it. What is as "
        "declared is not touched, so a second run does nothing. What the file does not declare is named, and deleted "
        "only with --prune: cursors of its topics, routers between them, and with `prefix` all topics and routers "
        "whose names begin so. Where nobody can be asked, --yes is needed to change or delete; to create it is not."
    )
    shared.fill(parser, "apply", _apply, about=about, examples=_EXAMPLES)
    parser.add_argument(
        "-f", "--file", metavar="FILE", required=True, help="what there should be, see docs/commands.md"
    )
    parser.add_argument("--plan", action="store_true", help="print the plan, do nothing; exit code 6 if there is one")
    parser.add_argument("--prune", action="store_true", help="delete what the file answers for and does not declare")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print the plan as NDJSON, a line for each step")


def _apply(client: Client, options: argparse.Namespace) -> int:
    manifest = read_manifest(options.file)
    steps, undeclared = plan(manifest, deployed(client, manifest))
    if options.prune:
        routers = [
            step for step in undeclared if step.kind == "router"
        ]  # a dest has one source: the old one goes first
        steps, undeclared = routers + steps + [step for step in undeclared if step.kind != "router"], []
    if options.json:
        for step in steps + undeclared:
            print_line({**step._asdict(), "call": step.call.method, "pruned": step not in undeclared})
    else:
        put(render(steps, undeclared, paint_for(sys.stdout, options.environment)).encode())
    if options.plan or not steps:
        return EXIT_FOUND if steps else 0
    replacing = sum(step.action != "create" for step in steps)
    if replacing and not agreed("apply", f"Do this, with {replacing} changes and deletions?", options):
        return EXIT_REFUSED
    for done, step in enumerate(steps):
        try:
            client.call(step.call)
        except Exception:
            say(
                "apply",
                f"{done} of {len(steps)} steps are done; this one failed: {step.action} {step.kind} {step.name}",
            )
            raise
    return 0


def read_manifest(path: str) -> Manifest:
    try:
        with open(path, "rb") as file:
            return msgspec.toml.decode(file.read(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None


def deployed(client: Client, manifest: Manifest) -> Deployed:
    """Ask the service for all that the file names or answers for."""
    names = {*manifest.topics, *manifest.cursors}
    if manifest.prefix is not None:
        names |= {topic.topic for topic in client.list_topics(manifest.prefix)}
    topics: dict[str, Mapping[str, Any]] = {}
    cursors: dict[tuple[str, str], CursorState] = {}
    for name in sorted(names):
        try:
            topics[name] = client.get_topic(name, touch=False).config
            cursors |= {(name, cursor.cursor): cursor for cursor in client.list_cursors(name)}
        except NotFoundError:
            continue
    fields = RouterSpec.__struct_fields__
    routers = {one.router: RouterSpec(*(getattr(one, field) for field in fields)) for one in client.list_routers()}
    return Deployed(topics, routers, cursors)


def plan(manifest: Manifest, now: Deployed) -> tuple[list[Step], list[Step]]:
    """Return the steps to what the file declares, and the deletions of what it answers for and does not declare."""
    steps = [*_topic_steps(manifest, now), *_router_steps(manifest, now), *_cursor_steps(manifest, now)]
    return steps, list(_undeclared(manifest, now))


def _topic_steps(manifest: Manifest, now: Deployed) -> Iterator[Step]:
    for name, given in manifest.topics.items():
        before = now.topics.get(name)
        wanted = configuration(name, given, before)
        changes = changes_of({} if before is None else before, wanted)
        if before is None or changes:
            yield Step("create" if before is None else "change", "topic", name, changes, calls.put_topic(name, **given))


def _router_steps(manifest: Manifest, now: Deployed) -> Iterator[Step]:
    for name, given in manifest.routers.items():
        if unknown := sorted(given.keys() - set(RouterSpec.__struct_fields__)):
            raise UsageError(f"router {name!r}: a router has no field {unknown[0]!r}; docs/api.md section 6 has all")
        try:
            wanted = parse_router(name, given).echo()
        except TopicsError as error:
            raise UsageError(f"router {name!r}: {error.message}") from None
        before = now.routers.get(name)
        shown = {"source": wanted["source"], "dest": wanted["dest"], **given}
        changes = shared.changes({}, shown) if before is None else shared.changes(before.echo(), wanted)
        if before is None or changes:
            yield Step(
                "create" if before is None else "change", "router", name, changes, calls.put_router(name, **wanted)
            )


def _cursor_steps(manifest: Manifest, now: Deployed) -> Iterator[Step]:
    for topic, declared in manifest.cursors.items():
        for name, wanted in declared.items():
            before = now.cursors.get((topic, name))
            fields = {"consistency": wanted.consistency, "persist_every": wanted.persist_every}
            if before is None:
                start = {"tail": True} if wanted.tail else {"from_seq": wanted.from_seq}
                call = calls.put_cursor(topic, name, **fields, **start)  # type: ignore[arg-type]
                yield Step("create", "cursor", f"{topic} {name}", shared.changes({}, fields | start), call)
            elif changes := shared.changes({field: getattr(before, field) for field in fields}, fields):
                call = calls.put_cursor(topic, name, **fields)  # type: ignore[arg-type]
                yield Step("change", "cursor", f"{topic} {name}", changes, call)


def _undeclared(manifest: Manifest, now: Deployed) -> Iterator[Step]:
    """Yield the deletions, of routers and cursors before topics. A topic that a declaration names is not undeclared."""
    routers = {name: parse_router(name, given) for name, given in manifest.routers.items()}
    named = {*manifest.topics, *manifest.cursors, *(given.get("dead_letter") for given in manifest.topics.values())}
    named |= {topic for router in routers.values() for topic in (router.source, router.dest)}
    prefix = manifest.prefix
    for name, router in now.routers.items():
        ours = {router.source, router.dest} <= named or (prefix is not None and name.startswith(prefix))
        if ours and name not in routers:
            yield Step("delete", "router", name, [], calls.delete_router(name))
    for topic, name in now.cursors:
        if topic in named and name not in manifest.cursors.get(topic, {}):
            yield Step("delete", "cursor", f"{topic} {name}", [], calls.delete_cursor(topic, name))
    for name in now.topics if prefix is not None else ():
        if name not in named:
            yield Step("delete", "topic", name, [], calls.delete_topic(name))


def render(steps: list[Step], undeclared: list[Step], paint: Paint) -> str:
    """Return a plan as text."""
    lines = []
    for step in steps:
        sign, style = _SIGNS[step.action]
        lines.append(paint(f"{sign} {step.kind} {step.name}", style))
        lines += [f"    {change}" for change in step.changes]
    lines += [
        paint(f"  {step.kind} {step.name} is not in the file; --prune deletes it", "faint") for step in undeclared
    ]
    counts = {action: sum(step.action == action for step in steps) for action in _SIGNS}
    summary = ", ".join(f"{count} to {action}" for action, count in counts.items() if count)
    return "".join(f"{line}\n" for line in [*lines, summary or "nothing to do: the service is as declared"])
