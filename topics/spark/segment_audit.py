"""The check of one segment by the job `audit`: all bytes of its three files, and all that they say twice.

It compares whole columns first. Only if something differs does it check each record, like `topics verify`
(`storage.segment_reader.SegmentReader.damage`).
"""

from __future__ import annotations

import os
from typing import Final

import msgspec
import numpy as np

from topics.api.segment_answers import ManifestSegment
from topics.core.location import LOCATION_DELETED, LOCATION_LOST
from topics.spark import segment_arrow
from topics.spark.columns import Records
from topics.spark.options import Directories
from topics.spark.segment_arrow import ArrowEntries, InconsistentLengthsError
from topics.storage.postings import CorruptPostings, Postings
from topics.storage.segment import DELETED, ENTRY_LEN, CorruptSegment, index_digest
from topics.storage.segment_reader import SegmentReader

_GONE: Final = LOCATION_DELETED | LOCATION_LOST


class AuditFinding(msgspec.Struct, frozen=True):
    """A defect at `offset` (bytes) of a file. `kind`: data, index, tags, missing, unreadable, gap, floors."""

    topic: str
    kind: str
    path: str
    offset: int
    reason: str
    first_seq: int
    last_seq: int


class Audited(msgspec.Struct):
    """The state of one segment: its records from `earliest_seq` on, counted by state, and its defects."""

    topic: str
    first_seq: int
    last_seq: int
    live: int = 0
    deleted: int = 0
    lost: int = 0
    data_bytes: int = 0
    findings: list[AuditFinding] = []


def audit_segment(topic: str, segment: ManifestSegment, earliest_seq: int, directories: Directories) -> Audited:
    """Check a whole segment. Its defects are findings, never exceptions."""
    found = Audited(topic, segment.first_seq, segment.last_seq)
    cold = segment.tier == "cold"
    data_root = directories.cold if cold else directories.data
    data_path = os.path.join(data_root or "", segment.data_path)
    idx_path = os.path.join(directories.data, segment.idx_path)

    def finding(kind: str, path: str, offset: int, reason: str) -> None:
        found.findings.append(AuditFinding(topic, kind, path, offset, reason, segment.first_seq, segment.last_seq))

    contents: list[bytes] = []
    store = directories.cold_store if cold else None
    for path in (idx_path, data_path, os.path.splitext(idx_path)[0] + ".tags"):
        try:
            if path == data_path and store is not None:
                name = segment.data_path.removeprefix("topics/")
                contents.append(store.read_range(name, 0, store.len(name)))
                continue
            with open(path, "rb") as file:
                contents.append(file.read())
        except FileNotFoundError:
            borrowed = segment.tier == "archive" and path == data_path
            where = "it is still in the archive that the service was restored from, and was not checked"
            finding("missing", path, 0, where if borrowed else "the file is not there")
        except OSError as error:
            finding("unreadable", path, 0, error.strerror or str(error))
    if len(contents) < 3:
        return found
    idx, data, tags = contents
    records = segment.last_seq - segment.first_seq + 1
    found.data_bytes = len(data)
    if len(idx) != records * ENTRY_LEN:
        finding("index", idx_path, len(idx), f"has {len(idx)} bytes, {records} records take {records * ENTRY_LEN}")
        return found
    if len(data) != segment.data_bytes:
        finding("data", data_path, len(data), f"has {len(data)} bytes, the service counts {segment.data_bytes}")
        return found
    if segment.idx_xxh3 is not None and f"{index_digest(idx):016x}" != segment.idx_xxh3:
        finding("index", idx_path, 0, f"is not the index that the service has ({segment.idx_xxh3})")
    entries = segment_arrow.read_entries(idx, 0, records)
    if (entries.ts[0], entries.ts[-1]) != (segment.first_ts, segment.last_ts):
        reason = f"is of {entries.ts[0]} to {entries.ts[-1]}, the service says {segment.first_ts} to {segment.last_ts}"
        finding("index", idx_path, 0, reason)
    flags = entries.flags[max(0, earliest_seq - segment.first_seq) :]
    found.lost = int(np.count_nonzero(flags & LOCATION_LOST))
    found.deleted = int(np.count_nonzero((flags & _GONE) == LOCATION_DELETED))
    found.live = len(flags) - found.lost - found.deleted
    try:
        records_in = _check_columns(idx_path, data_path, data, segment.first_seq, entries, cold)
    except CorruptSegment as suspect:
        # A deletion may be in progress: it marks the data first, and of a cold segment only the index.
        reader = SegmentReader(os.path.dirname(idx_path), segment.first_seq, idx, data, segment.version)
        for defect in list(reader.damage(None)) or ([] if found.findings else [suspect]):
            in_index = defect.path in (idx_path, reader.idx_path)
            finding("index" if in_index else "data", idx_path if in_index else data_path, defect.offset, defect.reason)
        return found
    tags_path = os.path.splitext(idx_path)[0] + ".tags"
    try:
        postings = Postings(tags_path, tags)
    except CorruptPostings as defect:
        finding("tags", tags_path, defect.offset, defect.reason)
        return found
    if misplaced := postings.misplaced(os.path.dirname(tags_path), segment.first_seq, records):
        finding("tags", tags_path, 0, misplaced)
    elif list(postings.items()) != _seqs_by_tag(records_in):
        finding("tags", tags_path, 0, "does not list the tags that the segment's records have")
    return found


def _check_columns(
    idx_path: str, data_path: str, data: bytes, first_seq: int, entries: ArrowEntries, cold: bool
) -> Records | None:
    """Return all records that have a frame, deleted or not; None without any. Raise CorruptSegment, after which the
    caller checks each record.
    """
    ts, flags, lengths = entries.ts, entries.flags, entries.lengths
    framed = lengths > 0
    wrong = np.flatnonzero((np.diff(ts, prepend=ts[0]) < 0) | (framed & (flags & LOCATION_LOST != 0)))
    if len(wrong):
        raise CorruptSegment(idx_path, int(wrong[0]) * ENTRY_LEN, "an impossible entry, or a time before the last one")
    if (~framed & (flags & _GONE == 0)).any():
        raise CorruptSegment(idx_path, 0, "a live record without a frame")
    # Frames of deleted records stay whole until the segment is rewritten.
    kept = np.where(framed, flags & ~LOCATION_DELETED, flags)
    starts, end = segment_arrow.extent(entries, len(data), idx_path, 0)
    segment_arrow.check_frames(data_path, data, 0, first_seq, entries._replace(flags=kept), starts)
    if end != len(data):
        raise CorruptSegment(data_path, end, f"the last frame ends there, the file at {len(data)}")
    if not framed.any():
        return None
    places = starts[framed]
    content = np.frombuffer(data, np.uint8)
    frame_lens = np.ascontiguousarray(content[places[:, None] + np.arange(4)]).view("<u4")[:, 0]
    differing = np.flatnonzero(frame_lens != lengths[framed] - 4)
    if len(differing):
        raise CorruptSegment(data_path, int(places[differing[0]]), "inconsistent lengths")
    marks = content[places + lengths[framed] - 1]
    unknown = np.flatnonzero((marks != 0) & (marks != DELETED))
    if len(unknown):
        at = int(places[unknown[0]] + lengths[framed][unknown[0]] - 1)
        raise CorruptSegment(data_path, at, f"del is {int(marks[unknown[0]]):#x}, neither 0 nor {DELETED:#x}")
    ahead = np.flatnonzero((flags[framed] & LOCATION_DELETED != 0) & (marks != DELETED))
    if len(ahead) and not cold:
        number = int(np.flatnonzero(framed)[ahead[0]])
        reason = f"seq {first_seq + number} is deleted here and live in the data"
        raise CorruptSegment(idx_path, number * ENTRY_LEN, reason)
    seqs = first_seq + np.flatnonzero(framed).astype(np.int64)
    try:
        return segment_arrow.decode(
            data, seqs, ts[framed], places, lengths[framed], tags=None, not_node=None, with_meta=False
        )
    except InconsistentLengthsError as error:
        raise CorruptSegment(data_path, int(places[error.number]), "inconsistent lengths") from None


def _seqs_by_tag(records: Records | None) -> list[tuple[bytes, list[int]]]:
    if records is None:
        return []
    tagged = records.tag.is_valid()
    tags = records.tag.filter(tagged).dictionary_encode()
    seqs = records.seq.filter(tagged).to_numpy()
    codes = tags.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(tags.dictionary)))[:-1]
    names = [name.encode() for name in tags.dictionary.to_pylist()]
    return sorted(zip(names, (part.tolist() for part in np.split(seqs[order], ends)), strict=True)) if names else []
