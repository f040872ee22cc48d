"""The parser by itself: what it refuses, and that how bytes are cut into reads never matters."""

from __future__ import annotations

from typing import Any, NamedTuple

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.cost import lines_of
from topics.core.errors import TopicsError
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http1_parser import Chunks, Head, Heads, RequestParser

LIMITS = HttpLimits(max_header_bytes=2000, max_headers=10, max_uri_bytes=200, max_body_bytes=5000)


class Parsed(NamedTuple):
    head: Head
    body: bytes


def parse(reads: list[bytes], limits: HttpLimits = LIMITS) -> tuple[list[Parsed], bytes]:
    """Run the parser as a connection does, over these reads: the requests, and what was left unused."""
    parser = RequestParser(Heads(limits))
    requests: list[Parsed] = []
    pending = b""
    head: Head | None = None
    body = bytearray()
    for read in reads:
        data, position = pending + read, 0
        while position < len(data):
            if head is None:
                position, end = parser.find_head(data, position)
                if end < 0:
                    break
                head = parser.parse_head(data[position:end])
                if head is None:  # another protocol's, and all that follows
                    return requests, data[position:]
                position = end
                body = bytearray()
            if not parser.complete and position < len(data):
                position = parser.read_body(data, position, body.extend)
            if parser.complete:
                requests.append(Parsed(head, bytes(body)))
                head = None
        pending = data[position:]
    return requests, pending


def refusal(data: bytes, limits: HttpLimits = LIMITS) -> TopicsError:
    """The refusal of `data`, the same whether it comes at once or byte by byte."""
    with pytest.raises(TopicsError) as whole:
        parse([data], limits)
    with pytest.raises(TopicsError) as bytewise:
        parse([data[i : i + 1] for i in range(len(data))], limits)
    assert whole.value.code == bytewise.value.code
    return whole.value


GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        # Two lengths: which one a proxy in front believes is what smuggling lives on.
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        *(
            POST + b"Content-Length: " + length + b"\r\n\r\nhello"
            for length in (b"5, 5", b"5,6", b"+5", b"-5", b"0x5", b"5a", b"5 5", b"5_0", b"", b"99999999999999999999")
        ),
        *(
            POST + b"Transfer-Encoding: " + coding + b"\r\n\r\n0\r\n\r\n"
            for coding in (
                b"gzip",
                b"identity",
                b"xchunked",
                b"chunkedx",
                b"gzip, chunked",
                b"chunked, gzip",
                b"chunked, chunked",
                b",chunked",
                b"\x0bchunked",
                b"",
                b"chunked\r\nTransfer-Encoding: chunked",
                b"gzip\r\nTransfer-Encoding: chunked",
                b"chunked\r\nTransfer-Encoding: identity",
            )
        ),
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        # Lines and blanks.
        b"GET / HTTP/1.1\nHost: a\n\n",
        GET + b"X: y\n\r\n",
        GET + b"X: y\r\n\n",
        GET + b"X: y\rZ: z\r\n\r\n",
        GET + b"X: y\r\n z\r\n\r\n",
        GET + b"X: y\r\n\tz\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
        GET + b"X : y\r\n\r\n",
        GET + b": y\r\n\r\n",
        GET + b"X\r\n\r\n",
        GET + b"X: a\0b\r\n\r\n",
        GET + b"X\0: b\r\n\r\n",
        GET + b"X: a\x01b\r\n\r\n",
        GET + b"X: a\x7fb\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET\t/\tHTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / http/1.1\r\nHost: a\r\n\r\n",
        b"GET / RTSP/1.0\r\nHost: a\r\n\r\n",
        b"SOURCE / ICE/1.0\r\nHost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /#x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"\0\0\0\0",
        b"x" * 40,
        # Host.
        b"GET / HTTP/1.1\r\n\r\n",
        GET + b"Host: a\r\n\r\n",
        GET + b"hOST: b\r\n\r\n",
        *(
            b"GET / HTTP/1.1\r\nHost:" + host + b"\r\n\r\n"
            for host in (b"", b" a b", b" a/b", b" a@b", b" a:b", b" [::1", b" a:80:80", b' "a"', b" a,b:x")
        ),
        # Chunks.
        *(
            CHUNKED + chunk
            for chunk in (
                b"g\r\n",
                b"-1\r\nx",
                b"+5\r\nhello\r\n0\r\n\r\n",
                b"0x5\r\nhello\r\n0\r\n\r\n",
                b" 5\r\nhello\r\n0\r\n\r\n",
                b"5 \r\nhello\r\n0\r\n\r\n",
                b"5\nhello\r\n0\r\n\r\n",
                b"5\r\nhello0\r\n\r\n",
                b"5\r\nhello\n0\r\n\r\n",
                b"5\r\nhelloXX0\r\n\r\n",
                b"5;a\nb\r\nhello\r\n0\r\n\r\n",
                b"5\r\nhello\r\n0\r\n\n",
                b"5\r\nhello\r\n0\n\r\n",
                b"10000000000000000\r\n",
                b"\r\n5\r\nhello\r\n0\r\n\r\n",
                b"0\r\nContent-Length: 3\r\n\r\n",
                b"0\r\nX : y\r\n\r\n",
            )
        ),
    ],
)
def test_refused_as_invalid(data: bytes) -> None:
    assert refusal(data).code == "invalid_request"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", "http_version_not_supported"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", "http_version_not_supported"),
        (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", "http_version_not_supported"),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", "method_not_allowed"),
        (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", "method_not_allowed"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", "method_not_allowed"),
        (b"GET /" + b"x" * 200 + b" HTTP/1.1\r\nHost: a\r\n\r\n", "uri_too_long"),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", "uri_too_long"),
        (GET + b"X: " + b"y" * 2000 + b"\r\n\r\n", "headers_too_large"),
        (GET + b"X: y\r\n" * 10 + b"\r\n", "headers_too_large"),
        (POST + b"Content-Length: 5001\r\n\r\n", "payload_too_large"),
        (CHUNKED + b"1389\r\n" + b"x" * 0x1389, "payload_too_large"),
        (CHUNKED + b"3e8\r\n" + b"x" * 1000 + b"\r\n" + b"1000\r\n" + b"x" * 4096, "payload_too_large"),
        (POST + b"Expect: tea\r\n\r\n", "expectation_failed"),
        (CHUNKED + b"1000\r\n" + bytes(4096) + b"\r\n1;" + b"x" * 5000, "invalid_request"),
        (CHUNKED + b"5;" + b"x" * 3000 + b"\r\nhello\r\n0\r\n\r\n", "invalid_request"),
        (CHUNKED + b"0\r\n" + b"X: y\r\n" * 500 + b"\r\n", "invalid_request"),
    ],
)
def test_refused_with_its_own_code(data: bytes, code: str) -> None:
    assert refusal(data).code == code


def test_a_line_with_the_size_of_a_chunk_may_come_in_two_pieces() -> None:
    data = CHUNKED + b"1000;" + b"x" * 1500 + b"\r\n" + bytes(4096) + b"\r\n0\r\n\r\n"
    for cut in (len(CHUNKED) + 2, len(CHUNKED) + 700, len(CHUNKED) + 1506):
        (request,), _ = parse([data[:cut], data[cut:]])
        assert request.body == bytes(4096)


def test_blank_lines_cost_nothing() -> None:
    """Each byte of them took a turn of a loop: 256 KB, one read, held up everybody else for 10 ms and more."""
    parser = RequestParser(Heads(LIMITS))
    assert lines_of(lambda: parser.find_head(b"\r\n" * 100_000, 0)) < 20
    assert parser.find_head(b"\r\n" * 1000 + GET + b"\r\n", 0) == (2000, 2000 + len(GET) + 2)


def test_too_many_headers_are_not_looked_at() -> None:
    """A head may have 40,000 of them, which took 10 ms."""
    head = GET + b"a:\r\n" * 10_000 + b"\r\n"

    def refused() -> None:
        with pytest.raises(TopicsError, match="10001 headers, at most 10"):
            Heads(LIMITS).parse(head)

    assert lines_of(refused) < 100


def test_a_host_is_no_longer_than_a_name_may_be() -> None:
    """The last ones are kept."""
    parse([b"GET / HTTP/1.1\r\nHost: " + b"a" * 253 + b":65535\r\n\r\n"])
    assert refusal(b"GET / HTTP/1.1\r\nHost: " + b"a" * 301 + b"\r\n\r\n").code == "invalid_request"


def test_limits_are_reached_exactly() -> None:
    target = b"/" + b"x" * 199
    (request,), _ = parse([b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 9 + b"\r\n"])
    assert request.head.raw_path == target
    assert len(request.head.headers) == 10
    filler = 2000 - len(GET + b"X: \r\n\r\n")
    (request,), _ = parse([GET + b"X: " + b"y" * filler + b"\r\n\r\n"])
    assert request.head.headers[1] == (b"x", b"y" * filler)
    (request,), _ = parse([POST + b"Content-Length: 5000\r\n\r\n" + b"x" * 5000])
    assert len(request.body) == 5000
    (request,), _ = parse([CHUNKED + b"1388\r\n" + b"x" * 5000 + b"\r\n0\r\n\r\n"])
    assert len(request.body) == 5000


def test_refusal_shows_the_value_and_the_way_out() -> None:
    assert "'a b'" in refusal(b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n").message
    assert "5001 bytes, at most 5000" in refusal(POST + b"Content-Length: 5001\r\n\r\n").message
    assert "HTTP/1.1 is" in refusal(b"GET / HTTP/1.2\r\nHost: a\r\n\r\n").message


def test_other_protocols_are_left_alone() -> None:
    for head in (b"PRI * HTTP/2.0\r\n\r\n", GET + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"):
        parser = RequestParser(Heads(LIMITS))
        assert parser.find_head(head + b"SM\r\n\r\n", 0) == (0, len(head))
        assert parser.parse_head(head) is None


def test_the_handshake_of_a_websocket_is_a_head_like_others_but_not_kept() -> None:
    heads = Heads(LIMITS)
    head = GET + b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    parsed = heads.parse(head)
    assert parsed is not None
    assert parsed.is_websocket
    assert heads.parse(head) is not parsed, "each one has another key"


@pytest.mark.parametrize(
    "head",
    [
        GET + b"Connection: Upgrade\r\nUpgrade: teapot/1\r\n",
        GET + b"Proxy-Connection: Upgrade\r\nUpgrade: websocket\r\n",
        GET + b"Connection: Upgrade\r\nUpgrade: websocket, teapot/1\r\n",
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n",
        GET + b"Connection: Upgrade\r\nConnection: keep-alive\r\nUpgrade: websocket\r\n",
        GET.replace(b"GET", b"PUT") + b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        GET.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: Upgrade, keep-alive\r\nUpgrade: h2c\r\n",
        GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n",
        GET + b"upgrade:teapot/1\r\nX: y\r\nCONNECTION:upgrade\r\nUPGRADE: \r\n",
    ],
)
@pytest.mark.parametrize("body", [b"", b"Content-Length: 9\r\n\r\nnot HTTP\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_any_other_upgrade_is_ignored(head: bytes, body: bytes) -> None:
    """RFC 9110 §7.8. Hypercorn would serve it, too, but without limits for who does not read."""
    if body and (b"Content-Length" in head or b"HTTP/1.0" in head):
        body = b""
    chunks = b"9\r\nnot HTTP\n\r\n0\r\n\r\n" if b"chunked" in body else b""
    requests, rest = parse([head + (body or b"\r\n") + chunks + GET + b"\r\n"])
    assert [request.body for request in requests] == [b"not HTTP\n" if body else b"", b""]
    assert rest == b""
    assert any(name == b"upgrade" for name, _ in requests[0].head.headers)


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        (b"HTTP/1.1\r\nHost: a", True),
        (b"HTTP/1.1\r\nHost: a\r\nConnection: Close", False),
        (b"HTTP/1.1\r\nHost: a\r\nConnection: x, close ,y", False),
        (b"HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, close", False),
        (b"HTTP/1.1\r\nHost: a\r\nConnection: close\r\nConnection: keep-alive", False),
        (b"HTTP/1.0", False),
        (b"HTTP/1.0\r\nConnection: Keep-Alive", True),
    ],
)
def test_keep_alive(lines: bytes, keep_alive: bool) -> None:
    (request,), _ = parse([b"GET / " + lines + b"\r\n\r\n"])
    assert request.head.keep_alive is keep_alive


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/", (b"/", b"")),
        (b"/a?b?c", (b"/a", b"b?c")),
        (b"/a%2Fb?", (b"/a%2Fb", b"")),
        (b"//a/b", (b"//a/b", b"")),
        (b"*", (b"*", b"")),
        (b"http://b:80/c?d", (b"/c", b"d")),
        (b"http://b", (b"/", b"")),
    ],
)
def test_targets(target: bytes, expected: tuple[bytes, bytes]) -> None:
    (request,), _ = parse([b"OPTIONS " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n"])
    assert (request.head.raw_path, request.head.query) == expected


# Bodies like to contain what looks like the end of a body or the start of the next request.
pieces = st.lists(
    st.sampled_from([b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"\n", b"\r", b"x", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
    | st.binary(min_size=1, max_size=20),
    max_size=6,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request's bytes and its body."""
    path = b"/" + bytes(draw(st.lists(st.sampled_from(b"abc/%"), max_size=5)))
    head = b"POST " + path + b" HTTP/1.1\r\nHost: a\r\n"
    parts = draw(pieces)
    body = b"".join(parts)
    kind = draw(st.sampled_from(["none", "length", "chunked"]))
    if kind == "none":
        return head + b"\r\n", b""
    if kind == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
    extension = draw(st.sampled_from([b"", b";a=b", b';a="b c"']))
    trailers = draw(st.sampled_from([b"", b"X: y\r\n", b"Host: b\r\nX: y\r\n"]))
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n", body


@given(st.lists(requests(), min_size=1, max_size=5), st.data())
@settings(max_examples=300, deadline=None)
def test_reads_may_be_cut_anywhere(expected: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    wire = b"".join(request for request, _ in expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    if data.draw(st.booleans(), "byte by byte"):
        cuts = list(range(len(wire)))
    reads = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    parsed, pending = parse(reads)
    assert [request.body for request in parsed] == [body for _, body in expected]
    assert pending == b""
    assert all(request.head.headers[0] == (b"host", b"a") for request in parsed)


LLHTTP = httptools.HttpRequestParser


class CountingLlhttp:
    """llhttp, and how often it is called."""

    calls = 0

    def __init__(self, protocol: Any) -> None:
        self._llhttp = LLHTTP(protocol)

    def feed_data(self, data: Any) -> None:
        CountingLlhttp.calls += 1
        self._llhttp.feed_data(data)


def test_a_head_that_comes_again_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections share what they know; a body of known length needs no llhttp."""
    monkeypatch.setattr(httptools, "HttpRequestParser", CountingLlhttp)
    monkeypatch.setattr(CountingLlhttp, "calls", 0)
    heads = Heads(LIMITS)
    head = POST + b"Content-Length: 5\r\n\r\n"
    parsed = []
    for body in (b"first", b"other", b"third"):
        parser = RequestParser(heads)
        read: list[bytes] = []
        parsed.append(parser.parse_head(head))
        assert not parser.complete
        assert parser.read_body(body + GET, 0, read.append) == 5
        assert parser.complete
        assert read == [body]
    assert parsed[0] is parsed[1] is parsed[2]
    assert CountingLlhttp.calls == 1


def test_only_short_heads_are_kept() -> None:
    heads = Heads(HttpLimits())
    short, long = (GET + b"X: %b\r\n\r\n" % (b"y" * length) for length in (1, 1024))
    assert heads.parse(short) is heads.parse(short)
    assert heads.parse(long) == heads.parse(long)
    assert heads.parse(long) is not heads.parse(long)


def test_no_head_with_a_key_is_kept() -> None:
    heads = Heads(LIMITS)
    queries = (GET.replace(b"/ ", b"/?%b=abc " % name) + b"\r\n" for name in (b"token", b"%74oken"))
    for head in (GET + b"AUTHORIZATION: Bearer abc\r\n\r\n", *queries):
        assert heads.parse(head) == heads.parse(head)
        assert heads.parse(head) is not heads.parse(head)


def test_the_oldest_head_makes_room_for_a_new_one() -> None:
    heads = Heads(LIMITS)
    first, *others = (heads.parse(GET.replace(b"/ ", b"/%d " % n) + b"\r\n") for n in range(1025))
    again = heads.parse(GET.replace(b"/ ", b"/0 ") + b"\r\n")
    assert again == first
    assert again is not first
    assert heads.parse(GET.replace(b"/ ", b"/1024 ") + b"\r\n") is others[-1]


def test_a_refused_head_is_refused_again() -> None:
    heads = Heads(LIMITS)
    for _ in range(2):
        with pytest.raises(TopicsError, match="header Host is there twice"):
            heads.parse(GET + b"Host: b\r\n\r\n")


@pytest.mark.parametrize("data", [b"\r\n\r\n" * 1000, b"0\r\n\r\n" * 800], ids=["empty lines", "ends"])
@pytest.mark.parametrize("chunk_bytes", [4000, 500])
def test_what_a_chunk_holds_costs_nothing(data: bytes, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call into llhttp for a read, one piece for the app: each took microseconds of the loop, a thousand times."""
    monkeypatch.setattr(httptools, "HttpRequestParser", CountingLlhttp)
    parser = RequestParser(Heads(LIMITS))
    parser.parse_head(CHUNKED)
    monkeypatch.setattr(CountingLlhttp, "calls", 0)
    chunks = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    body: list[bytes] = []
    middle = len(wire) // 2
    assert parser.read_body(wire[:middle], 0, body.append) == middle
    assert not parser.complete
    assert parser.read_body(wire[middle:] + GET, 0, body.append) == len(wire) - middle
    assert parser.complete
    assert b"".join(body) == data
    assert (CountingLlhttp.calls, len(body)) == (2, 2)


@pytest.mark.parametrize("llhttp_ends", [True, False])
def test_two_opinions_on_where_a_body_ends_are_a_refusal(llhttp_ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should llhttp and we ever differ: what follows must not be taken for a request."""
    wire = CHUNKED + b"1\r\nx\r\n0\r\n\r\n"
    if llhttp_ends:
        monkeypatch.setattr(Chunks, "ended", property(lambda _: False, lambda *_: None), raising=False)
    else:
        monkeypatch.setattr("topics.frontend.http.http1_parser._Pieces.on_message_complete", lambda _: None)
    with pytest.raises(TopicsError, match="its end is not clear"):
        parse([wire])


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_or_waited_for(garbage: bytes, after_a_head: bool) -> None:
    """No other exception, and nothing that was not asked for comes out."""
    try:
        parse([CHUNKED + garbage if after_a_head else garbage])
    except TopicsError as refused:
        assert refused.message  # noqa: PT017 - no refusal is as good


def test_a_list_that_comes_in_several_headers_is_one() -> None:
    lines = (
        b"Accept: a/b\r\nX: 1\r\nConnection: upgrade\r\nACCEPT: text/html;q=0.5\r\nX: 2\r\nConnection: keep-alive\r\n"
    )
    head = Heads(LIMITS).parse(b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n" + lines + b"\r\n")
    assert head is not None
    assert head.is_websocket
    assert head.headers[2:] == [
        (b"accept", b"a/b, text/html;q=0.5"),
        (b"x", b"1"),
        (b"connection", b"upgrade, keep-alive"),
        (b"x", b"2"),
    ]
