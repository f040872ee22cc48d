"""Durations of requests by route: histograms in shared memory that each frontend writes and any of them reads.

    block of frontend 0 | block of frontend 1 | …        each written by its frontend alone

    block    | route 0 | route 1 | …                     `Route`, in its order
    route    | count u64 × LATENCY_BUCKETS | sum of all in µs u64 |

A block outlives its frontend: counters never go down while the service runs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

from topics.shm.control import LATENCY_BUCKETS, latency_bucket

_ROUTE_WORDS: Final = LATENCY_BUCKETS + 1


class Route(IntEnum):
    """The kind of a request whose duration is counted; the names are labels in the metrics."""

    APPEND = 0
    DIFF = 1
    DIFF_WAIT = 2
    """A diff that waited for records, as long as its client allowed."""
    LIST_TOPICS = 3
    GET_TOPIC = 4
    PUT_TOPIC = 5
    DELETE_TOPIC = 6
    DELETE_RECORDS = 7
    CREATE_WATCH = 8
    HEALTH = 9
    READY = 10
    METRICS = 11
    OTHER = 12
    CLAIM = 13
    ACK = 14
    NACK = 15
    EXTEND = 16
    REDRIVE = 17
    READ_CURSOR = 18
    OTHER_CURSOR = 19
    """Cursors created, shown or deleted."""
    LIST_ROUTERS = 20
    GET_ROUTER = 21
    PUT_ROUTER = 22
    DELETE_ROUTER = 23
    WS_PUBLISH = 24
    """Commands over a WebSocket, each until its answer is sent."""
    WS_SUBSCRIBE = 25
    WS_UNSUBSCRIBE = 26
    WS_PING = 27
    PEEK = 28


_BLOCK_WORDS: Final = len(Route) * _ROUTE_WORDS


class Histogram(NamedTuple):
    """Counts by bucket (`latency_bucket`), and the sum of all durations."""

    counts: list[int]
    sum_us: int


class Durations:
    """The blocks of all frontends."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @staticmethod
    def size_bytes(frontends: int) -> int:
        return frontends * _BLOCK_WORDS * 8

    def observe(self, frontend: int, route: Route, took_us: int) -> None:
        """Count a request. Only the process `frontend` calls it."""
        words = self._words
        word = frontend * _BLOCK_WORDS + route * _ROUTE_WORDS
        words[word + latency_bucket(took_us)] += 1
        words[word + LATENCY_BUCKETS] += took_us

    def read(self) -> dict[Route, Histogram]:
        """Return the histograms of all frontends together."""
        words = self._words.tolist()
        blocks = [words[at : at + _BLOCK_WORDS] for at in range(0, len(words), _BLOCK_WORDS)]
        sums = blocks[0] if len(blocks) == 1 else list(map(sum, zip(*blocks, strict=True)))
        ends = range(LATENCY_BUCKETS, _BLOCK_WORDS, _ROUTE_WORDS)
        return {
            route: Histogram(sums[end - LATENCY_BUCKETS : end], sums[end])
            for route, end in zip(Route, ends, strict=True)
        }
