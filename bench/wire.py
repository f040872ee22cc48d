"""Requests as bytes, made once before the clock starts."""

from __future__ import annotations

DATA_BYTES = 100


def data(number: int) -> bytes:
    """Return a JSON object of exactly DATA_BYTES."""
    opening = b'{"n":%d,"pad":"' % number
    return opening + b"x" * (DATA_BYTES - len(opening) - 2) + b'"}'


def write_body(batch: int, first: int = 0) -> bytes:
    """Return the body of a write of `batch` records."""
    return b'{"records":[' + b",".join(b'{"data":' + data(first + n) + b"}" for n in range(batch)) + b"]}"


def post(path: str, body: bytes) -> bytes:
    """Return one keep-alive request."""
    return request("POST", path, body)


def put(path: str, body: bytes) -> bytes:
    return request("PUT", path, body)


def request(method: str, path: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def write(topic: str, batch: int) -> bytes:
    """Return a write that does not ask for its seqs: its answer has the first and the last."""
    return post(f"/v0/topics/{topic}?return_seqs=false", write_body(batch))


def diff(topic: str, from_seq: int, limit: int) -> bytes:
    return post(f"/v0/topics/{topic}/diff", b'{"from_seq":%d,"limit":%d}' % (from_seq, limit))
