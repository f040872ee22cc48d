"""The calls about a topic's sealed segments as values, and what they answer (docs/spark.md)."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from topics.client.calls import Call, topic_path


class Segment(msgspec.Struct, frozen=True):
    """A sealed segment. `data_path` is below the cold directory when `tier` is "cold", else below the data directory,
    where `idx_path` always is. `idx_xxh3`: of offset, len and ts of all entries; None where it cannot be read.
    """

    first_seq: int
    last_seq: int
    first_ts: int
    last_ts: int
    data_bytes: int
    version: int
    tier: str
    data_path: str
    idx_path: str
    idx_xxh3: str | None


class PinMade(msgspec.Struct, frozen=True):
    """Keeps the files of the segments that came with it."""

    id: str
    ttl_ms: int


class Manifest(msgspec.Struct, frozen=True):
    """The sealed segments of a topic, up to `next_from_seq` (None: all). Nothing below `earliest_seq` counts; records
    from `http_from_seq` on are in none.
    """

    topic: str
    epoch: str
    head_seq: int
    earliest_seq: int
    evict_floor: int
    dedupe_node: bool
    http_from_seq: int
    segments: list[Segment]
    next_from_seq: int | None
    pin: PinMade | None


class PinRenewed(msgspec.Struct, frozen=True):
    """`held` is False when the pin is over: its files may be gone."""

    topic: str
    pin: str
    held: bool


class PinEnded(msgspec.Struct, frozen=True):
    topic: str
    pin: str
    ended: bool


_manifest = msgspec.json.Decoder(Manifest).decode
_renewed = msgspec.json.Decoder(PinRenewed).decode
_ended = msgspec.json.Decoder(PinEnded).decode


def segments(topic: str, from_seq: int = 0, to_seq: int | None = None, *, pin_ttl_ms: int = 0) -> Call[Manifest]:
    """Of records from_seq + 1..to_seq; with `pin_ttl_ms` the files stay for so long."""
    query = {"from_seq": str(from_seq), "pin_ttl_ms": str(pin_ttl_ms)}
    if to_seq is not None:
        query["to_seq"] = str(to_seq)
    # A repeat makes another pin, which ends by itself.
    return Call("GET", f"{topic_path(topic)}/segments", _manifest, None, query)


def renew_pin(topic: str, pin: str, pin_ttl_ms: int) -> Call[PinRenewed]:
    """It holds for so long from now on, if it still did."""
    return Call("PUT", _pin_path(topic, pin), _renewed, None, {"pin_ttl_ms": str(pin_ttl_ms)})


def end_pin(topic: str, pin: str) -> Call[PinEnded]:
    return Call("DELETE", _pin_path(topic, pin), _ended)


def _pin_path(topic: str, pin: str) -> str:
    return f"{topic_path(topic)}/pins/{quote(pin, safe='')}"
