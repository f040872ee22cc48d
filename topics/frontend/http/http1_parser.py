"""The parser of HTTP/1.1 requests: heads and bodies, checked and bounded. No transport, no clock, no ASGI.

    data ─ find_head ─▶ head ─ parse_head ─▶ Head ─ read_body ─▶ pieces … complete ─▶ find_head …
                                                    (Content-Length: counted; chunked: `ChunkedBody`)

llhttp (httptools) checks every byte of a head and of a chunked body, in its strict mode. It is fed exact pieces, a
whole head, then no more than the rest of its body, so it never sees the request behind the current one. `Heads`
refuses what llhttp accepts and this service does not. After a TopicsError nothing more can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import unquote

import httptools
import msgspec

from topics.core.errors import TopicsError, invalid
from topics.frontend.http.deadlines import HttpLimits

_VIEW_FROM_BYTES = 8 * 1024  # from this length a view is cheaper than a copy
_KEPT_HEADS = 1024
_KEPT_HEAD_MAX_BYTES = 1024
_H2_PREFACE_HEAD = b"PRI * HTTP/2.0\r\n\r\n"
_NAMES_WITH_MEANING = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"})
_LISTS = frozenset({b"accept", b"accept-encoding", b"connection", b"content-encoding", b"if-none-match"})
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_HOST_MAX_BYTES = 300  # a name has 253 at most; the last hosts are kept
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32} ")
_REQUEST_LINE = re.compile(rb"[^ ]+ [^ ]+ (HTTP/[0-9]\.[0-9])")
_BLANK_LINES = re.compile(rb"[\r\n]+")
_ORIGIN = re.compile(rb"(?i)\r\norigin:[ \t]*([^\r\n]+)")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_UPGRADE_LINES = re.compile(rb"(?i)\r\nupgrade:[^\r\n]*(?:\r\n[ \t][^\r\n]*)*")
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\r\n]{0,4000})?\r\n")
_SIZE_LINE_MAX_BYTES = 4096
"""A longer line is refused before its end: until then all of it would be kept, and counted in no budget."""
_SHORT_CHUNKS = re.compile(b"(?:%b)*+" % b"|".join(b"[%x%X]\r\n.{%d}" % (n, n, n + 2) for n in range(1, 16)), re.DOTALL)
"""Any number of whole chunks of up to 15 bytes. A read may have 40,000 of them, too many for a loop in Python."""


class Head(msgspec.Struct, frozen=True):
    """A checked request head. Requests with the same bytes share one."""

    method: str
    raw_path: bytes
    path: str
    """`raw_path` without percent-encoding."""
    query: bytes
    http11: bool
    headers: list[tuple[bytes, bytes]]
    """In the order sent, names in lower case, each list once. Nobody changes it."""
    keep_alive: bool
    expects_continue: bool
    length: int | None
    """Bytes of the body; None: it is chunked."""
    is_websocket: bool
    """True if it is the handshake of a WebSocket, which is still to be checked."""


class Chunks:
    """Finds the end of one chunked body. llhttp does not tell it, and must not be fed the request behind it.

        5;ext⏎  hello⏎   A⏎  , chunked!⏎   0⏎   [Trailer: x⏎ …] ⏎
        └size┘ └─left──┘ └ ┘ └──left────┘ └size┘ └──── trailers ───┘

    It skips chunks by their lengths and never searches their data. Any cut into reads gives the same end.
    """

    def __init__(self) -> None:
        self._left_bytes = 0  # of the current chunk and the CR LF behind it
        self._line = bytearray()  # the part of a size line that has arrived
        self._tail: bytes | None = None  # in the trailers: the last 3 bytes that were read
        self.ended = False

    def follow(self, data: bytes | bytearray, position: int) -> int:
        """Return where this body's part of `data[position:]` ends: at the end of `data`, or at that of the body, which
        has `ended` then. Raise TopicsError.
        """
        size = len(data)
        while position < size:
            if self._left_bytes:
                step = min(self._left_bytes, size - position)
                self._left_bytes -= step
                position += step
            elif self._tail is not None:
                return self._follow_trailers(data, position)
            else:
                if not self._line:
                    short_chunks = _SHORT_CHUNKS.match(data, position)
                    assert short_chunks is not None
                    position = short_chunks.end()
                if position < size:
                    position = self._follow_size(data, position)
        return position

    def _follow_size(self, data: bytes | bytearray, position: int) -> int:
        found = None if self._line else _SIZE_LINE.match(data, position)
        if found is not None:
            end = found.end()
        else:
            end = data.find(b"\n", position) + 1
            self._line += data[position : end or len(data)]
            if not end and len(self._line) < _SIZE_LINE_MAX_BYTES:
                return len(data)
            found = _SIZE_LINE.fullmatch(self._line)
            if found is None:
                size = bytes(self._line[:40])
                raise invalid(f"the chunked body is malformed: {size!r} is not the size of a chunk")
            self._line = bytearray()
        length = int(found[1], 16)
        if length:
            self._left_bytes = length + 2
        else:
            self._tail = b"\r\n"
        return end

    def _follow_trailers(self, data: bytes | bytearray, position: int) -> int:
        """Find the first empty line, which ends the body. It may have begun in the read before."""
        assert self._tail is not None
        for split in (3, 2, 1):
            if self._tail.endswith(b"\r\n\r\n"[:split]) and data.startswith(b"\r\n\r\n"[split:], position):
                self.ended = True
                return position + 4 - split
        end = data.find(b"\r\n\r\n", position)
        if end >= 0:
            self.ended = True
            return end + 4
        self._tail = (self._tail + data[max(position, len(data) - 3) :])[-3:]
        return len(data)


class ChunkedBody:
    """One chunked body. It owns the llhttp that checks it, and finds where it ends."""

    def __init__(self, head: bytes) -> None:
        self._pieces = _Pieces()
        self._llhttp = httptools.HttpRequestParser(self._pieces)
        # Hide an Upgrade that is ignored from llhttp, which would take the request for one without a body.
        self._llhttp.feed_data(_UPGRADE_LINES.sub(b"", head))
        self._chunks = Chunks()

    @property
    def complete(self) -> bool:
        return self._pieces.complete

    def read(self, data: bytes | bytearray, start: int) -> tuple[int, list[bytes]]:
        """Return the end of this body's part of `data[start:]`, and what its chunks hold. Raise TopicsError."""
        position = self._chunks.follow(data, start)
        large = position - start > _VIEW_FROM_BYTES
        try:
            self._llhttp.feed_data(memoryview(data)[start:position] if large else data[start:position])
        except httptools.HttpParserError as error:
            raise invalid(f"the chunked body is malformed: {error}") from error
        if self._chunks.ended is not self._pieces.complete:
            # `Chunks` and llhttp disagree. A proxy that sides with the other one would see another request behind this.
            raise invalid("the chunked body is malformed: its end is not clear")
        found, self._pieces.found = self._pieces.found, []
        return position, found


class _Pieces:
    """The part of a chunked body that llhttp has found since the last look."""

    def __init__(self) -> None:
        self.found: list[bytes] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop it: the headers are known, and trailers are of no use."""
        assert not self.complete, "llhttp was fed beyond the end of a request"

    def on_body(self, data: bytes) -> None:
        self.found.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


class Heads:
    """Parses and checks heads. All connections of a process share it. It remembers the latest short ones, at most
    _KEPT_HEADS, and none with a key in it: a client sends the same head with each of its requests.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._kept: dict[bytes, Head] = {}

    def parse(self, head: bytes) -> Head | None:
        """Return the checked head; None if it begins HTTP/2. Raise TopicsError."""
        known = self._kept.get(head)
        if known is not None:
            return known
        parsed = self._parse(head)
        if (
            parsed is not None
            and not parsed.is_websocket
            and len(head) <= _KEPT_HEAD_MAX_BYTES
            and not _has_key(parsed)
        ):
            if len(self._kept) == _KEPT_HEADS:
                del self._kept[next(iter(self._kept))]
            self._kept[head] = parsed
        return parsed

    def _parse(self, head: bytes) -> Head | None:
        if head == _H2_PREFACE_HEAD:
            return None
        limits = self.limits
        line = head[: head.index(b"\r\n")]
        count = head.count(b"\n") - 2  # of headers: llhttp refuses those that go on in the next line
        if count > limits.max_headers:
            raise TopicsError("headers_too_large", f"{count} headers, at most {limits.max_headers}")
        lines = _Lines()
        upgrade = False
        try:
            httptools.HttpRequestParser(lines).feed_data(head)
        except httptools.HttpParserUpgrade:
            upgrade = True
        except httptools.HttpParserError as error:
            raise _malformed(line, str(error)) from error
        headers = join_lists(lines.headers)
        # llhttp is lenient here (HTTP/0.9, other protocols, more than one space). We want three words.
        words = line.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            raise _not_a_request_line(line)
        method, target, version = words
        http11 = version == b"HTTP/1.1"
        if not http11 and version != b"HTTP/1.0":
            raise _unsupported(version)
        if len(target) > limits.max_uri_bytes:
            raise uri_too_long(limits)

        host: bytes | None = None
        length: int | None = 0
        expects_continue = False
        asks_close = asks_keep_alive = False
        for name, value in headers:
            if name not in _NAMES_WITH_MEANING:
                continue
            if name == b"host":
                if host is not None:
                    raise invalid("header Host is there twice")
                host = value
            elif name == b"content-length":
                length = int(value)  # llhttp has checked: digits, one header, and not with chunked
            elif name == b"transfer-encoding":
                if length is None or not http11 or value.lower() != b"chunked":
                    raise invalid(f"Transfer-Encoding {_show(value)} is not supported; `chunked` is, once")
                length = None
            elif name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                asks_close = asks_close or b"close" in tokens
                asks_keep_alive = asks_keep_alive or b"keep-alive" in tokens
            elif http11:
                if value.lower() != b"100-continue":
                    raise TopicsError(
                        "expectation_failed", f"Expect {_show(value)} is unknown; `100-continue` is known"
                    )
                expects_continue = True
        if host is None:
            if http11:
                raise invalid("header Host is missing")
        elif len(host) > _HOST_MAX_BYTES or not _is_host(host):
            raise invalid(f"header Host is {_show(host)}; it must be `name` or `name:port`")
        if length is not None and length > limits.max_body_bytes:
            raise _body_too_large(limits, f"the body has {length} bytes, at most {limits.max_body_bytes}")
        if method == b"CONNECT":
            raise TopicsError("method_not_allowed", "CONNECT is for proxies; this is not a proxy")
        asked = [value.lower() for name, value in headers if name == b"upgrade"] if upgrade else []
        if asked == [b"h2c"] and _begins_http2(http11, headers):
            return None
        # Any other upgrade is ignored (RFC 9110 §7.8).
        raw_path, query = _split_target(target)
        path = raw_path.decode()
        return Head(
            method=method.decode(),
            raw_path=raw_path,
            path=unquote(path) if "%" in path else path,
            query=query,
            http11=http11,
            headers=headers,
            keep_alive=not asks_close and (http11 or asks_keep_alive),
            expects_continue=expects_continue,
            length=length,
            is_websocket=asked == [b"websocket"] and _begins_websocket(method, headers),
        )


def _has_key(head: Head) -> bool:
    """Return whether a head may have an API key in it: a header, or `?token=`, however that is encoded."""
    return b"token" in head.query or b"%" in head.query or any(name == b"authorization" for name, _ in head.headers)


def origin_of(head: bytes | bytearray) -> bytes:
    """Return the Origin in a head, or in the part of it that is there; empty if there is none."""
    found = _ORIGIN.search(head.partition(b"\r\n\r\n")[0])
    return b"" if found is None else bytes(found[1].rstrip())


def join_lists(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers with the parts of each list joined: a client may send several (RFC 9110 §5.3)."""
    joined = dict(headers)
    if len(joined) == len(headers):
        return headers
    for name in _LISTS & joined.keys():
        joined[name] = b", ".join(value for other, value in headers if other == name)
    return [(name, joined.pop(name) if name in _LISTS else value) for name, value in headers if name in joined]


class _Lines:
    """The headers that llhttp finds in one head."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))


class RequestParser:
    """Parses the requests of one connection, one after the other. Must not be used again after a TopicsError."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._limits = heads.limits
        self._scanned = 0  # leading bytes that hold no end of a head
        self.body_left_bytes: int | None = None  # bytes that the current body lacks; None: it is chunked
        self.body_received_bytes = 0  # of the current body
        self._body_wire_bytes = 0
        self._chunked_body: ChunkedBody | None = None
        self.chunks_read = 0  # pieces of a body that the last `read_body` has found
        self.complete = True  # true if the current request has been read to its end

    def find_head(self, data: bytes | bytearray, position: int) -> tuple[int, int]:
        """Return the start and end of the next head in `data[position:]`, which is not empty. The end is -1 until the
        head is whole: pass the rest again, with more behind it. Raise TopicsError if it cannot become a head.
        """
        if data[position] in b"\r\n":  # RFC 9112 §2.2: blank lines before a request line are skipped
            blank = _BLANK_LINES.match(data, position)
            assert blank is not None
            position = blank.end()
            if position == len(data):
                self._scanned = 0
                return position, -1
        end = data.find(b"\r\n\r\n", max(position, self._scanned - 3))
        if end >= 0:
            self._scanned = 0
            end += 4
            if end - position > self._limits.max_header_bytes:
                raise self._too_large(data, position)
            return position, end
        self._check_partial_head(data, position)
        self._scanned = len(data) - position
        return position, -1

    def parse_head(self, head: bytes) -> Head | None:
        """Parse and check a whole head; None if it begins HTTP/2. Raise TopicsError."""
        parsed = self._heads.parse(head)
        if parsed is not None:
            self.body_left_bytes = parsed.length
            self.body_received_bytes = self._body_wire_bytes = 0
            self._chunked_body = ChunkedBody(head) if parsed.length is None else None
            self.complete = parsed.length == 0
        return parsed

    def read_body(self, data: bytes | bytearray, position: int, sink: Callable[[bytes], None]) -> int:
        """Give `sink` the body in `data[position:]`, without framing. Return the start of the unused rest: the end of
        `data`, or of the request, which is then `complete`. Raise TopicsError.
        """
        if self._chunked_body is not None:
            return self._read_chunks(self._chunked_body, data, position, sink)
        assert self.body_left_bytes is not None
        end = min(position + self.body_left_bytes, len(data))
        self.body_left_bytes -= end - position
        self.body_received_bytes += end - position
        self.complete = not self.body_left_bytes
        self.chunks_read = 1
        # A slice of bytes is one copy, or none if it is the whole. A slice of a bytearray would take two copies.
        sink(data[position:end] if isinstance(data, bytes) else bytes(memoryview(data)[position:end]))
        return end

    def _read_chunks(
        self, body: ChunkedBody, data: bytes | bytearray, start: int, sink: Callable[[bytes], None]
    ) -> int:
        end, pieces = body.read(data, start)
        self.chunks_read = len(pieces)
        self.body_received_bytes += sum(map(len, pieces))
        self._body_wire_bytes += end - start
        if self.body_received_bytes > self._limits.max_body_bytes:
            raise _body_too_large(self._limits, f"the body has more than {self._limits.max_body_bytes} bytes")
        # Chunk extensions and trailers are dropped, but must not go on for ever. A chunk of one byte takes six.
        if self._body_wire_bytes > self._limits.max_header_bytes + 8 * self.body_received_bytes:
            raise invalid("the chunked body is nearly all framing")
        if pieces:
            sink(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if body.complete:
            self.complete = True
            self._chunked_body = None
        return end

    # Refusals.

    def _check_partial_head(self, data: bytes | bytearray, position: int) -> None:
        """Refuse the beginning of a head that cannot become valid, instead of waiting for its time-out."""
        limits = self._limits
        size = len(data) - position
        line_end = data.find(b"\n", position)
        if size > limits.max_header_bytes or (line_end < 0 and size > limits.max_uri_bytes + 64):
            raise self._too_large(data, position)
        if line_end >= 0:
            if data.count(b" ", position, line_end) != 2:
                raise _not_a_request_line(bytes(data[position:line_end]))
            if _BARE_LF.search(data, max(position, self._scanned - 1)):
                raise _malformed(bytes(data[position:line_end]), "a line does not end in CR LF")
        else:
            word = bytes(data[position : position + 33])
            if _METHOD.match(word if b" " in word else word + b" ") is None:
                raise _not_a_request_line(bytes(data[position:]))

    def _too_large(self, data: bytes | bytearray, position: int) -> TopicsError:
        line_end = data.find(b"\r\n", position)
        if line_end < 0 or line_end - position > self._limits.max_uri_bytes:
            return uri_too_long(self._limits)
        return TopicsError("headers_too_large", f"the head has more than {self._limits.max_header_bytes} bytes")


def _begins_websocket(method: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    # There may be no Connection: llhttp obeys Proxy-Connection, too.
    connection = next((value for name, value in reversed(headers) if name == b"connection"), b"")
    return method == b"GET" and b"upgrade" in [token.strip() for token in connection.lower().split(b",")]


def _begins_http2(http11: bool, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return True if Hypercorn obeys this upgrade to h2c. It would serve other requests with its own HTTP/1.1, without
    our bounds.
    """
    return http11 and not any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """Return path and query of a request target in origin, absolute or asterisk form. Raise TopicsError."""
    if target[0] != 0x2F and target != b"*":
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError as error:
            raise invalid(f"the request target {_show(target)} is not a URL") from error
        return url.path or b"/", url.query or b""
    if b"#" in target:
        raise invalid(f"the request target {_show(target)} has a fragment; write # as %23")
    path, _, query = target.partition(b"?")
    return path, query


def _body_too_large(limits: HttpLimits, message: str) -> TopicsError:
    return TopicsError("payload_too_large", message, {"max_body_bytes": limits.max_body_bytes})


def uri_too_long(limits: HttpLimits) -> TopicsError:
    return TopicsError("uri_too_long", f"the request target has more than {limits.max_uri_bytes} bytes")


def _malformed(line: bytes, why: str) -> TopicsError:
    """Return the most helpful error for a head that llhttp refuses, by its request line."""
    if (match := _REQUEST_LINE.fullmatch(line)) is not None:
        if match[1] not in (b"HTTP/1.1", b"HTTP/1.0"):
            return _unsupported(match[1])
        if why.startswith("Invalid method"):
            return TopicsError("method_not_allowed", f"the method of {_show(line)} is unknown")
    return invalid(f"malformed request: {why}")


def _not_a_request_line(line: bytes) -> TopicsError:
    return invalid(f"{_show(line)} is not a request line; it must be `METHOD target HTTP/1.1`")


def _unsupported(version: bytes) -> TopicsError:
    return TopicsError(
        "http_version_not_supported", f"{_show(version)} is not supported; HTTP/1.1 is, and HTTP/2 (h2c)"
    )


def _show(value: bytes) -> str:
    """Return a client's bytes for an error message: short and printable."""
    text = value[:80].decode("latin-1")
    return repr(text if len(value) <= 80 else text + "…")
