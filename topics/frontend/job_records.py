"""Leased jobs as consumers get them: the record, spliced from its frame, with its lease (api §9)."""

from __future__ import annotations

from typing import Final, NamedTuple

from topics.core.errors import TopicsError
from topics.core.seq_set import runs_of
from topics.frontend.reading import TopicReader
from topics.frontend.records import PageOptions
from topics.shm.queue_messages import Dealt

ANSWER_BYTES_MAX: Final = 8 << 20
"""Of one claim; at least one job."""
_PREFIX: Final = "lease_"


class RenderedJobs(NamedTuple):
    """`body` is `jobs` JSON objects joined by commas. Jobs that are gone by now are left out and forgotten; `unsent`
    did not fit and are to be given back, with their leases.
    """

    body: bytes
    jobs: int
    unsent: list[int]
    unsent_leases: list[int]


def lease_id(lease_no: int) -> str:
    return f"{_PREFIX}{lease_no:016x}"


def lease_no(lease_id: str) -> int:
    """-1, which no lease has, for a text that is no lease id."""
    digits = lease_id.removeprefix(_PREFIX)
    if digits == lease_id or len(digits) != 16:
        return -1
    try:
        number = int(digits, 16)
    except ValueError:
        return -1
    return number if f"{number:016x}" == digits else -1


def render_jobs(reader: TopicReader, name: str, dealt: Dealt, max_bytes: int = ANSWER_BYTES_MAX) -> RenderedJobs:
    """Raises `topic_not_found` when the queue went away, `storage_unavailable` when a frame cannot be read."""
    extras = {
        seq: b',"lease_id":"%b","deadline":%d,"deliveries":%d'
        % (lease_id(number).encode(), dealt.deadline_ms, deliveries)
        for number, (seq, deliveries) in enumerate(zip(dealt.seqs, dealt.deliveries, strict=True), dealt.first_lease_no)
    }
    ref = reader.get(name)
    now_ms = reader.now_ms()
    bodies: list[bytes] = []
    count = 0
    left_bytes = max_bytes
    for first_seq, last_seq in runs_of(dealt.seqs):
        cursor = first_seq - 1
        while cursor < last_seq:
            if count and left_bytes <= 0:
                return _cut(dealt, bodies, count, cursor + 1)
            options = PageOptions(last_seq - cursor, max(1, left_bytes), include_tags=True, extras=extras)
            page = reader.read_page(ref, cursor, options, now_ms, last_seq)
            if page.next_from_seq <= cursor:
                raise TopicsError("storage_unavailable", f"job {cursor + 1} of topic {name!r} cannot be read")
            cursor = page.next_from_seq
            if page.count:
                bodies.append(page.body)
                count += page.count
                left_bytes -= len(page.body)
    return RenderedJobs(b",".join(bodies), count, [], [])


def _cut(dealt: Dealt, bodies: list[bytes], count: int, from_seq: int) -> RenderedJobs:
    unsent = [seq for seq in dealt.seqs if seq >= from_seq]
    first = dealt.first_lease_no + len(dealt.seqs) - len(unsent)
    return RenderedJobs(b",".join(bodies), count, unsent, list(range(first, first + len(unsent))))
