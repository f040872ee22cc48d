"""The handbook says what the code does: its table of limits is printed from the code."""

from __future__ import annotations

from tests.docs_tables import OPERATIONS, limits_table, with_tables
from topics.frontend.entry import limits


def test_the_table_of_limits_is_that_of_the_code() -> None:
    page = OPERATIONS.read_text()
    assert page == with_tables(page), "run python -m tests.docs_tables"
    assert len(limits_table().splitlines()) == 2 + len(limits.ALL)
    assert len(limits.ALL) == len({id(limit) for limit in limits.ALL}) > 10


def test_every_limit_has_a_bound_and_a_sentence() -> None:
    for limit in limits.ALL:
        assert limit.most_bytes or limit.most_count, limit
        assert limit.what, limit
        assert "|" not in limit.what, limit
