"""`topics completion SHELL`: completions out of the parsers of all commands, by shtab."""

from __future__ import annotations

import argparse
from typing import Final

import shtab

_TOPICS: Final = shtab.cmd("topics list --names --patience-s 0 2>/dev/null")
"""Completes the name of a topic by asking the service of TOPICS_URL."""
_EXAMPLES: Final = """examples:
  topics completion bash > ~/.local/share/bash-completion/completions/topics
  topics completion zsh > "${fpath[1]}/_topics"
  topics completion fish > ~/.config/fish/completions/topics.fish"""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print completions of all commands, options and names of topics for a shell. Names come from the service that "
        "TOPICS_URL names, at the moment you press TAB; without one nothing is offered."
    )
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose completions")
    parser.set_defaults(command=_print)


def _print(options: argparse.Namespace) -> int:
    from topics.cli.main import COMMANDS, make_parser

    parser = make_parser(COMMANDS)
    _mark(parser)
    print(shtab.complete(parser, options.shell))
    return 0


def _mark(parser: argparse.ArgumentParser) -> None:
    """Say of the arguments of a parser, and of those below it, how they are completed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _mark(below)
        elif action.dest in ("topic", "topics"):
            vars(action)["complete"] = _TOPICS
        elif action.metavar in ("FILE", "DIR"):
            vars(action)["complete"] = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY
