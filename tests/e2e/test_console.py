"""The console in a real Chromium: clicks, keys, a lost connection, a fast tail, themes, widths, accessibility.

Needs a Chromium and, for two tests, axe-core; `make test-all` fetches both. With TOPICS_SCREENSHOTS=docs/console the
pictures of docs/console.md are written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from bench import consoles, wire
from bench.load import Plan, closed_loop
from tests.contract.asking import diff, put, write
from tests.e2e import npm_package
from tests.e2e.browser import Browser, find_browser
from tests.e2e.fetch_axe import FETCHED
from tests.e2e.npm_package import CannotFetchError
from tests.e2e.vendor_console import VENDOR, vendored
from tests.harness import OWN_URL, Service, poll
from topics.archive.ownership import take_over
from topics.core.clock import SystemClock
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem

COMMAND = find_browser()
needs_browser = pytest.mark.skipif(
    COMMAND is None and os.environ.get("TOPICS_REQUIRE_BROWSER") != "1",
    reason="no Chromium on this machine: install one, or name it in TOPICS_CHROMIUM",
)
needs_axe = pytest.mark.skipif(not FETCHED.exists(), reason="axe-core was not fetched: python -m tests.e2e.fetch_axe")
pytestmark = pytest.mark.long

VIEWS = (
    "overview",
    "topics",
    "topic/shop.orders",
    "topic/shop.orders?tab=tail",
    "queues",
    "queue/shop.mails",
    "cursors",
    "routers",
)
LINES_MAX = 2500
CONSOLE = VENDOR.parent


@pytest.fixture(scope="module")
def shop() -> Iterator[Service]:
    """A service with some of everything."""
    with Service() as running:
        client = running.client
        for name in ("shop.orders", "shop.clicks", "shop.payments"):
            put(client, name, **({"cap_records": 60} if name == "shop.clicks" else {}))
            for at in range(30):
                data = {"id": at, "item": ["tea", "milk", "rice"][at % 3], "price": 4.5, "for": {"name": "Ann"}}
                record = {"data": data, "tag": ["tea", "milk"][at % 2], "node": f"till-{at % 3}"}
                client.post(f"/v0/topics/{name}", json={"records": [record] * 3})
        client.post("/v0/topics/shop.orders/delete", json={"before_seq": 20})
        client.put("/v0/topics/shop.orders/cursors/warehouse", json={"from_seq": 40})
        put(
            client,
            "shop.mails",
            type="queue",
            dead_letter="shop.mails.dead",
            max_deliveries=1,
            lease_ms=86_400_000,
            leases_durable=True,
        )
        jobs = [{"data": {"to": f"user-{at}@example.org"}} for at in range(12)]
        later = {"data": {"to": "later"}, "delay_ms": 3_600_000}
        mails = partial(asked, client, "/v0/topics/shop.mails")
        mails("", records=[*jobs, later])
        dead = mails("/claim", node="worker-0", max=2)["claimed"]
        mails("/nack", node="worker-0", seqs=[job["$seq"] for job in dead])
        assert len(mails("/claim", node="worker-1", max=3)["claimed"]) == 3
        # A page that is opened before has found no topic there, and asks again later and later.
        poll("two dead letters", lambda: client.get("/v0/topics/shop.mails.dead").json().get("count") == 2)
        for at in range(200):
            source, dest = f"hall-{at // 20}.in", f"hall-{at // 20}.line-{at % 20}"
            if at % 20 >= 14:
                source = f"hall-{at // 20}.line-{at % 7}"
            client.put(f"/v0/routers/route-{at:03}", json={"source": source, "dest": dest})
        yield running


@pytest.fixture(scope="module")
def tab(shop: Service) -> Iterator[Browser]:
    assert COMMAND is not None, "TOPICS_REQUIRE_BROWSER=1, but there is no Chromium"
    with Browser(COMMAND, f"{shop.url}/console") as opened:
        opened.resize(1280, 860)
        opened.prefer("light")
        yield opened


def asked(client: httpx.Client, path: str, more: str, **body: Any) -> Any:
    return client.post(path + more, json=body).raise_for_status().json()


def go(tab: Browser, view: str) -> None:
    """Open a view, and wait until it has something to show; what another view has shown does not count."""
    script = f"""(() => {{
      const viewOf = (hash) => hash.split("?")[0] || "#/overview";
      if (viewOf(location.hash) !== viewOf("#/{view}")) document.querySelector("main").dataset.left = "";
      location.hash = "#/{view}";
    }})()"""
    tab.run(script)
    shown = "document.querySelector('main:not([data-left]) :is(table, .floors)') !== null"
    poll(f"{view} to be shown", lambda: tab.run(shown), 30)


def text_of(tab: Browser, where: str) -> str:
    return tab.run(f"document.querySelector({where!r})?.textContent") or ""


def wait_in(tab: Browser, what: str, probe: Callable[[], object]) -> None:
    """Wait for `probe`; the error has what is shown instead."""
    try:
        poll(what, lambda: bool(probe()), 30)
    except AssertionError as error:
        error.add_note(f"shown at {tab.run('location.href')}: {text_of(tab, 'body')[:2000]}")
        raise


def shows(tab: Browser, text: str, where: str = "body") -> None:
    """Wait until a text is shown."""
    wait_in(tab, f"{text!r} to be shown", lambda: text in text_of(tab, where))


def click(tab: Browser, text: str) -> None:
    """Click the button or link with this text, once it can be clicked."""
    script = f"""(() => {{
      const found = [...document.querySelectorAll("button, a")].find((one) => one.textContent.trim() === {text!r});
      if (!found || found.disabled) return false;
      found.click();
      return true;
    }})()"""
    wait_in(tab, f"a button {text!r}", lambda: tab.run(script))


def fill(tab: Browser, where: str, text: str) -> None:
    tab.run(
        f"""(() => {{
          const field = document.querySelector({where!r});
          field.value = {text!r};
          field.dispatchEvent(new Event("input", {{ bubbles: true }}));
        }})()"""
    )


def rows(tab: Browser) -> list[str]:
    found: list[str] = tab.run("[...document.querySelectorAll('main tbody th')].map((one) => one.textContent.trim())")
    return found


# -- without a browser


@pytest.mark.timeout(1800)  # four packages; the network may be slow
def test_the_libraries_are_those_of_npm() -> None:
    try:
        expected = vendored()
    except CannotFetchError as error:
        pytest.skip(f"{error}")
    assert {path.name: path.read_bytes() for path in VENDOR.iterdir()} == expected


def test_a_network_that_fails_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `npm` that cannot fetch at its first call, and then writes the package into the directory that it is given."""
    npm = tmp_path / "npm"
    npm.write_text("""#!/bin/sh
cd "$(dirname "$0")"
test -e called || { touch called; echo "network is down" >&2; exit 1; }
for target; do :; done
printf packed > "$target/some-1.0.0.tgz"
""")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(npm_package, "TRY_AGAIN_S", 0)
    assert npm_package.download("some@1.0.0", hashlib.sha256(b"packed").hexdigest()) == b"packed"
    with pytest.raises(SystemExit, match="not the package that was tested"):
        npm_package.download("some@1.0.0", "0" * 64)
    npm.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(CannotFetchError):
        npm_package.download("some@1.0.0", "0" * 64)


def test_our_own_part_stays_small() -> None:
    own = [path for path in CONSOLE.rglob("*.*") if VENDOR not in path.parents and path.suffix != ".svg"]
    assert sum(len(path.read_text().splitlines()) for path in own) <= LINES_MAX


def test_nothing_keeps_a_key_and_nothing_comes_from_elsewhere() -> None:
    for path in [*CONSOLE.glob("*.js"), *CONSOLE.glob("views/*.js"), CONSOLE / "index.html"]:
        text = path.read_text()
        for word in ("localStorage", "sessionStorage", "document.cookie", "innerHTML", "http://", "https://", "?token"):
            assert word not in text, f"{word} in {path.name}"


def test_its_files_are_kept_for_ever_and_the_page_is_not(shop: Service) -> None:
    page = shop.client.get("/console")
    assert page.headers["cache-control"] == "no-cache"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    etag = page.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", W/{etag}', "*"):
        again = shop.client.get("/console", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert shop.client.get("/console", headers={"If-None-Match": '"other", W/"one"'}).status_code == 200
    path = next(line.split('"')[3] for line in page.text.splitlines() if "app.js" in line)
    part = shop.client.get(f"/{path}")
    assert (part.status_code, part.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert "immutable" in part.headers["cache-control"]
    build = path.split("/")[1]
    assert shop.client.get(f"/console/{build}/views/none.js").status_code == 404
    assert shop.client.get(f"/{path.replace(build, '0' * 16)}").status_code == 404
    assert shop.client.get(f"/console/{build}/..%2f..%2fopenapi.py").status_code in (400, 404)


# -- views


@needs_browser
def test_the_overview_says_that_all_is_well_or_what_is_not(shop: Service, tab: Browser) -> None:
    go(tab, "overview")
    shows(tab, "Processes")
    assert {"shard 0", "shard 1", "frontend 0", "frontend 1", "compactor"} <= set(rows(tab))
    shop.wait_healed(shop.kill("walshard", 0))
    shows(tab, "walshard 0 was restarted", ".warnings")
    shows(tab, "SIGKILL", ".warnings")


@needs_browser
def test_the_overview_warns_of_a_service_that_was_taken_over(tmp_path: Path) -> None:
    assert COMMAND is not None
    env = {"TOPICS_ARCHIVE_URL": tmp_path.as_uri(), "TOPICS_ARCHIVE_INTERVAL_MS": "50"}
    with Service(env=env) as former, Browser(COMMAND, f"{former.url}/console") as opened:
        shows(opened, "Processes")
        poll("the archiver", lambda: "archiver" in rows(opened))
        archive = Archive(open_archive(OsFileSystem(), str(tmp_path)))
        poll("an archive", archive.generations)
        take_over(archive, archive.generations()[-1], SystemClock(), "another machine")
        former.client.post("/v0/topics/orders", json={"records": [{"data": 1}]})  # refused if it knows by now
        shows(opened, "Another service took over from this one", ".warnings")


@needs_browser
def test_the_overview_names_the_service_that_leads_now(tmp_path: Path) -> None:
    """Only answers of the API named it, and the log."""
    assert COMMAND is not None
    env = {"TOPICS_ARCHIVE_INTERVAL_MS": "50", "TOPICS_ADVERTISE_URL": OWN_URL}
    with Service(env=env | {"TOPICS_ARCHIVE_URL": tmp_path.as_uri()}) as former:
        poll("a base", lambda: former.status()["archiver"]["bases"] > 0)
        with Service(env=env | {"TOPICS_FOLLOW": tmp_path.as_uri()}) as heir:
            assert heir.run("promote").returncode == 0
            with Browser(COMMAND, f"{former.url}/console") as opened:
                shows(opened, f"Send clients to {heir.url}.", ".warnings")


@needs_browser
def test_the_overview_of_a_follower_names_its_process_and_warns_of_nothing(tmp_path: Path) -> None:
    assert COMMAND is not None
    env = {"TOPICS_ARCHIVE_INTERVAL_MS": "50"}
    with Service(env=env | {"TOPICS_ARCHIVE_URL": tmp_path.as_uri()}) as leader:
        poll("a base", lambda: leader.status()["archiver"]["bases"] > 0)
        leader.client.post("/v0/topics/orders", json={"records": [{"data": 1}]}).raise_for_status()
        with (
            Service(env=env | {"TOPICS_FOLLOW": tmp_path.as_uri()}) as follower,
            Browser(COMMAND, f"{follower.url}/console") as opened,
        ):
            shows(opened, "Processes")
            poll("the follower", lambda: "follower" in rows(opened))
            assert "compactor" not in rows(opened)
            assert "archive" not in opened.run("document.querySelector('.warnings')?.textContent || ''")


@needs_browser
def test_the_history_of_the_overview_goes_on_while_another_view_is_open(tab: Browser) -> None:
    module = "import(new URL('views/overview.js', document.querySelector('script[type=module]').src))"
    points = f"{module}.then((of) => of.history.times.length)"
    go(tab, "overview")
    poll("a point", lambda: tab.run(points) > 0)
    go(tab, "topics")
    seen = tab.run(points)
    poll("two more", lambda: tab.run(points) >= seen + 2, 60)
    go(tab, "overview")
    assert tab.run(f"{module}.then((of) => of.history.column(0).slice({seen}).every((rate) => rate !== null))")


@needs_browser
def test_topics_are_sorted_and_found_by_the_service(tab: Browser) -> None:
    go(tab, "topics?sort=topic")
    fill(tab, "input[type=search]", "shop.")
    poll(
        "the search",
        lambda: rows(tab) == ["shop.clicks", "shop.mails", "shop.mails.dead", "shop.orders", "shop.payments"],
    )
    click(tab, "Size")
    poll("the order by size", lambda: rows(tab)[0] == "shop.payments")
    click(tab, "Queues")  # the view of that name in the navigation comes first
    shows(tab, "Leased")


@needs_browser
@pytest.mark.timeout(3600)
def test_100_000_topics_stay_in_the_service() -> None:
    """Each order and each search brings a page of them, whatever their number. A frontend keeps an order 50 times as
    long as it took to make it.
    """
    assert COMMAND is not None
    with Service() as crowded:
        paths = [f"/v0/topics/crowd.{number:05}" for number in range(100_000)]
        writes = [wire.post(f"{path}?return_seqs=false", b'{"records":[{"data":1}]}') for path in paths]
        closed_loop(Plan(crowded.port, [writes[first::16] for first in range(16)], rounds=1))
        crowded.client.put("/v0/topics/crowd.00777/cursors/slow", json={"from_seq": 0})
        write(crowded.client, "crowd.31415", "x" * 9000)
        write(crowded.client, "crowd.00042", *range(50))
        with Browser(COMMAND, f"{crowded.url}/console#/topics?sort=topic") as tab:
            poll("the first page", lambda: rows(tab)[:1] == ["crowd.00000"], 60)
            shows(tab, "100 of 100,000")
            for column, first in (("Records", "crowd.00042"), ("Size", "crowd.31415"), ("Lag", "crowd.00777")):
                click(tab, column)
                poll(f"the order by {column}", lambda: rows(tab)[:1] == [first], 300)
            click(tab, "Written")
            poll("the youngest", lambda: rows(tab)[:2] == ["crowd.00042", "crowd.31415"], 300)
            write(crowded.client, "crowd.27182", *range(500))
            click(tab, "Rate")
            poll("the busiest", lambda: rows(tab)[:1] == ["crowd.27182"], 300)
            fill(tab, "input[type=search]", "0.777")
            shows(tab, "No topic matches")
            fill(tab, "input[type=search]", "99")
            poll("the search", lambda: len(rows(tab)) == 100 and all("99" in name for name in rows(tab)), 60)
            largest = "Math.max(...performance.getEntriesByType('resource').map((one) => one.decodedBodySize))"
            assert tab.run(largest) < 200_000, "an answer has a page of topics"


@needs_browser
def test_a_topic_shows_what_of_it_is_there(tab: Browser) -> None:
    go(tab, "topic/shop.orders")
    shows(tab, "deleted1 – 19", ".floors")
    shows(tab, "live20 – 90", ".floors")
    shows(tab, "warehouse")
    go(tab, "topic/shop.clicks")
    shows(tab, "evicted1 – 30", ".floors")
    fill(tab, "input[name=seq]", "40")
    click(tab, "Jump")
    poll("the jump", lambda: rows(tab)[-1:] == ["40"])
    tab.run("document.querySelector('tbody .fold').click()")
    shows(tab, "Ann", ".fold-body")


@needs_browser
def test_a_record_is_written_and_deleted_with_a_preview(shop: Service, tab: Browser) -> None:
    put(shop.client, "shop.notes")
    go(tab, "topic/shop.notes")
    click(tab, "Write…")
    fill(tab, "dialog textarea", '{"big": 12345678901234567890}')
    fill(tab, "dialog input[name=tag]", "draft")
    click(tab, "Write")
    shows(tab, "Written as 1", "dialog")
    click(tab, "Close")
    raw = shop.client.post("/v0/topics/shop.notes/diff", json={"include_tags": True}).text
    assert '"data":{"big": 12345678901234567890}' in raw  # as it was typed
    click(tab, "Newest")
    shows(tab, "12345678901234567890", "table.records")  # and as it is
    write(shop.client, "shop.notes", 1, 2, 3)
    click(tab, "Delete…")
    fill(tab, "dialog .columns .field:nth-child(2) input", "dra*")
    assert tab.run("document.querySelector('dialog .danger').disabled") is True
    click(tab, "Show what would go")
    shows(tab, "1 record of 4 would go", "dialog")
    click(tab, "Delete the records")
    shows(tab, "1 record is gone", "dialog")
    click(tab, "Close")
    assert shop.client.get("/v0/topics/shop.notes").json()["count"] == 3


@needs_browser
def test_an_object_is_shown_as_one_whatever_its_member_is_called(shop: Service, tab: Browser) -> None:
    write(shop.client, "shop.chat", {"text": "hi"})
    go(tab, "topic/shop.chat")
    poll("the record", lambda: rows(tab)[-1:] == ["1"])
    tab.run("document.querySelector('tbody .fold').click()")
    shows(tab, 'text: "hi"', ".fold-body")


@needs_browser
def test_a_preview_of_a_deletion_passes_a_long_stretch_that_is_gone(shop: Service, tab: Browser) -> None:
    client, path = shop.client, "/v0/topics/shop.holes"
    write(client, "shop.holes", "first")
    asked(client, path, "", records=[{"data": n, "tag": "gone"} for n in range(6000)])
    write(client, "shop.holes", *range(5))
    asked(client, path, "/delete", match="gone")
    go(tab, "topic/shop.holes")
    click(tab, "Delete…")
    fill(tab, "dialog input[inputmode=numeric]", "6005")
    click(tab, "Show what would go")
    shows(tab, "4 records of 6 would go", "dialog")
    click(tab, "Delete the records")
    shows(tab, "4 records are gone", "dialog")
    click(tab, "Close")


@needs_browser
def test_jobs_their_holders_and_the_way_back(shop: Service, tab: Browser) -> None:
    go(tab, "queue/shop.mails")
    shows(tab, "worker-1", "main")
    click(tab, "Scheduled")
    shows(tab, "later", "table.records")
    click(tab, "Redrive")
    shows(tab, "2 jobs are back")
    assert shop.client.get("/v0/topics/shop.mails.dead").json()["count"] == 0


@needs_browser
def test_each_state_of_a_queue_and_its_depth_over_time(tab: Browser) -> None:
    go(tab, "queue/shop.mails")
    for state, shown in (("waiting", "user-"), ("leased", "user-"), ("scheduled", "later")):
        click(tab, state.capitalize())
        shows(tab, f"Jobs that are {state}", "table.records caption")
        shows(tab, shown, "table.records tbody")
    click(tab, "Behind")
    shows(tab, "No job is behind", "main")
    shows(tab, "Depth", "main")
    poll("a curve", lambda: tab.run("document.querySelector('.charts canvas') !== null"), 30)


@needs_browser
def test_cursors_with_their_lag(shop: Service, tab: Browser) -> None:
    go(tab, "cursors")
    lag = shop.client.get("/v0/topics/shop.orders").json()["head_seq"] - 40
    poll("the cursor", lambda: "warehouse" in (tab.run("document.querySelector('main tbody').textContent") or ""))
    shows(tab, str(lag), "main tbody")


@needs_browser
def test_a_jump_to_a_time(shop: Service, tab: Browser) -> None:
    name = "shop.times"
    write(shop.client, name, "early")
    early_ms = diff(shop.client, name)["records"][0]["$ts"]
    go(tab, f"topic/{name}")
    before = "new Date(%d - new Date().getTimezoneOffset() * 60000).toISOString().slice(0, 19)"
    for offset_ms, expected in ((-3_600_000, ["1"]), (3_600_000, [])):
        local = tab.run(before % (early_ms + offset_ms))
        fill(tab, "input[name=time]", local)
        click(tab, "Jump")
        poll("the jump", partial(_has_rows, tab, expected), 30)


def _has_rows(tab: Browser, expected: list[str]) -> bool:
    return rows(tab) == expected


@needs_browser
def test_200_routers_are_a_graph_one_can_read(tab: Browser) -> None:
    go(tab, "routers")
    poll("the graph", lambda: tab.run("document.querySelectorAll('.graph .node').length") > 20)
    assert tab.run("document.querySelectorAll('main tbody tr').length") == 200
    height = "document.querySelector('.graph .node').getBoundingClientRect().height"
    assert tab.run(height) >= 26 * 0.7 - 1, "nodes are as large as text that one reads"
    stack = "document.querySelector('.graph .stack')"
    nodes = tab.run("document.querySelectorAll('.graph .node').length")
    tab.run(f"{stack}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))")
    poll("the stack to open", lambda: tab.run("document.querySelectorAll('.graph .node').length") > nodes)
    name = "document.querySelector('.graph .node:not(.stack)').getAttribute('aria-label')"
    enter = "new KeyboardEvent('keydown', { key: 'Enter', bubbles: true })"
    tab.run(f"document.querySelector('.graph .node:not(.stack)').dispatchEvent({enter})")
    shows(tab, f"From and to {tab.run(name)}")
    poll("others to fade", lambda: tab.run("document.querySelectorAll('.graph .far').length") > 0)


@needs_browser
def test_keys_of_the_keyboard(tab: Browser) -> None:
    go(tab, "overview")
    tab.press("4")
    shows(tab, "After a crash")
    tab.press("/")
    assert tab.run("document.activeElement.type") == "search"
    tab.run("document.activeElement.blur()")
    tab.press("?")
    poll("the list of shortcuts", lambda: tab.run("document.querySelector('dialog[open]') !== null"))
    click(tab, "✕")
    poll("it to be closed", lambda: tab.run("document.querySelector('dialog') === null"))
    themes = []
    for _ in range(3):
        tab.press("d")
        themes.append(poll("a theme", lambda: tab.run("document.documentElement.dataset.theme || 'system'")))
    assert themes == ["light", "dark", "system"]


@needs_browser
def test_the_newest_records_are_shown_however_large_they_are(shop: Service, tab: Browser) -> None:
    """An answer has 512 KiB, fewer than 50 of them. The page before ends where this one begins."""
    write(shop.client, "shop.large", *("x" * 90_000 for _ in range(60)))
    go(tab, "topic/shop.large")
    poll("the newest", lambda: rows(tab)[:1] == ["60"])
    first = int(rows(tab)[-1])
    click(tab, "← Older")
    poll("those before them", lambda: rows(tab)[:1] == [str(first - 1)])


@needs_browser
def test_the_few_jobs_of_a_queue_that_are_left_are_shown(shop: Service, tab: Browser) -> None:
    put(shop.client, "shop.left", type="queue")
    write(shop.client, "shop.left", *range(200))
    shop.client.post("/v0/topics/shop.left/delete", json={"before_seq": 3}).raise_for_status()
    claim = {"node": "worker-2", "max": 197, "lease_ms": 86_400_000}
    jobs = shop.client.post("/v0/topics/shop.left/claim", json=claim).json()["claimed"]
    done = {"node": "worker-2", "seqs": [job["$seq"] for job in jobs if job["$seq"] != 5]}
    shop.client.post("/v0/topics/shop.left/ack", json=done).raise_for_status()
    go(tab, "topic/shop.left")
    poll("all of them", lambda: rows(tab) == ["200", "5"])


@needs_browser
def test_a_record_that_is_opened_stays_while_the_topic_goes_on(shop: Service, tab: Browser) -> None:
    write(shop.client, "shop.steady", *range(60))
    go(tab, "topic/shop.steady")
    poll("the newest", lambda: rows(tab)[:1] == ["60"])
    tab.run("document.querySelector('tbody .fold').click()")
    write(shop.client, "shop.steady", *range(100))
    shows(tab, "160", ".figures")
    poll("a look behind that", lambda: "true" not in tab.run(NEWEST))
    assert rows(tab)[0] == "60"
    click(tab, "Newest")
    poll("the newest of now", lambda: rows(tab)[:1] == ["160"])


NEWEST = "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Newest').ariaPressed"


@needs_browser
def test_an_address_that_somebody_typed_shows_a_page(tab: Browser) -> None:
    tab.run("location.hash = '#/topic/100%'; true")
    shows(tab, "100%", "main h1")
    tab.run("location.hash = '#/no-such-view'; true")
    shows(tab, "Shards", "main")


@needs_browser
def test_a_reader_of_the_screen_hears_of_warnings_once(shop: Service, tab: Browser) -> None:
    """No live region has what changes every three seconds, such as an uptime."""
    go(tab, "overview")
    poll("a word", lambda: re.fullmatch(r"All is well|\d+ warnings?", tab.run(SPOKEN)) is not None)
    assert tab.run("document.querySelectorAll('main [aria-live], main [role=alert]').length") == 0


SPOKEN = "document.querySelector('main > [role=status]').textContent"


# -- the tail


@needs_browser
def test_ten_thousand_records_a_second_do_not_freeze_the_tail(shop: Service, tab: Browser) -> None:
    """Frames go on, the table stays short, and everything that was written arrives, in whatever time that takes."""
    put(shop.client, "shop.flood")
    go(tab, "topic/shop.flood?tab=tail")
    shows(tab, "following", ".tail-state")
    tab.run("window.frames_seen = 0; (function count() { frames_seen += 1; requestAnimationFrame(count); })(); true")
    batches, size = 40, 1000
    body = {
        "records": [
            {"data": {"n": at, "text": "x" * 60}, "tag": "even" if at % 2 == 0 else "odd"} for at in range(size)
        ]
    }

    def feed() -> None:
        with httpx.Client(base_url=shop.url, timeout=60) as client:
            for _ in range(batches):
                client.post("/v0/topics/shop.flood?return_seqs=false", json=body).raise_for_status()

    feeder = threading.Thread(target=feed)
    feeder.start()
    received = "Number(document.querySelector('.tail-state').dataset.received)"
    poll("all records", lambda: tab.run(received) == batches * size, 120)
    feeder.join()
    assert tab.run("frames_seen") > 10
    assert tab.run("document.querySelectorAll('.tail tbody tr').length") == 100
    assert rows(tab)[0] == f"{batches * size:,}"

    tab.press("p")  # pause
    shown = rows(tab)
    write(shop.client, "shop.flood", "after")
    poll("the record behind the pause", lambda: tab.run(received) == batches * size + 1)
    assert rows(tab) == shown
    tab.press("p")
    poll("it to go on", lambda: rows(tab)[0] == f"{batches * size + 1:,}")
    fill(tab, ".tail-bar input[aria-label*=tag]", "odd")
    poll(
        "the filter",
        lambda: (
            set(tab.run("[...document.querySelectorAll('.tail td.cut:nth-child(3)')].map((one) => one.textContent)"))
            == {"odd"}
        ),
    )


@needs_browser
def test_the_tail_is_filtered_by_tag_node_and_text(shop: Service, tab: Browser) -> None:
    put(shop.client, "shop.mixed")
    go(tab, "topic/shop.mixed?tab=tail")
    shows(tab, "following", ".tail-state")
    for tag, node, text in [("a", "till-1", "Green Tea"), ("b", "till-1", "milk"), ("a", "till-2", "black tea")]:
        record = {"data": {"item": text}, "tag": tag, "node": node}
        shop.client.post("/v0/topics/shop.mixed", json={"records": [record]}).raise_for_status()
    poll("all three", lambda: rows(tab) == ["3", "2", "1"])
    for label, given, fitting in [("text", "tea", ["3", "1"]), ("node", "till-1", ["1"]), ("tag", "b", [])]:
        fill(tab, f".tail-bar input[aria-label*={label}]", given)
        poll(f"the filter by {label}", lambda: rows(tab) == fitting)
    fill(tab, ".tail-bar input[aria-label*=text]", "")
    write(shop.client, "shop.mixed", "of nobody")
    item = {"data": {"item": "milk"}, "tag": "b", "node": "till-1"}
    shop.client.post("/v0/topics/shop.mixed", json={"records": [item]}).raise_for_status()
    poll("what fits of the new ones", lambda: rows(tab) == ["5"])


@needs_browser
def test_a_lost_connection_comes_back_without_a_hole(shop: Service, tab: Browser) -> None:
    put(shop.client, "shop.lost")
    go(tab, "topic/shop.lost?tab=tail")
    shows(tab, "following", ".tail-state")
    write(shop.client, "shop.lost", *range(5))
    received = "Number(document.querySelector('.tail-state').dataset.received)"
    poll("the first five", lambda: tab.run(received) == 5)
    tab.command("Network.enable")
    for index in range(2):
        shop.wait_healed(shop.kill("frontend", index))
    write(shop.client, "shop.lost", *range(5, 12))
    poll("those after it", lambda: len(set(rows(tab))) == 12, 60)
    assert rows(tab) == [str(seq) for seq in range(12, 0, -1)]
    tab.command("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    shows(tab, "No connection")
    tab.command(
        "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
    )
    poll("the connection", lambda: "No connection" not in tab.run("document.body.textContent"), 60)
    tab.command("Network.disable")


class Between:
    """A proxy before a service. As `fault` it answers 502 to every request, as a proxy whose service is away; or it
    keeps connections with an event stream open and passes on nothing more of them, as a network that has forgotten
    them.
    """

    def __init__(self, service: Service) -> None:
        self.fault: Literal["", "502", "silence"] = ""
        self.streams = 0
        """The number of streams that had the head of their answer."""
        self._service = service
        self._asked: set[socket.socket] = set()
        self._streaming: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def say(self, event: str, data: object) -> None:
        """Put an event of our own into each stream, as a chunk of its answer: nothing else is sent meanwhile."""
        text = f"event: {event}\ndata: {json.dumps(data)}\n\n"
        for inner in self._streaming:
            inner.sendall(f"{len(text):x}\r\n{text}\r\n".encode())

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(("127.0.0.1", self._service.port))
                for source, target in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pass, args=(source, target, inner), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, inner: socket.socket) -> None:
        streams = False
        with suppress(OSError):
            while received := source.recv(1 << 16):
                if source is inner and received.startswith(b"GET /v0/watch/"):
                    streams = True
                    self._asked.add(inner)
                if source is inner and self.fault == "502":
                    inner.sendall(
                        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\nContent-Type: text/html\r\n\r\nbad"
                    )
                    break
                if self.fault != "silence" or inner not in self._streaming:
                    target.sendall(received)
                if target is inner and inner in self._asked:
                    self._asked.remove(inner)
                    if not self.fault:
                        self._streaming.add(inner)
                    self.streams += 1
        if not (streams and self.fault == "silence"):
            for one in (source, target):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def between(shop: Service) -> Iterator[Between]:
    proxy = Between(shop)
    yield proxy
    proxy.close()


@needs_browser
def test_a_stream_that_fell_silent_is_opened_again(shop: Service, between: Between) -> None:
    """The first record is written before the session has delivered anything: its position is that of its start."""
    assert COMMAND is not None
    put(shop.client, "shop.silent")
    with Browser(COMMAND, f"{between.url}/console#/topic/shop.silent?tab=tail") as opened:
        shows(opened, "following", ".tail-state")
        poll("the stream", lambda: between.streams == 1)
        between.fault = "silence"
        write(shop.client, "shop.silent", "unheard")
        poll("it to arrive", lambda: rows(opened) == ["1"], 60)
        assert between.streams == 2


@needs_browser
def test_a_topic_that_cannot_be_read_now_is_told_until_it_can(shop: Service, between: Between) -> None:
    assert COMMAND is not None
    put(shop.client, "shop.troubled")
    with Browser(COMMAND, f"{between.url}/console#/topic/shop.troubled?tab=tail") as opened:
        shows(opened, "following", ".tail-state")
        poll("the stream", lambda: between.streams == 1)
        between.say(
            "error", {"code": 429, "error": "shard 1 is busy", "retry_after_ms": 9, "topics": ["shop.troubled"]}
        )
        shows(opened, "It cannot be read now: shard 1 is busy", "main")
        write(shop.client, "shop.troubled", 1)
        poll("the record", lambda: rows(opened) == ["1"])
        poll("the word to go", lambda: "cannot be read" not in opened.run("document.body.textContent"))


@needs_browser
def test_the_tail_keeps_fewer_of_large_records(tab: Browser) -> None:
    module = "import(new URL('views/tail.js', document.querySelector('script[type=module]').src))"
    added = "const one = new of.Buffer(); for (let n = 0; n < 20; n += 1) one.add(Array(50).fill({}), %d)"
    for size, kept in ((50 << 20, "<= 200"), (5000, "=== 1000")):
        assert tab.run(f"{module}.then((of) => {{ {added % size}; return one.kept.length {kept}; }})")


@needs_browser
def test_a_service_that_is_away_behind_a_proxy_is_no_connection(shop: Service, between: Between) -> None:
    assert COMMAND is not None
    with Browser(COMMAND, f"{between.url}/console#/topic/shop.orders") as opened:
        poll("its records", lambda: rows(opened) != [])
        between.fault = "502"
        shows(opened, "No connection. What you see is from ")
        click(opened, "Oldest")  # fails, and is tried again by itself
        shows(opened, "This could not be loaded", "main")
        between.fault = ""
        poll("the oldest", lambda: rows(opened)[-1:] == ["20"], 60)
        poll("nothing to be said", lambda: opened.run("document.querySelector('.problem') === null"))


# -- what it asks

ASKED = "performance.getEntriesByType('resource').map((one) => one.name).filter((name) => name.includes('/v0/'))"


@needs_browser
def test_a_page_asks_what_the_bench_of_consoles_asks(shop: Service, tab: Browser) -> None:
    """Nothing beside it but what it asks once: the rights of the key, and where a topic was in the last minutes."""
    for name, config in (("log-0", {}), ("queue-0", {"type": "queue"})):
        put(shop.client, name, **config)
    for view, asked in consoles.VIEWS.items():
        go(tab, "overview")
        tab.run("performance.clearResourceTimings(); performance.setResourceTimingBufferSize(2000); true")
        go(tab, view)
        wanted = {f"/v0/{one.path}" for one in asked}

        def paths() -> set[str]:
            urls = [httpx.URL(url) for url in tab.run(ASKED)]
            found = {f"{url.path}?{url.query.decode()}".removesuffix("?") for url in urls}
            return {re.sub(r"from_seq=\d+", "from_seq=1", path) for path in found}

        poll(f"all requests of {view}", lambda: wanted <= paths())
        assert paths() - wanted <= {"/v0/key", "/v0/topics/log-0/diff"}, view


# -- keys


@needs_browser
def test_it_asks_for_a_key_and_a_key_that_reads_only_reads() -> None:
    assert COMMAND is not None
    with Service(env={"TOPICS_API_KEYS": "root,looker:read:shop."}) as locked:
        for name in ("shop.a", "bank.b"):
            body, headers = {"records": [{"data": 1}]}, {"Authorization": "Bearer root"}
            locked.client.post(f"/v0/topics/{name}", json=body, headers=headers).raise_for_status()
        with Browser(COMMAND, f"{locked.url}/console#/topics?sort=topic") as tab:
            shows(tab, "asks for a key", "dialog")
            for _ in range(3):  # the browser lets a page keep a dialog open against one of them
                tab.press("Escape")
            poll("it to be there again", lambda: tab.run("document.querySelector('dialog[open]') !== null"))
            for key, says in (("wrong", "not valid"), ("looker", "")):
                fill(tab, "dialog input", key)
                click(tab, "Use key")
                if says:
                    shows(tab, says, "dialog")
            poll("the topics of the key", lambda: rows(tab) == ["shop.a"])
            shows(tab, "read only", ".rights")
            assert "looker" not in tab.run("location.href + JSON.stringify({...localStorage}) + document.cookie")
            go(tab, "topic/shop.a")
            shows(tab, "Newest")
            buttons = tab.run("[...document.querySelectorAll('button')].map((one) => one.textContent).join()")
            assert "Write" not in buttons
            assert "Delete" not in buttons
            tab.press("k")
            fill(tab, "dialog input", "root")
            click(tab, "Use key")
            shows(tab, "all rights", ".rights")
            shows(tab, "Write…")
            go(tab, "topic/shop.a?tab=tail")
            shows(tab, "following", ".tail-state")
            tab.press("k")
            for key in ("wrong", "root"):
                fill(tab, "dialog input", key)
                click(tab, "Use key")
                if key == "wrong":
                    shows(tab, "not valid", "dialog")
            shows(tab, "following", ".tail-state")
            locked.client.post("/v0/topics/shop.a", json=body, headers=headers).raise_for_status()
            poll("the tail to go on", lambda: rows(tab) == ["2"])


# -- how it looks


@needs_browser
@needs_axe
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(tab: Browser, theme: str) -> None:
    tab.prefer(theme)
    tab.run(FETCHED.read_text() + ";true")
    found: dict[str, Any] = {}
    for view in VIEWS:
        go(tab, view)
        result = tab.run(AXE)
        if json.loads(result):
            found[view] = json.loads(result)
    go(tab, "topic/shop.orders")
    for dialog in ("Write…", "Delete…"):
        click(tab, dialog)
        poll("the dialog", lambda: tab.run("document.querySelector('dialog[open]') !== null"))
        if broken := json.loads(tab.run(AXE)):
            found[dialog] = broken
        click(tab, "✕")
        poll("it to be closed", lambda: tab.run("document.querySelector('dialog') === null"))
    tab.prefer("light")
    assert not found, json.dumps(found, indent=1)


@needs_browser
@needs_axe
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_the_page_of_the_api(shop: Service, theme: str) -> None:
    assert COMMAND is not None
    with Browser(COMMAND, f"{shop.url}/v0/docs") as page:
        page.prefer(theme)
        poll("the routes", lambda: page.run("document.querySelectorAll('details').length") > 20)
        page.run("[...document.querySelectorAll('main > details')].slice(0, 6).forEach((one) => { one.open = true; })")
        poll("a form", lambda: page.run("document.querySelector('details[open] textarea') !== null"))
        page.run(FETCHED.read_text() + ";true")
        assert json.loads(page.run(AXE)) == []
        page.resize(380, 800)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_nothing_is_wider_than_a_phone(tab: Browser) -> None:
    tab.resize(380, 800)
    for view in VIEWS:
        go(tab, view)
        poll(f"{view} to fit", lambda: tab.run("document.documentElement.scrollWidth <= innerWidth"))
    tab.resize(1280, 860)


AXE = """axe.run(document, { resultTypes: ["violations"] }).then((of) => JSON.stringify(of.violations.map((one) =>
  [one.id, one.nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} ${node.any[0]?.message || ""}`)])))"""

PICTURES = (
    ("overview", "overview", "light", 1280, 900), ("topic", "topic/shop.orders", "light", 1280, 900),
    ("tail-dark", "topic/shop.orders?tab=tail", "dark", 1280, 900), ("queue", "queue/shop.mails", "light", 1280, 900),
    ("routers-dark", "routers", "dark", 1280, 820), ("topics-phone", "topics", "dark", 380, 720),
)  # fmt: skip


@needs_browser
def test_pictures(shop: Service, tab: Browser, tmp_path: Path) -> None:
    """Each view in its theme; both themes differ, and where asked for the pictures are kept."""
    folder = Path(os.environ.get("TOPICS_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    stop, wanted = threading.Event(), 3000 if "TOPICS_SCREENSHOTS" in os.environ else 50

    def trade() -> None:
        with httpx.Client(base_url=shop.url, timeout=60) as client:
            at = 0
            while not stop.wait(0.02):
                at += 1
                data = {
                    "id": at,
                    "item": ["tea", "milk", "rice"][at % 3],
                    "price": 4.5 + at % 7,
                    "for": {"name": "Ann", "since": 2019},
                }
                record = {"data": data, "tag": ["tea", "milk"][at % 2], "node": f"till-{at % 3}"}
                for name in ("shop.orders", "shop.clicks", "hall-1.in"):
                    client.post(f"/v0/topics/{name}", json={"records": [record] * (1 + at % 4)})

    trader = threading.Thread(target=trade)
    trader.start()
    try:
        grounds = {}
        for name, view, theme, width, height in PICTURES:
            tab.prefer(theme)
            tab.resize(width, height)
            go(tab, view)
            if view == "topics":
                shows(tab, "/s", "tbody")
            if view == "overview" or "orders" in view:
                poll("some figures", lambda: tab.run("document.querySelectorAll('.plot canvas').length") > 0)
                seen = shop.client.get("/v0/topics/shop.orders").json()["head_seq"]
                poll(
                    "some trade",
                    lambda: shop.client.get("/v0/topics/shop.orders").json()["head_seq"] > seen + wanted,
                    90,
                )
            if "queue" in view and wanted > 50:  # a picture that is kept shows lines
                jobs = {"records": [{"data": {"to": f"user-{at}@example.org"}} for at in range(3)]}
                for _ in range(10):
                    shop.client.post("/v0/topics/shop.mails", json=jobs)
                    shop.client.post("/v0/topics/shop.mails/claim", json={"node": "worker-1", "max": 1})
                    time.sleep(2)
            shows(tab, "live", ".top")
            grounds[theme] = tab.run("getComputedStyle(document.body).backgroundColor")
            (folder / f"{name}.png").write_bytes(tab.picture())
        assert grounds["light"] != grounds["dark"]
    finally:
        stop.set()
        trader.join()
        tab.resize(1280, 860)
        tab.prefer("light")
