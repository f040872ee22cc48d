"""The same work again and again, and the service does not grow by it: ten minutes with `make soak`, here a sample."""

from __future__ import annotations

import os

import pytest

from bench.soak import Soak, State, soak
from tests.harness import Service

SECONDS = float(os.environ.get("TOPICS_SOAK_S", "12"))
LONG_S = 300.0
"""From here on everything that fills up has filled up by the middle of the run: it has to be flat."""
MIB = 1 << 20


def thirds(states: list[State]) -> tuple[list[State], list[State]]:
    """The middle and the last."""
    third = len(states) // 3
    return states[third : 2 * third], states[2 * third :]


@pytest.mark.timeout(SECONDS + 120)
def test_mixed_load_leaves_nothing_behind() -> None:
    with Service(wal_file_bytes=None) as service:
        soaked = soak(Soak(service.port, service.family(), service.shared_memory(), SECONDS))
        status = service.status()
    assert soaked.odd == []
    assert soaked.delivered > 0
    assert all(restarts == 0 for restarts in (process["restarts"] for process in status["processes"]))
    middle, last = thirds(soaked.states)
    print(middle[0], last[-1], soaked.statuses)
    assert max(state.threads for state in last) <= max(state.threads for state in middle) + 2
    # Connections come and go; sockets, maps and log files that are kept would add up.
    assert max(state.descriptors for state in last) <= max(state.descriptors for state in middle) + 16
    if SECONDS >= LONG_S:
        anonymous = [sum(state.anonymous_bytes for state in part) / len(part) for part in (middle, last)]
        assert anonymous[1] <= anonymous[0] * 1.03 + 2 * MIB, anonymous
        # A log in RAM grows until its oldest file goes.
        shm = [max(state.shm_bytes for state in part) for part in (middle, last)]
        assert shm[1] <= shm[0] * 1.05 + 2 * MIB, shm
