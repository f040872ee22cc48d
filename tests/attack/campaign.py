"""One attack from its beginning to its end: a service, its clients, and so many rounds."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

from tests.attack.actor import Actor, World
from tests.attack.assault import SETTINGS, WAL_FILE_BYTES, Assault, Power
from tests.attack.copies import CycleClient, RouterClient, TransactionClient
from tests.attack.deleters import Deleter, Expirer
from tests.attack.queues import JobClient
from tests.attack.readers import CursorReader, Follower, Watcher
from tests.attack.writers import ClassChanger, HeadWriter, KeyWriter, LogWriter, PrefixWriter, ProducerWriter, Remaker
from tests.harness import Service

SETTLE_EVERY: Final = 3
JOIN_S: Final = 150.0
FINDINGS_MAX: Final = 6


def populate(world: World) -> None:
    """Make the clients of all features; each adds itself to the world."""
    logs = [LogWriter(world, durability, "plain") for durability in ("fsync", "disk", "memory", "ephemeral")]
    keys = [KeyWriter(world, durability) for durability in ("fsync", "disk")]
    for durability in ("fsync", "disk"):
        ProducerWriter(world, durability)
    heads = [HeadWriter(world, "disk", "head", "log.head", number) for number in range(2)]
    for head in heads:
        head.writers = [*heads]
    Follower(world, [*logs, *keys])
    Watcher(world, [*logs, *keys], "follow.watch")
    Watcher(world, [*logs, *keys], "follow.slowly", chunk_bytes=512, pause_s=0.05)
    for log in logs[:2]:
        CursorReader(world, log)
    for durability in ("fsync", "disk"):
        TransactionClient(world, durability)
        Deleter(world, durability)
        Deleter(world, durability, cap_records=20)
        JobClient(world, durability, leases_durable=True)
    JobClient(world, "fsync", leases_durable=False)
    Expirer(world)
    RouterClient(world, "at_least_once")
    RouterClient(world, "exactly_once")
    CycleClient(world)
    PrefixWriter(world)
    for number in range(2):
        Remaker(world, number)
        ClassChanger(world, number)


class Campaign:
    """Runs one attack. With a `folder`, preferably in memory, it loses power as well, and needs a C compiler."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self._seed = seed
        self._folder = folder

    def run(self, rounds: int, round_s: float, say: bool = False) -> list[str]:
        """Return what was found; the files of the service are kept then. Raise NoCompilerError."""
        with contextlib.ExitStack() as stack:
            power = stack.enter_context(Power.prepared(self._folder)) if self._folder is not None else None
            environment = SETTINGS | (power.environment if power is not None else {})
            service = Service(shards=2, frontends=2, env=environment, wal_file_bytes=WAL_FILE_BYTES)
            stack.enter_context(service.unstarted())
            service.start()
            world = World(self._seed, service.port)
            populate(world)
            assault = Assault(world, service, power)
            try:
                self._attack(world, assault, service, rounds, round_s, say)
            except Exception:  # noqa: BLE001 — a service that does not come back is a finding
                world.findings.append(traceback.format_exc()[-3000:])
            if world.findings:
                kept = Path(tempfile.mkdtemp(prefix="topics-attack-kept-"))
                shutil.copytree(service.root, kept, dirs_exist_ok=True)
                world.findings.append(f"files and log of the service are in {kept}")
            world.ended.set()
        return world.findings[: FINDINGS_MAX - 1] + world.findings[FINDINGS_MAX - 1 :][-1:]

    def _attack(self, world: World, assault: Assault, service: Service, rounds: int, round_s: float, say: bool) -> None:
        for actor in world.actors:
            actor.set_up()
        for actor in world.actors:
            actor.start()
        for number in range(1, rounds + 1):
            done = assault.round(round_s)
            if say:
                steps = sum(actor.steps for actor in world.actors)
                print(f"{time.strftime('%H:%M:%S')} round {number}: {done}; {steps} steps so far", flush=True)
            if number % SETTLE_EVERY == 0 or number == rounds:
                assault.settle()
            assault.read_log()
            if world.findings:
                return
        world.ended.set()
        for actor in world.actors:
            actor.join(JOIN_S)
            _drain(actor)
        service.stop()
        assault.verify()
        assault.read_log()


def _drain(actor: Actor) -> None:
    try:
        actor.drain()
    except Exception as error:  # noqa: BLE001 — whatever it is, it is a finding
        actor.found("drain", f"{type(error).__name__}: {error}")
