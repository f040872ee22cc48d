"""The whole service as metrics (api §8), read from shared memory: the control page and the durations of requests.
Nobody is asked, so any frontend answers for all, also while processes are dead or recovering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal

from topics import __version__
from topics.core.config import CLASSES
from topics.core.priority import BANDS
from topics.frontend.operators.exposition import Buckets, Family, Sample, single
from topics.shm.control import LATENCY_BUCKETS, ControlPage, ProcessCell, Role, replay_progress
from topics.shm.durations import Durations, Route

_BOUNDS_US: Final = [1 << (bucket + 3) for bucket in range(LATENCY_BUCKETS - 1)]
_BOUNDS_AS_US: Final = [str(bound) for bound in _BOUNDS_US]
_BOUNDS_AS_SECONDS: Final = [repr(bound / 1_000_000) for bound in _BOUNDS_US]

_Kind = Literal["gauge", "counter"]
_WAL: Final[tuple[tuple[str, str, str], ...]] = (
    ("frames", "wal_frames", "Frames written to the logs"),
    ("batches", "wal_batches", "Groups committed, each with one write"),
    ("fsyncs", "wal_fsyncs", "Syncs of the logs, those in the background included"),
    ("bytes_written", "wal_bytes_written", "Bytes written to the logs"),
    ("rotations", "wal_rotations", "Log files begun after the first"),
)
_SHARD: Final[tuple[tuple[str, _Kind, str, str], ...]] = (
    ("topics", "gauge", "topics", "Topics of one shard"),
    ("records_live", "gauge", "records_live", "Live records of one shard"),
    ("bytes_live", "gauge", "bytes_live", "Live bytes of one shard"),
    ("wal_queue_depth", "gauge", "queue_depth", "Requests in the group that one shard took last"),
    ("wal_read_only", "gauge", "wal_read_only", "1 if the log of one shard cannot be written any more"),
    ("wal_unsynced_bytes", "gauge", "wal_unsynced_bytes", "Bytes in the log of one shard that are not synced yet"),
    ("wal_bytes_written_total", "counter", "wal_bytes_written", "Bytes written to the log of one shard"),
    ("wal_batches_total", "counter", "wal_batches", "Groups committed by one shard"),
    ("wal_fsyncs_total", "counter", "wal_fsyncs", "Syncs of the log of one shard"),
    ("wal_write_errors_total", "counter", "write_errors", "Groups that could not be written or synced"),
)
_FRONTEND: Final[tuple[tuple[str, _Kind, str, str], ...]] = (
    ("connections", "gauge", "connections", "Open HTTP/1.1 connections of one frontend"),
    ("sse_connections", "gauge", "sse_connections", "Open event streams of one frontend"),
    ("ws_connections", "gauge", "ws_connections", "Open WebSockets of one frontend"),
    ("work_streams", "gauge", "work_streams", "Open streams of queue workers of one frontend"),
    ("long_polls", "gauge", "long_polls", "Long polls that wait in one frontend"),
    ("requests_total", "counter", "requests", "Requests to one frontend"),
    ("ready_topics", "gauge", "ready_topics", "Topics that wait to be delivered by one frontend"),
    ("throttled_total", "counter", "throttled", "429s of one frontend for want of room on the way to a shard"),
)
_COMPACTOR: Final[tuple[tuple[str, _Kind, str, str], ...]] = (
    ("snapshots_total", "counter", "snapshots", "Snapshots made"),
    ("records_total", "counter", "checkpointed_records", "Records taken over from the logs into segments"),
    ("bytes_total", "counter", "checkpointed_bytes", "Bytes of frames written to segments by checkpoints"),
    ("segments_sealed_total", "counter", "segments_sealed", "Segments sealed"),
    ("segments_dropped_total", "counter", "segments_dropped", "Segments whose files were removed"),
    ("segments_rewritten_total", "counter", "segments_rewritten", "Segments rewritten without deleted records"),
    ("segments_relocated_total", "counter", "segments_relocated", "Segments moved to the cold directory"),
    ("segments_unexplained", "gauge", "orphans", "Segments on the disk that belong to nothing known, and stay"),
    ("failures_total", "counter", "failures", "Checkpoints and other work that failed and was repeated later"),
)
_TRAFFIC: Final[tuple[tuple[str, str, str], ...]] = (
    ("requests", "requests", "Requests that reached a route, and commands over WebSockets"),
    ("records_written", "records_in", "Records committed for clients"),
    ("records_delivered", "records_out", "Records sent to clients, by diff and watch"),
    ("sse_frames", "sse_frames", "Frames sent on event streams"),
)
_PRESSURE: Final[tuple[tuple[str, str, str], ...]] = (
    ("pressure", "pressure_ppm", "Pressure of one process, 0 to 1"),
    ("busy_ratio", "busy_ppm", "How much of the time one process computes or waits for the disk"),
)
_DELIVERY: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "scheduler_wait",
        "scheduling_us",
        "How long topics waited for their turn to be delivered, mean of the last interval",
    ),
    ("event_loop_lag", "loop_lag_us", "How late a frontend's event loop was, last sample"),
    ("coalesce", "coalesce_us", "How far apart a frontend's frames of one topic are at least"),
)


class ServiceFigures:
    """Everything but the series of single topics."""

    def __init__(self, control: ControlPage, durations: Durations, now_ms: Callable[[], int]) -> None:
        self._control = control
        self._durations = durations
        self._now_ms = now_ms
        self._shards = [control.cell(Role.WALSHARD, shard) for shard in range(control.shards)]
        self._frontends = [control.cell(Role.FRONTEND, frontend) for frontend in range(control.frontends)]

    def families(self) -> Iterator[Family]:
        yield from self._content()
        yield from self._health()
        yield from self._wal()
        yield from self._compactor()
        yield from self._parts("shard", self._shards, _SHARD)
        yield from self._parts("frontend", self._frontends, _FRONTEND)
        yield from self._requests()
        yield from self._pressure()
        yield from self._processes()

    def _content(self) -> Iterator[Family]:
        shards = self._shards
        yield single("topics_topics", "gauge", "Topics", _sum(shards, "topics"))
        by_class: list[Sample] = [((name,), _sum(shards, f"topics_{name}")) for name in CLASSES]
        yield Family("topics_topics_by_class", "gauge", "Topics by durability class", ("class",), by_class)
        yield single("topics_queue_topics", "gauge", "Topics of type queue", _sum(shards, "queue_topics"))
        yield single("topics_records_live", "gauge", "Live records in all topics", _sum(shards, "records_live"))
        yield single("topics_bytes_live", "gauge", "Live bytes in all topics", _sum(shards, "bytes_live"))
        leases = _sum(shards, "leases_in_flight")
        yield single("topics_queue_leases_in_flight", "gauge", "Leases held by consumers of queues", leases)
        yield single("topics_routers", "gauge", "Routers", _sum(shards, "routers"))
        forwarded = _sum(shards, "router_copies")
        yield single("topics_router_copies_total", "counter", "Copies made by routers", forwarded)
        oversize = _sum(shards, "router_oversize")
        help = "Copies left out because their dest could never hold them, however empty"
        yield single("topics_router_oversize_total", "counter", help, oversize)
        lag = _sum(shards, "router_lag_records")
        yield single(
            "topics_router_lag_records", "gauge", "Source records that are yet to be copied, as of a second ago", lag
        )
        yield single("topics_watch_sessions", "gauge", "Watch sessions that are kept", _sum(shards, "sessions"))
        streams = _sum(self._frontends, "sse_connections") + _sum(self._frontends, "work_streams")
        yield single("topics_sse_connections", "gauge", "Open event streams", streams)
        sockets = _sum(self._frontends, "ws_connections")
        yield single("topics_ws_connections", "gauge", "Open WebSockets", sockets)

    def _health(self) -> Iterator[Family]:
        ready = all(cell.get("generation") for cell in self._shards)
        progress = replay_progress(self._shards)
        uptime_ms = max(0, self._now_ms() - self._control.header.get("started_ms"))
        yield Family("topics_build_info", "gauge", "The version that runs", ("version",), [((__version__,), 1)])
        yield single("topics_ready", "gauge", "1 if all topics can be read", int(ready))
        yield single("topics_recovery_progress", "gauge", "How much of the logs has been read, 0 to 1", progress)
        yield single("topics_uptime_ms", "gauge", "Milliseconds since the service was started", uptime_ms)

    def _wal(self) -> Iterator[Family]:
        shards = self._shards
        for name, field, help in _WAL:
            yield single(f"topics_wal_{name}_total", "counter", help, _sum(shards, field))
        full = _sum(self._frontends, "ring_full")
        yield single("topics_wal_submit_full_total", "counter", "Requests that found the ring of a shard full", full)
        depth = _sum(shards, "queue_depth")
        yield single("topics_wal_queue_depth", "gauge", "Requests in the groups that the shards took last", depth)
        peak = max(cell.get("queue_depth_peak") for cell in shards)
        yield single("topics_wal_queue_depth_peak", "gauge", "Most requests in one group since its shard started", peak)
        read_only = int(any(cell.get("wal_read_only") for cell in shards))
        yield single("topics_wal_read_only", "gauge", "1 if the log of a shard cannot be written any more", read_only)
        counts = [_sum(shards, f"fsync_us_{bucket:02d}") for bucket in range(LATENCY_BUCKETS)]
        buckets = Buckets(_BOUNDS_AS_US, counts, _sum(shards, "fsync_us_sum"))
        help = "Microseconds that a group waited for its sync"
        yield Family("topics_wal_fsync_latency_us", "histogram", help, (), [((), buckets)])

    def _compactor(self) -> Iterator[Family]:
        cell = self._control.cell(Role.COMPACTOR, 0)
        lags: list[Sample] = [((str(shard),), self._control.lag_bytes(shard)) for shard in range(len(self._shards))]
        help = "Bytes in the log of one shard that no snapshot has absorbed"
        yield Family("topics_compactor_lag_bytes", "gauge", help, ("shard",), lags)
        since_ms = cell.get("absorbed_ms") or self._control.header.get("started_ms")
        behind_ms = max(0, self._now_ms() - since_ms) if any(lag for _, lag in lags) else 0
        help = "Seconds since the newest snapshot was begun, 0 if it has absorbed everything"
        yield single("topics_compactor_lag_seconds", "gauge", help, behind_ms / 1000)
        help = "When the newest snapshot was made, seconds since 1970; 0: none yet"
        last_s = cell.get("last_snapshot_ms") / 1000
        yield single("topics_compactor_last_snapshot_timestamp_seconds", "gauge", help, last_s)
        for name, kind, field, help in _COMPACTOR:
            yield single(f"topics_compactor_{name}", kind, help, cell.get(field))

    def _parts(
        self, label: str, cells: list[ProcessCell], columns: tuple[tuple[str, _Kind, str, str], ...]
    ) -> Iterator[Family]:
        for name, kind, field, help in columns:
            samples: list[Sample] = [((str(index),), cell.get(field)) for index, cell in enumerate(cells)]
            yield Family(f"topics_{label}_{name}", kind, help, (label,), samples)

    def _requests(self) -> Iterator[Family]:
        for name, field, help in _TRAFFIC:
            yield single(f"topics_{name}_total", "counter", help, _sum(self._frontends, field))
        errors: list[Sample] = [((s,), _sum(self._frontends, f"responses_{s}")) for s in ("4xx", "5xx")]
        yield Family("topics_error_responses_total", "counter", "Requests that were refused", ("status",), errors)
        samples: list[Sample] = []
        for route in Route:
            counts, sum_us = self._durations.read(route)
            samples.append(((route.name.lower(),), Buckets(_BOUNDS_AS_SECONDS, counts, sum_us / 1_000_000)))
        help = "Seconds from a request to the end of its answer, event streams left out"
        yield Family("topics_request_duration_seconds", "histogram", help, ("route",), samples)

    def _pressure(self) -> Iterator[Family]:
        cells = self._control.cells()
        yield single("topics_pressure", "gauge", "Pressure of the service, 0 to 1", self._control.pressure())
        deferring = int(any(cell.get("deferring") for cell in cells.values()))
        help = "1 while topics of negative priority are not pushed and routers copy less at a time"
        yield single("topics_deferring", "gauge", help, deferring)
        help = "Requests refused with 429 for want of room on the way to a shard; limits are not counted"
        yield single("topics_throttled_total", "counter", help, _sum(self._frontends, "throttled"))
        at_work = [(role, index, cell) for (role, index), cell in cells.items() if role is not Role.COMPACTOR]
        for name, field, help in _PRESSURE:
            samples: list[Sample] = [
                ((role.name.lower(), str(index)), cell.get(field) / 1e6) for role, index, cell in at_work
            ]
            yield Family(f"topics_process_{name}", "gauge", help, ("process", "index"), samples)
        for name, field, help in _DELIVERY:
            samples = [((str(index),), cell.get(field) / 1e6) for index, cell in enumerate(self._frontends)]
            yield Family(f"topics_{name}_seconds", "gauge", help, ("frontend",), samples)
        windows: list[Sample] = [
            ((str(index),), cell.get("commit_window_us") / 1e6) for index, cell in enumerate(self._shards)
        ]
        help = "How far apart one shard's groups begin at least"
        yield Family("topics_shard_commit_window_seconds", "gauge", help, ("shard",), windows)
        brakes: list[Sample] = [((str(index),), cell.get("brake_ppm") / 1e6) for index, cell in enumerate(self._shards)]
        help = "Part of full braking (0 to 1) that slows writers while the compactor is behind"
        yield Family("topics_shard_brake_ratio", "gauge", help, ("shard",), brakes)
        depths: list[Sample] = [
            ((str(index), str(band)), cell.get(f"ready_band_{band}"))
            for index, cell in enumerate(self._frontends)
            for band in range(BANDS)
        ]
        help = "Topics that wait to be delivered, by band of priority, 0 is the most urgent"
        yield Family("topics_scheduler_band_depth", "gauge", help, ("frontend", "band"), depths)

    def _processes(self) -> Iterator[Family]:
        up: list[Sample] = []
        restarts: list[Sample] = []
        for (role, index), cell in self._control.cells().items():
            labels = (role.name.lower(), str(index))
            up.append((labels, int(cell.supervisor.get("pid") > 0)))
            restarts.append((labels, cell.supervisor.get("restarts")))
        names = ("process", "index")
        yield Family("topics_process_up", "gauge", "1 while the process runs", names, up)
        help = "Starts of the process after its first"
        yield Family("topics_process_restarts_total", "counter", help, names, restarts)


def _sum(cells: list[ProcessCell], field: str) -> int:
    return sum([cell.get(field) for cell in cells])
