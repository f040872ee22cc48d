"""api §7 and §7.7 with a browser's own EventSource and WebSocket; the API page in the browser it is for.

Needs a Chromium, which `make test-all` fetches. Without one these are skipped, and nothing else of the suite is; with
TOPICS_REQUIRE_BROWSER=1 its absence is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.contract.asking import put, write
from tests.contract.stream import watch
from tests.e2e.browser import Browser, find_browser
from tests.harness import Service, poll

COMMAND = find_browser()
pytestmark = pytest.mark.skipif(
    COMMAND is None and os.environ.get("TOPICS_REQUIRE_BROWSER") != "1",
    reason="no Chromium on this machine: install one, or name it in TOPICS_CHROMIUM",
)


@pytest.fixture(scope="module")
def own() -> Iterator[Service]:
    """A service of its own: its frontends are killed."""
    with Service() as running:
        yield running


@pytest.fixture(scope="module")
def browser(own: Service) -> Iterator[Browser]:
    assert COMMAND is not None, "TOPICS_REQUIRE_BROWSER=1, but there is no Chromium"
    with Browser(COMMAND, f"{own.url}/v0/docs") as opened:
        yield opened


FOLLOW = """
window.seen = []; window.kinds = []; window.opened = 0;
window.source = new EventSource("/v0/watch/%s");
source.onopen = () => { opened += 1; };
for (const kind of ["record", "tombstone", "caught-up", "topic-deleted", "error"])
  source.addEventListener(kind, (event) => {
    if (!event.data) return;  // the browser's own error event
    kinds.push(kind);
    if (kind === "record") for (const record of JSON.parse(event.data).records) seen.push(record.$seq);
  });
true
"""


def test_the_api_page_renders_every_operation(own: Service, browser: Browser) -> None:
    document = own.client.get("/v0/openapi.json").json()
    count = sum(len(methods) for methods in document["paths"].values())
    poll(
        "the operations to be shown", lambda: browser.run("document.querySelectorAll('main > details').length") == count
    )
    assert "Append records" in browser.run("document.querySelector('#post_v0_topics_topic').textContent")
    assert browser.run("document.querySelector('noscript') === null")
    browser.run(
        """(() => {
          const operation = document.querySelector('#get_v0_topics');
          operation.open = true;
          operation.querySelector('button').click();
        })()"""
    )
    shown = "document.querySelector('#get_v0_topics pre').textContent"
    answer = poll("the answer to be shown", lambda: browser.run(shown) or None, 30)
    assert answer.startswith("200\n")
    assert '"topics":' in answer


def test_an_event_source_follows_and_comes_back_by_itself(own: Service, browser: Browser) -> None:
    write(own.client, "browsed", *range(5))
    browser.run(FOLLOW % watch(own.client, {"browsed": {}}, limit=3)["wid"])
    poll("the backlog", lambda: browser.run("kinds.join()") == "record,record,caught-up")
    assert browser.run("seen.length") == 5
    write(own.client, "browsed", 5, 6)
    poll("the live ones", lambda: browser.run("seen.length") == 7)
    for index in range(2):
        own.wait_healed(own.kill("frontend", index))
    write(own.client, "browsed", *range(7, 20))
    poll("those after the reconnect", lambda: browser.run("seen.length") >= 20, deadline_s=30)
    assert browser.run("seen.join()") == ",".join(map(str, range(1, 21)))
    assert browser.run("opened") >= 2
    own.client.delete("/v0/topics/browsed")
    poll("the end of the topic", lambda: browser.run("kinds.at(-1)") == "topic-deleted")
    browser.run("source.close()")


def test_a_websocket_of_the_page(own: Service, browser: Browser) -> None:
    put(own.client, "talked")
    said = browser.run(
        """new Promise((done, fail) => {
          const socket = new WebSocket(location.origin.replace("http", "ws") + "/v0/ws");
          const said = [];
          socket.onerror = () => fail(new Error("refused"));
          socket.onopen = () => {
            socket.send(JSON.stringify({op: "subscribe", request_id: 1, topic: "talked"}));
            socket.send(JSON.stringify({op: "publish", request_id: 2, topic: "talked", records: [{data: "grüße"}]}));
          };
          socket.onmessage = (event) => {
            const message = JSON.parse(event.data);
            said.push(message.op);
            if (said.includes("ack") && said.includes("record")) { socket.close(); done(said.sort().join()); }
          };
        })"""
    )
    assert said in ("ack,caught_up,record,subscribed", "ack,record,subscribed")


def test_a_page_of_another_origin_gets_nothing(own: Service, browser: Browser) -> None:
    """`localhost` is another origin than `127.0.0.1`: no CORS, no WebSocket."""
    other = own.url.replace("127.0.0.1", "localhost")
    blocked = browser.run(f"fetch('{other}/v0/topics').then(() => false, () => true)")
    assert blocked is True
    refused = browser.run(
        f"""new Promise((done) => {{
          const socket = new WebSocket("{other.replace("http", "ws")}/v0/ws");
          socket.onopen = () => done(false);
          socket.onerror = () => done(true);
        }})"""
    )
    assert refused is True
