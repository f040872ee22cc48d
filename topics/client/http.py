"""HTTP/1.1 of a client, without sockets: makes requests as bytes, reads answers and events out of bytes. Pure.

Both kinds of connection (`links.py`) use it. llhttp parses the answers, as in the frontends.
"""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import httptools

from topics.client.errors import ClientError


class TransportError(Exception):
    """No whole answer came. The request may have been carried out."""

    def __init__(self, reason: str | OSError) -> None:
        super().__init__(reason if isinstance(reason, str) else _reason(reason))


class NotSentError(TransportError):
    """The request did not leave: no connection could be made."""


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return "what answers there speaks no TLS: write http://, or put a proxy with TLS in front of it"
    if error.errno is not None and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)  # asyncio's own text does not say why a connection failed
    return str(error) or type(error).__name__


class ServiceAddress:
    """The address of a service, and the headers that all requests to it share. With `needs_leader` a service that only
    reads refuses them. ClientError for a bad `url` or `token`.

    Proxies from the environment are not used: none belongs between a program and its log.
    """

    def __init__(self, url: str, token: str | None, tls: ssl.SSLContext | None, needs_leader: bool = False) -> None:
        try:
            parsed = urlsplit(url)
            port, host = parsed.port, (parsed.hostname or "").encode("idna").decode()
        except ValueError as error:
            raise ClientError(f"url {url!r} is not valid: {error}") from None
        place = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
        self._prefix = parsed.path.rstrip("/")
        if parsed.scheme not in ("http", "https") or not host or not _fits(place + self._prefix):
            raise ClientError(f"url {url!r} does not name a service: give one like http://127.0.0.1:4000")
        self.url = f"{parsed.scheme}://{place}{self._prefix}"
        self.host = host
        self.port = port or (443 if parsed.scheme == "https" else 80)
        # Reading the authorities' certificates takes 14 ms, and plain HTTP does not use them.
        self.tls = (tls or ssl.create_default_context()) if parsed.scheme == "https" else None
        head = f"Host: {place}\r\nAccept-Encoding: identity\r\n"
        if token is not None:
            if not (isinstance(token, str) and _fits(token, " ")):
                raise ClientError("the token is no text, or has characters that a header of HTTP cannot have")
            head += f"Authorization: Bearer {token}\r\n"
        elif parsed.username is not None:
            account = f"{unquote(parsed.username)}:{unquote(parsed.password or '')}"
            head += f"Authorization: Basic {base64.b64encode(account.encode()).decode()}\r\n"
        if needs_leader:
            head += "Topics-Leader: required\r\n"
        self._head = head

    def request(self, method: str, target: str, body: bytes | None, headers: Mapping[str, str] = {}) -> bytes:
        """Return a request as bytes; `target` is quoted already."""
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]) if headers else ""
        if body is not None:
            more += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        elif method in ("PUT", "POST"):
            more += "Content-Length: 0\r\n"
        return f"{method} {self._prefix}{target} HTTP/1.1\r\n{self._head}{more}\r\n".encode() + (body or b"")


def _fits(text: str, also: str = "") -> bool:
    return all("!" <= character <= "~" or character in also for character in text)


class AnswerReader:
    """An answer out of its bytes, as llhttp finds it. `feed` raises TransportError for bytes that are no answer."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        """Their names are in lower case."""
        self.whole = False
        self.reusable = False
        """True when the connection may carry another request."""

    def feed(self, data: bytes) -> None:
        """Read bytes that came. Empty bytes mean that the connection has ended."""
        if not data:
            if not self.status or self.headers.keys() & {"content-length", "transfer-encoding"}:
                raise TransportError("the connection was closed before the answer was whole")
            self.whole = True  # HTTP/1.0: the answer ends with its connection
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise TransportError(f"the answer is not HTTP/1.1: {error}") from None

    def take_body(self) -> bytes:
        """Return the part of the body that has come since the last call."""
        body, self._body = self._body, []
        return body[0] if len(body) == 1 else b"".join(body)

    def on_message_begin(self) -> None:
        self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self.status:
            self.whole = True
            self.reusable = self._parser.should_keep_alive()
        else:
            self.headers.clear()  # 1xx: the answer itself follows


class Event(NamedTuple):
    """An event of a stream. `id` is empty where it has none."""

    event: str
    data: bytes
    id: str


class EventReader:
    """The events of a stream out of its bytes. Their lines end with \\n alone, as the service sends them (api §7)."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that are whole now."""
        old = len(self._unread)
        self._unread += data
        end = self._unread.rfind(b"\n\n", max(0, old - 1))
        if end < 0:
            return []
        frames = bytes(self._unread[:end])
        del self._unread[: end + 2]
        return [event for event in map(_event, frames.split(b"\n\n")) if any(event)]


def _event(frame: bytes) -> Event:
    event = id = data = b""
    for line in frame.split(b"\n"):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data = data + b"\n" + value if data else value
        elif name == b"event":
            event = value
        elif name == b"id":
            id = value
    return Event(event.decode(), data, id.decode())
