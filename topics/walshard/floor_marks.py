"""EVICT_WATERMARK: what ttl and caps took, as the log is told.

A ttl takes nothing before the log says so. Caps evict as records come, and the next commit that says anything of the
topic says that first; whoever reads the log without it works it out again.
"""

from __future__ import annotations

from functools import partial

from topics.core.control_bodies import EvictBody, encode_body
from topics.core.floors import Floors
from topics.storage import frame
from topics.storage.frame import FrameType
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation


def floor_frame(hosted: Hosted, floors: Floors, ts: int) -> bytes:
    """The floors as they are to be."""
    body = encode_body(EvictBody(floors))
    return frame.encode(FrameType.EVICT_WATERMARK, 0, hosted.topic.id, floors.earliest_seq, ts, b"", b"", body)


def cap_operation(hosted: Hosted, ts: int) -> Operation:
    """The floors where caps have moved them."""
    floors = hosted.topic.floors()
    return Operation([floor_frame(hosted, floors, ts)], partial(_logged, hosted, floors))


def _logged(hosted: Hosted, floors: Floors, _file_no: int, _offset: int) -> None:
    hosted.topic.revision = floors.revision
    hosted.topic.logged_floor = floors.evict_floor
