"""The time that a service trusted last, on the disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tests.storage.faults import CHANGING_CALLS, Fault, FaultyFileSystem
from tests.walshard.rig import TestClock
from topics.compactor.life import NOTE_MS, ClockNote
from topics.core.clock import TrustedTime
from topics.shm.control import CELL_WORDS, ProcessCell, Role
from topics.storage.layout import CLOCK_NAME
from topics.storage.notes import note_path, read_clock, write_clock

TIME = TrustedTime("b0a7", 1_700_000_000_000, 81_234_567)


def test_it_is_as_it_was_written(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    assert read_clock(fs, str(tmp_path)) is None
    for trusted in (TIME, TIME._replace(wall_ms=5)):
        write_clock(fs, str(tmp_path), trusted)
        assert read_clock(fs, str(tmp_path)) == trusted
    assert os.listdir(tmp_path / "meta") == ["clock.json"]


@pytest.mark.parametrize("fault", range(1, 6))
def test_a_failed_write_leaves_the_former_one(tmp_path: Path, fault: int) -> None:
    fs = FaultyFileSystem()
    write_clock(fs, str(tmp_path), TIME)
    newer = TIME._replace(wall_ms=TIME.wall_ms + 1)
    fs.arm(Fault(fault, errno.EIO, calls=CHANGING_CALLS))
    failed = False
    try:
        write_clock(fs, str(tmp_path), newer)
    except OSError:
        failed = True
    assert failed or not fs.struck
    assert read_clock(fs, str(tmp_path)) in ((TIME, newer) if failed else (newer,))


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"wall_ms": -1}, {"wall_ms": 1 << 60}, {"boot_id": 5}, {"monotonic_ms": None}]
)
def test_what_is_not_understood_is_not_guessed(tmp_path: Path, change: dict[str, object]) -> None:
    fs = FaultyFileSystem()
    write_clock(fs, str(tmp_path), TIME)
    path = Path(note_path(str(tmp_path), CLOCK_NAME))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OSError, match=r"clock\.json"):
        read_clock(fs, str(tmp_path))
    path.write_bytes(b"\xff")
    with pytest.raises(OSError, match=r"clock\.json"):
        read_clock(fs, str(tmp_path))


def test_the_compactor_notes_what_all_shards_trust(tmp_path: Path) -> None:
    fs, clock = FaultyFileSystem(), TestClock()
    cells = [ProcessCell(memoryview(bytearray(CELL_WORDS * 8)).cast("Q"), Role.WALSHARD) for _ in range(3)]
    note = ClockNote(fs, str(tmp_path), "b0a7", cells, clock)
    note.keep()
    assert read_clock(fs, str(tmp_path)) is None, "no shard has looked yet"
    cells[0].clock_offset_ms = 7
    cells[2].clock_offset_ms = -5
    note.keep()
    assert read_clock(fs, str(tmp_path)) == TrustedTime("b0a7", clock.ms - 5, clock.ms)
    noted_ms = clock.ms
    clock.ms += NOTE_MS - 1
    note.keep()
    assert read_clock(fs, str(tmp_path)) == TrustedTime("b0a7", noted_ms - 5, noted_ms)
    clock.ms += 1
    fs.arm(Fault(1, errno.ENOSPC))
    note.keep()
    assert read_clock(fs, str(tmp_path)) == TrustedTime("b0a7", noted_ms - 5, noted_ms)
    note.close()
    assert read_clock(fs, str(tmp_path)) == TrustedTime("b0a7", clock.ms - 5, clock.ms)
