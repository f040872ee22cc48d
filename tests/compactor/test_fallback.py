"""The newest snapshot is damaged at rest, and so is the next one: the one to fall back on still goes with its logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.faults import Crash
from tests.walshard.compaction import Compaction
from topics.core.names import owner_shard
from topics.shm.topic_messages import DeleteRecords
from topics.storage import layout, reshard
from topics.storage.filesystem import OsFileSystem, boot_id
from topics.storage.origin import Origin, RestingEnds
from topics.storage.snapshot import plan_move
from topics.storage.verify import verify

BLOCKS = 6
BLOCK = b"x" * 200_000
"""A block of which six do not fit into one log file."""


pytestmark = pytest.mark.shard(segment_max_events="4", segment_rewrite_dead_ratio="0.3")


def write(compaction: Compaction) -> None:
    for _ in range(BLOCKS):
        compaction.rig.append("large", BLOCK)


def damage_newest(compaction: Compaction, how: str) -> None:
    data_dir = compaction.rig.settings.data_dir
    path = Path(layout.snapshot_path(data_dir, layout.list_snapshots(compaction.rig.fs, data_dir)[-1]))
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])


def first_log_file(compaction: Compaction) -> int:
    return layout.list_log_files(compaction.rig.fs, layout.group_dir(compaction.rig.settings.data_dir, 0, 1))[0]


def versions(compaction: Compaction) -> set[int]:
    """Return the versions of the first segment of topic t, by its files."""
    view = compaction.rig.view("t")
    names = layout.discover_segments(
        compaction.rig.fs, layout.topic_dir(compaction.rig.settings.data_dir, view.topic_id)
    )
    return {name.version for name in names if name.first_seq == 1}


@pytest.mark.parametrize("begins_again", [False, True])
@pytest.mark.parametrize("how", ["short", "gone"])
def test_what_the_older_snapshot_needs_stays(compaction: Compaction, how: str, begins_again: bool) -> None:
    rig = compaction.rig
    for number in range(1, 9):
        rig.append("t", b"%d" % number, tag=b"" if number % 2 else b"even")
    compaction.cut()
    rig.call(DeleteRecords("t", None, "eq", b"even"))
    write(compaction)
    compaction.cut()
    compaction.upkeep()
    fallback_begins = first_log_file(compaction)
    write(compaction)
    compaction.cut()
    assert versions(compaction) == {0, 1}
    damage_newest(compaction, how)
    if begins_again:
        compaction.begin_again()
    write(compaction)
    rig.append("t", b"9")
    compaction.cut()
    assert versions(compaction) == {0, 1}
    damage_newest(compaction, "short")
    rig.restart_service()
    compaction.begin_again()
    assert [seq for seq, _ in compaction.read("t")] == [1, 3, 5, 7, 9]
    assert len(compaction.read("large")) == 3 * BLOCKS
    for _ in range(4):
        write(compaction)
        compaction.cut()
    assert versions(compaction) == {1}
    assert first_log_file(compaction) > fallback_begins + 2
    assert len(compaction.read("large")) == 7 * BLOCKS
    rig.shard.close()
    assert verify(rig.settings.data_dir, lambda *_: None).damage == []


def test_a_change_of_the_shard_count_that_was_given_up_pushes_out_none(compaction: Compaction) -> None:
    """It was killed before its swap, and the service goes on with its former count: its snapshot is of no use."""
    rig = compaction.rig
    data_dir, fs = rig.settings.data_dir, OsFileSystem()

    def lay_out(shards: int, dies: bool) -> None:
        def owner(name: str) -> int:
            return owner_shard(name, shards)

        def before_swap(new_logs: list[reshard.NewLog]) -> None:
            assert move is not None
            move.before_swap(new_logs)
            raise Crash

        reshard.finish_swap(fs, data_dir)
        move = plan_move(fs, data_dir, owner)
        assert move is not None
        used = move._replace(before_swap=before_swap) if dies else move
        reshard.reshard(fs, data_dir, shards, boot_id(), owner, lambda _share: None, file_bytes=1 << 20, move=used)

    def give_up() -> None:
        with pytest.raises(Crash):
            lay_out(2, dies=True)
        lay_out(1, dies=False)

    rig.append("t", b"1")
    compaction.cut()
    rig.append("t", b"2")
    compaction.cut()
    compaction.begin_again()
    rig.restart_service(give_up)
    assert layout.list_snapshots(fs, data_dir) == [1, 2, 3]
    newest = Path(layout.snapshot_path(data_dir, 2))
    content = newest.read_bytes()
    newest.write_bytes(content[:-1])
    compaction.begin_again()
    rig.restart_service(give_up)
    assert compaction.read("t") == [(1, b"1"), (2, b"2")], "the older one counts"
    newest.write_bytes(content)
    compaction.begin_again()
    rig.restart_service()
    rig.append("t", b"3")
    compaction.cut()
    assert layout.list_snapshots(fs, data_dir) == [2, 5]
    damage_newest(compaction, "short")
    compaction.begin_again()
    rig.restart_service()
    assert compaction.read("t") == [(1, b"1"), (2, b"2"), (3, b"3")]


def test_a_log_that_is_damaged_while_it_is_archived_is_named(compaction: Compaction) -> None:
    write(compaction)
    fs, data_dir = compaction.rig.fs, compaction.rig.settings.data_dir
    ends = RestingEnds(data_dir)
    path = Path(layout.log_path(layout.wal_dir(data_dir), 1))
    content = path.read_bytes()
    path.write_bytes(content[:20] + b"x" + content[21:])
    origin = Origin(fs, data_dir, ends)
    found = ends.read()
    assert found is not None
    (log,) = origin.logs(found)
    with pytest.raises(OSError, match="is not a log file: checksum does not match") as caught:
        origin.start(log, None)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("damage", ["changed", "empty"])
def test_a_damaged_log_file_that_only_the_older_one_needs_holds_up_no_start(
    compaction: Compaction, damage: str
) -> None:
    rig = compaction.rig
    for _ in range(3):
        write(compaction)
        compaction.cut()
    path = Path(layout.log_path(layout.wal_dir(rig.settings.data_dir), first_log_file(compaction)))
    content = path.read_bytes()
    ends = RestingEnds(rig.settings.data_dir).read()
    path.write_bytes(b"" if damage == "empty" else content[:20] + b"x" + content[21:])
    assert RestingEnds(rig.settings.data_dir).read() == ends, "nor a backup"
    compaction.begin_again()
    rig.restart_service()
    assert len(compaction.read("large")) == 3 * BLOCKS
    report = verify(rig.settings.data_dir, lambda *_: None)
    assert [finding.path for finding in report.damage] == [str(path)]
    assert [note for note in report.notes if "the log knows no such topic" in note] == []
    for _ in range(2):
        write(compaction)
        compaction.cut()
    assert not path.exists()
    assert verify(rig.settings.data_dir, lambda *_: None).damage == []
