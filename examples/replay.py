"""Replay a file of change events into a topic: one write per commit, each line kept byte for byte.

    python -m examples.replay --topic commits
    python -m examples.replay --url http://127.0.0.1:4000 --rate 500

Every write carries its commit as idempotency key and is repeated until it is answered, so the topic holds each event
once, in file order, whatever dies in between: the network, a frontend, a shard, the whole service.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from tqdm import tqdm

from topics.client import Client, ClientError, NewRecord, Retry

DATA = Path(__file__).with_name("data") / "commit-changes.ndjson.gz"
BATCH_MAX_RECORDS = 10_000


class Event(NamedTuple):
    """One line of the file: its commit, the first folder of its path, and its bytes."""

    commit: str
    folder: str | None
    line: bytes


class Batch(NamedTuple):
    """The events of one write."""

    key: str
    events: list[Event]

    def records(self) -> list[NewRecord]:
        """Return the records to write, with the lines' own bytes: printing them again could change them."""
        return [NewRecord(msgspec.Raw(event.line), tag=event.folder) for event in self.events]


def first_folder(path: str) -> str | None:
    """Return the tag of a path; None for a file at the root. For a rename (`a/{old => new}/b`) it is that of the new
    path.
    """
    path = re.sub(r"\{[^{}]* => ([^{}]*)\}", r"\1", path).rpartition(" => ")[2]
    folder, slash, _ = path.lstrip("/").partition("/")
    return folder if slash else None


def events(path: Path) -> Iterator[Event]:
    """Yield the lines of an .ndjson or .ndjson.gz file."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for line in lines:
            fields = json.loads(line)
            yield Event(fields["commit"], first_folder(fields["path"]), line.rstrip(b"\n"))


def batches(stream: Iterator[Event], max_records: int = BATCH_MAX_RECORDS) -> Iterator[Batch]:
    """Yield consecutive events of one commit; a commit larger than `max_records` is cut and its parts are numbered."""
    for commit, group in itertools.groupby(stream, key=lambda event: event.commit):
        whole = list(group)
        parts = [whole[start : start + max_records] for start in range(0, len(whole), max_records)]
        for number, part in enumerate(parts, 1):
            yield Batch(commit if len(parts) == 1 else f"{commit}/{number}", part)


def replay(topics: Client, topic: str, source: Path, *, rate: float) -> str:
    """Write the whole file, at most `rate` events a second (0: no limit); return a summary."""
    total = sum(1 for _ in events(source))
    writes = deduped = done = 0
    start = time.monotonic()
    # disable=None: no bar when the output is not a terminal.
    with tqdm(total=total, unit=" events", disable=None) as bar:
        for batch in batches(events(source)):
            appended = topics.append(topic, batch.records(), idempotency_key=batch.key)
            writes += 1
            deduped += appended.deduped
            done += len(batch.events)
            bar.update(len(batch.events))
            bar.set_postfix(head=appended.head_seq, refresh=False)
            if rate and (ahead_s := done / rate - (time.monotonic() - start)) > 0:
                time.sleep(ahead_s)
    seconds = time.monotonic() - start
    return f"{done} events in {writes} writes to {topic!r} in {seconds:.1f} s, {deduped} already there"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="replay", allow_abbrev=False, description="Replay change events into a topic, one write per commit."
    )
    parser.add_argument("--url", default="http://127.0.0.1:4000", help="the service (default %(default)s)")
    parser.add_argument("--token", help="its API key, if it wants one")
    parser.add_argument("--topic", default="commits", help="the topic to write to (default %(default)s)")
    parser.add_argument(
        "--file", type=Path, default=DATA, help="an .ndjson or .ndjson.gz file (default: the one beside)"
    )
    parser.add_argument("--rate", type=float, default=0, help="events a second at most; 0 = no limit (default)")
    parser.add_argument(
        "--retry-for",
        type=float,
        default=60,
        metavar="S",
        help="give up on a write after S seconds (default %(default)s)",
    )
    arguments = parser.parse_args()
    with Client(arguments.url, token=arguments.token, retry=Retry(total_s=arguments.retry_for)) as topics:
        try:
            summary = replay(topics, arguments.topic, arguments.file, rate=arguments.rate)
        except ClientError as trouble:
            print(f"replay: {trouble}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
