"""The first moment with a record, in an archive with several generations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.archive.test_borrowing import FS, ship
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive.inspection import check, prune
from topics.archive.restoring import NotThereError, WantedMoment, plan
from topics.cli.read import timestamp_ms
from topics.storage.archive_objects import Archive, ArchiveDamagedError, generation_name, open_archive


class Twice:
    """A service whose directory went back to its 10th record, and whose archive has both histories: 20 records in the
    first one, 15 in the other.
    """

    def __init__(self, root: Path) -> None:
        self.archive = Archive(open_archive(FS, str(root / "archive")))
        self.data_dir = root / "data"
        self.data_dir.mkdir()
        self.now_ms = 0
        self.live(10)
        shutil.copytree(self.data_dir, root / "copy")
        self.live(10)
        shutil.rmtree(self.data_dir)
        shutil.copytree(root / "copy", self.data_dir)
        self.live(5)

    def live(self, records: int) -> None:
        """Write so many records, some of them into segments, and ship them."""
        rig = Rig(str(self.data_dir), segment_max_events="4")
        rig.clock.ms += self.now_ms
        for number in range(records):
            rig.clock.ms += 1000
            rig.append("t", b"%d" % number)
            if number == records // 2:
                Compaction(rig).cut()
        rig.clock.ms += 1000
        self.now_ms = rig.clock.ms - 1_700_000_000_000
        ship(rig, self.archive)

    def generation_with(self, seq: int) -> int:
        return plan(self.archive, WantedMoment(topic="t", seq=seq)).generation.number


def test_a_record_is_found_in_whichever_generation_has_it(tmp_path: Path) -> None:
    archive = Twice(tmp_path)
    assert archive.archive.generations() == [1, 2]
    assert {seq: archive.generation_with(seq) for seq in (1, 10, 16, 20)} == {1: 1, 10: 1, 16: 1, 20: 1}
    with pytest.raises(NotThereError, match="has no record 21"):
        archive.generation_with(21)


def test_a_pruning_leaves_alone_what_has_lost_the_object_of_its_generation(tmp_path: Path) -> None:
    """It removed all bases, and the files of them: what could be had once that object was there again."""
    archive, objects = Twice(tmp_path).archive, tmp_path / "archive" / "archive"
    kept = objects.rename(tmp_path / "kept")
    shutil.copytree(kept, objects)
    (objects / generation_name(1)).unlink()
    prune(archive, 0)
    shutil.copy(kept / generation_name(1), objects / generation_name(1))
    assert check(archive, lambda _done, _total: None) == []
    assert plan(archive, WantedMoment(topic="t", seq=20)).generation.number == 1


def test_a_seq_that_two_records_had_names_the_moments_of_both(tmp_path: Path) -> None:
    """The newest one was taken, and the other could not be had by its seq."""
    archive = Twice(tmp_path)
    for seq in (11, 15):
        with pytest.raises(NotThereError, match=r"has had 2 records .* went back, or the topic was deleted") as caught:
            archive.generation_with(seq)
        words = str(caught.value).split()
        moments = [timestamp_ms(words[at + 1]) for at, word in enumerate(words) if word == "--to-ts"]
        found = [plan(archive.archive, WantedMoment(ts_ms=moment)) for moment in moments]
        assert [(one.generation.number, one.moment.taken_ms) for one in found] == list(
            zip((1, 2), moments, strict=True)
        )


def test_damage_in_a_generation_that_is_not_needed_refuses_nothing(tmp_path: Path) -> None:
    archive = Twice(tmp_path)
    (piece,) = (tmp_path / "archive/archive/g00000002.pieces").glob("*1")
    piece.write_bytes(b"damaged")
    with capture_logs() as logs:
        assert archive.generation_with(16) == 1
    (line,) = (line for line in logs if line["log_level"] == "warning")
    assert line["generation"] == 2
    assert str(piece) in line["reason"]
    with pytest.raises(ArchiveDamagedError, match=str(piece)):
        archive.generation_with(21)


def test_where_no_base_is_whole_that_is_said(tmp_path: Path) -> None:
    """Its topics were said to have no such record."""
    archive = Twice(tmp_path)
    for bases in (tmp_path / "archive/archive").glob("*.bases"):
        shutil.rmtree(bases)
    with pytest.raises(NotThereError, match="its first base is not complete"):
        archive.generation_with(1)
