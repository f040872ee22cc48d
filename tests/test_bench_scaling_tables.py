"""The tables of `python -m bench.scaling`: a line for each operation, verdicts, and the places where they go."""

from __future__ import annotations

import pytest

from bench import figures
from bench.scaling import MODEL_PAGE, PAGE
from bench.scaling_tables import Point, costs_table, growth_table, layouts_table, lines_of

LAYOUTS = "shards and frontends"
POINTS = [
    Point(LAYOUTS, "a write of 100", 2, 5_000.0, 90.0, 60.0, 100.0, 30.0, 100),
    Point(LAYOUTS, "a write of 100", 1, 5_500.0, 60.0, 40.0, 100.0, 30.0, 100),
    Point("topics", "a write of 1", 1, 9_000.0, 70.0, 30.0, 5.0, 20.0),
    Point("topics", "a write of 1", 100_000, 9_000.0, 80.0, 40.0, 90.0, 20.0),
    Point("topics", "moved", 1, 0.0, 0.0, 0.0, 2.0, 0.0),
]


def test_the_compactor_does_not_count_in_the_cost_of_what_a_client_waits_for() -> None:
    growths = {line.operation: line.growth for line in lines_of(POINTS)}
    assert growths == pytest.approx({"a write of 100": 1.5, "a write of 1": 1.2, "moved": 1.0})


def test_each_dimension_has_a_table_with_a_verdict() -> None:
    lines = growth_table(POINTS).splitlines()
    assert lines[0] == "| shards and frontends | 1 | 2 | growth | ≤ 1.3 |"
    assert lines[2] == "| a write of 100 | 100 µs, 5.5 k/s | 150 µs, 5.0 k/s | 1.50 | **missed** |"
    assert lines[4] == "| topics | 1 | 100,000 | growth | ≤ 1.3 |"
    assert lines[6] == "| a write of 1 | 100 µs, 9.0 k/s | 120 µs, 9.0 k/s | 1.20 | met |"
    assert lines[7] == "| moved | 2 µs |  | 1.00 | met |"


def test_the_model_is_made_from_the_fewest_processes() -> None:
    assert "| a write of 100 | 60 | 40 | 100 | 30 | 8.7 k/s | 5.5 k/s |" in costs_table(POINTS)
    row = layouts_table(POINTS).splitlines()[2]
    assert row.startswith("| a write of 100 | 1 + 1, 10.0 k = 1.0 M records, "), row


def test_the_pages_have_a_place_for_each_table() -> None:
    page, model = PAGE.read_text(), MODEL_PAGE.read_text()
    for text, name in ((page, "scaling"), (page, "loop holds"), (model, "model")):
        changed = figures.with_table(text, name, "| new |")
        assert "\n\n| new |\n\n" in changed
        assert figures.with_table(changed, name, "| new |") == changed
        assert changed.partition("<!--")[0] == text.partition("<!--")[0]
    assert page.index("loop holds: end") < page.index(figures.LATEST_RUN), "the next full run would take its place"
    with pytest.raises(AssertionError, match="no place for elsewhere"):
        figures.with_table(page, "elsewhere", "")
