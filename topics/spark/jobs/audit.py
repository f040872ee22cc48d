"""`topics spark audit`: a check of the whole history of topics, in parallel, while the service runs.

Executors read every sealed segment: checksums, sequence, index against data, tags. The driver checks that segments and
the records read over HTTP follow each other without a hole, and that the service's floors and counts match the files.
It prints a report; exit code 3 when something is wrong. `topics verify` is for a directory that no service uses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession

from topics.api.segment_answers import ManifestSegment
from topics.client import Client, Record, ServiceBusyError, TopicState
from topics.spark import http_read
from topics.spark.http_read import TASK_RETRY, connect
from topics.spark.jobs import program
from topics.spark.options import Directories, read_options
from topics.spark.segment_audit import Audited, AuditFinding, audit_segment
from topics.spark.segment_scan import end_pins, pinned_segments

EXIT_DAMAGE: Final = 3
_FINDINGS_SHOWN: Final = 1_000


def main(arguments: Sequence[str] | None = None) -> int:
    made = program.parser("audit", "Check every record of topics: files, checksums, sequence, floors.")
    program.topics_arguments(made)
    made.add_argument("--data-dir", required=True, help="TOPICS_DATA_DIR as it is mounted where tasks run")
    made.add_argument("--cold-dir", default=None, help="TOPICS_COLD_DIR as it is mounted there, or TOPICS_COLD_URL")
    return program.run("audit", made, _work, arguments, exit_code=lambda report: EXIT_DAMAGE if report["damage"] else 0)


def _work(spark: SparkSession, options: argparse.Namespace) -> dict[str, Any]:
    reading = read_options(program.source_options(options))
    directories = Directories(options.data_dir, options.cold_dir)
    report: dict[str, Any] = {"topics": 0, "segments": 0, "records": 0, "data_bytes": 0, "damage": 0, "findings": []}
    findings: list[AuditFinding] = []
    with connect(reading.service, TASK_RETRY) as client:
        states = http_read.states(client, reading)
        http_read.require(states, reading)
        for name, state in states.items():
            manifest, segments, pins = pinned_segments(client, name)
            tasks = [(name, segment, manifest.earliest_seq) for segment in segments]
            slices = max(1, min(len(tasks), spark.sparkContext.defaultParallelism * 4))
            audited = (
                spark.sparkContext.parallelize(tasks, slices)
                .map(lambda task: audit_segment(*task, directories))
                .collect()
                if tasks
                else []
            )
            end_pins(client, pins)
            findings += [finding for one in audited for finding in one.findings]
            findings += _holes(name, segments, manifest.earliest_seq, manifest.http_from_seq)
            findings += _rest(client, name, state, manifest.http_from_seq, audited)
            report["topics"] += 1
            report["segments"] += len(audited)
            report["records"] += sum(one.live + one.deleted + one.lost for one in audited)
            report["data_bytes"] += sum(one.data_bytes for one in audited)
    report["damage"] = len(findings)
    report["findings"] = [msgspec.structs.asdict(one) for one in findings[:_FINDINGS_SHOWN]]
    for one in findings[:_FINDINGS_SHOWN]:
        where = f"{one.path} at {one.offset}: " if one.path else ""
        print(f"topics spark audit: {one.topic}: {one.kind}: {where}{one.reason}", file=sys.stderr)
    return report


def _holes(
    topic: str, segments: Sequence[ManifestSegment], earliest_seq: int, http_from_seq: int
) -> Iterator[AuditFinding]:
    """Yield the seqs from the floor on that are neither in a segment nor read over HTTP."""
    parts = [(segment.first_seq, segment.last_seq) for segment in segments]
    due = earliest_seq
    for first_seq, last_seq in [*parts, (http_from_seq, http_from_seq)] if parts else []:
        if first_seq > due:
            reason = f"seqs {due} to {first_seq - 1} are in no segment"
            yield AuditFinding(topic, "gap", "", 0, reason, due, first_seq - 1)
        due = last_seq + 1


def _rest(
    client: Client, topic: str, before: TopicState, http_from_seq: int, audited: Sequence[Audited]
) -> Iterator[AuditFinding]:
    """Check that all other records can be read, in order, and that the service counts all live records."""
    live, last_seq = 0, http_from_seq - 1
    try:
        for item in client.read(topic, http_from_seq - 1, tombstones="yield"):
            if not isinstance(item, Record):
                continue
            if item.seq <= last_seq:
                reason = f"seq {item.seq} comes behind {last_seq}"
                yield AuditFinding(topic, "gap", "", 0, reason, item.seq, last_seq)
            live += 1
            last_seq = item.seq
    except ServiceBusyError as error:
        yield AuditFinding(topic, "unreadable", "", 0, str(error), last_seq + 1, before.head_seq)
        return
    after = client.get_topic(topic, touch=False)
    moved = (after.head_seq, after.count, after.epoch) != (before.head_seq, before.count, before.epoch)
    counted = live + sum(one.live for one in audited)
    # Segments that could not be read have no count, and findings already.
    if not moved and not any(one.findings for one in audited) and counted != after.count:
        reason = f"{counted} records live in files and over HTTP, the service counts {after.count}"
        yield AuditFinding(topic, "floors", "", 0, reason, after.earliest_seq, after.head_seq)


if __name__ == "__main__":
    sys.exit(main())
