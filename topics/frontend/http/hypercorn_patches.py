"""Everything inside Hypercorn (and h2) that this service replaces, subclasses or relies on, and why.

None of it is a public interface. So `RELIED_ON` names each member with a digest of its source in CHECKED_VERSIONS, and
a test fails when a source changes. Then read the change, and update the digest only if the reason still holds.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import hypercorn.protocol
from h2.connection import H2Connection
from h2.frame_buffer import FrameBuffer
from h2.stream import H2Stream
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import EventWrapper, WorkerContext
from hypercorn.protocol import ProtocolWrapper, h2
from hypercorn.protocol.h2 import H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import Handshake, WSStream

from topics.frontend.http.http2_buffer import BoundedBuffer, BoundedProtocol, BoundedStream
from topics.frontend.http.http2_websocket import BoundedWebSocket

CHECKED_VERSIONS: Final = {"hypercorn": "0.18.0", "h2": "4.4.1"}


class Reliance(NamedTuple):
    """One member of a library, and the first 12 digits of the SHA-256 of its source (`inspect.getsource`)."""

    member: Any
    source_digest: str
    why: str


RELIED_ON: Final = (
    # Replaced: `install` puts ours where Hypercorn's modules look for theirs.
    Reliance(StreamBuffer, "bc347b7c7806", "its `push` believes that a client without a window keeps up"),
    Reliance(HTTPStream, "e0f656feb55a", "ours gives the app room for long answers in its scope"),
    Reliance(H2Protocol, "7257f8bafcca", "the differences that `BoundedProtocol` lists"),
    Reliance(WSStream, "67434c428a1a", "its refusals have no JSON error; it takes and sends messages uncounted"),
    # Subclassed.
    Reliance(TCPServer, "3bfa72b31950", "`_close` waits for a client for ever; `send_lock` orders writers"),
    Reliance(WorkerContext, "6eeeae02ae17", "one for each connection: its waits end when the client is gone"),
    Reliance(FrameBuffer, "660a8b118b91", "looks at a length when all of a frame is there; `_data` is what it has"),
    Reliance(EventWrapper, "04c3221b13f0", "`terminated` must be set by a protocol's callback, without an await"),
    # Relied on as they are.
    Reliance(ProtocolWrapper, "caf949187e9b", "looks up `H2Protocol` when HTTP/2 begins"),
    Reliance(H11Protocol, "b32a61e0a8ca", "obeys each `Upgrade: h2c` without a body"),
    Reliance(Handshake, "701a154c29b5", "`is_valid` requires nothing that `handshake_error` does not"),
    Reliance(ASGIWrapper, "8670a23eb460", "runs the app of each request and WebSocket"),
    Reliance(H2Connection.receive_data, "4470c8fafce8", "takes frames from `incoming_buffer` until that has no more"),
    Reliance(H2Connection.__init__, "e5c93da64d0e", "its decoder obeys DEFAULT_MAX_HEADER_LIST_SIZE alone"),
    Reliance(H2Connection._receive_frame, "39b2e16b4fd7", "hands a frame to whom `_frame_dispatch_table` names"),
    Reliance(H2Connection._receive_headers_frame, "4a014e7d795a", "behind the decoding, plain errors are of a request"),
    Reliance(H2Stream.receive_headers, "6bb0626547eb", "likewise: its stream exists by then, and can be reset"),
    Reliance(H2Stream._initialize_content_length, "268409356c43", "believes that trailers state it"),
    Reliance(H2Stream._track_content_length, "a4580a2f3c85", "called for pieces of bodies alone"),
)


def install(max_header_bytes: int) -> None:
    """Make Hypercorn use our classes in this process, and its HTTP/2 accept heads of `max_header_bytes`."""
    vars(h2)["StreamBuffer"] = BoundedBuffer
    vars(h2)["HTTPStream"] = BoundedStream
    vars(hypercorn.protocol)["H2Protocol"] = BoundedProtocol
    vars(h2)["WSStream"] = BoundedWebSocket
    H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE = max_header_bytes
