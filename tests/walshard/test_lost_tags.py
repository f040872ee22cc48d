"""A delete by tag where a segment's postings are missing or damaged (api §5): its frames can tell, or it is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core.errors import TopicsError
from topics.core.segment_list import COLD
from topics.shm.topic_messages import DeleteRecords
from topics.storage.frame import CHECKSUM
from topics.storage.postings import BODY_AT, HEADER
from topics.storage.verify import verify

RECORDS = 24
EVENTS = 8


pytestmark = pytest.mark.shard(segment_max_events=str(EVENTS), segment_rewrite_dead_ratio="0")


@pytest.fixture
def compaction(rig: Rig, compaction: Compaction) -> Compaction:
    """Three sealed segments; odd seqs are tagged so, and seq 10 was deleted."""
    for number in range(1, RECORDS + 1):
        rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"ten" if number == 10 else b"")
    rig.call(DeleteRecords("t", None, "eq", b"ten"))
    compaction.cut()
    return compaction


def file(compaction: Compaction, suffix: str) -> Path:
    """Return that file of the second segment."""
    return next(Path(compaction.rig.settings.data_dir).rglob(f"seg-{EVENTS + 1:020d}.{suffix}"))


def delete(compaction: Compaction) -> int:
    return int(compaction.rig.call(DeleteRecords("t", None, "eq", b"odd")).deleted)


def seqs(compaction: Compaction) -> list[int]:
    return [seq for seq, _ in compaction.read("t")]


def other_release(content: bytes) -> bytes:
    """The file as it might be with version 2."""
    header = bytearray(content[: HEADER.size])
    header[8] = 2
    return bytes(header) + CHECKSUM.pack(xxh3_64_intdigest(bytes(header) + content[BODY_AT:])) + content[BODY_AT:]


@pytest.mark.parametrize("damage", ["missing", "empty", "short", "changed", "another's"])
def test_the_frames_tell(compaction: Compaction, damage: str) -> None:
    path = file(compaction, "tags")
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        other = path.with_name(f"seg-{2 * EVENTS + 1:020d}.tags").read_bytes()
        contents = {"empty": b"", "short": content[:-1], "changed": content[:-1] + b"x", "another's": other}
        path.write_bytes(contents[damage])
    assert delete(compaction) == RECORDS // 2
    left = [seq for seq in range(2, RECORDS + 1, 2) if seq != 10]
    assert seqs(compaction) == left
    assert delete(compaction) == 0
    compaction.rig.restart_service()
    compaction.begin_again()
    assert seqs(compaction) == left


def test_the_file_of_another_topic_is_not_believed(compaction: Compaction) -> None:
    """It has the same first seq and as many records: a delete took those that the other topic has so."""
    path = file(compaction, "tags")
    for number in range(1, RECORDS + 1):
        compaction.rig.append("u", b"%d" % number, tag=b"even" if number % 2 else b"odd")
    compaction.cut()
    (other,) = [found for found in path.parent.parent.rglob(path.name) if found != path]
    path.write_bytes(other.read_bytes())
    assert [str(path)] == [one.path for one in verify(compaction.rig.settings.data_dir, lambda *_: None).damage]
    assert delete(compaction) == RECORDS // 2
    assert seqs(compaction) == [seq for seq in range(2, RECORDS + 1, 2) if seq != 10]


def test_a_file_that_cannot_be_opened_now_is_not_taken_for_damaged(compaction: Compaction) -> None:
    """A process without open files left must not need more of them for that, nor keep the tags in its memory."""
    path = file(compaction, "tags")
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path)  # ELOOP
    with pytest.raises(TopicsError) as refused:
        delete(compaction)
    assert refused.value.code == "storage_unavailable"
    path.unlink()
    path.write_bytes(content)
    assert delete(compaction) == RECORDS // 2


@pytest.mark.parametrize("restored", [None, "in place", "renamed"])
def test_tags_that_are_cut_while_the_shard_has_them_open(compaction: Compaction, restored: str | None) -> None:
    """The file is cut in place, as `cp` does first to the file it writes to: for a map of it that is the shard's end.
    The frames tell the tags meanwhile.
    """
    path, data = file(compaction, "tags"), file(compaction, "data")
    content, frames = path.read_bytes(), data.read_bytes()
    compaction.rig.call(DeleteRecords("t", None, "eq", b"none"))
    os.truncate(path, 0)
    if restored:
        os.truncate(data, 0)
        with pytest.raises(TopicsError) as refused:
            delete(compaction)
        assert refused.value.code == "storage_unavailable"
        if restored == "in place":
            path.write_bytes(content)
        else:
            copy = path.with_suffix(".copy")
            copy.write_bytes(content)
            copy.rename(path)
        data.write_bytes(frames)
    assert delete(compaction) == RECORDS // 2
    assert seqs(compaction) == [seq for seq in range(2, RECORDS + 1, 2) if seq != 10]


def test_damaged_frames_tell_nothing(compaction: Compaction) -> None:
    before = seqs(compaction)
    file(compaction, "tags").unlink()
    path = file(compaction, "data")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"odd", b"old", 1))
    with pytest.raises(TopicsError) as refused:
        delete(compaction)
    assert refused.value.code == "storage_unavailable"
    path.write_bytes(content)
    assert seqs(compaction) == before
    assert delete(compaction) == RECORDS // 2


def test_a_file_of_another_release_is_not_passed_over(compaction: Compaction) -> None:
    path = file(compaction, "tags")
    path.write_bytes(other_release(path.read_bytes()))
    with pytest.raises(TopicsError) as refused:
        delete(compaction)
    assert refused.value.code == "storage_unavailable"
    assert len(seqs(compaction)) == RECORDS - 1


@pytest.fixture
def all_cold(tmp_path: Path) -> Iterator[Compaction]:
    rig = Rig(
        str(tmp_path / "data"), segment_max_events=str(EVENTS), cold_dir=str(tmp_path / "cold"), hot_retain_segments="0"
    )
    yield Compaction(rig)
    rig.close()


def test_frames_in_the_cold_directory_are_not_waited_for(all_cold: Compaction) -> None:
    compaction, rig = all_cold, all_cold.rig
    for number in range(1, RECORDS + 1):
        rig.append("t", b"%d" % number, tag=b"odd" if number % 2 else b"")
    compaction.cut()
    compaction.upkeep()
    assert all(info.flags & COLD for info in compaction.segments("t"))
    path = file(compaction, "tags")
    content = path.read_bytes()
    path.unlink()
    assert delete(compaction) == RECORDS // 2, "they are still here as well"
    for _ in range(3):
        compaction.cut()
    assert not list(Path(rig.settings.data_dir).rglob("*.data"))
    rig.boot()
    with pytest.raises(TopicsError) as refused:
        delete(compaction)
    assert refused.value.code == "storage_unavailable"
    path.write_bytes(content)
    assert delete(compaction) == 0
