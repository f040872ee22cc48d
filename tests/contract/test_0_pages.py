"""Pages of other origins may not act here, nor pages that give their own name this machine's address (api §0.1)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.contract.asking import diff, ok, put, refused, write
from tests.harness import Service


@pytest.fixture(params=["h1", "h2"])
def browser(request: pytest.FixtureRequest, service: Service) -> Iterator[httpx.Client]:
    """A client that sends what a page makes its browser send."""
    is_h2 = request.param == "h2"
    with httpx.Client(base_url=service.url, http1=not is_h2, http2=is_h2, timeout=20) as client:
        yield client


FOREIGN = ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"})


def test_a_page_of_another_origin_moves_no_cursor_takes_no_job_and_pins_nothing(
    browser: httpx.Client, client: httpx.Client, topic: str
) -> None:
    put(client, topic, type="queue")
    write(client, topic, 1, 2)
    ok(client.put(f"/v0/topics/{topic}/cursors/c", json={"consistency": "strictly_at_once", "from_seq": 0}))
    for headers in FOREIGN:
        refused(browser.post(f"/v0/topics/{topic}/cursors/c/read", headers=headers), 403, "forbidden")
        refused(browser.get(f"/v0/topics/{topic}/work?node=n", headers=headers), 403, "forbidden")
        refused(browser.get(f"/v0/topics/{topic}/segments?pin_ttl_ms=3600000", headers=headers), 403, "forbidden")
        refused(browser.delete(f"/v0/topics/{topic}", headers=headers), 403, "forbidden")
        ok(browser.get(f"/v0/topics/{topic}", headers=headers))
    assert ok(client.get(f"/v0/topics/{topic}/cursors/c"))["cursor_seq"] == 0
    jobs = ok(client.post(f"/v0/topics/{topic}/claim", json={"node": "w", "max": 2}))["claimed"]
    assert [job["deliveries"] for job in jobs] == [1, 1]
    assert [record["data"] for record in diff(client, topic)["records"]] == [1, 2]


def test_another_name_for_this_machine_is_not_served_without_keys(browser: httpx.Client, topic: str) -> None:
    port = browser.base_url.port
    rebound = {"Host": f"evil.example:{port}"}
    assert "TOPICS_ALLOWED_HOSTS" in refused(browser.get("/v0/topics", headers=rebound), 403, "forbidden")["message"]
    refused(browser.put(f"/v0/topics/{topic}", json={}, headers=rebound), 403, "forbidden")
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", f"app.localhost:{port}"):
        ok(browser.get("/v0/topics", headers={"Host": host}))
    assert browser.get("/v0/health", headers=rebound).status_code == 200
