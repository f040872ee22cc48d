"""A Status as text for people."""

from __future__ import annotations

import itertools

from topics.setting_values import MIB
from topics.supervisor.children import show_exit
from topics.supervisor.status import CompactorStatus, FrontendStatus, ProcessStatus, ShardStatus, Status


def render(status: Status) -> str:
    """Some lines, the first of which says it all."""
    if status.pid is None:
        return f"topics  {status.state}  {status.data_dir}\n"
    blocks = [_summary(status)]
    if status.processes:
        heads = "process pid state uptime restarts last_exit cpu_s rss_mib pressure"
        blocks.append(_table(heads, map(_process, status.processes)))
    if status.shards:
        blocks.append(
            _table(
                "shard topics wal_file wal_offset queue fsync_p50 fsync_p99 window_ms lag", map(_shard, status.shards)
            )
        )
    if status.frontends:
        heads = "frontend connections sse requests req/s ready wait_ms coalesce_ms throttled"
        blocks.append(_table(heads, map(_frontend, status.frontends)))
    if status.compactor is not None:
        heads = "compactor snapshots records segments dropped rewritten cold failures"
        blocks.append(_table(heads, map(_compactor, [status.compactor])))
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


def _process(process: ProcessStatus) -> list[str]:
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


def _shard(shard: ShardStatus) -> list[str]:
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


def _compactor(compactor: CompactorStatus) -> list[str]:
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
    """Columns as wide as they need; the first to the left, the rest to the right."""
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
