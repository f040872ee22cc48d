"""Causes of a frontend's pressure (docs/architecture.md "Pressure")."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frontend.live import Live, on_loop, until
from topics.core.scheduler import BANDS, LAST
from topics.frontend.operators import frontend_pressure as module
from topics.frontend.operators.frontend_pressure import READY_FULL, FrontendPressure, ready_fullness


def test_topics_of_all_bands_but_the_last_fill_the_queue() -> None:
    for band in range(BANDS):
        depths = [0] * BANDS
        depths[band] = READY_FULL // 2
        assert ready_fullness(depths) == (0.0 if band == LAST else 0.5)
    assert ready_fullness([READY_FULL] * BANDS) == 1.0


def test_what_is_paused_for_the_pressure_does_not_keep_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still: only the end of the pause brings the records."""
    monkeypatch.setattr(module, "READY_FULL", 10)

    async def test(live: Live) -> None:
        names = [f"t{n}" for n in range(20)]
        for name in names:
            await live.put(name, priority=-1000)
        wire, _ = live.follow(dict.fromkeys(names, 0))
        pressure = FrontendPressure(live.rig.shared.control, live.cell, live.hub, live.gateway)
        pressure._governor.pressure = 1.0
        pressure._ladder.update(1.0)
        live.hub.pause(pressure._ladder.deferring)
        for name in names:
            await live.write(name)
        await until(lambda: live.hub.ready.depths()[LAST] == 20)
        assert not wire.of("record")
        pressure.start()
        await until(lambda: all(wire.seqs(name) == [1] for name in names))
        assert live.cell.get("deferring") == 0

    on_loop(tmp_path, test)
