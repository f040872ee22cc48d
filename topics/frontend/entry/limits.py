"""Every bound of what waits or is held in a frontend; `tests/docs_tables.py` prints the table of docs/operations.md."""

from __future__ import annotations

from typing import Final

from topics.frontend.entry.budget import AtLimit, Limit

_MIB: Final = 1 << 20
_WAIT, _REFUSE, _CUT = AtLimit

MEDIUM_BODIES: Final = Limit(
    "body_bytes",
    _WAIT,
    "bodies and WebSocket messages of 64 KiB to 1 MiB, packed and unpacked, until they are answered or decoded to"
    " something short. A body waits unread; a message without room is dropped and `throttled`, its socket lives on",
    256 * _MIB,
    wait_s=2.0,
)
LONG_BODIES: Final = MEDIUM_BODIES._replace(
    what="the same above 1 MiB; four times `TOPICS_MAX_BODY_BYTES`, if that is more. Writing one takes twice its length"
)
CONNECTION_ANSWERS: Final = Limit(
    "answer_bytes",
    _WAIT,
    "long answers (pages, claims, peeks, lists, scrapes) from before they are made until the client has read them."
    " Other streams of the connection go on. A claim waits for 2 s, or half its lease: then its jobs go back and it is"
    " `throttled`",
    16 * _MIB,
    per="HTTP/2 connection",
)
KEPT_ANSWERS: Final = Limit(
    "kept_answers",
    _CUT,
    "answers above 128 KiB that clients have not read to the end, over any protocol, each with its whole length. From"
    " half of this on connections (streams of HTTP/2) are cut whose clients have read nothing for 2 s, longest first;"
    " above all of it others as well",
    512 * _MIB,
)
UNADMITTED_INPUT: Final = Limit(
    "unadmitted_input",
    _CUT,
    "heads, and frames of HTTP/2, that are not whole, of connections without an admitted request. Beyond it connections"
    " are cut, those first that have held some for longest",
    64 * _MIB,
)
KEPT_FRAMES: Final = Limit(
    "kept_frames",
    _WAIT,
    "what event streams and WebSockets keep for clients with more than 64 KiB waiting. Frames of up to 64 KiB never"
    " wait. Where nothing else makes room, clients are cut that have read nothing for 2 s, longest first",
    256 * _MIB,
)
SOCKET_MESSAGES: Final = Limit(
    "socket_messages",
    _WAIT,
    "messages behind the one that is being sent, and one that went over that",
    64 << 10,
    4,
    per="WebSocket",
)
SOCKET_PUBLISHES: Final = Limit("socket_publishes", _WAIT, "publishes on their way to shards", 0, 64, per="WebSocket")
PACKING: Final = Limit("packing", _REFUSE, "answers that wait for a thread to pack them; others go unpacked", 64 * _MIB)
NODE_SETS: Final = Limit(
    "node_bytes",
    _REFUSE,
    "writers that long polls and streams leave out (`node`), in memory: equal sets once, those below 4 KiB not at all."
    " A stream of a watch session that was let in before is not refused",
    128 * _MIB,
)
CURSOR_PAGES: Final = Limit(
    "cursor_pages",
    _WAIT,
    "pages whose cursors are being moved, from when their shard has told where they are. One waits for"
    " `TOPICS_SHARD_WAIT_MS` at most",
    256 * _MIB,
)
CURSOR_READERS: Final = Limit(
    "cursor_readers", _REFUSE, "readers that wait for their turn, for `TOPICS_SHARD_WAIT_MS`", 0, 1000, per="cursor"
)
TAILS: Final = Limit(
    "followers",
    _REFUSE,
    "answers to services that follow this one, 8 MiB each; a follower takes the archive",
    32 * _MIB,
)
SCRAPES: Final = Limit(
    "scrapes", _WAIT, "scrapes of the metrics, with 8 MiB each while it is made; beyond 104 refused", 32 * _MIB, 104
)
LONG_POLLS: Final = Limit("long_polls", _REFUSE, "long polls that wait", 0, 10_000)
RING_WAITERS: Final = Limit(
    "ring_waiters",
    _REFUSE,
    "requests that found the ring full, for 250 ms (50 ms under the greatest pressure); and as many writes with"
    " `disable_backpressure`, for `TOPICS_SHARD_WAIT_MS`, then `503 shard_unavailable`",
    32 * _MIB,
    1024,
    per="frontend and shard",
)
RING_POSTS: Final = Limit(
    "ring_posts",
    _REFUSE,
    "messages without an answer: that a stream has ended, jobs that nobody got. At the limit requests are refused"
    " instead, because they would cause more; those under way still cause one each, and each topic one watch",
    8 * _MIB,
    16_384,
    per="frontend and shard",
)
SPILLS: Final = Limit("spills", _REFUSE, "messages too long for a ring, in `/dev/shm`", 256 * _MIB)
COLD_READS: Final = Limit(
    "cold_reads", _REFUSE, "reads of the cold tier that have no thread yet; then `503 storage_unavailable`", 0, 1024
)
PINS: Final = Limit("pins", _REFUSE, "pins, each of which keeps disk space that retention has given up", 0, 256)

ALL: Final = tuple(limit for limit in vars().values() if isinstance(limit, Limit))
