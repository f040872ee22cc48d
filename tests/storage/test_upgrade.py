"""Data of release 0.1.0: which of them have copies that are in no log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.storage.faults import FaultyFileSystem
from tests.storage.logs import TS_MS, appends, commit, kill, open_writer, patch
from topics.core.fold import Fold
from topics.core.record_index import UnlocatedIndex
from topics.core.routers import FeedFrameBody, FeedRouter, Router, RouterSpec
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem, ReadOnlyFileSystem, boot_id
from topics.storage.frame import FrameType, encode
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import RefusedLog, WalIdentity, WalPosition
from topics.storage.recovery import Recovery
from topics.storage.snapshot import encode_part, encode_parts, save_snapshot
from topics.storage.upgrade import check_upgrade

SHARDS = 2
SOURCE, DEST = 1, 2
HEAD_SEQ = 3


def created(topic_id: int, name: str, **config: Any) -> bytes:
    body = msgspec.msgpack.encode({"name": name, "config": config})
    return encode(FrameType.TOPIC_CREATE, 0, topic_id, 0, TS_MS, b"", b"", body)


def cursor(
    source_seq: int, source_id: int = SOURCE, dest_id: int = DEST, routers: int = 1, full: bool = False
) -> bytes:
    forwarding = [FeedRouter(Router(1, 1, "r", RouterSpec("source", "dest")), 0) for _ in range(routers)]
    body = msgspec.msgpack.encode(FeedFrameBody("source", source_id, source_seq, forwarding, full=full))
    return encode(FrameType.ROUTER_CURSOR, 0, dest_id, 0, TS_MS, b"", b"", body)


def write(data_dir: Path, shard: int, *writes: bytes) -> int:
    """The log of one shard, as a killed process leaves it; returns its id."""
    directory = layout.group_dir(str(data_dir), shard, SHARDS)
    os.makedirs(directory)
    writer = open_writer(FaultyFileSystem(), directory, identity=WalIdentity(shard, SHARDS, boot_id()))
    commit(writer, *writes)
    kill(writer)
    return writer.log_id


def fill(
    data_dir: Path, *of_dest: bytes, source: dict[str, Any] | None = None, dest: dict[str, Any] | None = None
) -> None:
    """A source with three records on shard 0, a dest on shard 1."""
    write(data_dir, 0, created(SOURCE, "source", **source or {}), appends(1, [b"1"] * HEAD_SEQ, SOURCE))
    write(data_dir, 1, created(DEST, "dest", **dest or {}), *of_dest)


def checked(data_dir: Path) -> None:
    check_upgrade(str(data_dir), accept_data_loss=False, progress=lambda _share: None)


def test_new_data_have_nothing_to_be_checked(tmp_path: Path) -> None:
    checked(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_cursor_at_the_head_of_its_source_is_settled(tmp_path: Path) -> None:
    fill(tmp_path, cursor(HEAD_SEQ - 1), cursor(HEAD_SEQ))
    checked(tmp_path)


@pytest.mark.parametrize("source_seq", [0, HEAD_SEQ - 1, HEAD_SEQ + 1])
def test_any_other_cursor_is_not(tmp_path: Path, source_seq: int) -> None:
    fill(tmp_path, cursor(HEAD_SEQ), cursor(source_seq), created(9, "another"), cursor(0, dest_id=9))
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RefusedLog, match=r"in no log, of 2 topics, the first is 'another': start version 0\.1\.0 "):
        checked(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content


@pytest.mark.parametrize(
    "settled",
    [
        {"of_dest": cursor(0, full=True)},
        {"of_dest": cursor(0, routers=0)},
        {"of_dest": cursor(0, source_id=0)},
        {"of_dest": cursor(0, source_id=77)},
        {"of_dest": cursor(0), "dest": {"durability": "ephemeral"}},
        {"of_dest": cursor(0), "source": {"durability": "ephemeral"}},
    ],
    ids=["full", "no routers", "no source yet", "its source is deleted", "ephemeral", "of an ephemeral source"],
)
def test_a_cursor_that_has_no_copies_behind_it_in_ram(tmp_path: Path, settled: dict[str, Any]) -> None:
    fill(tmp_path, settled.pop("of_dest"), **settled)
    checked(tmp_path)


def test_a_deleted_dest_does_not_count(tmp_path: Path) -> None:
    fill(tmp_path, cursor(0), encode(FrameType.TOPIC_DELETE, 0, DEST, 0, TS_MS, b"", b"", b""))
    checked(tmp_path)


@pytest.mark.parametrize("source_seq", [0, HEAD_SEQ])
def test_a_snapshot_has_the_beginning_of_the_logs(tmp_path: Path, source_seq: int) -> None:
    """The cursor is in it, and the log behind it has nothing."""
    log_ids = [
        write(tmp_path, 0, created(SOURCE, "source")),
        write(tmp_path, 1, created(DEST, "dest"), cursor(source_seq)),
    ]
    parts = []
    for shard, log_id in enumerate(log_ids):
        fold = Fold(lambda _topic_id: UnlocatedIndex())
        group = layout.group_dir(str(tmp_path), shard, SHARDS)
        recovery = Recovery(ReadOnlyFileSystem(), group, WalIdentity(shard, SHARDS, boot_id()))
        for batch in recovery:
            fold_frames(fold, batch, in_ram=False)
        assert recovery.end is not None
        position = WalPosition(recovery.end.file_no, recovery.end.offset)
        parts.append(encode_part(shard, SHARDS, log_id, position, fold.state()))
    save_snapshot(OsFileSystem(), str(tmp_path), encode_parts(parts))
    if source_seq == 0:
        checked(tmp_path)
    else:
        with pytest.raises(RefusedLog, match="in no log, of 1 topics, the first is 'dest'"):
            checked(tmp_path)


def test_damage_is_refused_unless_its_loss_is_accepted(tmp_path: Path) -> None:
    fill(tmp_path, cursor(HEAD_SEQ))
    patch(layout.group_dir(str(tmp_path), 1, SHARDS), 1, 0, b"\xff" * 8)
    with pytest.raises(RefusedLog, match="shard-01"):
        checked(tmp_path)
    check_upgrade(str(tmp_path), accept_data_loss=True, progress=lambda _share: None)


def test_it_says_how_far_it_is(tmp_path: Path) -> None:
    fill(tmp_path, cursor(HEAD_SEQ))
    shares: list[float] = []
    check_upgrade(str(tmp_path), accept_data_loss=False, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
