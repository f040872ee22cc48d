"""A segment is sealed when it is old, whether anything is written or not (storage.md Segments, SEGMENT_MAX_AGE_MS)."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from topics.compactor.checkpoints import SEAL_AGAIN_MAX_MS, SEAL_AGAIN_MS
from topics.core.segment_list import SEALED

AGE_MS = 5_000


pytestmark = pytest.mark.shard(segment_max_age_ms=str(AGE_MS))


def settle(compaction: Compaction) -> None:
    """Do what the process does when a cut is due, as long as there is reason for one."""
    for _ in range(5):
        if not compaction.compactor.has_news:
            return
        compaction.cut()
    pytest.fail("an idle service is cut again and again")


def test_an_idle_service_seals_what_is_old(compaction: Compaction) -> None:
    compaction.rig.append("t", b"1", b"2")
    settle(compaction)
    assert [info.flags for info in compaction.segments("t")] == [0]
    compaction.rig.clock.ms += AGE_MS
    settle(compaction)
    assert [info.flags for info in compaction.segments("t")] == [SEALED]


def test_one_that_cannot_be_sealed_is_no_news_for_ever(compaction: Compaction) -> None:
    compaction.rig.append("t", b"1", b"2")
    settle(compaction)
    path = next(Path(compaction.rig.settings.data_dir).rglob("*.data"))
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    compaction.rig.clock.ms += AGE_MS
    settle(compaction)
    path.write_bytes(content)
    settle(compaction)
    compaction.rig.append("t", b"3")
    settle(compaction)
    assert compaction.segments("t")[0].flags == SEALED
    assert [seq for seq, _ in compaction.read("t")] == [1, 2, 3]


def test_one_whose_tags_cannot_be_written_holds_up_no_snapshot(compaction: Compaction) -> None:
    fs = compaction.rig.fs
    assert isinstance(fs, FaultyFileSystem)
    compaction.rig.append("t", b"1", b"2")
    settle(compaction)
    compaction.rig.clock.ms += AGE_MS
    fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"rename"})))
    assert compaction.cut()
    assert fs.struck == 1
    assert compaction.cut()
    assert [info.flags for info in compaction.segments("t")] == [0], "it is tried again a while later"
    compaction.rig.clock.ms += SEAL_AGAIN_MS
    settle(compaction)
    assert [info.flags for info in compaction.segments("t")] == [SEALED]


def test_one_that_is_repaired_is_sealed_though_nothing_is_written(compaction: Compaction) -> None:
    compaction.rig.append("t", b"1", b"2")
    settle(compaction)
    path = next(Path(compaction.rig.settings.data_dir).rglob("*.data"))
    content = path.read_bytes()
    path.unlink()
    compaction.rig.clock.ms += AGE_MS
    settle(compaction)
    snapshots = compaction.life.cell.get("snapshots")
    for _ in range(10 * SEAL_AGAIN_MAX_MS // SEAL_AGAIN_MS):
        compaction.rig.clock.ms += SEAL_AGAIN_MS
        settle(compaction)
    assert 10 <= compaction.life.cell.get("snapshots") - snapshots <= 20, "it is looked at ever more seldom"
    path.write_bytes(content)
    compaction.rig.clock.ms += SEAL_AGAIN_MAX_MS
    settle(compaction)
    assert [info.flags for info in compaction.segments("t")] == [SEALED]
