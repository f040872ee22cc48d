"""Signals wait until they are asked for."""

from __future__ import annotations

import os
import signal

from topics.supervisor.signals import Signals


def test_they_come_one_after_the_other_when_asked_for() -> None:
    with Signals() as signals:
        assert signals.wait(0) is None
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert {signals.wait(0), signals.wait(0)} == {signal.SIGHUP, signal.SIGTERM}
        assert signals.wait(0) is None


def test_a_stop_asked_for_again_does_not_end_the_process_at_its_end() -> None:
    """It would exit with -15 and not with what the first stop came to."""
    with Signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
