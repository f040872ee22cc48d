"""Colours, tables and times as text."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.terminal import Styled, coloured, duration, paint_for, plain, table

CODES = re.compile(r"\x1b\[\d+m")
cells = st.one_of(st.none(), st.integers(0, 10**9), st.text("abc ", min_size=1, max_size=8).map(lambda t: f"{t}."))


class Terminal(io.StringIO):
    """An output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "painted"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),  # no-color.org: present and not empty
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_colours_are_for_terminals(stream: io.StringIO, environment: dict[str, str], painted: bool) -> None:
    assert (paint_for(stream, environment) is coloured) == painted


@given(st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), min_size=1)))
def test_columns_stand_below_each_other_in_colour_or_not(rows: list[list[str | int | None]]) -> None:
    styled = [[cell if cell is None else Styled(cell, "bad") for cell in row] for row in rows]
    assert CODES.sub("", table(styled, coloured)) == table(rows)
    lines = table(rows).splitlines()
    assert len(lines) == len(rows)
    if len(rows[0]) > 1:
        assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines, rows, strict=True):
        shown = ["-" if cell is None else str(cell).strip() for cell in row]
        assert line.split() == " ".join(shown).split()


def test_a_cell_keeps_its_style_when_it_is_aligned() -> None:
    assert table([["A", "B"], ["x", Styled(7, "bad")]], coloured).splitlines()[1] == "x  \x1b[31m7\x1b[0m"
    assert table([["A", "B"], ["x", Styled(7, "")]], coloured).splitlines()[1] == "x  7"
    assert plain("x", "bad") == "x"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, None),
        (850, "850 ms"),
        (12_000, "12 s"),
        (185_000, "3 min 5 s"),
        (7_800_000, "2 h 10 min"),
        (86_400_000, "1 d"),
    ],
)
def test_times_have_two_units_at_most(ms: int | None, text: str | None) -> None:
    assert duration(ms) == text
