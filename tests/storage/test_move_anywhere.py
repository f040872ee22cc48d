"""A changed shard count after a kill at any moment: whatever the snapshot knows by then, every topic arrives."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.storage.logs import appends, commit, kill, open_writer, topic_create
from topics.core.control_bodies import DeleteFrameBody, encode_body
from topics.core.floors import Floors
from topics.core.fold import Fold, FoldError
from topics.core.names import owner_shard
from topics.core.record_index import UnlocatedIndex
from topics.core.shard_state import FoldedTopic
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem, boot_id
from topics.storage.frame import FrameType, encode
from topics.storage.log_fold import OfflineFold, fold_frames
from topics.storage.logfile import RefusedLog, WalIdentity, WalPosition, read_first_start
from topics.storage.recovery import Recovery
from topics.storage.reshard import finish_swap, reshard
from topics.storage.segment_check import DamageFinding
from topics.storage.snapshot import encode_part, encode_parts, load_snapshot, plan_move, save_snapshot
from topics.storage.upgrade import write_mark
from topics.storage.verify import verify

NAMES = ("a", "b", "c", "d", "e")
FILE_BYTES = 4096


class History(NamedTuple):
    """The life of a service: `steps` are (name, records), one after the other; -1 records delete the topic.

    `snapshot_at` is the share of the steps that the snapshot covers, 0 without one; `heard` the share of the later
    writes whose deletions the shard has told to the compactor, which reads of them in the log only after the snapshot.
    """

    steps: list[tuple[str, int]]
    snapshot_at: float
    heard: float


HISTORIES = st.builds(
    History,
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-1, 3)), min_size=1, max_size=40),
    st.floats(0, 1),
    st.floats(0, 1),
)


def delete_frame(topic_id: int, revision: int, head_seq: int) -> bytes:
    """Deletes all records: then a snapshot needs no segment."""
    floors = Floors(revision, head_seq + 1, head_seq + 1, 0, 1, 0, 0)
    body = encode_body(DeleteFrameBody(head_seq + 1, [], floors))
    return encode(FrameType.DELETE, 0, topic_id, head_seq, 1, b"", b"", body)


def frames_of(steps: list[tuple[str, int]], snapshot_at: int) -> Iterator[tuple[bytes, int]]:
    """Yields (write, the id of the topic that it deletes or 0)."""
    live: dict[str, tuple[int, int, int]] = {}
    next_id = 1
    for number, (name, records) in enumerate(steps):
        if records < 0:
            if name in live:
                topic_id, _, _ = live.pop(name)
                yield encode(FrameType.TOPIC_DELETE, 0, topic_id, 0, 1, b"", b"", b""), topic_id
            continue
        if name not in live:
            live[name] = (next_id, 0, 0)
            yield topic_create(next_id, name), 0
            next_id += 1
        topic_id, head_seq, revision = live[name]
        if records:
            yield appends(head_seq + 1, [b"1"] * records, topic_id), 0
            head_seq += records
            if number < snapshot_at:
                revision += 1
                yield delete_frame(topic_id, revision, head_seq), 0
        live[name] = (topic_id, head_seq, revision)


@contextmanager
def killed_service(history: History) -> Iterator[str]:
    """The data directory of a service with one shard, as SIGKILL leaves it."""
    with tempfile.TemporaryDirectory() as data_dir:
        fs = OsFileSystem()
        directory = layout.group_dir(data_dir, 0, 1)
        Path(directory).mkdir(parents=True)
        Path(layout.meta_dir(data_dir)).mkdir()
        cut = int(len(history.steps) * history.snapshot_at)
        writes = list(frames_of(history.steps, cut))
        before = sum(1 for _ in frames_of(history.steps[:cut], cut))
        heard = before + int((len(writes) - before) * history.heard)
        writer = open_writer(fs, directory, None, WalIdentity(0, 1, boot_id()), file_bytes=FILE_BYTES)
        for write, _ in writes:
            commit(writer, write)
        kill(writer)
        if cut:
            save_part(fs, data_dir, directory, before, {topic_id for _, topic_id in writes[before:heard] if topic_id})
        write_mark(fs, data_dir)
        yield data_dir


def save_part(fs: OsFileSystem, data_dir: str, directory: str, before: int, heard_of: set[int]) -> None:
    """A snapshot of the first writes. `heard_of` were deleted behind it, which the compactor knows already."""
    fold = Fold(lambda _topic_id: UnlocatedIndex())
    position, left = WalPosition(1, 0), before
    for batch in Recovery(fs, directory, WalIdentity(0, 1, boot_id())):
        frames = batch.frames
        writes = [at for at, frame in enumerate(frames) if not frame[3] & 8][:left]
        if writes:
            kept = frames[: writes[-1] + 1]
            fold_frames(fold, batch._replace(frames=kept), in_ram=False)
            left -= len(writes)
            offset, total_len, *_ = kept[len(kept) - 1]
            position = WalPosition(batch.file_no, offset + total_len)
    for topic_id in heard_of & fold.topics.keys():
        fold.topic_delete(topic_id)
    start = read_first_start(fs, directory)
    assert start is not None
    save_snapshot(fs, data_dir, encode_parts([encode_part(0, 1, start.log_id, position, fold.state())]))


def topics_of(data_dir: str, shards: int) -> dict[str, FoldedTopic]:
    """The topics that a start with so many shards would have."""
    fs = OsFileSystem()
    snapshot = load_snapshot(fs, data_dir)
    found: dict[str, FoldedTopic] = {}
    for shard in range(shards):
        directory = layout.group_dir(data_dir, shard, shards)
        start = read_first_start(fs, directory)
        part = None if start is None or snapshot is None else snapshot.part_of(start.log_id)
        folding = OfflineFold(part)
        for batch in Recovery(fs, directory, WalIdentity(shard, shards, boot_id()), start="lowest"):
            folding.add(batch)
        for topic in folding.state().topics:
            assert owner_shard(topic.name, shards) == shard
            found[topic.name] = topic
    return found


def damage(data_dir: str) -> list[DamageFinding]:
    return verify(data_dir, lambda _share: None).damage


def move(data_dir: str, shards: int) -> None:
    """Brings the data to another shard count, as a start does it."""
    fs = OsFileSystem()

    def owner(name: str) -> int:
        return owner_shard(name, shards)

    finish_swap(fs, data_dir)
    planned = plan_move(fs, data_dir, owner)
    reshard(fs, data_dir, shards, boot_id(), owner, lambda _share: None, file_bytes=FILE_BYTES, move=planned)


@settings(max_examples=10)
@given(HISTORIES, st.integers(2, 4), st.integers(1, 3))
@example(History([("a", 0), ("a", -1), ("b", 0)], 0.4, 1.0), 2, 1)
def test_every_topic_arrives_whatever_the_snapshot_knows(history: History, shards: int, later: int) -> None:
    check_move(history, shards, later)


@pytest.mark.long
@settings(max_examples=60)
@given(HISTORIES, st.integers(2, 4), st.integers(1, 3))
def test_every_topic_of_many_histories_arrives(history: History, shards: int, later: int) -> None:
    check_move(history, shards, later)


def check_move(history: History, shards: int, later: int) -> None:
    with killed_service(history) as data_dir:
        expected = topics_of(data_dir, 1)
        assert not damage(data_dir)
        for count in (shards, later):
            move(data_dir, count)
            assert topics_of(data_dir, count) == expected, count
            assert not damage(data_dir)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "write",
    [appends(1, [b"1"], 77), encode(FrameType.TOPIC_DELETE, 0, 77, 0, 1, b"", b"", b"")],
    ids=["record", "deletion"],
)
def test_a_topic_that_was_never_created_stops_every_start_and_the_check_says_so(write: bytes, shards: int) -> None:
    with killed_service(History([("a", 1), ("b", 1)], 0.5, 0.0)) as data_dir:
        fs = OsFileSystem()
        identity = WalIdentity(0, 1, boot_id())
        recovery = Recovery(fs, layout.group_dir(data_dir, 0, 1), identity)
        list(recovery)
        writer = open_writer(fs, layout.group_dir(data_dir, 0, 1), recovery.end, identity, file_bytes=FILE_BYTES)
        commit(writer, write)
        kill(writer)
        assert "0x4d" in str(damage(data_dir))
        start = topics_of if shards == 1 else move
        with pytest.raises((RefusedLog, FoldError), match="0x4d"):
            start(data_dir, shards)
