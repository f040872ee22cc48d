"""api §1 and §3, `epoch` [+]: which instance of a topic an answer is about."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.contract.asking import diff, ok, state, write
from tests.harness import Service

pytestmark = pytest.mark.long


def test_state_and_diff_name_the_same_epoch_and_a_recreated_topic_has_another(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    first = state(client, topic)["epoch"]
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert diff(client, topic)["epoch"] == first
    ok(client.delete(f"/v0/topics/{topic}"))
    write(client, topic, 1, 2, 3)
    second = state(client, topic)["epoch"]
    assert second > first
    assert diff(client, topic, from_seq=1)["epoch"] == second


def test_an_epoch_outlives_restarts(topic: str) -> None:
    with Service() as service:
        write(service.client, topic, 1)
        before = state(service.client, topic)["epoch"]
        service.restart()
        assert state(service.client, topic)["epoch"] == before
