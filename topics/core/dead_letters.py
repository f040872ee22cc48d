"""What the meta of a job says of its way to the dead letters and back (api §9). Pure.

    queue mails                     its dead letters                                queue mails again
    {}            ── died ──▶       $dead_letter_from: "mails"         ── redrive ──▶  $job_key: "mails:<epoch>:1"
                                    $dead_letter_src_seq: "1", …
                                    $dead_letter_job_key: "mails:<epoch>:1"

A dead letter may be a job in its turn, and die again: what was said of its first way waits in `$dead_letter_before` for
a redrive. All are the server's: a client that could write them could have any record taken for a job of a queue, or
for one that was done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from topics.core.routers import META_KEY

FROM: Final = "$dead_letter_from"
DELIVERIES: Final = "$dead_letter_deliveries"
SRC_SEQ: Final = "$dead_letter_src_seq"
ORDER_KEY: Final = "$dead_letter_order_key"
"""Only of jobs that have one."""
DEAD_JOB_KEY: Final = "$dead_letter_job_key"
BEFORE: Final = "$dead_letter_before"
"""Only of those that died before: the same of that, newest first, as the text of a JSON list of objects."""
JOB_KEY: Final = "$job_key"
"""Of a job that came back: its key as it was, of which its new seq says nothing."""

_OF_DEAD: Final = frozenset((FROM, DELIVERIES, SRC_SEQ, ORDER_KEY, DEAD_JOB_KEY, BEFORE))
RESERVED: Final = _OF_DEAD | {JOB_KEY, META_KEY}
"""What no writer may say of a record."""

Meta = dict[str, Any]
"""Text, but what routers add, which is an object."""

_encode = msgspec.json.Encoder().encode
_decode_before = msgspec.json.Decoder(list[dict[str, str]]).decode


def job_key(meta: Mapping[str, Any], topic: str, epoch: int, seq: int) -> str:
    """Names the job for ever: the queue, its instance, and the seq that it had there first."""
    known = meta.get(JOB_KEY)
    # A router, or a program, may have brought a copy of it to another queue: there it is another job.
    if isinstance(known, str) and known.rsplit(":", 2)[0] == topic:
        return known
    return f"{topic}:{epoch:016x}:{seq}"


def died(meta: Mapping[str, Any], topic: str, epoch: int, seq: int, deliveries: int, order_key: str) -> Meta:
    """The meta of the dead letter that a job of `topic` becomes."""
    left = {key: value for key, value in meta.items() if key not in _OF_DEAD and key != JOB_KEY}
    left |= {FROM: topic, DELIVERIES: str(deliveries), SRC_SEQ: str(seq)}
    left[DEAD_JOB_KEY] = job_key(meta, topic, epoch, seq)
    if order_key:
        left[ORDER_KEY] = order_key
    former = {key: value for key, value in meta.items() if key in _OF_DEAD and key != BEFORE}
    # One for each queue at most: two that are each other's dead letters would add to it for ever.
    before = _of_other_queues(([former] if former else []) + _before(meta), topic)
    if before:
        left[BEFORE] = _encode(before).decode()
    return left


def came_back(meta: Mapping[str, Any]) -> Meta:
    """The meta of the job that a dead letter becomes: as it was when it died, and its key."""
    left = {key: value for key, value in meta.items() if key not in _OF_DEAD and key != JOB_KEY}
    if DEAD_JOB_KEY in meta:
        left[JOB_KEY] = meta[DEAD_JOB_KEY]
    before = _before(meta)
    if before:
        left |= before[0]
    if before[1:]:
        left[BEFORE] = _encode(before[1:]).decode()
    return left


def _before(meta: Mapping[str, Any]) -> list[dict[str, str]]:
    return _decode_before(meta[BEFORE]) if BEFORE in meta else []


def _of_other_queues(ways: Iterable[dict[str, str]], topic: str) -> list[dict[str, str]]:
    known = {topic}
    others = []
    for way in ways:
        if (queue := way.get(FROM, "")) not in known:
            known.add(queue)
            others.append(way)
    return others
