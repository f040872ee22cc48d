"""Everything inside Hypercorn (and h2) that is replaced, subclassed or relied on, and why.

None of it is a public interface. So `RELIED_ON` names each member with a digest of its source, as checked against
CHECKED_VERSIONS, and a test fails when one of them changes. Then read what changed, and whether the reason still
holds; write down the new digest only after that.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import hypercorn.protocol
from h2.connection import H2Connection
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import EventWrapper, WorkerContext
from hypercorn.protocol import ProtocolWrapper, h2, h11
from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H11Protocol, H11WSConnection
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import Handshake, WebsocketBuffer, WSStream

from topics.frontend.http.http2_buffer import BoundedBuffer, BoundedProtocol, BoundedStream
from topics.frontend.http.websocket_stream import BoundedWebSocket

CHECKED_VERSIONS: Final = {"hypercorn": "0.18.0", "h2": "4.4.1"}


class Reliance(NamedTuple):
    """One member, and what about it."""

    member: Any
    source_digest: str
    """Of `inspect.getsource`: SHA-256, its first 12 digits."""
    why: str


RELIED_ON: Final = (
    # Replaced: `install` puts ours where Hypercorn's modules look for theirs.
    Reliance(
        StreamBuffer,
        "bc347b7c7806",
        "`BoundedBuffer`: `push` takes a window of 0 for a client that keeps up",
    ),
    Reliance(
        HTTPStream,
        "e0f656feb55a",
        "`BoundedStream`: the app is told in its scope where it gets room for a long answer",
    ),
    Reliance(
        H2Protocol,
        "7257f8bafcca",
        "`BoundedProtocol`: a reset stream frees who sends on it, the reader waits for no window, an answer without an "
        "end is reset, a connection without a request is idle",
    ),
    Reliance(
        WSStream,
        "67434c428a1a",
        "`BoundedWebSocket`: refusals in the envelope of every error, messages in pieces, counted as they come",
    ),
    # Subclassed.
    Reliance(WebsocketBuffer, "31c9b1345f30", "`CountedMessages`: messages that come count as bodies do"),
    Reliance(
        TCPServer,
        "3bfa72b31950",
        "`Connection`: its closing waits for ever for a client that takes nothing; `send_lock` orders who writes",
    ),
    Reliance(
        WorkerContext,
        "6eeeae02ae17",
        "`ConnectionContext`: one for each connection, so that the idle and the pingers wake when its client is gone",
    ),
    Reliance(EventWrapper, "04c3221b13f0", "`terminated` is set without an await, by a protocol's callback"),
    # Relied on as they are.
    Reliance(
        ProtocolWrapper,
        "caf949187e9b",
        "looks up `H2Protocol` in its module when HTTP/2 begins, and passes on `TCPServer.protocol_send` as `send`",
    ),
    Reliance(
        H11Protocol,
        "b32a61e0a8ca",
        "looks up `WSStream` in its module; obeys each `Upgrade: h2c` without a body",
    ),
    Reliance(
        H11WSConnection, "33372cf68942", "is never recycled: no second request of HTTP/1.1 is served behind a WebSocket"
    ),
    Reliance(
        Handshake,
        "701a154c29b5",
        "`is_valid` asks for nothing that is not checked before; `accept` takes an offer to compress",
    ),
    Reliance(ASGIWrapper, "8670a23eb460", "runs the app of each request and WebSocket"),
    Reliance(
        H2Connection.__init__,
        "e5c93da64d0e",
        "its decoder goes by DEFAULT_MAX_HEADER_LIST_SIZE, whatever was announced",
    ),
)


def install(max_header_bytes: int) -> None:
    """From now on Hypercorn uses ours in this process, and its HTTP/2 takes heads of `max_header_bytes`."""
    vars(h2)["StreamBuffer"] = BoundedBuffer
    vars(h2)["HTTPStream"] = BoundedStream
    vars(hypercorn.protocol)["H2Protocol"] = BoundedProtocol
    for module in (h11, h2):
        vars(module)["WSStream"] = BoundedWebSocket
    H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE = max_header_bytes
