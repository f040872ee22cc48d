"""The job `audit`: finds each kind of damage that is planted, and nothing where there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness import Service, poll
from tests.spark.conftest import COMPACTED_S
from tests.storage.logs import TOPIC_ID
from tests.storage.segments import Record, make_segment
from topics.api.segment_answers import ManifestSegment
from topics.client import Client, NewRecord, calls
from topics.core.location import LOCATION_DELETED
from topics.spark.jobs import audit
from topics.spark.options import Directories
from topics.spark.segment_audit import Audited, audit_segment
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment import ENTRY, ENTRY_LEN, index_digest
from topics.storage.segment_deletes import mark_deleted
from topics.storage.segment_reader import SegmentReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FS = OsFileSystem()
COUNT = 20


class Sealed:
    """One sealed segment, and what a manifest says of it."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        records = [Record(b"%d" % n, tag=b"t%d" % (n % 3) if n % 4 else b"") for n in range(COUNT)]
        reader = make_segment(FS, self.root, records, 11)
        self.directory = layout.topic_dir(self.root, TOPIC_ID)
        self.idx = Path(reader.idx_path)
        self.data = Path(reader.data_path)
        self.tags = self.idx.with_suffix(".tags")
        entries = reader.entries(11, 10 + COUNT)
        self.segment = ManifestSegment(
            first_seq=11,
            last_seq=10 + COUNT,
            records=COUNT,
            first_ts=entries[1],
            last_ts=entries[-3],
            data_bytes=self.data.stat().st_size,
            version=0,
            tier="hot",
            data_path=os.path.relpath(self.data, self.root),
            idx_path=os.path.relpath(self.idx, self.root),
            idx_xxh3=f"{index_digest(self.idx.read_bytes()):016x}",
        )

    def audit(self, earliest_seq: int = 1) -> Audited:
        return audit_segment("t", self.segment, earliest_seq, Directories(self.root, None))

    def offset(self, number: int) -> int:
        return int(ENTRY.unpack_from(self.idx.read_bytes(), number * ENTRY_LEN)[0])


@pytest.fixture
def sealed(tmp_path: Path) -> Sealed:
    return Sealed(tmp_path)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x21
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap_entries(sealed: Sealed) -> None:
    content = bytearray(sealed.idx.read_bytes())
    content[20:40], content[40:60] = content[40:60], content[20:40]
    sealed.idx.write_bytes(content)


def mark_in_index_alone(sealed: Sealed) -> None:
    content = bytearray(sealed.idx.read_bytes())
    content[5 * ENTRY_LEN + 16] |= LOCATION_DELETED
    sealed.idx.write_bytes(content)


def other_tags(sealed: Sealed) -> None:
    make_segment(FS, f"{sealed.root}/other", [Record(b"1", tag=b"x")] * COUNT, 11)
    other = Path(layout.segment_tags_path(layout.topic_dir(f"{sealed.root}/other", TOPIC_ID), 11))
    sealed.tags.write_bytes(other.read_bytes())


def test_a_whole_segment_is_clean(sealed: Sealed) -> None:
    found = sealed.audit()
    assert (found.findings, found.live, found.deleted, found.lost) == ([], COUNT, 0, 0)
    mark_deleted(FS, sealed.directory, 11, [13, 14])
    found = sealed.audit(earliest_seq=14)
    assert (found.findings, found.live, found.deleted) == ([], COUNT - 4, 1)


DAMAGE: dict[str, tuple[str, Callable[[Sealed], Any]]] = {
    "a payload": ("data", lambda sealed: flip(sealed.data, sealed.offset(7) + 40)),
    "a checksum": ("data", lambda sealed: flip(sealed.data, sealed.offset(8) - 3)),
    "a seq in a frame": ("data", lambda sealed: flip(sealed.data, sealed.offset(2) + 5)),
    "a del byte": ("data", lambda sealed: flip(sealed.data, sealed.offset(3) - 1)),
    "a length": ("data", lambda sealed: flip(sealed.data, sealed.offset(4))),
    "data cut": ("data", lambda sealed: cut(sealed.data)),
    "index cut": ("index", lambda sealed: cut(sealed.idx)),
    "entries swapped": ("index", swap_entries),
    "a time in the index": ("index", lambda sealed: flip(sealed.idx, 3 * ENTRY_LEN + 9)),
    "a flag in the index": ("data", lambda sealed: flip(sealed.idx, 3 * ENTRY_LEN + 16)),
    "a mark in the index alone": ("index", mark_in_index_alone),
    "tags": ("tags", lambda sealed: flip(sealed.tags, 60)),
    "tags of another segment": ("tags", other_tags),
    "no data": ("missing", lambda sealed: sealed.data.unlink()),
    "no index": ("missing", lambda sealed: sealed.idx.unlink()),
    "no tags": ("missing", lambda sealed: sealed.tags.unlink()),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_each_kind_of_damage_is_found(sealed: Sealed, what: str) -> None:
    kind, plant = DAMAGE[what]
    plant(sealed)
    findings = sealed.audit().findings
    assert findings
    assert kind in {finding.kind for finding in findings}
    assert all(finding.path.startswith(sealed.root) for finding in findings)


# --- the program


@pytest.fixture(scope="module")
def stored() -> Iterator[Service]:
    with Service(env={"TOPICS_SEGMENT_MAX_EVENTS": "40", "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}) as running:
        yield running


def run(service: Service, capsys: pytest.CaptureFixture[str], topic: str) -> tuple[int, dict[str, Any], str]:
    code = audit.main(["--url", service.url, "--topics", topic, "--data-dir", str(service.data_dir)])
    said = capsys.readouterr()
    report: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    return code, report, said.err


def test_the_program_reports(
    spark: SparkSession, stored: Service, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(stored.url) as client:
        client.append(topic, [NewRecord({"n": n}, tag=f"t{n % 10}") for n in range(170)])
        poll("segments", lambda: len(client.call(calls.segments(topic)).segments) == 4, COMPACTED_S)
        client.delete_records(topic, match="t3")
        client.delete_records(topic, before_seq=50)
        manifest = client.call(calls.segments(topic))
    code, report, _ = run(stored, capsys, topic)
    assert (code, report["damage"], report["topics"], report["segments"]) == (0, 0, 1, 3)
    first, second = (stored.data_dir / row.data_path for row in manifest.segments[:2])
    flip(first, 60)
    second.with_suffix(".tags").unlink()
    code, report, said = run(stored, capsys, topic)
    assert code == audit.EXIT_DAMAGE
    assert sorted({finding["kind"] for finding in report["findings"]}) == ["data", "missing"]
    assert f"{first} at " in said
    assert str(second.with_suffix(".tags")) in said


def test_a_record_that_vanished_from_the_count_is_found(
    spark: SparkSession, stored: Service, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record marked deleted in both files that nobody deleted: only the service's count knows better."""
    with Client(stored.url) as client:
        client.append(topic, [{"n": n} for n in range(90)])
        poll("segments", lambda: len(client.call(calls.segments(topic)).segments) == 2, COMPACTED_S)
        row = client.call(calls.segments(topic)).segments[0]
    directory = str((stored.data_dir / row.idx_path).parent)
    reader = SegmentReader.open(directory, row.first_seq, 40, row.data_bytes)
    assert reader.frame(5) is not None
    mark_deleted(FS, directory, row.first_seq, [5])
    code, report, _ = run(stored, capsys, topic)
    assert code == audit.EXIT_DAMAGE
    assert [finding["kind"] for finding in report["findings"]] == ["floors"]
