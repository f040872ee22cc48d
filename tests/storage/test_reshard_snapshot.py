"""A changed shard count when a snapshot holds the beginning of every log: both change together, or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.storage.faults import Crash, Fault, FaultyFileSystem
from tests.storage.test_reshard import BOOT_ID, FILE_BYTES, NAMES, by_topic, owner_of, write_logs
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import FrameType
from topics.storage.logfile import RefusedLog, WalIdentity, WalPosition, read_first_start
from topics.storage.recovery import Recovery
from topics.storage.reshard import Move, NewLog, finish_swap, needs_reshard, reshard


class Snapshot(NamedTuple):
    """The part of a real snapshot that this needs: frames stand for the state they lead to."""

    shards: int
    log_ids: dict[int, int]
    positions: dict[int, WalPosition]
    folded: dict[int, bytes]

    def fits(self, data_dir: str) -> bool:
        for shard, log_id in self.log_ids.items():
            start = read_first_start(FaultyFileSystem(), layout.group_dir(data_dir, shard, self.shards))
            if start is None or start.log_id != log_id:
                return False
        return True


def behind(data_dir: str, snapshot: Snapshot) -> dict[int, bytes]:
    """The frames of every topic that the logs hold behind the snapshot."""
    found: dict[int, bytes] = {}
    for shard in range(snapshot.shards):
        directory = layout.group_dir(data_dir, shard, snapshot.shards)
        identity = WalIdentity(shard, snapshot.shards, BOOT_ID)
        for batch in Recovery(FaultyFileSystem(), directory, identity, start=snapshot.positions.get(shard)):
            for offset, total_len, _, _, topic_id, *_ in batch.frames:
                assert owner_of(snapshot.shards)(NAMES[topic_id]) == shard
                found[topic_id] = found.get(topic_id, b"") + bytes(batch.buffer[offset : offset + total_len])
    return found


def trimmed_logs(data_dir: str, shards: int, keep: float) -> tuple[Snapshot, dict[int, bytes]]:
    """Logs whose first files are dropped, the snapshot that allows it, and all frames of every topic."""
    write_logs(data_dir, shards, rounds=2 + 4 * shards)
    original = by_topic(data_dir, shards)
    snapshot = Snapshot(shards, {}, {}, {})
    for shard in range(shards):
        directory = layout.group_dir(data_dir, shard, shards)
        first = read_first_start(FaultyFileSystem(), directory)
        if first is None:
            continue
        snapshot.log_ids[shard] = first.log_id
        recovery = Recovery(FaultyFileSystem(), directory, WalIdentity(shard, shards, BOOT_ID))
        frames = [(batch.file_no, batch.buffer, frame) for batch in recovery for frame in batch.frames]
        if not frames:
            snapshot.positions[shard] = WalPosition(1, 0)
            continue
        writes = [at + 1 for at, (_, _, frame) in enumerate(frames) if not frame[3] & 8]
        cut = writes[int(len(writes) * keep)]
        for _, buffer, (offset, total_len, _, _, topic_id, *_) in frames[:cut]:
            piece = bytes(buffer[offset : offset + total_len])
            snapshot.folded[topic_id] = snapshot.folded.get(topic_id, b"") + piece
        file_no, _, frame = frames[cut]
        snapshot.positions[shard] = WalPosition(file_no, frame[0])
        for number in range(1, file_no):
            os.unlink(layout.log_path(directory, number))
    assert any(position.file_no > 2 for position in snapshot.positions.values())
    return snapshot, original


def whole(data_dir: str, snapshot: Snapshot) -> dict[int, bytes]:
    later = behind(data_dir, snapshot)
    return {topic_id: snapshot.folded.get(topic_id, b"") + later.get(topic_id, b"") for topic_id in NAMES}


def start_up(data_dir: str, shards: int, snapshots: list[Snapshot], fs: FileSystem | None = None) -> Snapshot:
    """Start as the service does; return the snapshot that is in force afterwards."""
    fs = fs or FaultyFileSystem()

    def before_swap(logs: list[NewLog]) -> None:
        snapshots.append(
            Snapshot(
                shards,
                {log.shard: log.log_id for log in logs},
                {log.shard: WalPosition(1, 0) for log in logs},
                snapshots[0].folded,
            )
        )

    if needs_reshard(fs, data_dir, shards):
        finish_swap(fs, data_dir)
        (current,) = [snapshot for snapshot in snapshots if snapshot.fits(data_dir)]
        if needs_reshard(fs, data_dir, shards):
            reshard(
                fs,
                data_dir,
                shards,
                BOOT_ID,
                owner_of(shards),
                lambda _share: None,
                file_bytes=FILE_BYTES,
                move=Move(
                    {
                        layout.group_dir(data_dir, shard, current.shards): position
                        for shard, position in current.positions.items()
                    },
                    {topic_id: NAMES[topic_id] for topic_id in current.folded},
                    before_swap=before_swap,
                ),
            )
    (current,) = [snapshot for snapshot in snapshots if snapshot.fits(data_dir)]
    return current


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_there_and_back(tmp_path: Path, keep: float) -> None:
    data_dir = str(tmp_path)
    snapshot, original = trimmed_logs(data_dir, 1, keep)
    assert whole(data_dir, snapshot) == original
    assert set(snapshot.folded) == set(NAMES)
    snapshots = [snapshot]
    for shards in (3, 2, 1, 4):
        current = start_up(data_dir, shards, snapshots)
        assert current.shards == shards
        assert whole(data_dir, current) == original
        copied = b"".join(behind(data_dir, current).values())
        assert len(copied) < sum(map(len, original.values())), "only what is behind the positions"
        for shard in range(shards):
            assert read_first_start(FaultyFileSystem(), layout.group_dir(data_dir, shard, shards)) is not None


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(3, 2, marks=pytest.mark.long)])
@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH], ids=["before", "after"])
def test_a_crash_at_each_step(tmp_path: Path, before: int, after: int, error: int) -> None:
    origin = str(tmp_path / "origin")
    os.mkdir(origin)
    snapshot, original = trimmed_logs(origin, before, 0.5)
    shutil.copytree(origin, tmp_path / "clean")
    clean = FaultyFileSystem()
    start_up(str(tmp_path / "clean"), after, [_moved(snapshot)], clean)
    in_force = set()
    for nth in range(1, len(clean.log) + 1):
        wanted = (after, before)[nth % 2]  # the other way out of a crash: back to the former count
        data_dir = str(tmp_path / f"{nth}")
        shutil.copytree(origin, data_dir)
        snapshots = [snapshot]
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        with pytest.raises(Crash):
            start_up(data_dir, after, snapshots, fs)
        fs.bury()
        current = start_up(data_dir, wanted, snapshots)
        assert current.shards == wanted
        assert whole(data_dir, current) == original
        in_force.add(snapshots.index(current))
        assert os.listdir(data_dir) == [layout.WAL_NAME]
        shutil.rmtree(data_dir)
    assert in_force >= {0, 1, 2}, "the old snapshot, the new one, one of a repeated run"


def _moved(snapshot: Snapshot) -> Snapshot:
    return snapshot._replace(folded=dict(snapshot.folded))


def test_the_new_logs_are_on_the_disk_before_their_snapshot(tmp_path: Path) -> None:
    snapshot, _ = trimmed_logs(str(tmp_path), 1, 0.5)
    fs = FaultyFileSystem()
    calls: list[str] = []
    reshard(
        fs,
        str(tmp_path),
        2,
        BOOT_ID,
        owner_of(2),
        lambda _share: None,
        file_bytes=FILE_BYTES,
        move=Move(
            {layout.group_dir(str(tmp_path), 0, 1): snapshot.positions[0]},
            NAMES,
            before_swap=lambda _logs: calls.extend(fs.log),
        ),
    )
    assert calls[-6:] == ["fdatasync", "pwritev", "fdatasync"] * 2
    assert fs.log[len(calls) :][:4] == ["rename", "fsync_dir", "rename", "fsync_dir"]


def test_a_snapshot_of_a_log_that_is_gone_is_refused(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    snapshot, _ = trimmed_logs(data_dir, 1, 0.5)
    missing = layout.group_dir(data_dir, 1, 2)
    with pytest.raises(RefusedLog, match=r"shard-01: the log is missing, and the snapshot goes on in it"):
        reshard(
            FaultyFileSystem(),
            data_dir,
            2,
            BOOT_ID,
            owner_of(2),
            lambda _share: None,
            move=Move({layout.group_dir(data_dir, 0, 1): snapshot.positions[0], missing: WalPosition(1, 0)}, NAMES),
        )
    assert whole(data_dir, snapshot).keys() == set(NAMES)


def test_a_topic_that_neither_log_nor_snapshot_knows_is_refused(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    snapshot, _ = trimmed_logs(data_dir, 1, 0.5)
    with pytest.raises(RefusedLog, match="which the log never created"):
        reshard(
            FaultyFileSystem(),
            data_dir,
            2,
            BOOT_ID,
            owner_of(2),
            lambda _share: None,
            move=Move({layout.group_dir(data_dir, 0, 1): snapshot.positions[0]}, {}),
        )


def test_creations_are_behind_none_of_these_positions(tmp_path: Path) -> None:
    """The tests above rest on this: without the snapshot's names nothing could be dealt out."""
    snapshot, _ = trimmed_logs(str(tmp_path), 1, 0.5)
    recovery = Recovery(
        FaultyFileSystem(),
        layout.group_dir(str(tmp_path), 0, 1),
        WalIdentity(0, 1, BOOT_ID),
        start=snapshot.positions[0],
    )
    assert FrameType.TOPIC_CREATE not in {frame[2] for batch in recovery for frame in batch.frames}
