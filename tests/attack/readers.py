"""Clients that read what others write: by long polls, by a watch, by named cursors; quickly and slowly."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from tests.attack.actor import RETRY_S, Actor, World
from tests.attack.asking import Finding, Page, Refused, Unknown, need
from tests.attack.writers import LogWriter

CATCH_UP_S: Final = 60.0
SILENT_READS_MAX: Final = 12
"""Reads of a second each in which a stream may say nothing: its heartbeat comes every second."""


class Follower(Actor):
    """Reads topics to their heads again and again, by long polls."""

    def __init__(self, world: World, writers: Sequence[LogWriter], name: str = "follow.diff") -> None:
        super().__init__(world, name)
        self.seqs = {writer.topic: 0 for writer in writers}
        self.pages = {topic: Page() for topic in self.seqs}

    def step(self) -> None:
        topic = self.rng.choice(list(self.seqs))
        self._read_on(topic, self.rng.choice([0, 50]))

    def _read_on(self, topic: str, wait_ms: int = 0) -> bool:
        answer = self.diff(topic, self.seqs[topic], self.pages[topic], wait_ms=wait_ms)
        self.seqs[topic] = answer["next_from_seq"]
        return bool(answer["caught_up"])

    def check(self) -> None:
        for topic in self.seqs:
            while not self._read_on(topic):
                pass
            self.compare(topic, self.read(topic))

    def compare(self, topic: str, whole: Page) -> None:
        """Check that what was read bit by bit is what there is."""
        mine = self.pages[topic]
        need(not mine.silent, self.id, topic, "silent", mine.silent[:5])
        for seq in whole.records:
            if seq <= self.seqs[topic]:
                need(seq in mine.records, self.id, topic, f"never saw {seq}", mine.reason_at(seq))
        for seq in mine.records:
            need(seq in whole.records or whole.reason_at(seq), self.id, topic, f"{seq} is gone without a gap")


class Watcher(Follower):
    """Reads by a watch, opens its stream again behind the last id, and waits `pause_s` after each `chunk_bytes`."""

    def __init__(
        self, world: World, writers: Sequence[LogWriter], name: str, chunk_bytes: int = 65536, pause_s: float = 0.0
    ) -> None:
        super().__init__(world, writers, name)
        self._chunk_bytes = chunk_bytes
        self._pause_s = pause_s
        self._wid = self._last_id = ""
        self._open: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None
        self._buffer = b""
        self._frames_left = self._silent_reads = 0

    def step(self) -> None:
        response = self._response or self._connect()
        try:
            chunk = response.read1(self._chunk_bytes)
        except TimeoutError:
            if not self.world.going.is_set():
                self._drop()
                return
            self._silent_reads += 1
            need(self._silent_reads < SILENT_READS_MAX, self.id, "a silent stream")
            return
        except (OSError, http.client.HTTPException, AttributeError, ValueError):
            chunk = b""
        self._silent_reads = 0
        if not chunk:
            self._drop()
            raise Unknown
        self._buffer += chunk
        *frames, self._buffer = self._buffer.split(b"\n\n")
        for frame in frames:
            self._take_frame(frame)
        self._frames_left -= len(frames)
        if self._frames_left < 0:
            self._drop()
        if self._pause_s and self.world.going.is_set():
            time.sleep(self._pause_s)

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = self._response = None
        self._buffer = b""

    def _connect(self) -> http.client.HTTPResponse:
        if not self._wid:
            topics = {topic: {"from_seq": seq} for topic, seq in self.seqs.items()}
            body = {"topics": topics, "heartbeat_ms": 1000, "limit": self.rng.choice([3, 50, 1000])}
            self._wid, self._last_id = self.sure("POST", "/v0/watch", body)["wid"], ""
        self._frames_left = self.rng.randrange(5, 300)
        self._open = http.client.HTTPConnection("127.0.0.1", self.world.port, timeout=1)
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        try:
            self._open.request("GET", f"/v0/watch/{self._wid}", headers=headers)
            response = self._open.getresponse()
            if response.status == 200:
                self._response = response
                return response
            text = response.read()
        except (OSError, http.client.HTTPException):
            self._drop()
            raise Refused from None
        self._drop()
        need(response.status in (404, 429, 503), self.id, response.status, text)
        if response.status == 404:
            self._wid = ""
        raise Refused

    def _take_frame(self, raw: bytes) -> None:
        if raw.startswith((b":", b"retry")):
            return
        fields = dict(line.split(b": ", 1) for line in raw.split(b"\n"))
        kind, data = fields[b"event"].decode(), json.loads(fields[b"data"])
        if kind == "error":
            need(data["code"] in (410, 429, "server_shutting_down"), self.id, data)
            if data["code"] != 429:
                self._drop()
            return
        need(kind in ("record", "tombstone", "caught-up"), self.id, raw)
        topic = data["topic"]
        page, seq = self.pages[topic], self.seqs[topic]
        if not page.epoch:
            page.epoch = self.sure("GET", f"/v0/topics/{topic}")["epoch"]
        if kind == "tombstone":
            need(data["gap_from"] == seq + 1, self.id, "tombstone", data, "at", seq)
            page.gaps.append((data["gap_from"], data["gap_to"], data["reason"]))
            self.seqs[topic] = data["gap_to"]
        elif kind == "record":
            need(data["from_seq"] == seq, self.id, topic, f"a frame from {data['from_seq']} at {seq}")
            self.take(topic, seq, page, data["records"], None, data["to_seq"])
            self.seqs[topic] = data["to_seq"]
        if b"id" in fields:
            self._last_id = fields[b"id"].decode()
            told = json.loads(base64.urlsafe_b64decode(self._last_id + "=" * (-len(self._last_id) % 4)))
            for name, at in told.items():
                need(at == self.seqs[name], self.id, f"the id says {name} is at {at}, it is at {self.seqs[name]}")

    def check(self) -> None:
        end = time.monotonic() + CATCH_UP_S
        wholes = {topic: self.read(topic) for topic in self.seqs}
        pause_s, self._pause_s = self._pause_s, 0.0
        while any(self.seqs[topic] < page.head_seq for topic, page in wholes.items()):
            if time.monotonic() > end:
                raise Finding(f"{self.id} never caught up: {self.seqs}")
            try:
                self.step()
            except (Refused, Unknown):
                time.sleep(RETRY_S)
        self._pause_s = pause_s
        for topic, page in wholes.items():
            self.compare(topic, page)


class CursorReader(Actor):
    """Reads one topic by named cursors: a strict one, and two that may give records again."""

    CURSORS: Final = {"strict": ("strictly_at_once", 1), "lazy": ("at_least_once", 1), "lazy3": ("at_least_once", 3)}

    def __init__(self, world: World, writer: LogWriter) -> None:
        super().__init__(world, f"cursors.{writer.topic}")
        self._topic = writer.topic
        self._path = f"/v0/topics/{writer.topic}/cursors"
        self._given: dict[str, Counter[int]] = {name: Counter() for name in self.CURSORS}
        self._pages = {name: Page() for name in self.CURSORS}
        self._seqs = dict.fromkeys(self.CURSORS, 0)
        self._unknown: set[str] = set()
        """Cursors that may have moved without an answer since their last records."""

    def set_up(self) -> None:
        for name, (consistency, every) in self.CURSORS.items():
            body = {"consistency": consistency, "persist_every": every, "from_seq": 0}
            self.sure("PUT", f"{self._path}/{name}", body)

    def step(self) -> None:
        self._read_by(self.rng.choice(list(self.CURSORS)))

    def _read_by(self, name: str) -> bool:
        try:
            answer = self.once("POST", f"{self._path}/{name}/read", {"limit": self.rng.choice([1, 5, 60, 60, 2000])})
        except Unknown:
            self._unknown.add(name)
            raise
        former, tombstone = self._seqs[name], answer["tombstone"]
        if tombstone or answer["records"]:
            first = tombstone["gap_from"] if tombstone else answer["records"][0]["$seq"]
            if name == "strict":
                need(first > former, self.id, f"the strict cursor goes back: {first} after {former}")
                need(first == former + 1 or name in self._unknown, self.id, f"the strict one skips {former} to {first}")
            else:
                need(first <= former + 1, self.id, f"{name} skips: {former} to {first}")
            page = Page()
            page.epoch = answer["epoch"]
            self.take(self._topic, first - 1, page, answer["records"], tombstone, answer["cursor_seq"])
            need(not page.silent, self.id, "silent", page.silent)
            self._pages[name].gaps += page.gaps
            self._given[name].update(page.records.keys())
            self._seqs[name] = answer["cursor_seq"]
            self._unknown.discard(name)
        return bool(answer["caught_up"])

    def check(self) -> None:
        for name in self.CURSORS:
            end = time.monotonic() + CATCH_UP_S
            caught_up = False
            while not caught_up:
                need(time.monotonic() < end, self.id, name, "never caught up")
                try:
                    caught_up = self._read_by(name)
                except (Refused, Unknown):
                    time.sleep(RETRY_S)
            given = self._given[name]
            if name == "strict":
                twice = [seq for seq, count in given.items() if count > 1]
                need(not twice, self.id, "the strict cursor gave twice", twice[:5])
            else:
                for seq in self.read(self._topic).records:
                    need(seq in given, self.id, name, f"never gave {seq}", self._pages[name].reason_at(seq))
