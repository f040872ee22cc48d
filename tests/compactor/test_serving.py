"""The order in which the compactor's process does things."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.walshard.compaction import Compaction, Life
from tests.walshard.rig import Rig
from topics.compactor import main
from topics.compactor.life import ClockNote
from topics.shm.topic_messages import DeleteRecords

INTERVAL_MS = 1_000
STEP_MS = 50


class Serving(Life):
    """Time goes on by a step whenever the process sleeps; `seen` is then (cuts, rewritten segments) so far."""

    def __init__(self, rig: Rig, sleeps: int, step_ms: int = STEP_MS) -> None:
        super().__init__(rig)
        self._step_ms = step_ms
        self.seen: list[tuple[int, int]] = []
        self._left = sleeps

    @property
    def stopping(self) -> bool:
        return self._left == 0

    def sleep(self, timeout_ms: int) -> None:
        self._left -= 1
        self._rig.clock.ms += self._step_ms
        self._rig.run()
        self.seen.append((self.cell.get("snapshots"), self.cell.get("segments_rewritten")))


def test_upkeep_waits_for_the_first_cut(tmp_path: Path) -> None:
    """An error that ends the process in upkeep, in each incarnation, must not keep it from ever making a snapshot."""
    rig = Rig(
        str(tmp_path), segment_max_events="8", segment_rewrite_dead_ratio="0.1", checkpoint_interval_ms=str(INTERVAL_MS)
    )
    compaction = Compaction(rig)
    try:
        for number in range(16):
            rig.append("t", b"%d" % number, tag=b"x" if number % 2 else b"y")
        compaction.cut()
        rig.call(DeleteRecords("t", None, "eq", b"x"))
        compaction.begin_again()  # it finds in the index what it is to rewrite
        rig.append("t", b"news")
        compactor = compaction.compactor
        life = Serving(rig, 3 * INTERVAL_MS // STEP_MS)
        before = life.cell.get("snapshots")
        note = ClockNote(rig.fs, rig.settings.data_dir, "this boot", [], rig.clock)
        main.serve(compactor, rig.settings, cast(Any, life), note)
        assert {cuts > before for cuts, rewritten in life.seen if rewritten} == {True}
        assert {rewritten for cuts, rewritten in life.seen if cuts == before} == {0}
        assert life.seen[-1][1] == 2
    finally:
        rig.close()


def test_upkeep_and_tidying_do_not_wait_for_a_long_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(
        str(tmp_path), segment_max_events="8", segment_rewrite_dead_ratio="0.1", checkpoint_interval_ms="86400000"
    )
    compaction = Compaction(rig)
    try:
        for number in range(16):
            rig.append("t", b"%d" % number, tag=b"x" if number % 2 else b"y")
        compaction.cut()
        rig.call(DeleteRecords("t", None, "eq", b"x"))
        compaction.begin_again()
        compactor = compaction.compactor
        life = Serving(rig, 130, step_ms=1_000)
        begun_ms = rig.clock.ms
        tidied: list[int] = []
        monkeypatch.setattr(compactor, "tidy", lambda: tidied.append(rig.clock.ms - begun_ms))
        note = ClockNote(rig.fs, rig.settings.data_dir, "this boot", [], rig.clock)
        main.serve(compactor, rig.settings, cast(Any, life), note)
        assert [rewritten for _, rewritten in life.seen[:60]] == [0] * 60
        assert life.seen[-1][1] == 2
        assert tidied == [60_000, 120_000]
    finally:
        rig.close()
