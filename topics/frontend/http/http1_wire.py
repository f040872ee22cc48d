"""What an HTTP/1.1 answer is on the wire, apart from its headers: status lines, chunks, answers that no app made."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from topics.core.errors import STATUS_BY_CODE

LAST_CHUNK: Final = b"0\r\n\r\n"
STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


def chunk(data: bytes) -> bytes:
    """One chunk of a body whose length nobody knows."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_answer(
    code: str, message: str, detail: Mapping[str, object] | None = None, *, with_body: bool = True
) -> bytes:
    """A whole answer that did not come from the app (api §0.6); the connection closes after it."""
    status = STATUS_BY_CODE[code]
    error = {"code": code, "message": message} | ({"detail": detail} if detail else {})
    body = msgspec.json.encode({"error": error})
    allow = b"allow: DELETE, GET, HEAD, OPTIONS, POST, PUT\r\n" if code == "method_not_allowed" else b""
    retry = b"retry-after: 1\r\n" if status in (429, 503) else b""
    return b"%bcontent-type: application/json\r\n%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        STATUS_LINES[status],
        allow,
        retry,
        len(body),
        body if with_body else b"",
    )
