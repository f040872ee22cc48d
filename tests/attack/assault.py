"""All that is done to the service: parts of it killed, all of it stopped or killed, power lost, other shard counts."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.attack.actor import Moment, World
from tests.attack.asking import COUNTS, Finding, need
from tests.harness import Service, poll

SETTINGS: Final = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": "60",
    "TOPICS_CHECKPOINT_WAL_BYTES": "64KiB",
    "TOPICS_SEGMENT_MAX_EVENTS": "25",
    "TOPICS_SHUTDOWN_GRACE_MS": "60000",
}
"""Everything happens all the time: checkpoints, segments that are full, log files that are."""
WAL_FILE_BYTES: Final = 1 << 20
READY_S: Final = 60.0
STEP_S: Final = 130.0
SLOT: Final = struct.Struct("<4Q")
PAGE_BYTES: Final = 4096


class NoCompilerError(Exception):
    """There is no C compiler, so a power loss cannot be played."""


class Power(NamedTuple):
    """The preloaded library, its table of what is synced, and the file that stands for the machine's boot id."""

    library: Path
    table: Path
    boot_id: Path

    @classmethod
    @contextlib.contextmanager
    def prepared(cls, folder: Path) -> Iterator[Power]:
        """Compile the library in a folder. Raise NoCompilerError."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NoCompilerError("no cc, gcc or clang: power losses are played by a small C library")
        library = folder / "power.so"
        source = Path(__file__).with_name("power.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        power = cls(library, folder / "table", folder / "boot_id")
        power.boot_id.write_text("0" * 32 + "\n")
        yield power

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that is to be watched."""
        return {"LD_PRELOAD": str(self.library), "SHIM_TABLE": str(self.table), "SHIM_BOOT": str(self.boot_id)}

    def lose(self, data_dir: Path, rng: random.Random) -> None:
        """Take from the logs what was not synced: all of it, or what lies behind some place, or single pages."""
        self.boot_id.write_text(f"{rng.getrandbits(128):032x}\n")
        known = {inode: (written, synced) for inode, written, synced, _ in SLOT.iter_unpack(self.table.read_bytes())}
        for path in sorted((data_dir / "wal").rglob("wal-*.log")):
            written, synced = known.get(path.stat().st_ino, (0, 0))
            if written > synced:
                chance = rng.random()
                at = synced if chance < 0.3 else written if chance < 0.4 else rng.randrange(synced, written)
                COUNTS["lost bytes"] += written - at
                _cut(path, at, written, rng)


def _cut(path: Path, at: int, written: int, rng: random.Random) -> None:
    """Zero a file from a place on. Some pages behind it may have reached the disk, and some of it may be garbage."""
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(at)
        tail = file.read(written - at)
        file.truncate(at)
        file.truncate(size_bytes)
        if rng.random() < 0.3 and len(tail) > 2 * PAGE_BYTES:
            later = (at // PAGE_BYTES + 2) * PAGE_BYTES
            file.seek(later)
            file.write(tail[later - at :])
        elif rng.random() < 0.2:
            file.seek(at)
            file.write(rng.randbytes(min(len(tail), 300)))


class Assault:
    """Hurts the service, and looks at what its clients and its log say. Without `power` it loses none."""

    def __init__(self, world: World, service: Service, power: Power | None) -> None:
        self._world = world
        self._service = service
        self._power = power
        self._rng = random.Random(world.seed)
        self._log_seen = 0

    def round(self, run_s: float) -> str:
        """Let the clients go on for about `run_s`, hurt the service, and wait until it is ready. Say what was done."""
        rng = self._rng
        COUNTS["rounds"] += 1
        time.sleep(run_s * (0.3 + rng.random()))
        chance = rng.random()
        if chance < 0.45:
            done = self._kill_some()
            for _ in range(rng.choice([0, 0, 1, 2])):
                time.sleep(rng.random() * 0.4)
                done += ", " + self._kill_some()
        else:
            done = self._end_and_start(chance)
        poll("ready", self._service.is_ready, READY_S)
        return done

    def _kill_some(self) -> str:
        found: dict[str, list[int]] = {}
        for process in self._service.status()["processes"]:
            if process["pid"]:
                found.setdefault(process["role"], []).append(process["pid"])
        killed = []
        for _ in range(self._rng.randrange(1, 5)):
            role = self._rng.choice(list(found))
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rng.choice(found[role]), signal.SIGKILL)
                COUNTS["kills"] += 1
            killed.append(role)
            time.sleep(self._rng.choice([0, self._rng.random() * 0.1]))
        self._hurt(kills=1)
        return "+".join(killed)

    def _hurt(self, kills: int, restarts: int = 0, power_losses: int = 0) -> None:
        now = self._world.moment
        self._world.moment = Moment(now.kills + kills, now.restarts + restarts, now.power_losses + power_losses)

    def _end_and_start(self, chance: float) -> str:
        rng, service = self._rng, self._service
        how = "all" if chance < 0.62 else "supervisor" if chance < 0.7 else "stop" if chance < 0.82 else "power"
        self._end(how)
        if rng.random() < 0.7 or how == "power":
            self.verify()
        if rng.random() < 0.6:
            service.shards = rng.randrange(1, 5)
        if rng.random() < 0.3:
            service.frontends = rng.randrange(1, 4)
        done = f"{how}, {service.shards} shards, {service.frontends} frontends"
        service.start(wait_ready=False)
        if rng.random() < 0.25:
            time.sleep(rng.random() * 0.8)
            self._end("all")
            done += ", all while it started"
            service.start(wait_ready=False)
        return done

    def _end(self, how: str) -> None:
        power = self._power if how == "power" else None
        if how == "stop":
            self._service.stop()
        elif how == "supervisor":
            self._service.kill_supervisor()
            COUNTS["kills"] += 1
        else:
            COUNTS["kills"] += len(self._service.family())
            self._service.kill_group()
        if power is not None:
            power.lose(self._service.data_dir, self._rng)
            COUNTS["power losses"] += 1
            if self._rng.random() < 0.5:
                for entry in self._service.shared_memory():
                    if entry.is_file():
                        entry.unlink()
        self._hurt(kills=1, restarts=1, power_losses=int(power is not None))

    def verify(self) -> None:
        """Have `topics verify` look at the files of the service, which does not run."""
        command = [str(Path(sys.executable).with_name("topics")), "verify", str(self._service.data_dir)]
        env = self._service.environment()
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        said = answer.stdout[-1500:] + answer.stderr[-1500:]
        need(answer.returncode == 0 and "clean" in answer.stdout, "topics verify:", answer.returncode, said)
        COUNTS["verifies"] += 1

    def settle(self) -> None:
        """Stop the clients between two steps, and have each check what it was promised."""
        poll("ready", self._service.is_ready, READY_S)
        self._world.going.clear()
        held = []
        try:
            for actor in self._world.actors:
                if not actor.busy.acquire(timeout=STEP_S):
                    raise Finding(f"{actor.id} hangs")
                held.append(actor)
            for actor in self._world.actors:
                if actor.is_alive() and not self._world.findings:
                    try:
                        actor.check()
                    except Exception as error:  # noqa: BLE001 — whatever it is, it is a finding
                        actor.found("check", f"{type(error).__name__}: {error}")
        finally:
            for actor in held:
                actor.busy.release()
            self._world.going.set()

    def read_log(self) -> None:
        """Take a traceback, or a line that is none of the service's, for a finding."""
        text = self._service.log_path.read_text(errors="replace")
        for line in text[self._log_seen :].splitlines():
            if "Traceback" in line or "never retrieved" in line or (line and not line.startswith("{")):
                self._world.findings.append("log: " + line[:3000])
            COUNTS["error lines"] += '"level": "error"' in line
        self._log_seen = len(text)
