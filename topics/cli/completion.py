"""`topics completion SHELL`: prints completions made from the parsers of all commands."""

from __future__ import annotations

import argparse
from typing import Final

from topics.terminal import SHELLS, completions

_TOPICS: Final = "topics list --names --patience-s 0 2>/dev/null"
"""Completes the name of a topic by asking the service of TOPICS_URL."""
_EXAMPLES: Final = """examples:
  topics completion bash > ~/.local/share/bash-completion/completions/topics
  topics completion zsh > "${fpath[1]}/_topics"
  topics completion fish > ~/.config/fish/completions/topics.fish"""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print completions of all commands, options and names of topics for a shell. Names come from the service that "
        "TOPICS_URL names, at the moment you press TAB; without one nothing is offered. `topics-supervisor completion` "
        "prints those of that program."
    )
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="whose completions")
    parser.set_defaults(command=_print)


def _print(options: argparse.Namespace) -> int:
    from topics.cli.main import COMMANDS, make_parser

    print(completions(make_parser(COMMANDS), options.shell, dict.fromkeys(("topic", "topics", "prefix"), _TOPICS)))
    return 0
