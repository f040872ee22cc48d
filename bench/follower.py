"""A client of event streams that accounts for every seq: each comes once, in order, or is in a tombstone.

Unlike `crowd.Watcher`, which is cheap and counts, it reads every frame as a client does: it resumes with
`Last-Event-ID`, and drops a frame that was cut short.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from bench.crowd import Client


class Follower:
    """One session and its stream. `receive_bytes` is the size of its socket's buffer, for one that is to stall."""

    def __init__(self, port: int, *topics: str, receive_bytes: int | None = None) -> None:
        self._port = port
        self._topics = topics
        self._receive_bytes = receive_bytes
        self._path = ""
        self._last_id = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._unread = b""
        self._chunk_bytes = 0
        """Bytes of the chunk whose size has been read, the end of line included."""
        self.next_seq: dict[str, int] = {}
        """Seq that has to come next, by topic."""
        self.records = 0
        self.tombstones = 0
        self.odd: list[str] = []
        """Records that are missing, came twice or out of order, and events that ended a stream."""

    async def begin(self, client: Client) -> None:
        """Make the session, at the heads."""
        body = {"topics": {topic: {"tail": True} for topic in self._topics}}
        while (answer := await client.ask("POST", "/v0/watch", json.dumps(body).encode())).status == 429:
            await asyncio.sleep(0.1)
        assert answer.status == 200, answer
        self._path = answer.json["stream_url"]
        self.next_seq = {topic: place["from_seq"] + 1 for topic, place in answer.json["topics"].items()}

    async def open(self) -> None:
        """Open a stream where the last one ended; repeat a refused request."""
        while (head := await self._ask()).startswith(b"HTTP/1.1 429"):
            self.close()
            await asyncio.sleep(0.2)
        if not head.startswith(b"HTTP/1.1 200"):
            self.odd.append(f"{self._topics}: {head[:200]!r}")
        self._unread, self._chunk_bytes = b"", 0

    async def _ask(self) -> bytes:
        end = socket.socket()
        if self._receive_bytes is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", self._port))
        self._streams = reader, writer = await asyncio.open_connection(sock=end)
        resume = f"Last-Event-ID: {self._last_id}\r\n" if self._last_id else ""
        writer.write(f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\n{resume}\r\n".encode())
        return await reader.readuntil(b"\r\n\r\n")

    def close(self) -> None:
        """Cut the stream, possibly in the middle of a frame."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def read(self, seconds: float, enough: Callable[[], object] = lambda: False) -> None:
        """Read for so long, or until it is enough. Between two calls nothing is read."""
        try:
            async with asyncio.timeout(seconds):
                while not enough():
                    await self._read_chunk()
        except TimeoutError:
            return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.odd.append(f"{self._topics}: the server ended the stream, last was {self._unread[-300:]!r}")

    def has_passed(self, topic: str, seq: int) -> bool:
        return self.next_seq[topic] > seq

    async def finish(self, client: Client, deadline_s: float) -> None:
        """Read all that is left, once nobody writes any more."""
        heads = {topic: (await client.ask("GET", f"/v0/topics/{topic}")).json["head_seq"] for topic in self._topics}
        await self.open()
        await self.read(deadline_s, lambda: all(self.next_seq[topic] > heads[topic] for topic in self._topics))
        self.close()
        if any(self.next_seq[topic] != heads[topic] + 1 for topic in self._topics):
            self.odd.append(f"not within {deadline_s} s: all up to {heads}; next would have been {self.next_seq}")

    async def _read_chunk(self) -> None:
        assert self._streams is not None
        reader, _ = self._streams
        # Its time may be over at either of the two: it goes on there.
        if not self._chunk_bytes:
            self._chunk_bytes = int(await reader.readuntil(b"\r\n"), 16) + 2
        chunk = await reader.readexactly(self._chunk_bytes)
        self._chunk_bytes = 0
        *frames, self._unread = (self._unread + chunk[:-2]).split(b"\n\n")
        for frame in frames:
            self._take(frame)

    def _take(self, frame: bytes) -> None:
        fields: dict[bytes, bytes] = {}
        for line in frame.split(b"\n"):
            name, _, value = line.partition(b": ")
            fields[name] = fields[name] + b"\n" + value if name in fields else value
        event = fields.get(b"event")
        if event is None:  # a comment, or how long to wait before the next try
            return
        data = json.loads(fields[b"data"])
        if event == b"record":
            self._took(data["topic"], [record["$seq"] for record in data["records"]], data)
            self.records += len(data["records"])
        elif event == b"tombstone":
            self._took(data["topic"], range(data["gap_from"], data["gap_to"] + 1), data)
            self.tombstones += 1
        elif event != b"caught-up" and data.get("code") != 429:
            self.odd.append(f"{self._topics}: {frame[:300]!r}")
        self._last_id = fields.get(b"id", self._last_id.encode()).decode()

    def _took(self, topic: str, seqs: Any, data: dict[str, Any]) -> None:
        expected = self.next_seq[topic]
        if list(seqs) != list(range(expected, expected + len(seqs))):
            told = {name: value for name, value in data.items() if name != "records"}
            self.odd.append(f"{topic}: {seqs[0]} to {seqs[-1]} came where {expected} had to, in {told}")
        self.next_seq[topic] = seqs[-1] + 1
