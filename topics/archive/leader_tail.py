"""The way to the leader of a service that follows: it tells what it has committed before that is in the archive."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from topics.core.clock import Clock, doubled_ms
from topics.storage.archive_objects import ArchiveDamagedError, LogEnd, Piece, decode

WAIT_MS: Final = 200
"""The time that the leader waits for news before it answers. Without news the state shown is at most that old."""
TIMEOUT_S: Final = 1.5
"""Time-out of each read of an answer. A leader that stands still holds up a takeover for as long."""
RETRY_MS: Final = (500, 10_000)
PATH: Final = "/v0/archive/tail"


class LeaderAwayError(Exception):
    """The leader tells nothing now; the message says why. The archive has everything later."""


class LeaderTail:
    """One connection to the leader. Owns it, and the pauses between tries when it fails."""

    def __init__(self, key: str | None, clock: Clock) -> None:
        """`key` is one that may read everything, None if the leader asks for none."""
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._clock = clock
        self._connection: http.client.HTTPConnection | None = None
        self._url = ""
        self._failures = 0
        self._not_before_ms = 0

    def is_due(self, url: str) -> bool:
        """Return whether the leader at this address is to be asked now."""
        if url != self._url:
            self.give_up()
            self._url, self._failures, self._not_before_ms = url, 0, 0
        return bool(url) and self._clock.monotonic_ms() >= self._not_before_ms

    def ask(self, ends: Sequence[LogEnd]) -> tuple[Piece, memoryview]:
        """Return what the leader's logs have behind these ends. Raise LeaderAwayError; then ask later."""
        try:
            found = self._ask(msgspec.json.encode({"ends": ends, "wait_ms": WAIT_MS}))
        except (OSError, http.client.HTTPException, ArchiveDamagedError) as error:
            self.give_up()
            # The next try comes after a pause, which doubles with each failure.
            self._not_before_ms = self._clock.monotonic_ms() + doubled_ms(RETRY_MS[0], self._failures, RETRY_MS[1])
            self._failures += 1
            raise LeaderAwayError(f"{self._url}: {error or type(error).__name__}") from error
        self._failures = 0
        return found

    def give_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, body: bytes) -> tuple[Piece, memoryview]:
        if self._connection is None:
            self._connection = _connect(self._url)
        self._connection.request("POST", PATH, body, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            reason = f"answers {answer.status}: {content[:500].decode(errors='replace')}"
            if answer.status in (401, 403):
                reason += "; set TOPICS_FOLLOW_KEY to a key of the leader with read and admin, and without prefixes"
            raise OSError(reason)
        return decode(content, Piece, f"{self._url}{PATH}")


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname is not None, "the leader's settings have checked it"
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return connect(parts.hostname, parts.port, timeout=TIMEOUT_S)
