"""The same work again and again, and the service does not grow by it: ten minutes with `make soak`, here a sample."""

from __future__ import annotations

import os
import random

import pytest

from bench.soak import SAMPLES, Soak, State, growth_per_min, soak
from tests.contract.stream import held_by_frontends
from tests.harness import Service

SECONDS = float(os.environ.get("TOPICS_SOAK_S", "12"))
SEGMENT_FILES_MAX = 200
"""Open in all processes: there are some 60 topics, each of a few hundred records, and they are rewritten all along."""
LONG_S = 300.0
"""From here on everything that fills up has filled up by the end of the first third: it has to be flat."""
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""The most that asyncio's pool of a frontend may have."""
MIB = 1 << 20
GROWTH_MAX_BYTES_PER_MIN = 0.5 * MIB
"""Growth of a process's private memory: half of what has to be noticed. All processes together may have half as much
again, because the ups and downs of each add up.
"""


def thirds(states: list[State]) -> tuple[list[State], list[State]]:
    """The middle and the last."""
    third = len(states) // 3
    return states[third : 2 * third], states[2 * third :]


@pytest.mark.parametrize("leak_mib_per_min", [0.0, 1.0])
def test_a_leak_of_a_mib_a_minute_is_seen_and_a_sawtooth_is_none(leak_mib_per_min: float) -> None:
    """The assertion below sees a leak: with 30 MiB up and down, as a compactor is, and at times 10 more for one
    sample.
    """
    for seed in range(50):
        dice = random.Random(seed)
        states = []
        for n in range(SAMPLES):
            at_s = 600 * n / SAMPLES
            noise_mib = dice.choice([0, 0, 20, 30]) + dice.uniform(-0.5, 0.5) + 10 * (dice.random() < 0.05)
            anonymous = round((70 + leak_mib_per_min * at_s / 60 + noise_mib) * MIB)
            states.append(State(at_s, {1: anonymous}, 0, 0, 0))
        growth = growth_per_min(states, lambda state: state.anonymous_bytes[1])
        assert (growth > GROWTH_MAX_BYTES_PER_MIN) is (leak_mib_per_min > 0), (seed, growth / MIB)


@pytest.mark.timeout(7 * SECONDS + 360)
def test_mixed_load_leaves_nothing_behind() -> None:
    for seconds in (SECONDS, 2 * SECONDS, 4 * SECONDS):
        # Small rings: what the floods bring does not fit.
        with Service(wal_file_bytes=None, env={"TOPICS_RING_BYTES": "65536"}) as service:
            processes = service.status()["processes"]
            named = {process["pid"]: f"{process['role']} {process['index']}" for process in processes}
            soaked = soak(Soak(service.port, service.family(), service.shared_memory(), seconds))
            status = service.status()
            waited = held_by_frontends(service, "ring_full")
            assert not soaked.odd, "\n".join(soaked.odd[:20])  # in here: the service's log is shown
        if min(soaked.delivered, waited, soaked.stalls, soaked.stalled_over):
            break  # else the machine had no time for all of it
    assert soaked.delivered > 0
    assert waited > 0, "the rings were never full"
    assert soaked.stalls > 0
    assert soaked.stalled_over > 0, "whoever stopped reading was never behind"
    assert all(restarts == 0 for restarts in (process["restarts"] for process in status["processes"]))
    middle, last = thirds(soaked.states)
    first, end = middle[0], last[-1]
    growing = {}
    for pid, now_bytes in end.anonymous_bytes.items():
        grown = growth_per_min(soaked.states, lambda state: state.anonymous_bytes[pid])
        growing[named.get(pid, "supervisor")] = grown
        print(
            f"{named.get(pid, 'supervisor'):<14}{first.anonymous_bytes[pid] / MIB:8.1f} → {now_bytes / MIB:.1f} MiB"
            f"{grown / MIB:+9.2f} MiB/min"
        )
    together = growth_per_min(soaked.states, lambda state: sum(state.anonymous_bytes.values()))
    print(f"all {together / MIB:+.2f} MiB/min")
    print(f"shared memory {first.shm_bytes / MIB:.1f} → {end.shm_bytes / MIB:.1f} MiB")
    print(f"descriptors {first.descriptors} → {end.descriptors}, threads {first.threads} → {end.threads}")
    print(soaked.statuses)
    more = 2 if SECONDS >= LONG_S else service.frontends * POOL_THREADS  # which are made when all others are at work
    assert max(state.threads for state in last) <= max(state.threads for state in middle) + more
    assert max(state.segment_files for state in soaked.states) <= SEGMENT_FILES_MAX
    # Connections come and go; sockets and maps that are kept would add up.
    assert max(state.descriptors for state in last) <= max(state.descriptors for state in middle) + 16
    if SECONDS >= LONG_S:
        assert {what: grown for what, grown in growing.items() if grown > GROWTH_MAX_BYTES_PER_MIN} == {}
        assert together <= 1.5 * GROWTH_MAX_BYTES_PER_MIN, together / MIB
        # A log in RAM grows until its oldest file goes.
        shm = [max(state.shm_bytes for state in part) for part in (middle, last)]
        assert shm[1] <= shm[0] * 1.05 + 2 * MIB, shm
