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
    """One member, the first 12 digits of the SHA-256 of its source (`inspect.getsource`), and the reason."""

    member: Any
    source_digest: str
    why: str


RELIED_ON: Final = (
    # Replaced: `install` puts ours where Hypercorn's modules look for theirs.
    Reliance(StreamBuffer, "bc347b7c7806", "its `push` takes a client without a window for one that keeps up"),
    Reliance(HTTPStream, "e0f656feb55a", "ours tells the app in its scope where to get room for a long answer"),
    Reliance(H2Protocol, "7257f8bafcca", "the four differences that `BoundedProtocol` lists"),
    Reliance(WSStream, "67434c428a1a", "refusals have no envelope, messages go out whole and are counted by nobody"),
    # Subclassed.
    Reliance(WebsocketBuffer, "31c9b1345f30", "messages that come must count as bodies do"),
    Reliance(TCPServer, "3bfa72b31950", "`_close` waits for ever for a client; `send_lock` orders who writes"),
    Reliance(
        WorkerContext, "6eeeae02ae17", "one for each connection: `terminated` and `sleep` end when its client is gone"
    ),
    Reliance(EventWrapper, "04c3221b13f0", "`terminated` must be set by a protocol's callback, without an await"),
    # Relied on as they are.
    Reliance(ProtocolWrapper, "caf949187e9b", "looks up `H2Protocol` when HTTP/2 begins; `send` is `protocol_send`"),
    Reliance(H11Protocol, "b32a61e0a8ca", "looks up `WSStream`; obeys each `Upgrade: h2c` without a body"),
    Reliance(H11WSConnection, "33372cf68942", "is never recycled: no request of HTTP/1.1 is served behind a WebSocket"),
    Reliance(Handshake, "701a154c29b5", "`is_valid` asks for nothing that is not checked before"),
    Reliance(ASGIWrapper, "8670a23eb460", "runs the app of each request and WebSocket"),
    Reliance(H2Connection.__init__, "e5c93da64d0e", "its decoder goes by DEFAULT_MAX_HEADER_LIST_SIZE alone"),
)


def install(max_header_bytes: int) -> None:
    """From now on Hypercorn uses ours in this process, and its HTTP/2 takes heads of `max_header_bytes`."""
    vars(h2)["StreamBuffer"] = BoundedBuffer
    vars(h2)["HTTPStream"] = BoundedStream
    vars(hypercorn.protocol)["H2Protocol"] = BoundedProtocol
    for module in (h11, h2):
        vars(module)["WSStream"] = BoundedWebSocket
    H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE = max_header_bytes
