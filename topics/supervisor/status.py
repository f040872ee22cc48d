"""A running service as it looks from outside: its control page, its lock and the process table; and that as text.

Nobody is asked, so the answer comes while a process is dead, hung or replaying its log. A process's word about itself
counts only while that process runs.
"""

from __future__ import annotations

import itertools
import os
from typing import Final

import msgspec
import psutil

from topics import __version__
from topics.core.clock import Clock
from topics.setting_values import MIB
from topics.shm import shm_names
from topics.shm.control import HEARTBEAT_STALE_MS, ControlPage, ProcessState, Role, latency_quantile_us
from topics.storage.filesystem import WritePath
from topics.storage.lock import holder_pid
from topics.supervisor.children import is_running, show_exit
from topics.supervisor.listeners import show

_ENDED: Final = (ProcessState.DEAD, ProcessState.STOPPED)


class SupervisorStatus(msgspec.Struct, frozen=True):
    cpu_seconds: float
    rss_bytes: int


class ProcessStatus(msgspec.Struct, frozen=True):
    """One process; figures that are unknown while it is down are None. `last_exit` is 128 + n for signal n."""

    role: str
    index: int
    pid: int | None
    state: str
    uptime_ms: int | None
    restarts: int
    last_exit: int | None
    cpu_seconds: float | None
    rss_bytes: int | None
    heartbeat_age_ms: int | None
    pressure: float | None


class ShardStatus(msgspec.Struct, frozen=True):
    """A shard's figures, also those its last life left behind. `progress` is None but while it recovers."""

    index: int
    topics: int
    wal_file: int
    wal_offset: int
    wal_read_only: bool
    unsynced_bytes: int
    queue_depth: int
    fsyncs: int
    fsync_p50_us: int | None
    fsync_p99_us: int | None
    commit_window_ms: float
    write_errors: int
    lag_bytes: int
    """Bytes written to its log and in no snapshot yet: a restart reads them again."""
    progress: float | None


class CompactorStatus(msgspec.Struct, frozen=True):
    """The compactor's work since the service was started. `snapshot_age_ms` is None before the first snapshot."""

    snapshot_age_ms: int | None
    snapshots: int
    checkpointed_records: int
    checkpointed_bytes: int
    segments_sealed: int
    segments_dropped: int
    segments_rewritten: int
    segments_relocated: int
    orphans: int
    failures: int


class FrontendStatus(msgspec.Struct, frozen=True):
    """A frontend's figures. `requests_per_s` is None without an earlier sample."""

    index: int
    connections: int
    sse_connections: int
    requests: int
    requests_per_s: float | None
    ready_topics: int
    scheduling_ms: float
    coalesce_ms: float
    throttled: int


class Status(msgspec.Struct, frozen=True):
    """The whole service; `state` is running, starting, recovering, degraded, draining or stopped."""

    state: str
    data_dir: str
    version: str = __version__
    pid: int | None = None
    uptime_ms: int | None = None
    listen: str | None = None
    topics: int = 0
    routers: int = 0
    pressure: float = 0.0
    deferring: bool = False
    shared_memory_bytes: int = 0
    write_path: str | None = None
    reshard_progress: float | None = None
    supervisor: SupervisorStatus | None = None
    processes: list[ProcessStatus] = []
    shards: list[ShardStatus] = []
    frontends: list[FrontendStatus] = []
    compactor: CompactorStatus | None = None


class StatusReader:
    """Reads one data directory's service as often as asked; remembers the last sample for the rates."""

    def __init__(self, data_dir: str, clock: Clock) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._page: ControlPage | None = None
        self._page_inode = 0
        self._requests: dict[int, tuple[int, int]] = {}

    def read(self) -> Status:
        """The state right now. OSError or ValueError when it cannot be known (no access, another version)."""
        pid = holder_pid(self._data_dir)
        if pid is None:
            return Status(state="stopped", data_dir=self._data_dir)
        page = self._attach()
        if page is None:
            return Status(state="starting", data_dir=self._data_dir, pid=pid)
        return self._describe(pid, page)

    def _attach(self) -> ControlPage | None:
        """The page of the service that runs now, None when it has not made one yet."""
        name = shm_names.shm_name(shm_names.identity(self._data_dir), "control")
        try:
            inode = os.stat(shm_names.SHM_ROOT + name).st_ino
            if self._page is None or inode != self._page_inode:
                self._page = ControlPage.attach(name)
                self._page_inode = inode
        except FileNotFoundError:
            return None
        return self._page

    def _describe(self, pid: int, page: ControlPage) -> Status:
        now_ms = self._clock.now_ms()
        header = page.header.read()
        processes = [_process(page, role, index, now_ms) for role, index in page.cells()]
        alive = is_running(pid)
        shards = [
            _shard(page, process.index, process.state) for process in processes if process.role == _name(Role.WALSHARD)
        ]
        frontends = [
            self._frontend(page, process.index) for process in processes if process.role == _name(Role.FRONTEND)
        ]
        return Status(
            state=_overall(alive, ProcessState(header["state"]), processes, shards),
            data_dir=self._data_dir,
            pid=pid,
            uptime_ms=max(0, now_ms - header["started_ms"]) if header["started_ms"] else None,
            listen=_listen_address(pid, header["port"]),
            topics=sum(shard.topics for shard in shards),
            routers=sum(cell.get("routers") for (role, _), cell in page.cells().items() if role is Role.WALSHARD),
            pressure=page.pressure(),
            deferring=any(page.cell(role, index).get("deferring") for role, index in page.cells()),
            shared_memory_bytes=_shared_memory_bytes(shm_names.identity(self._data_dir)),
            write_path=WritePath(header["write_path"]).name.lower() if header["write_path"] else None,
            reshard_progress=header["reshard_ppm"] / 1e6 if header["state"] == ProcessState.RECOVERING else None,
            supervisor=_supervisor(pid),
            processes=processes,
            shards=shards,
            frontends=frontends,
            compactor=_compactor(page, now_ms),
        )

    def _frontend(self, page: ControlPage, index: int) -> FrontendStatus:
        cell = page.cell(Role.FRONTEND, index).read()
        now_ms, requests = self._clock.monotonic_ms(), cell["requests"]
        rate = None
        if (before := self._requests.get(index)) is not None and now_ms > before[0]:
            # A restarted frontend counts from zero.
            rate = max(0, requests - before[1]) * 1000 / (now_ms - before[0])
        self._requests[index] = (now_ms, requests)
        return FrontendStatus(
            index=index,
            connections=cell["connections"],
            sse_connections=cell["sse_connections"],
            requests=requests,
            requests_per_s=rate,
            ready_topics=cell["ready_topics"],
            scheduling_ms=max(cell["scheduling_us"], cell["loop_lag_us"]) / 1000,
            coalesce_ms=cell["coalesce_us"] / 1000,
            throttled=cell["throttled"],
        )


def _name(role: Role) -> str:
    return role.name.lower()


def _process(page: ControlPage, role: Role, index: int, now_ms: int) -> ProcessStatus:
    cell = page.cell(role, index)
    known, own = cell.supervisor.read(), cell.read()
    pid = known["pid"] or None
    state = ProcessState(known["state"])
    cpu_seconds = rss_bytes = heartbeat_age_ms = None
    if pid is not None:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    raise psutil.NoSuchProcess(pid)
                times = process.cpu_times()
                cpu_seconds, rss_bytes = times.user + times.system, process.memory_info().rss
        except psutil.NoSuchProcess:
            # The supervisor has not noticed yet, or is gone itself.
            pid, state = None, ProcessState.DEAD
    if pid is not None and own["pid"] == pid:
        state = ProcessState(own["state"]) or state
        if own["heartbeat_ms"]:
            heartbeat_age_ms = max(0, now_ms - own["heartbeat_ms"])
    return ProcessStatus(
        role=_name(role),
        index=index,
        pid=pid,
        state=state.name.lower(),
        uptime_ms=max(0, now_ms - known["since_ms"]) if pid is not None else None,
        restarts=known["restarts"],
        last_exit=known["last_exit"] if known["restarts"] or state in _ENDED else None,
        cpu_seconds=cpu_seconds,
        rss_bytes=rss_bytes,
        heartbeat_age_ms=heartbeat_age_ms,
        pressure=own["pressure_ppm"] / 1e6 if pid is not None else None,
    )


def _compactor(page: ControlPage, now_ms: int) -> CompactorStatus:
    cell = page.cell(Role.COMPACTOR, 0).read()
    last_ms = cell["last_snapshot_ms"]
    return CompactorStatus(
        snapshot_age_ms=max(0, now_ms - last_ms) if last_ms else None,
        **{field: cell[field] for field in CompactorStatus.__struct_fields__[1:]},
    )


def _shard(page: ControlPage, index: int, state: str) -> ShardStatus:
    cell = page.cell(Role.WALSHARD, index).read()
    return ShardStatus(
        index=index,
        topics=cell["topics"],
        wal_file=cell["wal_file"],
        wal_offset=cell["wal_offset"],
        wal_read_only=bool(cell["wal_read_only"]),
        unsynced_bytes=cell["wal_unsynced_bytes"],
        queue_depth=cell["queue_depth"],
        fsyncs=cell["wal_fsyncs"],
        fsync_p50_us=latency_quantile_us(cell, 0.50),
        fsync_p99_us=latency_quantile_us(cell, 0.99),
        commit_window_ms=cell["commit_window_us"] / 1000,
        write_errors=cell["write_errors"],
        lag_bytes=page.lag_bytes(index),
        progress=cell["progress_ppm"] / 1e6 if state == "recovering" else None,
    )


def _overall(alive: bool, announced: ProcessState, processes: list[ProcessStatus], shards: list[ShardStatus]) -> str:
    """Returns one word for all processes: the worst that is true."""
    if not alive or announced in (ProcessState.DRAINING, ProcessState.STOPPED):
        return "draining"
    states = {process.state for process in processes}
    hangs = any(p.state == "ready" and (p.heartbeat_age_ms or 0) > HEARTBEAT_STALE_MS for p in processes)
    if states & {"dead", "degraded", "stopped"} or hangs or any(shard.wal_read_only for shard in shards):
        return "degraded"
    if announced == ProcessState.RECOVERING or "recovering" in states:
        return "recovering"
    return "running" if states == {"ready"} else "starting"


def _supervisor(pid: int) -> SupervisorStatus | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return SupervisorStatus(times.user + times.system, process.memory_info().rss)
    except psutil.NoSuchProcess:
        return None


def _listen_address(pid: int, port: int) -> str | None:
    """Returns the address on which the supervisor really listens, None once it has closed the door."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return show(connection.laddr.ip, connection.laddr.port)
    return None


def _shared_memory_bytes(identity: str) -> int:
    """Returns the bytes of /dev/shm that the service takes, files of ephemeral topics included."""
    total = 0
    for name in shm_names.objects(identity):
        path = os.path.join(shm_names.SHM_ROOT, name)
        for folder, _, files in os.walk(path):
            total += sum(_allocated_bytes(os.path.join(folder, file)) for file in files)
        total += _allocated_bytes(path)
    return total


def _allocated_bytes(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def render(status: Status) -> str:
    """Renders some lines, the first of which says it all."""
    if status.pid is None:
        return f"topics  {status.state}  {status.data_dir}\n"
    blocks = [_summary(status)]
    if status.processes:
        heads = "process pid state uptime restarts last_exit cpu_s rss_mib pressure"
        blocks.append(_table(heads, map(_process_row, status.processes)))
    if status.shards:
        blocks.append(
            _table(
                "shard topics wal_file wal_offset queue fsync_p50 fsync_p99 window_ms lag",
                map(_shard_row, status.shards),
            )
        )
    if status.frontends:
        heads = "frontend connections sse requests req/s ready wait_ms coalesce_ms throttled"
        blocks.append(_table(heads, map(_frontend, status.frontends)))
    if status.compactor is not None:
        heads = "compactor snapshots records segments dropped rewritten cold failures"
        blocks.append(_table(heads, map(_compactor_row, [status.compactor])))
    return "\n".join(blocks)


def _summary(status: Status) -> str:
    facts = [f"topics {status.version}", status.state, status.listen or "not listening", f"pid {status.pid}"]
    if status.uptime_ms is not None:
        facts.append(f"up {_duration(status.uptime_ms)}")
    facts.append(f"{status.topics} topics")
    if status.routers:
        facts.append(f"{status.routers} routers")
    facts.append(f"pressure {status.pressure:.2f}{' deferring' if status.deferring else ''}")
    facts.append(f"shared memory {status.shared_memory_bytes / MIB:.0f} MiB")
    if status.write_path is not None:
        facts.append(f"writes by {status.write_path}")
    if status.reshard_progress is not None:
        facts.append(f"resharding {status.reshard_progress:.0%}")
    return "  ".join(facts) + f"\n{status.data_dir}\n"


def _process_row(process: ProcessStatus) -> list[str]:
    return [
        f"{process.role} {process.index}",
        _or_dash(process.pid),
        process.state,
        "-" if process.uptime_ms is None else _duration(process.uptime_ms),
        str(process.restarts),
        "-" if process.last_exit is None else show_exit(process.last_exit),
        "-" if process.cpu_seconds is None else f"{process.cpu_seconds:.1f}",
        "-" if process.rss_bytes is None else f"{process.rss_bytes / MIB:.0f}",
        "-" if process.pressure is None else f"{process.pressure:.2f}",
    ]


def _shard_row(shard: ShardStatus) -> list[str]:
    notes = ["read-only"] if shard.wal_read_only else []
    if shard.progress is not None:
        notes.append(f"recovering {shard.progress:.0%}")
    return [
        " ".join([str(shard.index), *notes]),
        str(shard.topics),
        str(shard.wal_file),
        str(shard.wal_offset),
        str(shard.queue_depth),
        "-" if shard.fsync_p50_us is None else f"{shard.fsync_p50_us} µs",
        "-" if shard.fsync_p99_us is None else f"{shard.fsync_p99_us} µs",
        f"{shard.commit_window_ms:.1f}",
        f"{shard.lag_bytes / MIB:.1f} MiB",
    ]


def _compactor_row(compactor: CompactorStatus) -> list[str]:
    age_ms = compactor.snapshot_age_ms
    return [
        "no snapshot yet" if age_ms is None else f"{_duration(age_ms)} ago",
        str(compactor.snapshots),
        str(compactor.checkpointed_records),
        str(compactor.segments_sealed),
        str(compactor.segments_dropped),
        str(compactor.segments_rewritten),
        str(compactor.segments_relocated),
        str(compactor.failures),
    ]


def _frontend(frontend: FrontendStatus) -> list[str]:
    return [
        str(frontend.index),
        str(frontend.connections),
        str(frontend.sse_connections),
        str(frontend.requests),
        "-" if frontend.requests_per_s is None else f"{frontend.requests_per_s:.0f}",
        str(frontend.ready_topics),
        f"{frontend.scheduling_ms:.1f}",
        f"{frontend.coalesce_ms:.1f}",
        str(frontend.throttled),
    ]


def _table(heads: str, rows: map[list[str]]) -> str:
    """Renders columns as wide as they need; the first to the left, the rest to the right."""
    lines = [[head.replace("_", " ").upper() for head in heads.split()], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + "\n"
        for line in lines
    )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _duration(ms: int) -> str:
    """`850 ms`, `12 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`."""
    if ms < 1000:
        return f"{ms} ms"
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    seconds = ms // 1000
    for (unit, size), (smaller, smaller_size) in itertools.pairwise(units):
        if seconds >= size:
            rest = seconds % size // smaller_size
            return f"{seconds // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"
