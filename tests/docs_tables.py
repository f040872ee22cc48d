"""Print the tables of the documentation that come from the code: `python -m tests.docs_tables` writes them there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from topics.frontend.entry import limits
from topics.frontend.entry.budget import AtLimit, Limit

OPERATIONS: Final = Path(__file__).parent.parent / "docs" / "operations.md"
BEGIN: Final = "<!-- The table of topics/frontend/entry/limits.py; `python -m tests.docs_tables` prints it. -->\n"
END: Final = "<!-- The end of the printed table. -->\n"


def limits_table() -> str:
    """Return the table, one row for each limit of a frontend."""
    rows = ["| limit | of each | at most | beyond that | what is counted |", "|---|---|---|---|---|"]
    rows += [f"| `{one.name}` | {one.per} | {_most(one)} | {_beyond(one)} | {one.what} |" for one in limits.ALL]
    return "\n".join(rows) + "\n"


def _most(limit: Limit) -> str:
    shown = [f"{limit.most_count:,}"] if limit.most_count else []
    if limit.most_bytes:
        unit, shift = ("MiB", 20) if limit.most_bytes >= 1 << 20 else ("KiB", 10)
        shown.append(f"{limit.most_bytes >> shift} {unit}")
    return ", ".join(shown)


def _beyond(limit: Limit) -> str:
    if limit.at_limit is AtLimit.WAIT and limit.wait_s is not None:
        return f"one {limit.at_limit.value} for {limit.wait_s:g} s, then `429`"
    return f"one {limit.at_limit.value}"


def with_tables(page: str) -> str:
    """Return the page of operations with the table that the code gives."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{OPERATIONS.name} has no place for the table: {BEGIN!r} … {END!r}"
    return before + BEGIN + limits_table() + END + after


if __name__ == "__main__":
    OPERATIONS.write_text(with_tables(OPERATIONS.read_text()))
