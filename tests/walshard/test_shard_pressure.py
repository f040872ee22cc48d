"""The commit window and a shard's samples, over real rings and a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.walshard.rig import Rig
from topics.core.governor import FULL_FROM, INTERVAL_MS, WINDOW_US, Brake
from topics.shm.control import Role
from topics.walshard import shard_pressure as module
from topics.walshard.shard_pressure import GATHERED_BYTES, ShardPressure

MS = 1_000_000
LIMIT_BYTES = 1000


class Pressed:
    """A shard, and the pressure of the service as another process says it is."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.now = 0
        self.slept: list[float] = []
        self.lag_bytes = 0
        self.meanwhile: Callable[[], None] = lambda: None
        """Work of others while the shard sleeps."""
        frontend = rig.shared.control.cell(Role.FRONTEND, 0)
        frontend.supervisor.set("pid", 1)
        rig.cell.supervisor.set("pid", 1)
        self.others = frontend
        self.pressure = ShardPressure(
            rig.shared.control,
            rig.cell,
            rig.outbox,
            Brake(LIMIT_BYTES),
            lambda: self.lag_bytes,
            lambda: self.now,
            self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += round(seconds * 1e9)
        self.meanwhile()

    def turn(self, took_ms: int = 0) -> bool:
        """One turn of the shard's loop."""
        self.pressure.gather()

        def step() -> bool:
            worked = self.rig.step()
            self.now += took_ms * MS * worked
            return worked

        worked = self.pressure.group(step)
        self.pressure.sample()
        return worked

    def press(self, pressure: float) -> None:
        self.others.set("pressure_ppm", round(pressure * 1e6))
        self.now += INTERVAL_MS * MS
        self.turn()


@pytest.fixture
def pressed(rig: Rig) -> Pressed:
    return Pressed(rig)


def test_without_pressure_a_group_begins_at_once(pressed: Pressed) -> None:
    for _ in range(3):
        pressed.rig.post_append("t", [b"1"])
        assert pressed.turn()
    assert pressed.slept == []
    assert pressed.rig.cell.get("commit_window_us") == 0


def test_under_pressure_groups_are_a_window_apart(pressed: Pressed) -> None:
    pressed.press(1.0)
    assert pressed.rig.cell.get("commit_window_us") == WINDOW_US[1]
    pressed.rig.post_append("t", [b"1"])
    assert pressed.turn()
    assert pressed.slept == [], "what comes after a quiet time begins at once"
    pressed.now += 4 * MS
    for _ in range(5):
        pressed.rig.post_append("t", [b"1"])
    assert pressed.turn()
    assert sum(pressed.slept) == pytest.approx(0.006)
    assert pressed.rig.cell.get("queue_depth") == 5, "one group"
    pressed.press(0.4)
    assert pressed.rig.cell.get("commit_window_us") == 0


def test_nobody_waits_for_a_group_that_is_large_already(pressed: Pressed) -> None:
    pressed.press(1.0)
    pressed.rig.post_append("t", [b"1"])
    pressed.turn()
    pressed.rig.post_append("t", [b'"%b"' % (b"x" * GATHERED_BYTES)])
    assert pressed.turn()
    assert pressed.slept == []


def test_nobody_waits_while_a_ring_is_half_full(pressed: Pressed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHERED_BYTES", 1 << 30)
    pressed.press(1.0)
    pressed.rig.post_append("t", [b"1"])
    pressed.turn()
    while pressed.rig.outbox.fullness < FULL_FROM:
        pressed.rig.post_append("t", [b'"%b"' % (b"x" * 100_000)])
    assert pressed.turn()
    assert pressed.slept == []


def test_a_window_ends_when_a_ring_is_half_full(pressed: Pressed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small ring is full long before a window is over, and nobody can write until it is read."""
    monkeypatch.setattr(module, "GATHERED_BYTES", 1 << 30)
    pressed.press(1.0)
    pressed.rig.post_append("t", [b"1"])
    pressed.turn()
    pressed.rig.post_append("t", [b"1"])

    def others_write() -> None:
        if pressed.slept[2:]:
            while pressed.rig.outbox.fullness < FULL_FROM:
                pressed.rig.post_append("t", [b'"%b"' % (b"x" * 100_000)])

    pressed.meanwhile = others_write
    assert pressed.turn()
    assert sum(pressed.slept) == pytest.approx(0.003)


def test_an_idle_shard_does_not_wait_for_a_window(pressed: Pressed) -> None:
    pressed.press(1.0)
    pressed.rig.post_append("t", [b"1"])
    pressed.turn()
    assert not pressed.turn()
    assert pressed.slept == []


def test_slow_groups_are_pressure_and_it_passes(pressed: Pressed) -> None:
    for _ in range(5):
        pressed.rig.post_append("t", [b"1"])
        pressed.turn(took_ms=500)
    assert pressed.rig.cell.get("pressure_ppm") > 900_000
    assert pressed.rig.cell.get("deferring") == 1
    assert pressed.rig.shared.control.pressure() > 0.9
    # It slept meanwhile: one turn makes up for all the samples.
    pressed.now += 5_000 * MS
    pressed.turn()
    assert pressed.rig.cell.get("pressure_ppm") < 250_000
    assert pressed.rig.cell.get("deferring") == 0


def test_a_process_that_is_gone_presses_nobody(pressed: Pressed) -> None:
    pressed.press(1.0)
    assert pressed.rig.shared.control.pressure() == 1.0
    pressed.others.supervisor.set("pid", 0)
    assert pressed.rig.shared.control.pressure() < 0.3


def test_a_shard_whose_log_outgrows_its_snapshots_pauses_behind_each_group(pressed: Pressed) -> None:
    def paused_after(lag_bytes: int, worked_ms: int) -> float:
        pressed.lag_bytes = lag_bytes
        pressed.press(0.0)
        pressed.slept.clear()
        pressed.rig.post_append("t", [b"1"])
        assert pressed.turn(worked_ms)
        return sum(pressed.slept)

    assert paused_after(0, 1) == paused_after(LIMIT_BYTES // 2, 1) == 0
    assert paused_after(LIMIT_BYTES, 1) == pytest.approx(0.004)
    assert pressed.rig.cell.get("brake_ppm") == 500_000
    assert paused_after(LIMIT_BYTES * 9, 1) == pytest.approx(0.008)
    assert paused_after(LIMIT_BYTES * 9, 1000) == pytest.approx(0.2), "never for long at a time"
    assert pressed.rig.cell.get("busy_ppm") < 1_000_000, "a pause is no work"
    assert paused_after(0, 1) == 0
    assert pressed.rig.cell.get("brake_ppm") == 0


def test_a_pause_ends_when_the_compactor_asks(pressed: Pressed) -> None:
    """Its marks and snapshots are what ends the pauses."""
    shared = pressed.rig.shared
    pressed.lag_bytes = LIMIT_BYTES * 9
    pressed.press(0.0)
    pressed.slept.clear()
    pressed.rig.post_append("t", [b"1"])

    def ask() -> None:
        shared.rings[shared.compactor_row][0].requests.push(b"a request")

    pressed.meanwhile = ask
    pressed.turn(1000)
    assert sum(pressed.slept) == pytest.approx(0.001)
