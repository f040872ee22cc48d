"""The control page: what every process of a service says about itself, readable without asking anyone.

    +----------+----------+----------+-- … --+----------+
    | header   | cell     | cell     |       | cell     |      CELL_WORDS u64 words each
    +----------+----------+----------+-- … --+----------+
      supervisor frontend 0..M-1, walshard 0..N-1, compactor

A cell's first SUPERVISOR_WORDS words are the supervisor's notes on that process; the rest is the process's
own. So each word has one writer, and `status` works while a child is dead or recovering.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Final

from topics.core.config import CLASSES
from topics.core.priority import BANDS
from topics.shm.memory import SharedObject

CELL_WORDS: Final = 128
SHARDS_MAX: Final = 64
SUPERVISOR_WORDS: Final = 16
MAGIC: Final = 0x31535049434F5454  # "TTOCIPS1"
VERSION: Final = 4

EXIT_REFUSED: Final = 78
"""Exit code of a child that must not be restarted: its data needs a human (the log says what and where)."""


class Role(IntEnum):
    SUPERVISOR = 0
    FRONTEND = 1
    WALSHARD = 2
    COMPACTOR = 3


class ProcessState(IntEnum):
    NONE = 0
    STARTING = 1
    RECOVERING = 2
    READY = 3
    DRAINING = 4
    STOPPED = 5
    DEAD = 6
    DEGRADED = 7


HEARTBEAT_STALE_MS: Final = 5_000
"""A process that was ready and has not moved for so long hangs."""

HEADER_FIELDS: Final = (
    "magic",
    "version",
    "supervisor_pid",
    "state",
    "started_ms",
    "shards",
    "frontends",
    "port",
    "reshard_ppm",
    "keys_serial",
    "reloads",
    "write_path",
    "clock_offset_ms",
)
SUPERVISOR_FIELDS: Final = ("pid", "state", "restarts", "last_exit", "since_ms", "ended")
"""`ended`: the last incarnation that is over, 0 for none."""
LATENCY_BUCKETS: Final = 24
"""Bucket i counts latencies of at most 2^(i+3) µs that fit no earlier one: 8 µs … 34 s; the last one all longer."""

_COMMON = (
    "pid",
    "state",
    "incarnation",
    "started_ms",
    "heartbeat_ms",
    "progress_ppm",
    "pressure_ppm",
    "busy_ppm",
    "deferring",
)
CHILD_FIELDS: Final[dict[Role, tuple[str, ...]]] = {
    Role.FRONTEND: (
        *_COMMON,
        "connections",
        "sse_connections",
        "sse_admitted",
        "connections_admitted",
        "ws_connections",
        "work_streams",
        "requests",
        "responses_4xx",
        "responses_5xx",
        "records_in",
        "records_out",
        "sse_frames",
        "long_polls",
        "ring_full",
        "throttled",
        "keys_serial",
        "ready_topics",
        *(f"ready_band_{band}" for band in range(BANDS)),
        "scheduling_us",
        "loop_lag_us",
        "coalesce_us",
        "clock_offset_ms",
    ),
    Role.WALSHARD: (
        *_COMMON,
        "generation",
        "topics",
        *(f"topics_{durability}" for durability in CLASSES),
        "queue_topics",
        "leases_in_flight",
        "records_live",
        "bytes_live",
        "wal_file",
        "wal_offset",
        "committed",
        "wal_read_only",
        "wal_frames",
        "wal_batches",
        "wal_fsyncs",
        "wal_bytes_written",
        "wal_bytes_found",
        "wal_rotations",
        "wal_unsynced_bytes",
        "queue_depth",
        "queue_depth_peak",
        "commit_window_us",
        "write_errors",
        "sessions",
        "routers",
        "router_copies",
        "router_lag_records",
        "torn_bytes",
        "arena_bytes",
        "fsync_us_sum",
        *(f"fsync_us_{bucket:02d}" for bucket in range(LATENCY_BUCKETS)),
        "router_oversize",
        "clock_offset_ms",
    ),
    Role.COMPACTOR: (
        *_COMMON,
        "absorbed_ms",
        "last_snapshot_ms",
        "snapshots",
        "checkpoints",
        "checkpointed_records",
        "checkpointed_bytes",
        "segments_sealed",
        "segments_dropped",
        "segments_rewritten",
        "segments_relocated",
        "orphans",
        "failures",
        *(f"absorbed_bytes_{shard:02d}" for shard in range(SHARDS_MAX)),
    ),
}
"""A shard's `committed`: file_no << 32 | offset behind the last frame that is in the log for good; 0 before it has
recovered. One word, so that nobody sees the file of one and the offset of another.

`clock_offset_ms`: wall minus monotonic time as the process trusts it (`core/clock.py`), plus CLOCK_BIAS; 0
before it looked. A clock that was never set is behind the uptime: the words are unsigned.
In the header: as the service before this one trusted it, 0 if the clock is to be trusted.

The compactor's `absorbed_bytes_NN`: a shard's `log_bytes` at its last snapshot; what came since is the lag, and grows
while the compactor is dead. `absorbed_ms`: when that snapshot was begun. `wal_bytes_found`: what of a shard's log was
behind the newest snapshot when the service was started.
"""
CLOCK_BIAS: Final = 1 << 63
HELD_FIELDS: Final = (
    "topics",
    *(f"topics_{durability}" for durability in CLASSES),
    "queue_topics",
    "leases_in_flight",
    "records_live",
    "bytes_live",
    "sessions",
    "routers",
)
"""What a shard holds. It holds it while it is down, too: caps of the whole service count on that."""
OVER_LIVES: Final[dict[Role, frozenset[str]]] = {
    Role.FRONTEND: frozenset(
        (
            "requests",
            "responses_4xx",
            "responses_5xx",
            "records_in",
            "records_out",
            "sse_frames",
            "ring_full",
            "throttled",
            "clock_offset_ms",
        )
    ),
    Role.WALSHARD: frozenset(
        (
            "generation",
            *HELD_FIELDS,
            "wal_frames",
            "wal_batches",
            "wal_fsyncs",
            "wal_bytes_written",
            "wal_bytes_found",
            "wal_rotations",
            "write_errors",
            "router_copies",
            "router_oversize",
            "fsync_us_sum",
            *(f"fsync_us_{bucket:02d}" for bucket in range(LATENCY_BUCKETS)),
            "clock_offset_ms",
        )
    ),
    Role.COMPACTOR: frozenset(
        (
            "absorbed_ms",
            "last_snapshot_ms",
            "snapshots",
            "checkpoints",
            "checkpointed_records",
            "checkpointed_bytes",
            "segments_sealed",
            "segments_dropped",
            "segments_rewritten",
            "segments_relocated",
            "failures",
            *(f"absorbed_bytes_{shard:02d}" for shard in range(SHARDS_MAX)),
        )
    ),
}
"""Words that a new life of the process goes on with: counters never go down while the service runs, and readers use
the former arena `generation` until there is another.
"""


class Cell:
    """Named u64 words; only their one writer calls `set` and `add`."""

    def __init__(self, words: memoryview, fields: tuple[str, ...]) -> None:
        assert len(fields) <= len(words)
        self._words = words
        self._index = {field: index for index, field in enumerate(fields)}

    def set(self, field: str, value: int) -> None:
        self._words[self._index[field]] = value

    def set_all(self, values: Mapping[str, int]) -> None:
        """In their order."""
        words, index = self._words, self._index
        for field, value in values.items():
            words[index[field]] = value

    def add(self, field: str, amount: int = 1) -> None:
        self._words[self._index[field]] += amount

    def get(self, field: str) -> int:
        value: int = self._words[self._index[field]]
        return value

    def read(self) -> dict[str, int]:
        return {field: self._words[index] for field, index in self._index.items()}

    @property
    def clock_offset_ms(self) -> int | None:
        """Wall minus monotonic time as a process, or its former life, trusts it; None before it looked."""
        word = self.get("clock_offset_ms")
        return word - CLOCK_BIAS if word else None

    @clock_offset_ms.setter
    def clock_offset_ms(self, offset_ms: int) -> None:
        self.set("clock_offset_ms", offset_ms + CLOCK_BIAS)

    def clear(self, keep: Collection[str] = ()) -> None:
        """A new incarnation starts from zero, but for what it is to `keep`."""
        kept = {self._index[field] for field in keep}
        for index in range(len(self._words)):
            if index not in kept:
                self._words[index] = 0


class ProcessCell(Cell):
    """A process's own words, and beside them what the supervisor knows of it."""

    def __init__(self, words: memoryview, role: Role) -> None:
        super().__init__(words[SUPERVISOR_WORDS:], CHILD_FIELDS[role])
        self.supervisor = Cell(words[:SUPERVISOR_WORDS], SUPERVISOR_FIELDS)
        self._role = role

    def begin_life(self, incarnation: int, now_ms: int, state: ProcessState) -> None:
        """This process is the one that writes it from now on; what is not kept over lives begins anew."""
        self.clear(OVER_LIVES[self._role])
        self.set("incarnation", incarnation)
        self.set("pid", os.getpid())
        self.set("started_ms", now_ms)
        self.set("heartbeat_ms", now_ms)
        self.set("state", state)


def log_bytes(shard: Cell) -> int:
    """What its log has been since the snapshot that this service began with; it only grows."""
    return shard.get("wal_bytes_found") + shard.get("wal_bytes_written")


def latency_bucket(latency_us: int) -> int:
    """Which bucket counts this latency."""
    return min(LATENCY_BUCKETS - 1, max(0, (latency_us - 1).bit_length() - 3))


def latency_quantile_us(cell: dict[str, int], quantile: float) -> int | None:
    """Upper bound of the bucket that holds the quantile, None before the first sample."""
    counts = [cell[f"fsync_us_{bucket:02d}"] for bucket in range(LATENCY_BUCKETS)]
    rank = sum(counts) * quantile
    for bucket, count in enumerate(counts):
        rank -= count
        if count and rank <= 0:
            return 1 << (bucket + 3)
    return None


def replay_progress(shards: Sequence[Cell]) -> float:
    """How much of all logs has been read, 0 to 1. A shard that was ready once counts as read: its topics can be."""
    ppm = sum(1_000_000 if cell.get("generation") else cell.get("progress_ppm") for cell in shards)
    return ppm / len(shards) / 1_000_000


class ControlPage:
    """The mapped page of one service."""

    def __init__(self, shared: SharedObject, shards: int, frontends: int) -> None:
        self._shared = shared
        self.shards = shards
        self.frontends = frontends
        words = shared.words
        self.header = Cell(words[:CELL_WORDS], HEADER_FIELDS)
        roles = [(Role.FRONTEND, i) for i in range(frontends)] + [(Role.WALSHARD, i) for i in range(shards)]
        roles.append((Role.COMPACTOR, 0))
        self._cells = {
            key: ProcessCell(words[CELL_WORDS * (1 + at) : CELL_WORDS * (2 + at)], key[0])
            for at, key in enumerate(roles)
        }

    @staticmethod
    def size_bytes(shards: int, frontends: int) -> int:
        return CELL_WORDS * 8 * (2 + shards + frontends)

    @classmethod
    def create(cls, name: str, shards: int, frontends: int) -> ControlPage:
        page = cls(SharedObject.create(name, cls.size_bytes(shards, frontends)), shards, frontends)
        page.header.set("version", VERSION)
        page.header.set("shards", shards)
        page.header.set("frontends", frontends)
        page.header.set("magic", MAGIC)
        return page

    @classmethod
    def attach(cls, name: str) -> ControlPage:
        """The page of a running service; FileNotFoundError (none, or not made yet) or ValueError (another version)."""
        shared = SharedObject.attach(name)
        header = Cell(shared.words[:CELL_WORDS], HEADER_FIELDS)
        if not header.get("magic"):
            raise FileNotFoundError(f"shared memory {name} is being made")
        if header.get("magic") != MAGIC or header.get("version") != VERSION:
            raise ValueError(f"shared memory {name} was made by another version of topics")
        return cls(shared, header.get("shards"), header.get("frontends"))

    def cell(self, role: Role, index: int) -> ProcessCell:
        return self._cells[role, index]

    def trusted_offset_ms(self, role: Role, index: int) -> int | None:
        """What the clock of a process that begins is compared with; None: with nothing."""
        offset_ms = self.cell(role, index).clock_offset_ms
        return self.header.clock_offset_ms if offset_ms is None else offset_ms

    def cells(self) -> dict[tuple[Role, int], ProcessCell]:
        """All of them, in the order they are shown."""
        return self._cells

    def pressure(self) -> float:
        """Of the service, 0 to 1: the greatest of all processes that run."""
        return max(cell.get("pressure_ppm") if cell.supervisor.get("pid") else 0 for cell in self._cells.values()) / 1e6

    def lag_bytes(self, shard: int) -> int:
        """How much of its log is in no snapshot."""
        absorbed = self.cell(Role.COMPACTOR, 0).get(f"absorbed_bytes_{shard:02d}")
        return max(0, log_bytes(self.cell(Role.WALSHARD, shard)) - absorbed)

    def unlink(self) -> None:
        self._shared.unlink()
