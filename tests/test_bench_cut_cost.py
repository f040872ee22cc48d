"""Contract of `bench.cut_cost`: it runs against the compactor and the recovery as they are now."""

from __future__ import annotations

import pytest

from bench import cut_cost


def test_each_kind_of_log_is_followed_copied_and_recovered(capsys: pytest.CaptureFixture[str]) -> None:
    cut_cost.main(["--records", "4000", "--rounds", "1"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows] == [
        "batch 1000",
        "batch 100",
        "batch 100, lengths and tags mixed",
        "batch 10",
        "batch 1",
    ]
    assert all(len(row.split("|")) == 6 for row in rows), rows
