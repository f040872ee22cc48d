"""The process that prepares the logs before a start, on real logs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from topics.setting_values import MIB
from topics.settings import Settings, load
from topics.shm import shm_names
from topics.shm.control import EXIT_REFUSED
from topics.shm.instance import SharedMemory
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem, boot_id
from topics.storage.logfile import WalIdentity
from topics.storage.wal import WalWriter
from topics.supervisor import preparing


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedMemory]:
    made = SharedMemory.create(shm_names.identity(str(tmp_path)), shards=2, frontends=1, ring_bytes=64 * 1024)
    yield made
    made.destroy()


def settings(data_dir: Path, shards: int) -> Settings:
    return load({}, {"data_dir": str(data_dir), "wal_shards": str(shards), "wal_file_bytes": "1MiB"})


def test_once_for_each_change_of_the_shard_count(tmp_path: Path, shared: SharedMemory) -> None:
    for shards in (2, 3, 1, 2):
        assert preparing.is_needed(settings(tmp_path, shards))
        assert preparing.run(settings(tmp_path, shards), shared) == 0
        assert not preparing.is_needed(settings(tmp_path, shards))
        assert shared.control.header.get("reshard_ppm") == 1_000_000


def test_new_data_are_marked_once(tmp_path: Path, shared: SharedMemory) -> None:
    assert preparing.is_needed(settings(tmp_path, 1))
    assert preparing.run(settings(tmp_path, 1), shared) == 0
    assert os.listdir(tmp_path) == ["meta"]
    assert os.listdir(tmp_path / "meta") == ["format.json"]
    assert not preparing.is_needed(settings(tmp_path, 1))


def test_data_of_a_later_release_are_refused(tmp_path: Path, shared: SharedMemory) -> None:
    assert preparing.run(settings(tmp_path, 2), shared) == 0
    (tmp_path / "meta" / "format.json").write_text('{"version": 3}')
    for shards in (2, 3):
        assert preparing.is_needed(settings(tmp_path, shards))
        assert preparing.run(settings(tmp_path, shards), shared) == EXIT_REFUSED
    assert sorted(os.listdir(tmp_path / "wal")) == ["shard-00", "shard-01"]


def test_data_that_are_refused_get_no_mark(tmp_path: Path, shared: SharedMemory) -> None:
    assert preparing.run(settings(tmp_path, 2), shared) == 0
    (tmp_path / "meta" / "format.json").unlink()
    (tmp_path / "wal" / "shard-01" / "wal-00000000000000000001.log").write_text("no log")
    assert preparing.run(settings(tmp_path, 2), shared) == EXIT_REFUSED
    assert os.listdir(tmp_path / "meta") == []


def test_a_missing_log_is_refused(tmp_path: Path, shared: SharedMemory) -> None:
    assert preparing.run(settings(tmp_path, 3), shared) == 0
    for shard in range(3):
        directory = layout.group_dir(str(tmp_path), shard, 3)
        WalWriter(OsFileSystem(), directory, WalIdentity(shard, 3, boot_id()), None, file_bytes=MIB).close()
    shutil.rmtree(tmp_path / "wal" / "shard-01")
    assert preparing.run(settings(tmp_path, 2), shared) == EXIT_REFUSED


def test_a_disk_that_does_not_answer_is_tried_again_not_refused(tmp_path: Path, shared: SharedMemory) -> None:
    (tmp_path / "wal.new").write_text("in the way of the new directory")
    assert preparing.run(settings(tmp_path, 2), shared) == 1
