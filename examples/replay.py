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
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from tqdm import tqdm

DATA = Path(__file__).with_name("data") / "commit-changes.ndjson.gz"
BATCH_MAX_RECORDS = 10_000
BACKOFF_MS = (50, 2_000)
RETRIED_STATUSES = {429, 503}
JSON_HEADERS = {"Content-Type": "application/json"}


class Event(NamedTuple):
    """One line of the file: its commit, the first folder of its path, and its bytes."""

    commit: str
    folder: str | None
    line: bytes


class Batch(NamedTuple):
    """The events of one write."""

    key: str
    events: list[Event]

    def body(self) -> bytes:
        """The write as JSON, put together from the lines' own bytes: printing them anew could change them."""
        records = b",".join(
            b'{"data":' + event.line + (b',"tag":' + json.dumps(event.folder).encode() if event.folder else b"") + b"}"
            for event in self.events
        )
        return b'{"idempotency_key":' + json.dumps(self.key).encode() + b',"records":[' + records + b"]}"


class Outcome(NamedTuple):
    """What one write came to."""

    head_seq: int
    deduped: bool
    retries: int


class GaveUpError(Exception):
    """The service did not take a write within the time allowed, or refused it for good."""


def first_folder(path: str) -> str | None:
    """The tag of a path; None for a file at the root. Of a rename (`a/{old => new}/b`) the place it went to counts."""
    path = re.sub(r"\{[^{}]* => ([^{}]*)\}", r"\1", path).rpartition(" => ")[2]
    folder, slash, _ = path.lstrip("/").partition("/")
    return folder if slash else None


def events(path: Path) -> Iterator[Event]:
    """The lines of an .ndjson or .ndjson.gz file."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for line in lines:
            fields = json.loads(line)
            yield Event(fields["commit"], first_folder(fields["path"]), line.rstrip(b"\n"))


def batches(stream: Iterator[Event], max_records: int = BATCH_MAX_RECORDS) -> Iterator[Batch]:
    """Consecutive events of one commit; a commit larger than `max_records` is cut and its parts numbered."""
    for commit, group in itertools.groupby(stream, key=lambda event: event.commit):
        whole = list(group)
        parts = [whole[start : start + max_records] for start in range(0, len(whole), max_records)]
        for number, part in enumerate(parts, 1):
            yield Batch(commit if len(parts) == 1 else f"{commit}/{number}", part)


def write(client: httpx.Client, topic: str, batch: Batch, retry_for_s: float) -> Outcome:
    """One write, repeated until it is answered; GaveUpError after `retry_for_s` or at a refusal that stands."""
    body = batch.body()
    end = time.monotonic() + retry_for_s
    for attempt in itertools.count():
        try:
            answer = client.post(f"/v0/topics/{topic}?return_seqs=false", content=body, headers=JSON_HEADERS)
        except httpx.TransportError as error:
            trouble, pause_hint_s = f"{type(error).__name__}: {error}", 0.0
        else:
            if answer.is_success:
                fields = answer.json()
                return Outcome(fields["head_seq"], fields["deduped"], attempt)
            trouble, pause_hint_s = f"{answer.status_code} {answer.text}", retry_after_s(answer)
            if answer.status_code not in RETRIED_STATUSES:
                raise GaveUpError(f"commit {batch.key} was refused: {trouble}")
        if time.monotonic() > end:
            raise GaveUpError(f"commit {batch.key} was not taken within {retry_for_s:g} s; the last answer: {trouble}")
        time.sleep(max(backoff_s(attempt), min(pause_hint_s, BACKOFF_MS[1] / 1000)))
    raise AssertionError("count() does not end")


def backoff_s(attempt: int) -> float:
    """50 ms, doubled with each attempt up to 2 s, less up to half: clients of one outage must not come in step."""
    least_ms, most_ms = BACKOFF_MS
    full_ms = min(most_ms, least_ms * 2 ** min(attempt, 10))
    return random.uniform(full_ms / 2, full_ms) / 1000


def retry_after_s(answer: httpx.Response) -> float:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0


def replay(client: httpx.Client, topic: str, source: Path, *, rate: float, retry_for_s: float) -> str:
    """Writes the whole file, at most `rate` events a second (0 = as fast as it goes); a summary."""
    total = sum(1 for _ in events(source))
    writes = retries = deduped = done = 0
    start = time.monotonic()
    # disable=None: no bar when the output is not a terminal.
    with tqdm(total=total, unit=" events", disable=None) as bar:
        for batch in batches(events(source)):
            outcome = write(client, topic, batch, retry_for_s)
            writes += 1
            retries += outcome.retries
            deduped += outcome.deduped
            done += len(batch.events)
            bar.update(len(batch.events))
            bar.set_postfix(head=outcome.head_seq, retries=retries, refresh=False)
            if rate and (ahead_s := done / rate - (time.monotonic() - start)) > 0:
                time.sleep(ahead_s)
    seconds = time.monotonic() - start
    return (
        f"{done} events in {writes} writes to {topic!r} in {seconds:.1f} s, {retries} retries, {deduped} already there"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="replay", description="Replay change events into a topic, one write per commit."
    )
    parser.add_argument("--url", default="http://127.0.0.1:4000", help="the service (default %(default)s)")
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
    with httpx.Client(base_url=arguments.url, timeout=15) as client:
        try:
            summary = replay(
                client, arguments.topic, arguments.file, rate=arguments.rate, retry_for_s=arguments.retry_for
            )
        except GaveUpError as trouble:
            print(f"replay: {trouble}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
