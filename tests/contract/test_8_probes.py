"""api §8: health and readiness."""

from __future__ import annotations

import httpx
import pytest

from tests.contract.asking import put
from tests.harness import poll


@pytest.mark.parametrize("path", ["/v0/health", "/healthz"])
def test_health(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    body = answer.json()
    assert body["status"] == "ok"
    assert body["version"].count(".") == 2
    assert isinstance(body["uptime_ms"], int)
    poll("uptime to grow", lambda: client.get(path).json()["uptime_ms"] > body["uptime_ms"])


@pytest.mark.parametrize("path", ["/v0/ready", "/readyz"])
def test_ready(client: httpx.Client, topic: str, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["wal_replay_complete"]) == ("ready", True)
    assert 0 <= body["pressure"] <= 1
    put(client, topic)
    assert client.get(path).json()["topics"] >= 1


@pytest.mark.parametrize("path", ["/v0/health", "/healthz", "/v0/ready", "/readyz"])
def test_probes_need_no_accept_header_and_no_body(client: httpx.Client, path: str) -> None:
    assert client.get(path, headers={"Accept": "text/plain"}).status_code == 200
