"""The compactor fails or is killed at every call to the disk of a cut: nothing is lost, nothing is invented, the next
cut does the rest, and what it leaves behind checks clean.

One call in three unless TOPICS_CALL_STRIDE says otherwise; `make crash` takes every single one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.storage.faults import CHANGING_CALLS, Crash, Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.shm.topic_messages import DeleteRecords, DeleteTopic, PutTopic
from topics.storage.verify import verify

pytestmark = pytest.mark.long

WRITES = frozenset(("pwritev",))


class Kind(NamedTuple):
    error: int
    calls: frozenset[str] = CHANGING_CALLS
    at_least: int = 60
    """A sweep that reaches fewer calls than this has lost its subject."""


KINDS = {
    "fails": Kind(errno.EIO),
    "short": Kind(Fault.SHORT, WRITES, 15),
    "killed before": Kind(Fault.CRASH),
    "killed within": Kind(Fault.TORN_CRASH, WRITES, 15),
    "killed after": Kind(Fault.LATE_CRASH),
}


class World:
    """Topics with everything that a cut can meet, one cut behind them; the compactor has a file system of its own."""

    def __init__(self, data_dir: str) -> None:
        self.rig = Rig(data_dir, segment_max_events="6", segment_rewrite_dead_ratio="0.2", checkpoint_wal_bytes="64KiB")
        self.compaction = Compaction(self.rig)
        self.fs = FaultyFileSystem()
        self.rig.call(PutTopic("capped", TopicConfig(cap_records=5), True))
        self._write(1, 15)
        self._cut()
        self._write(16, 30)
        self.rig.call(DeleteRecords("tagged", None, "eq", b"odd"))
        self.rig.call(DeleteRecords("cut", 20, None, b""))
        self.rig.call(DeleteTopic("gone", False))
        self.expected = {
            "plain": list(range(1, 31)),
            "capped": list(range(26, 31)),
            "tagged": list(range(2, 31, 2)),
            "cut": list(range(20, 31)),
        }

    def _write(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            for name in ("plain", "capped", "cut", "gone"):
                self.rig.append(name, b"%d" % number)
            self.rig.append("tagged", b"%d" % number, tag=b"odd" if number % 2 else b"even")

    def _cut(self) -> None:
        """All that a compactor does, through its own file system."""
        shard_fs, self.rig.fs = self.rig.fs, self.fs
        try:
            self.compaction.cut()
            self.compaction.upkeep()
            self.compaction.cut()
        finally:
            self.rig.fs = shard_fs

    def try_cut(self, fault: Fault) -> bool:
        """True when the fault struck."""
        self.fs.arm(fault)
        try:
            self._cut()
        except OSError:
            pass
        except Crash:
            self.fs.bury()
            self.fs = FaultyFileSystem()
            self.compaction.begin_again()
            return True
        struck = bool(self.fs.struck)
        self.fs.arm(None)
        return struck

    def check(self) -> None:
        found = {name: self.compaction.read(name) for name in self.expected}
        assert found == {name: [(n, b"%d" % n) for n in numbers] for name, numbers in self.expected.items()}

    def go_on(self) -> None:
        """Check that the next cuts work, and that the service starts again on what they left."""
        self.check()
        self._cut()
        self.check()
        self.compaction.begin_again()
        self._cut()
        self.rig.restart_service()
        self.check()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", KINDS)
def test_every_call_of_a_cut(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    stride = int(os.environ.get("TOPICS_CALL_STRIDE", "3"))
    nth = 1 + random.Random(name).randrange(stride) - stride
    struck = True
    while struck:
        nth += stride
        data_dir = str(tmp_path / str(nth))
        world = World(data_dir)
        try:
            struck = world.try_cut(Fault(nth, kind.error, calls=kind.calls))
            if struck:
                world.go_on()
        finally:
            world.rig.close()
        report = verify(data_dir, lambda *_: None)
        assert not report.damage, (nth, report.damage)
        shutil.rmtree(data_dir)
    print(f"{name}: {nth - 1} calls, one in {stride}")
    assert nth > kind.at_least
