"""Contract of `bench.beside_cuts`: it measures a real service with its compactor held and at work."""

from __future__ import annotations

import pytest

from bench import beside_cuts


def test_it_says_where_a_record_s_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    beside_cuts.main(["--seconds", "0.3", "--rounds", "1", "--batch", "10"])
    out = capsys.readouterr().out
    cells = {row.split("|")[1].strip(): row.split("|")[2:4] for row in out.splitlines() if row.startswith("| ")}
    assert {"frontend, CPU", "walshard, CPU", "compactor, CPU", "idle", "requests/s"} <= cells.keys(), out
    assert all(float(cell.replace(",", "")) > 0 for cell in cells["walshard, CPU"]), out
    assert "at work / held" in out
