"""The types of answers about segments and pins; see `answers.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from topics.api.answers import Ms, Seq, TopicAnswer, one_of


class ManifestSegment(msgspec.Struct, frozen=True):
    """A sealed segment: records first_seq..last_seq, of first_ts..last_ts. `data_path` is below the cold directory when
    `tier` is "cold", `idx_path` always below the data directory. With the tier "archive" the data are still in the
    archive that the service was restored from: read these records over HTTP. `idx_xxh3`: XXH3-64 over offset, len and
    ts of all entries of the index; null where it cannot be read. Frames carry checksums of their own.
    """

    first_seq: Seq
    last_seq: Seq
    records: int
    first_ts: Ms
    last_ts: Ms
    data_bytes: int
    version: int
    tier: Annotated[str, one_of(Literal["archive", "cold", "hot"])]
    data_path: str
    idx_path: str
    idx_xxh3: str | None


class PinMade(msgspec.Struct, frozen=True):
    """A pin: the files of the listed segments stay for `ttl_ms`."""

    id: str
    ttl_ms: Ms


class Manifest(TopicAnswer, frozen=True, kw_only=True):
    """Sealed segments of a topic. Records from `http_from_seq` on are in no sealed segment. Those below `earliest_seq`
    do not count, even if a file has them. `next_from_seq`: ask again from there for more; null: these are all.
    """

    epoch: str
    head_seq: Seq
    earliest_seq: Seq
    evict_floor: Seq
    dedupe_node: bool
    http_from_seq: Seq
    segments: list[ManifestSegment]
    next_from_seq: Seq | None
    pin: PinMade | None


class PinRenewed(TopicAnswer, frozen=True, kw_only=True):
    """`held` is false for a pin that is over, or never was: its files may be gone."""

    pin: str
    held: bool


class PinEnded(TopicAnswer, frozen=True, kw_only=True):
    """`ended` is false for a pin that was over, or never was."""

    pin: str
    ended: bool
