"""`topics completion SHELL`: completions out of the parsers of all commands, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

import shtab

SHELLS: Final = ("bash", "zsh", "fish")
_TOPICS: Final = shtab.cmd("topics list --names --patience-s 0 2>/dev/null")
"""Completes the name of a topic by asking the service of TOPICS_URL."""
_EXAMPLES: Final = """examples:
  topics completion bash > ~/.local/share/bash-completion/completions/topics
  topics completion zsh > "${fpath[1]}/_topics"
  topics completion fish > ~/.config/fish/completions/topics.fish

exit codes:
  0  done
  2  usage"""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print completions of all commands, options and names of topics for a shell. Names come from the service that "
        "TOPICS_URL names, at the moment you press TAB; without one nothing is offered."
    )
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(command=_print)


def _print(options: argparse.Namespace) -> int:
    from topics.cli.main import COMMANDS, make_parser

    parser = make_parser(COMMANDS)
    for action in _actions(parser):
        if action.dest in ("topic", "topics") and not action.option_strings:
            action.complete = _TOPICS  # type: ignore[attr-defined]
        elif action.dest in ("data_dir", "cold_dir"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of the parsers below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
