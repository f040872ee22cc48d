"""Follow a topic live: one line per event, across every disconnect, each event once and in order.

    python -m examples.follow --topic commits --from 0
    python -m examples.follow --count 100 --quiet

The watch session lives on the server; after a disconnect the stream is opened again with the id of the last frame
seen (Last-Event-ID). When the session itself is gone, because the service was restarted, a new one starts where the
last frame ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import msgspec

HEARTBEAT_MS = 5_000
BACKOFF_MS = (20, 1_000)


class Record(msgspec.Struct):
    """One event; `data` is the JSON text as it was written."""

    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw
    tag: str = msgspec.field(name="$tag", default="")


class RecordFrame(msgspec.Struct):
    """The data of an `event: record`: `to_seq` is the last seq looked at, delivered or not."""

    records: list[Record]
    to_seq: int


class ServerSentEvent(NamedTuple):
    """One dispatched event of a stream."""

    kind: str
    data: bytes
    id: str | None


class EndedError(Exception):
    """The stream said that nothing more will come; the reason."""


def server_sent_events(chunks: Iterator[bytes]) -> Iterator[ServerSentEvent]:
    """Events of a text/event-stream. Lines end in LF here (the contract's frames do); comments and `retry` pass by."""
    pending = b""
    kind, identifier = "message", None
    data: list[bytes] = []
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not line:
                if data:
                    yield ServerSentEvent(kind, b"\n".join(data), identifier)
                kind, identifier, data = "message", None, []
            elif name == b"event":
                kind = value.decode()
            elif name == b"id":
                identifier = value.decode()
            elif name == b"data":
                data.append(value)


class Follower:
    """A topic's records from `position` on, for as long as it is iterated; `reconnects` counts the streams lost."""

    def __init__(self, client: httpx.Client, topic: str, position: int, retry_for_s: float) -> None:
        self._client = client
        self._topic = topic
        self._retry_for_s = retry_for_s
        self._wid: str | None = None
        self._last_event_id: str | None = None
        self.position = position
        self.reconnects = 0

    def __iter__(self) -> Iterator[Record]:
        """EndedError when the topic was deleted or nothing was reachable for `retry_for_s`."""
        failures = 0
        last_good_s = time.monotonic()
        while True:
            try:
                for event in self._stream():
                    failures, last_good_s = 0, time.monotonic()
                    yield from self._take(event)
            except httpx.HTTPError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                trouble = "the stream ended"
            if time.monotonic() - last_good_s > self._retry_for_s:
                raise EndedError(f"nothing was reachable for {self._retry_for_s:g} s: {trouble}")
            self.reconnects += 1
            time.sleep(min(BACKOFF_MS[1], BACKOFF_MS[0] * 2 ** min(failures, 10)) / 1000)
            failures += 1

    def _take(self, event: ServerSentEvent) -> Iterator[Record]:
        if event.kind == "record":
            frame = msgspec.json.decode(event.data, type=RecordFrame)
            # A frame is taken whole before its id counts, so that a disconnect inside it repeats nothing.
            self.position, self._last_event_id = frame.to_seq, event.id
            yield from frame.records
        elif event.kind == "topic-deleted":
            raise EndedError(f"topic {self._topic!r} was deleted")
        elif event.kind == "tombstone":
            print(f"follow: events are gone: {event.data.decode()}", file=sys.stderr)
            self._last_event_id = event.id
        elif event.id is not None:
            self._last_event_id = event.id

    def _stream(self) -> Iterator[ServerSentEvent]:
        """One connection's events; httpx.HTTPError when it cannot be had or breaks, or the topic is not there yet."""
        if self._wid is None:
            start = {"topics": {self._topic: {"from_seq": self.position}}}
            options = {"heartbeat_ms": HEARTBEAT_MS, "include_tags": True}
            answer = self._client.post("/v0/watch", json=start | options)
            if answer.status_code == 400:
                raise EndedError(f"the watch was refused: {answer.text}")
            answer.raise_for_status()
            self._wid, self._last_event_id = answer.json()["wid"], None
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if self._last_event_id is not None:
            headers["Last-Event-ID"] = self._last_event_id
        with self._client.stream("GET", f"/v0/watch/{self._wid}", headers=headers) as answer:
            if answer.status_code == 404:
                self._wid = None
            answer.raise_for_status()
            yield from server_sent_events(answer.iter_raw())


def print_record(record: Record) -> None:
    # White space between JSON tokens may hold line breaks; in a string they are always escaped.
    text = bytes(record.data).replace(b"\n", b" ").replace(b"\r", b" ").decode()
    print(record.seq, record.tag, text, sep="\t")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="follow", description="Follow a topic live, one line per event: seq, tag, data."
    )
    parser.add_argument("--url", default="http://127.0.0.1:4000", help="the service (default %(default)s)")
    parser.add_argument("--topic", default="commits", help="the topic to follow (default %(default)s)")
    parser.add_argument(
        "--from", dest="position", type=int, default=0, metavar="SEQ", help="start after this seq (default 0)"
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="exit after N events")
    parser.add_argument("--quiet", action="store_true", help="no line per event, only the summary at the end")
    parser.add_argument(
        "--retry-for",
        type=float,
        default=60,
        metavar="S",
        help="give up after S seconds without the service (default %(default)s)",
    )
    arguments = parser.parse_args()
    # Nothing for three heartbeats is a dead connection, whatever TCP believes.
    timeout = httpx.Timeout(10, read=3 * HEARTBEAT_MS / 1000)
    seen = 0
    with httpx.Client(base_url=arguments.url, timeout=timeout) as client:
        follower = Follower(client, arguments.topic, arguments.position, arguments.retry_for)
        try:
            for record in follower:
                seen += 1
                if not arguments.quiet:
                    print_record(record)
                if seen == arguments.count:
                    break
        except EndedError as reason:
            print(f"follow: {reason}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            pass
    print(f"follow: {seen} events of {arguments.topic!r}, {follower.reconnects} reconnects", file=sys.stderr)
    return 0 if seen >= arguments.count else 1


if __name__ == "__main__":
    sys.exit(main())
