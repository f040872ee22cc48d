"""Renders leased jobs for consumers: the record, copied from its frame, with its lease (api §9)."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final, NamedTuple

from topics.core.errors import TopicsError
from topics.core.seq_set import runs_of
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.records import PageOptions
from topics.log import get_logger
from topics.shm.queue_messages import Dealt

ANSWER_BYTES_MAX: Final = 8 << 20
"""Longest answer to one claim, which has at least one job."""
_LEASE_ID: Final = re.compile(r"lease_([0-9a-f]{16})")
_COLD_TRIES: Final = 4


class RenderedJobs(NamedTuple):
    """`jobs` JSON objects joined by commas, but for deleted ones. The last `unsent` did not fit: give them back."""

    body: bytes
    jobs: int
    unsent: int


def lease_id(lease_no: int) -> str:
    return f"lease_{lease_no:016x}"


def lease_no(lease_id: str) -> int:
    """Return the number of a lease; -1, which no lease has, for a text that is no lease id."""
    found = _LEASE_ID.fullmatch(lease_id)
    return -1 if found is None else int(found[1], 16)


async def fetch_jobs(reader: TopicReader, name: str, dealt: Dealt, max_bytes: int = ANSWER_BYTES_MAX) -> RenderedJobs:
    """Render jobs up to the first unreadable one. Raise `storage_unavailable` if it is the first, `topic_not_found`."""
    rendering = JobRendering(reader, name, dealt, max_bytes)
    missed_at, tries = -1, 0
    while True:
        try:
            return rendering.go_on()
        except ColdMissError as miss:
            tries = tries + 1 if missed_at == rendering.cursor else 1
            missed_at = rendering.cursor
            try:
                await reader.fetch(miss)
            except FileNotFoundError as error:  # it was moved, and a new view of the topic says where
                if tries > _COLD_TRIES:
                    raise _unreadable(name, missed_at + 1) from error
            except TopicsError:
                if not rendering.count:
                    raise
                return rendering.cut()


class JobRendering:
    """The rendering of some jobs. It stops at a record that has to be fetched from the cold tier, and goes on there."""

    def __init__(self, reader: TopicReader, name: str, dealt: Dealt, max_bytes: int = ANSWER_BYTES_MAX) -> None:
        self._reader = reader
        self._name = name
        self._seqs = dealt.seqs
        self._left_bytes = max_bytes
        self._runs = runs_of(dealt.seqs)
        self._extras = {
            seq: b',"lease_id":"%b","deadline":%d,"deliveries":%d'
            % (lease_id(number).encode(), dealt.deadline_ms, deliveries)
            for number, (seq, deliveries) in enumerate(
                zip(dealt.seqs, dealt.deliveries, strict=True), dealt.first_lease_no
            )
        }
        self._bodies: list[bytes] = []
        self.cursor = dealt.seqs[0] - 1
        """Seq of the last job that was looked at."""
        self.count = 0

    def go_on(self) -> RenderedJobs:
        """Render the rest. Raise as `fetch_jobs` does; after ColdMissError, fetch what is missing and go on."""
        ref = self._reader.get(self._name)
        now_ms = self._reader.now_ms()
        for first_seq, last_seq in self._runs:
            self.cursor = max(self.cursor, first_seq - 1)
            while self.cursor < last_seq:
                if self.count and self._left_bytes <= 0:
                    return self.cut()
                options = PageOptions(
                    last_seq - self.cursor, max(1, self._left_bytes), include_tags=True, extras=self._extras
                )
                try:
                    page = self._reader.read_page(ref, self.cursor, options, now_ms, last_seq)
                    if page.next_from_seq <= self.cursor:
                        raise _unreadable(self._name, self.cursor + 1)
                except TopicsError as error:
                    if error.code == "storage_unavailable" and self.count and not isinstance(error, ColdMissError):
                        return self.cut()
                    raise
                self.cursor = page.next_from_seq
                if page.count:
                    self._bodies.append(page.body)
                    self.count += page.count
                    self._left_bytes -= len(page.body)
        return RenderedJobs(b",".join(self._bodies), self.count, 0)

    def cut(self) -> RenderedJobs:
        """Return the jobs rendered so far. The others are to be given back."""
        return RenderedJobs(b",".join(self._bodies), self.count, sum(seq > self.cursor for seq in self._seqs))


def _unreadable(name: str, seq: int) -> TopicsError:
    return TopicsError(
        "storage_unavailable", f"job {seq} of topic {name!r} cannot be read", {"topic": name, "seq": seq}
    )


ASIDE_MS: Final = 30_000
"""The time that a job waits before it is tried again."""
_LOGGED_MAX: Final = 10_000

_log = get_logger()


class UnreadableJobs:
    """Jobs whose records cannot be read now: a corrupt segment, a cold directory that does not answer (api §9).

    Such a job is put aside for ASIDE_MS, so that the jobs behind it are served. That counts as no delivery. Each job is
    logged once, not at every attempt; the oldest are forgotten first.
    """

    def __init__(self) -> None:
        self._logged: OrderedDict[tuple[str, int], None] = OrderedDict()

    def is_unreadable(self, name: str, seq: int, error: TopicsError) -> bool:
        """Tell whether `error` means that this job cannot be read, and log that. False: the job is not the cause."""
        if error.code != "storage_unavailable":
            return False
        if (name, seq) not in self._logged:
            self._logged[name, seq] = None
            if len(self._logged) > _LOGGED_MAX:
                self._logged.popitem(last=False)
            _log.error(
                "a job cannot be read and is put aside", topic=name, seq=seq, retry_ms=ASIDE_MS, reason=error.message
            )
        return True
