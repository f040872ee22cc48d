"""Requests of the attack: one connection, and answers that say whether a thing was done.

Nothing here trusts the service: an answer that the contract does not know is a finding.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from typing import Any, Final

COUNTS: Final[Counter[str]] = Counter()
"""Numbers of what the attack did and met, for its last line."""
ANSWER_DEADLINE_S: Final = 30.0

Json = Any
"""A decoded answer; the attack checks each field that it uses."""


class Finding(AssertionError):  # noqa: N818 — named for what it is
    """A broken promise."""


class Unknown(Exception):  # noqa: N818 — named for what it is
    """Nobody knows whether the request was done."""


class Refused(Exception):  # noqa: N818 — named for what it is
    """The request was not done; it may be sent again."""


def need(condition: object, *what: object) -> None:
    """Check a promise."""
    COUNTS["checks"] += 1
    if not condition:
        raise Finding(" ".join(map(str, what)))


class Connection:
    """One connection to the service, opened when it is needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, body: Json = None) -> tuple[int, Json]:
        """Return (status, answer). Raise Refused, Unknown, Finding."""
        COUNTS["requests"] += 1
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            if self._open is None:
                self._open = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_DEADLINE_S)
                self._open.connect()
        except OSError:
            self.close()
            raise Refused from None
        try:
            self._open.request(method, path, data, headers)
            response = self._open.getresponse()
            text = response.read()
        except TimeoutError:
            self.close()
            raise Finding(f"no answer within {ANSWER_DEADLINE_S} s: {method} {path} {str(body)[:200]}") from None
        except (OSError, http.client.HTTPException):
            self.close()
            raise Unknown from None
        if response.will_close:
            self.close()
        try:
            answer = json.loads(text)
        except ValueError:
            raise Finding(f"{method} {path}: not JSON: {text[:200]!r}") from None
        if response.status >= 500 or response.status == 429:
            self._refused(method, path, response, answer)
        return response.status, answer

    def _refused(self, method: str, path: str, response: http.client.HTTPResponse, answer: Json) -> None:
        code = answer["error"]["code"]
        need(response.status in (429, 503), method, path, response.status, answer)
        need(response.headers["Retry-After"], "no Retry-After", answer)
        COUNTS[code] += 1
        if code == "shard_unavailable" or (code == "storage_unavailable" and "/commit" in path):
            raise Unknown
        raise Refused

    def close(self) -> None:
        """Close what is open; the next call opens another one."""
        if self._open is not None:
            self._open.close()
        self._open = None


class Facts:
    """All that anybody has seen: a seq of one topic (name and epoch) stands for one value, for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], dict[int, str]] = {}

    def saw(self, topic: str, epoch: str, seq: int, value: str) -> None:
        """Note a record, and check it against all that was ever seen at its seq."""
        with self._lock:
            former = self._values.setdefault((topic, epoch), {}).setdefault(seq, value)
        need(former == value, f"{topic} {epoch}: seq {seq} was {former} and is {value}")


class Page:
    """A topic as one reader has seen it: records by seq, gaps it was told of, and seqs nobody said anything about."""

    def __init__(self) -> None:
        self.records: dict[int, Json] = {}
        self.gaps: list[tuple[int, int, str]] = []
        self.silent: list[tuple[int, int]] = []
        self.epoch = ""
        self.head_seq = 0
        self.durable_seq = 0

    def reason_at(self, seq: int) -> str | None:
        """Return why this seq is missing; None if no gap says so."""
        return next((reason for first, last, reason in self.gaps if first <= seq <= last), None)

    def values(self) -> list[str]:
        """Return what the records are, in order."""
        return [record["data"]["v"] for record in self.records.values()]
