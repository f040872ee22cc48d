"""Text for people at a terminal: colours, tables, completions. `paint_for` decides whether an output has colours."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TextIO

_CODES: Final = {"head": "1", "faint": "2", "bad": "31", "good": "32", "warn": "33"}
SHELLS: Final = ("bash", "zsh", "fish")
CLEAR: Final = "\x1b[H\x1b[2J"
"""Moves to the upper left corner of a terminal and empties it."""

Paint = Callable[[str, str], str]
"""Returns a text in a style: one of `head`, `faint`, `good`, `warn`, `bad`; `""` for none."""


class OptionParser(argparse.ArgumentParser):
    """A parser that takes only whole names of options, also for its verbs: an abbreviation may change its meaning. A
    verb refuses by itself what it does not know, so the error comes with the verb's usage.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class Styled(str):
    """A text with the style that it is painted in."""

    style = ""

    def __new__(cls, text: object, style: str) -> Styled:
        made = super().__new__(cls, text)
        made.style = style
        return made


Cell = str | int | None
"""A cell of a table, which may be Styled; None is a figure that is unknown."""


def plain(text: str, style: str) -> str:
    """Return the text as it is."""
    return text


def coloured(text: str, style: str) -> str:
    """Return the text with the codes of a terminal around it."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style else text


def paint_for(stream: TextIO, environment: Mapping[str, str]) -> Paint:
    """Return how to paint for this output: in colours on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    wanted = stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return coloured if wanted else plain


def table(rows: Sequence[Sequence[Cell]], paint: Paint = plain, *, text_columns: int = 1) -> str:
    """Return rows as lines, in columns as wide as they need. The first row has the headings. The first columns are text
    and stand left, the others right.
    """
    shown = [["-" if cell is None else cell if isinstance(cell, str) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]

    def line(row: list[str], style: str) -> str:
        cells = []
        for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
            aligned = cell.rjust(width) if at >= text_columns else cell.ljust(width if at < len(row) - 1 else 0)
            cells.append(paint(aligned, cell.style if isinstance(cell, Styled) else style))
        return "  ".join(cells) + "\n"

    return "".join(line(row, "" if at else "head") for at, row in enumerate(shown))


def arguments_of(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[argparse.Action, Mapping[str, argparse.ArgumentParser]]]:
    """Yield each argument of a program, and, if the argument stands for verbs, their parsers by name."""
    for action in parser._actions:
        yield action, action.choices if isinstance(action, argparse._SubParsersAction) else {}


def completions(parser: argparse.ArgumentParser, shell: str, commands: Mapping[str, str]) -> str:
    """Return completions of a program for one of SHELLS. `commands` are lines that print the values of an argument, by
    its name. Arguments shown as FILE or DIR are paths.
    """
    import shtab  # for one command of many

    known = {"FILE": shtab.FILE, "CONFIG": shtab.FILE, "DIR": shtab.DIRECTORY} | {
        name: shtab.cmd(line) for name, line in commands.items()
    }

    def mark(parser: argparse.ArgumentParser) -> None:
        for action, verbs in arguments_of(parser):
            for below in verbs.values():
                mark(below)
            if found := known.get(action.dest) or known.get(str(action.metavar)):
                vars(action)["complete"] = found

    mark(parser)
    return str(shtab.complete(parser, shell))


def plural(count: int, noun: str) -> str:
    """Return `1 topic`, `2 topics`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(ms: int | None) -> str | None:
    """Return `850 ms`, `12 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`."""
    if ms is None:
        return None
    if ms < 1000:
        return f"{ms} ms"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    seconds = ms // 1000
    for (unit, size), (smaller, smaller_size) in itertools.pairwise(units):
        if seconds >= size:
            rest = seconds % size // smaller_size
            return f"{seconds // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"
