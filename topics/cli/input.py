"""Lines of stdin in batches: by count, by bytes, and by a short delay, so that a pipe that trickles is not held up."""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from topics.cli.service import UsageError

READ_MAX_BYTES: Final = 1 << 20
LINE_MAX_BYTES: Final = 64 << 20
"""The service's bound for a whole request: input without line breaks must not fill the memory."""
SHOWN_MAX_CHARS: Final = 120


class BadLineError(UsageError):
    """A line of the input that cannot be used."""

    def __init__(self, number: int, text: bytes, reason: str) -> None:
        shown = text[: 4 * SHOWN_MAX_CHARS].decode(errors="replace").strip()
        shown = shown[:SHOWN_MAX_CHARS] + ("…" if len(shown) > SHOWN_MAX_CHARS else "")
        super().__init__(f"line {number}: {reason}: {shown}")
        self.number = number


class Batch(NamedTuple):
    """Lines that go together, blank ones included; `first` is the number of the first, from 1."""

    first: int
    lines: list[bytes]

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1

    def texts(self) -> list[bytes]:
        """The lines that say something."""
        return [text for line in self.lines if (text := line.strip(b" \t\r"))]

    def before(self, number: int) -> Batch:
        """Its lines up to that one."""
        return Batch(self.first, self.lines[: number - self.first])


class Batcher:
    """Which lines go together, and when. Pure: lines and times come in."""

    def __init__(self, *, lines_max: int, bytes_max: int, delay_s: float) -> None:
        self._lines_max = lines_max
        self._bytes_max = bytes_max
        self._delay_s = delay_s
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._first = 1
        self._since_s = 0.0

    def add(self, lines: list[bytes], now_s: float) -> None:
        if not self._waiting:
            self._since_s = now_s
        self._waiting.extend(lines)
        self._waiting_bytes += sum(map(len, lines))

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait for more; None: until there is some."""
        return max(0.0, self._since_s + self._delay_s - now_s) if self._waiting else None

    def due(self, now_s: float, *, ended: bool) -> Batch | None:
        """What is to go now; with `ended`, when no more comes, all of it, batch by batch."""
        full = len(self._waiting) >= self._lines_max or self._waiting_bytes >= self._bytes_max
        if not self._waiting or not (full or ended or now_s >= self._since_s + self._delay_s):
            return None
        batch, len_bytes = Batch(self._first, []), 0
        while self._waiting and len(batch.lines) < self._lines_max:
            if batch.lines and len_bytes + len(self._waiting[0]) > self._bytes_max:
                break
            len_bytes += len(self._waiting[0])
            batch.lines.append(self._waiting.popleft())
        self._first += len(batch.lines)
        self._waiting_bytes -= len_bytes
        self._since_s = now_s
        return batch


class LineSource:
    """The lines of a file descriptor, as they come. `ended` once there are no more; the last one needs no line end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._whole = 0
        self.ended = False

    def take(self, wait_s: float | None) -> list[bytes]:
        """What whole lines have come within this time, waiting for no more than the first bytes."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return []
        chunk = os.read(self._fd, READ_MAX_BYTES)
        self.ended = not chunk
        if chunk and b"\n" not in chunk:
            return self._begin(chunk)
        lines = b"".join((*self._begun, chunk)).split(b"\n")
        self._begun, self._begun_bytes = [], 0
        rest = lines.pop()
        if self.ended:
            return [rest] if rest else []
        self._whole += len(lines)
        if rest:
            self._begin(rest)
        return lines

    def _begin(self, part: bytes) -> list[bytes]:
        self._begun.append(part)
        self._begun_bytes += len(part)
        if self._begun_bytes > LINE_MAX_BYTES:
            raise BadLineError(self._whole + 1, self._begun[0], f"is longer than {LINE_MAX_BYTES} bytes")
        return []


def stdin_batches(
    *, lines_max: int, bytes_max: int, delay_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Batch]:
    """The lines of stdin. Nothing is read while a batch is being dealt with: whoever writes into the pipe waits."""
    if sys.stdin is None:
        raise UsageError("stdin is closed: the input is NDJSON on stdin")
    source = LineSource(sys.stdin.fileno())
    batcher = Batcher(lines_max=lines_max, bytes_max=bytes_max, delay_s=delay_s)
    while True:
        batch = batcher.due(clock(), ended=source.ended)
        if batch is not None:
            yield batch
        elif source.ended:
            return
        else:
            lines = source.take(batcher.wait_s(clock()))
            batcher.add(lines, clock())
