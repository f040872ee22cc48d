"""The meta of a job that goes to the dead letters and comes back (api §9). Pure.

    queue mails                     its dead letters                                queue mails again
    {}            ── dead ──▶       $dead_letter_from: "mails"         ── redrive ──▶  $job_key: "mails:<epoch>:1"
                                    $dead_letter_src_seq: "1", …
                                    $dead_letter_job_key: "mails:<epoch>:1"

A dead letter may be a job of another queue and die again: then `$dead_letter_before` keeps its first entries for a
redrive. Only the server writes these keys: a client that could write them could pass any record off as a job of a
queue, or as a job that was done.
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
"""The job's order key, if it has one."""
DEAD_JOB_KEY: Final = "$dead_letter_job_key"
BEFORE: Final = "$dead_letter_before"
"""The same entries of earlier deaths, newest first, as the text of a JSON list of objects."""
JOB_KEY: Final = "$job_key"
"""The first job key of a redriven job. It cannot be made from the job's seq, which is a new one."""

_OF_DEAD: Final = frozenset((FROM, DELIVERIES, SRC_SEQ, ORDER_KEY, DEAD_JOB_KEY, BEFORE))
RESERVED: Final = _OF_DEAD | {JOB_KEY, META_KEY}
"""Keys that no client may write."""

Meta = dict[str, Any]
"""Texts by key; only the entry that routers add is an object."""

_encode = msgspec.json.Encoder().encode
_decode_before = msgspec.json.Decoder(list[dict[str, str]]).decode


def job_key(meta: Mapping[str, Any], topic: str, epoch: int, seq: int) -> str:
    """Return the permanent name of a job: its queue, the queue's instance, and the first seq of the job there."""
    known = meta.get(JOB_KEY)
    # A copy that a router or a program has brought to another queue is another job.
    if isinstance(known, str) and known.rsplit(":", 2)[0] == topic:
        return known
    return f"{topic}:{epoch:016x}:{seq}"


def dead_letter_meta(
    meta: Mapping[str, Any], topic: str, epoch: int, seq: int, deliveries: int, order_key: str
) -> Meta:
    """Return the meta of the dead letter that a job of `topic` becomes."""
    left = {key: value for key, value in meta.items() if key not in _OF_DEAD and key != JOB_KEY}
    left |= {FROM: topic, DELIVERIES: str(deliveries), SRC_SEQ: str(seq)}
    left[DEAD_JOB_KEY] = job_key(meta, topic, epoch, seq)
    if order_key:
        left[ORDER_KEY] = order_key
    former = {key: value for key, value in meta.items() if key in _OF_DEAD and key != BEFORE}
    # At most one entry for each queue: two queues that are each other's dead letters would add entries for ever.
    before = _of_other_queues(([former] if former else []) + _before(meta), topic)
    if before:
        left[BEFORE] = _encode(before).decode()
    return left


def redriven_meta(meta: Mapping[str, Any]) -> Meta:
    """Return the meta of the job that a dead letter becomes: its meta when it died, and its key."""
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


def _of_other_queues(deaths: Iterable[dict[str, str]], topic: str) -> list[dict[str, str]]:
    first_of = {topic: dict[str, str]()}
    for death in deaths:
        first_of.setdefault(death.get(FROM, ""), death)
    return list(first_of.values())[1:]
