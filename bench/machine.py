"""The machine under the figures: its description, the sharing of its cores, and readings of its disk and memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import psutil

PAGE = b"\0" * 4096
SYNC_FILE_BYTES = 4 << 20


class Cores(NamedTuple):
    """The cores of each side. The load generator has one of its own if frontend and shard can have one each as well."""

    server: set[int]
    load: set[int]


def share_cores() -> Cores:
    """Return the last core for the load and the others for the server; with fewer than three, all for both.

    Two processes pinned to one core take turns there, while the other core idles between answers.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 3:
        return Cores(set(cores), set(cores))
    return Cores(set(cores[:-1]), {cores[-1]})


def describe(directory: Path) -> dict[str, str]:
    """Return processor, memory, kernel, Python, and the file system that `directory` is on."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file system": _file_system(directory),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    path = directory.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    while path not in mounts and path != path.parent:
        path = path.parent
    return mounts.get(path, "unknown")


def fdatasync_us(directory: Path, seconds: float) -> list[float]:
    """Return times of a 4 KiB write and its fdatasync in µs, on space written before: no durable ack can be faster."""
    path = directory / "fdatasync"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.pwrite(descriptor, PAGE * (SYNC_FILE_BYTES // len(PAGE)), 0)
        os.fdatasync(descriptor)
        times: list[float] = []
        offset, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            start_ns = time.perf_counter_ns()
            os.pwrite(descriptor, PAGE, offset)
            os.fdatasync(descriptor)
            times.append((time.perf_counter_ns() - start_ns) / 1000)
            offset = (offset + len(PAGE)) % SYNC_FILE_BYTES
        return times
    finally:
        os.close(descriptor)
        path.unlink()


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process since it began, of all its threads, to the nanosecond."""
    return time.clock_gettime_ns(~pid << 3 | 2)  # as clock_getcpuclockid(3) makes it


class Memory(NamedTuple):
    """Memory of a service in bytes. Page cache under mapped log files is not in it: the kernel takes it back."""

    anonymous: int
    shared_objects: int
    rss: int

    @property
    def held(self) -> int:
        """Private memory of all processes (shared pages divided among them) and what is allocated in /dev/shm."""
        return self.anonymous + self.shared_objects


def memory_of(pids: list[int], shared_objects: list[Path]) -> Memory:
    """Return the memory of these processes together with these files or folders of /dev/shm."""
    rollups = [_rollup_kib(pid) for pid in pids]
    anonymous_kib = sum(rollup.get("Pss_Anon", rollup.get("Anonymous", 0)) for rollup in rollups)
    rss_kib = sum(rollup["Rss"] for rollup in rollups)
    return Memory(anonymous_kib * 1024, sum(map(_allocated_bytes, shared_objects)), rss_kib * 1024)


def proportional_bytes(pid: int) -> int:
    """Return what a process holds of memory that is no file's, its share of what it shares with others included."""
    rollup = _rollup_kib(pid)
    return (rollup["Pss_Anon"] + rollup["Pss_Shmem"]) * 1024


def _rollup_kib(pid: int) -> dict[str, int]:
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0])
    return fields


def _allocated_bytes(path: Path) -> int:
    files = [entry for entry in path.rglob("*") if entry.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_blocks * 512 for file in files)
