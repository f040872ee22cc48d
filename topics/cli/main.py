"""The program `topics`: commands for people and scripts, one module each."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from typing import Final

from topics import __version__
from topics.terminal import OptionParser
from topicsd import guarded

COMMANDS: Final = {
    "write": ("write", "append records to a topic: NDJSON on stdin"),
    "read": ("read", "print the records of a topic, up to its head, as NDJSON"),
    "tail": ("tail", "print the last records of topics, and with -f what comes after them, as NDJSON"),
    "list": ("list_topics", "list topics, as a table or as NDJSON"),
    "create": ("create", "create a topic, or change its configuration after showing what would change"),
    "apply": ("apply", "make the topics, routers and cursors of a service those of a file"),
    "delete": ("delete", "delete records of a topic, by seq and by tag, or the whole topic"),
    "router": ("router", "list, create, show and delete routers, which copy from topic to topic"),
    "cursor": ("cursor", "list, set and delete the named cursors of a topic"),
    "lag": ("lag", "show how far every reader is behind: cursors, routers, queues"),
    "top": ("top", "show a service and its busiest topics, live"),
    "queue": ("queue_commands", "claim, ack, nack, extend, count, redrive and peek at the jobs of a queue"),
    "bench": ("bench", "measure writes, deliveries and reads, on a topic of its own"),
    "doctor": ("doctor", "say what is wrong with this installation or its service, and the way out"),
    "completion": ("completion", "print completions for bash, zsh or fish"),
    "verify": ("verify_command", "check every byte of a data directory that no service uses; changes nothing"),
    "backup": ("backup", "copy the state of a data directory, whose service may run, into a folder or a bucket"),
    "restore": ("restore", "make a data directory from an archive, as it was at any moment there"),
    "archive": ("archive", "list, verify and prune an archive"),
    "spark": ("spark", "run a pipeline on Spark: export, rollup, replay or audit"),
}
"""Name → (module, help text). Only the given command is imported: `verify` needs no HTTP, a client no storage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = next((argument for argument in arguments if not argument.startswith("-")), None)
    return guarded(f"topics {given}" if given in COMMANDS else "topics", lambda: _run(arguments, given))


def _run(arguments: Sequence[str], given: str | None) -> int:
    options = make_parser({given}).parse_args(arguments)
    options.environment = os.environ
    return int(options.command(options))


def make_parser(whole: Collection[str | None]) -> argparse.ArgumentParser:
    """Return the parser of all commands; only those of `whole` have their own arguments."""
    parser = OptionParser(prog="topics", description="Commands of topics, a persistent event engine.")
    parser.add_argument("--version", action="version", version=f"topics {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name in whole:
            try:
                importlib.import_module(f"topics.cli.{module}").fill(command)
            except ModuleNotFoundError:
                if len(whole) == 1:
                    raise  # in a parser of all commands, one whose packages are missing just has no arguments
    return parser
