"""Tags of records that are in the logs: what an idle turn reads, keeps, and does with a log that is not there."""

from __future__ import annotations

import os

import pytest

from tests.storage.faults import FaultyFileSystem
from tests.walshard.rig import Rig
from topics.core import tags
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.storage import layout
from topics.walshard import setup
from topics.walshard.handlers import deletes
from topics.walshard.hosted import tag_search


class Reads(FaultyFileSystem):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.bytes_read = 0

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self.reads += 1
        self.bytes_read += length
        return super().pread(fd, length, offset)


@pytest.fixture
def fs() -> Reads:
    return Reads()


def delete(rig: Rig, name: str, tag: bytes = b"x") -> int:
    return rig.delete(DeleteRecords(name, None, "eq", tag))


def tags_of(rig: Rig, name: str) -> tags.TagIndex | None:
    return rig.hosted(name).topic.tags


def test_an_idle_turn_reads_little_however_far_apart_the_frames_lie(rig: Rig) -> None:
    fs = rig.fs
    assert isinstance(fs, Reads)
    rig.append("t", b"first", tag=b"x")
    assert delete(rig, "t") == 1
    far = 3 * tag_search.READS_MAX
    for _ in range(far):
        rig.append("t", b"near", tag=b"x")
        rig.append("t", b"near", tag=b"y")
        rig.append("t", b"-" * 20_000)
    turns = 0
    fs.reads = fs.bytes_read = 0
    while rig.shard.upkeep.idle():
        turns += 1
        assert fs.reads <= turns * tag_search.READS_MAX
    assert (fs.reads, turns) == (far, 3), "neighbours in one read"
    assert fs.bytes_read < far * 1000
    index = tags_of(rig, "t")
    assert index is not None
    assert index.next_seq == 3 * far + 2
    assert delete(rig, "t") == far
    assert [data for _, data in rig.read("t") if data == b"near"] == [b"near"] * far


def test_the_tag_of_a_long_frame_needs_no_more_than_its_beginning(rig: Rig) -> None:
    fs = rig.fs
    assert isinstance(fs, Reads)
    rig.append("t", b"-" * 200_000, tag=b"x")
    fs.bytes_read = 0
    assert delete(rig, "t") == 1
    assert fs.bytes_read < 150_000


def test_a_log_file_that_was_cut_in_place_ends_no_turn(rig: Rig) -> None:
    rig.append("t", b"1", tag=b"x")
    assert delete(rig, "t") == 1
    rig.append("t", b"2", tag=b"x")
    directory = layout.group_dir(rig.settings.data_dir, 0, 1)
    number = layout.list_log_files(rig.fs, directory)[-1]
    os.truncate(layout.log_path(directory, number), 10)
    assert not rig.shard.upkeep.idle()
    assert tags_of(rig, "t") is None
    with pytest.raises(TopicsError) as refused:
        delete(rig, "t")
    assert refused.value.code == "storage_unavailable"


def test_files_of_the_ram_log_that_are_gone_are_not_kept_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "RAM_FILE_BYTES", 100_000)
    rig.restart_service()
    rig.call(PutTopic("e", TopicConfig(durability="ephemeral", cap_records=4), True))
    ram_dir = layout.ram_group_dir(rig.shared.ram_dir, 0)
    for at in range(3000):
        rig.append("e", b"-" * 9000, tag=b"x" if at % 10 else b"y")
        if at % 100 == 0:
            delete(rig, "e", b"y")
        if layout.list_log_files(rig.fs, ram_dir)[0] > 1:
            break
    else:
        raise AssertionError("nothing was trimmed")
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(fd) for fd in fds if os.path.islink(fd)]
    assert not [path for path in targets if path.startswith(ram_dir) and path.endswith("(deleted)")]


def test_topics_have_their_turn_and_who_is_thrown_out_keeps_no_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletes, "BY_TAG_MAX", 2)
    for name in "abc":
        rig.append(name, b"1", tag=b"x")
        assert delete(rig, name) == 1
    assert tags_of(rig, "a") is None
    for name in "bc":
        rig.append(name, *[b"%d" % at for at in range(600)], tag=b"x")
    assert rig.shard.upkeep.idle()
    assert rig.shard.upkeep.idle()
    reached = [index.next_seq for name in "bc" if (index := tags_of(rig, name)) is not None]
    assert reached == [514, 514], "one turn each"
    assert delete(rig, "a") == 0
    assert delete(rig, "c") == 600


def test_an_index_is_let_go_of_though_nothing_comes_any_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "FORGET_FROM", 8)
    rig.append("t", *[b"%d" % at for at in range(40)], tag=b"y")
    assert delete(rig, "t") == 0
    assert rig.call(DeleteRecords("t", 41, None, b"")).deleted == 40
    index = tags_of(rig, "t")
    assert index is not None
    assert index.matching(tags.Match("glob", b"")) == [b"y"]
    rig.shard.upkeep.idle()
    assert index.matching(tags.Match("glob", b"")) == []
