"""A changed shard count over a snapshot: segments stay where they are, everything else finds its new owner."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.storage.faults import Crash, Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core.names import owner_shard
from topics.settings import Settings
from topics.settings import load as load_settings
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage import layout
from topics.storage.filesystem import FileSystem, OsFileSystem, boot_id
from topics.storage.reshard import finish_swap, needs_reshard, reshard
from topics.storage.snapshot import load_snapshot, plan_move

NAMES = [f"topic-{number}" for number in range(12)]
Content = dict[str, list[tuple[int, bytes]]]


def settings(data_dir: str, shards: int) -> Settings:
    return load_settings({}, {"data_dir": data_dir, "wal_shards": str(shards), "wal_file_bytes": "1MiB"})


def move(fs: FileSystem, data_dir: str, shards: int) -> None:
    """Move the logs as the supervisor's process does."""

    def owner(name: str) -> int:
        return owner_shard(name, shards)

    if not needs_reshard(fs, data_dir, shards):
        return
    finish_swap(fs, data_dir)
    plan = plan_move(fs, data_dir, owner)
    assert plan is not None
    reshard(fs, data_dir, shards, boot_id(), owner, lambda _share: None, file_bytes=1 << 20, move=plan)


def make(data_dir: str) -> Content:
    """One shard's directory: much of it in segments and no longer in the log."""
    rig = Rig(data_dir, segment_max_events="8")
    compaction = Compaction(rig)
    for turn in range(3):
        for name in NAMES:
            for number in range(7):
                rig.append(name, b'"%d-%d%s"' % (turn, number, b"x" * 10_000), tag=b"odd" if number % 2 else b"even")
        compaction.cut()
    rig.call(DeleteTopic(NAMES[0], False))
    for name in NAMES[1:]:
        rig.append(name, b'"behind"', key=name.encode())
        rig.call(DeleteRecords(name, 10, "eq", b"odd"))
    content = {name: compaction.read(name) for name in NAMES[1:]}
    rig.shard.close()
    rig.close()
    assert not Path(layout.log_path(layout.wal_dir(data_dir), 1)).exists()
    return content


def found(data_dir: str) -> Content:
    rig = Rig(data_dir, segment_max_events="8")
    try:
        compaction = Compaction(rig)
        content = {name: compaction.read(name) for name in NAMES[1:]}
        assert not rig.exists(NAMES[0])
        for name in NAMES[1:]:
            assert rig.append(name, b'"behind"', key=name.encode()).deduped
            view = rig.view(name)
            assert view.records == len(content[name])
        compaction.cut()
        assert {name: compaction.read(name) for name in NAMES[1:]} == content
        # Its name is known, though its log is not what it was.
        rig.append(NAMES[0], b"1")
        view = rig.view(NAMES[0])
        assert view.recreated
        rig.call(DeleteTopic(NAMES[0], False))
        return content
    finally:
        rig.close()


def test_there_and_back(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    content = make(data_dir)
    for shards in (3, 2, 4, 1):
        move(OsFileSystem(), data_dir, shards)
        snapshot = load_snapshot(OsFileSystem(), data_dir)
        assert snapshot is not None
        assert [(part.shard, part.shards) for part in snapshot.parts] == [(shard, shards) for shard in range(shards)]
        for part in snapshot.parts:
            for topic in part.decoded().topics:
                assert owner_shard(topic.name, shards) == part.shard
    assert found(data_dir) == content


@pytest.mark.long
@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH], ids=["before", "after"])
def test_killed_at_calls_all_over_and_started_again(tmp_path: Path, error: int) -> None:
    original = tmp_path / "original"
    content = make(str(original))
    counting = FaultyFileSystem()
    shutil.copytree(original, tmp_path / "counted")
    move(counting, str(tmp_path / "counted"), 2)
    assert len(counting.log) > 60
    step = 5  # each is several lives; neighbouring calls write the same file
    for nth in range(1, len(counting.log) + 1, step):
        data_dir = str(tmp_path / f"{nth}")
        shutil.copytree(original, data_dir)
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        with pytest.raises(Crash):
            move(fs, data_dir, 2)
        fs.bury()
        if nth % 2:
            move(OsFileSystem(), data_dir, 2)
        move(OsFileSystem(), data_dir, 1)
        assert found(data_dir) == content, (nth, counting.log[nth - 1])
        shutil.rmtree(data_dir)
