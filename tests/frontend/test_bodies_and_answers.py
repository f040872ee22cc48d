"""Bodies as they come, answers as they go: content types, gzip both ways, query parameters."""

from __future__ import annotations

import asyncio
import gzip
import os
from functools import partial
from typing import Any

import msgspec
import pytest
from starlette.datastructures import QueryParams

from topics.core.errors import STATUS_BY_CODE, TopicsError
from topics.frontend.entry import responses
from topics.frontend.entry.bodies import ClientGoneError, Headers, read_body, unzip
from topics.frontend.entry.responses import GZIP_MIN_BYTES, accepts_gzip, send_error, send_json
from topics.frontend.entry.wire import count, flag

JSON: Headers = {b"content-type": b"application/json"}


def read(chunks: list[bytes], headers: Headers, max_bytes: int = 100, gone: bool = False) -> bytes:
    """Return what `read_body` makes of a body in these pieces."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": gone or at < len(chunks) - 1}
        for at, chunk in enumerate(chunks)
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return asyncio.run(read_body(receive, headers, max_bytes))


def refused(chunks: list[bytes], headers: Headers, max_bytes: int = 100) -> str:
    with pytest.raises(TopicsError) as error:
        read(chunks, headers, max_bytes)
    return error.value.code


def test_a_body_in_pieces() -> None:
    assert read([b"{", b"", b"}"], JSON) == b"{}"
    assert read([b""], {}) == b""


def test_a_client_that_goes_away() -> None:
    for chunks in ([], [b"{"]):
        with pytest.raises(ClientGoneError):
            read(chunks, JSON, gone=True)


def test_the_limit_holds_whatever_the_pieces() -> None:
    assert len(read([b"x" * 60, b"x" * 40], JSON)) == 100
    assert refused([b"x" * 60, b"x" * 41], JSON) == "payload_too_large"
    assert refused([b"x" * 101], JSON) == "payload_too_large"


@pytest.mark.parametrize("content_type", [b"application/json; charset=utf-8", b"Application/JSON ;a=b"])
def test_content_types_that_are_json(content_type: bytes) -> None:
    assert read([b"{}"], {b"content-type": content_type}) == b"{}"


@pytest.mark.parametrize("content_type", [None, b"", b"text/plain", b"application/jsonx", b"application/x-json"])
def test_content_types_that_are_not(content_type: bytes | None) -> None:
    headers = {} if content_type is None else {b"content-type": content_type}
    assert refused([b"{}"], headers) == "unsupported_media_type"


def zipped(encoding: bytes = b"gzip") -> Headers:
    return JSON | {b"content-encoding": encoding}


@pytest.mark.parametrize("size", [50, 20_000], ids=["by the loop", "by a thread"])
def test_gzip_bodies(size: int) -> None:
    plain = os.urandom(size)
    assert read([gzip.compress(plain)], zipped(), 50_000) == plain
    assert read([gzip.compress(plain)], zipped(b" GZIP"), 50_000) == plain
    assert read([plain], zipped(b"identity"), 50_000) == plain
    assert refused([plain], zipped(b"br"), 50_000) == "unsupported_media_type"


def test_damaged_gzip() -> None:
    whole = gzip.compress(b"x" * 80)
    for body in (whole[:-1], whole[:5], b"\x1f\x8b", b"{}", whole[:-8] + b"\0" * 8, whole + whole, whole + b"x"):
        assert refused([body], zipped()) == "invalid_request"


def test_a_bomb_never_unpacks_beyond_the_limit() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    assert len(bomb) < 100_000
    with pytest.raises(TopicsError) as error:
        unzip(bomb, 1000)
    assert error.value.code == "payload_too_large"
    assert unzip(gzip.compress(b"x" * 1000), 1000) == b"x" * 1000


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (b"gzip", True),
        (b"gzip, deflate, br", True),
        (b"br;q=1, GZIP;q=0.5", True),
        (b"*", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.0, *", False),
        (b"*;q=0", False),
        (b"identity", False),
        (b"", False),
    ],
)
def test_who_takes_gzip(header: bytes, accepted: bool) -> None:
    assert accepts_gzip(header) == accepted


def sent(*arguments: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def main() -> None:
        if isinstance(arguments[0], TopicsError):
            await send_error(send, {}, *arguments)
        else:
            await send_json(send, *arguments)

    asyncio.run(main())
    start, body = messages
    return start["status"], dict(start["headers"]), body["body"]


@pytest.mark.parametrize("size", [GZIP_MIN_BYTES, 200_000], ids=["by the loop", "by a thread"])
def test_answers_are_packed_for_those_who_ask(size: int) -> None:
    body = b"x" * size
    status, headers, packed = sent({b"accept-encoding": b"gzip"}, 200, body)
    assert (status, headers[b"content-encoding"], headers[b"vary"]) == (200, b"gzip", b"accept-encoding")
    assert headers[b"content-length"] == b"%d" % len(packed)
    assert gzip.decompress(packed) == body
    for accept in ({b"accept-encoding": b"identity"}, {}):
        _, headers, plain = sent(accept, 200, body)
        assert b"content-encoding" not in headers
        assert plain == body
    _, headers, small = sent({b"accept-encoding": b"gzip"}, 200, b"{}")
    assert b"content-encoding" not in headers
    assert small == b"{}"


def test_answers_beyond_what_threads_keep_up_with_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait to be packed either: pages are made faster than they are packed."""
    body = b"x" * 200_000
    monkeypatch.setattr(responses.packing, "most_bytes", 3 * len(body))

    async def main() -> list[tuple[bool, bytes]]:
        messages: dict[int, list[Any]] = {at: [] for at in range(8)}

        async def send(at: int, message: Any) -> None:
            messages[at].append(message)

        takes_gzip = {b"accept-encoding": b"gzip"}
        for round_at in (0, 4):
            # All begin before any is packed.
            await asyncio.gather(
                *(send_json(partial(send, at), takes_gzip, 200, body) for at in range(round_at, round_at + 4))
            )
        return [(b"content-encoding" in dict(start["headers"]), answer["body"]) for start, answer in messages.values()]

    sent_at = asyncio.run(main())
    # The fourth of each finds no room, and what was packed before takes none.
    assert [packed for packed, _ in sent_at] == [True, True, True, False] * 2
    assert all((gzip.decompress(answer) if packed else answer) == body for packed, answer in sent_at)


@pytest.mark.parametrize("code", STATUS_BY_CODE)
def test_every_code_has_its_status_and_envelope(code: str) -> None:
    status, headers, body = sent(TopicsError(code, "why", {"k": 1}))
    assert status == STATUS_BY_CODE[code]
    assert msgspec.json.decode(body) == {"error": {"code": code, "message": "why", "detail": {"k": 1}}}
    assert (b"retry-after" in headers) == (status in (429, 503))
    assert msgspec.json.decode(sent(TopicsError(code, "why"))[2]) == {"error": {"code": code, "message": "why"}}


def test_query_parameters() -> None:
    query = QueryParams(
        "a=true&b=0&n=18446744073709551615&bad=yes&neg=-1&big=18446744073709551616&e=&d=%D9%A3&two=1&two=0"
    )
    assert (flag(query, "a", False), flag(query, "b", True), flag(query, "none", True)) == (True, False, True)
    assert (count(query, "n", 5), count(query, "none", 5)) == (2**64 - 1, 5)
    with pytest.raises(TopicsError, match=r"\?bad"):
        flag(query, "bad", True)
    with pytest.raises(TopicsError, match=r"\?two is there 2 times"):
        flag(query, "two", False)
    for name in ("neg", "big", "e", "bad", "d", "two"):
        with pytest.raises(TopicsError, match=rf"\?{name}"):
            count(query, name, 5)
