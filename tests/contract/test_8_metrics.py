"""api §8: metrics, read by a parser that is not ours, and judged by Prometheus' own promtool.

promtool is the one that TOPICS_PROMTOOL names, the one on the PATH, or the one that `make test` has fetched. Without
one its test is skipped; with TOPICS_REQUIRE_PROMTOOL=1 its absence is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.asking import Connection, diff, ok, put, refused, state, write
from tests.contract.socket_client import Socket
from tests.contract.stream import follow, watch
from tests.harness import Service, poll

pytestmark = pytest.mark.long

Labels = tuple[tuple[str, str], ...]
Samples = dict[tuple[str, Labels], float]

OF_THE_CONTRACT = {
    *("topics_topics", "topics_topics_by_class", "topics_routers", "topics_records_live", "topics_bytes_live"),
    *("topics_queue_topics", "topics_queue_leases_in_flight", "topics_sse_connections", "topics_watch_sessions"),
    *("topics_ready", "topics_recovery_progress", "topics_uptime_ms", "topics_topic_metrics_truncated"),
    *(f"topics_topic_{name}" for name in ("head_seq", "earliest_seq", "records_live", "bytes_live")),
    *(f"topics_wal_{name}_total" for name in ("frames", "batches", "fsyncs", "bytes_written", "rotations")),
    *("topics_wal_submit_full_total", "topics_wal_queue_depth", "topics_wal_queue_depth_peak"),
    *("topics_wal_read_only", "topics_wal_fsync_latency_us"),
}
NAME = re.compile(r"[a-z][a-z0-9_]*")
PROMTOOL = (
    os.environ.get("TOPICS_PROMTOOL")
    or shutil.which("promtool")
    or shutil.which("promtool", path=os.path.join(sys.prefix, "promtool"))
)


def text(client: httpx.Client) -> str:
    answer = client.get("/v0/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text


def samples(content: str) -> Samples:
    read: Samples = {}
    for family in text_string_to_metric_families(content):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in read, f"{key} comes twice"
            read[key] = sample.value
    return read


def scrape(client: httpx.Client) -> Samples:
    return samples(text(client))


def value(read: Samples, name: str, **labels: str) -> float:
    return read[name, tuple(sorted(labels.items()))]


def total(read: Samples, name: str) -> float:
    """Over all labels."""
    return sum(number for (of, _), number in read.items() if of == name)


@pytest.fixture
def own() -> Iterator[Service]:
    """For figures of the whole service: in one that others use, records expire and sessions end meanwhile."""
    with Service() as running:
        yield running


def test_every_metric_has_help_type_and_one_block(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    content = text(client)
    assert content.endswith("\n")
    helps = re.findall(r"^# HELP (\S+) (\S.*)$", content, re.MULTILINE)
    types = re.findall(r"^# TYPE (\S+) (\S+)$", content, re.MULTILINE)
    assert [name for name, _ in helps] == [name for name, _ in types]
    assert len({name for name, _ in types}) == len(types)
    for family in text_string_to_metric_families(content):
        assert NAME.fullmatch(family.name), family.name
        assert family.samples, family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total"), sample
            elif family.type == "gauge":
                assert not re.search(r"_(total|count|sum|bucket)$", sample.name), sample
            assert sample.value >= 0, sample
    assert {name for name, _ in types} >= OF_THE_CONTRACT


def promtool(content: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None, "TOPICS_REQUIRE_PROMTOOL=1, but there is no promtool"
    return subprocess.run(
        [PROMTOOL, "check", "metrics"], input=content, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(
    PROMTOOL is None and os.environ.get("TOPICS_REQUIRE_PROMTOOL") != "1",
    reason="there is no promtool; `make test` fetches one",
)
def test_promtool_accepts_the_metrics_of_a_busy_service(own: Service) -> None:
    """Exit code 0; or 3 for names that it would have chosen otherwise, which must be those that the contract gave."""
    client = own.client
    for number, durability in enumerate(("fsync", "disk", "memory", "ephemeral")):
        put(client, f"t{number}", durability=durability)
        write(client, f"t{number}", 1, 2)
        diff(client, f"t{number}")
    put(client, "q", type="queue")
    write(client, "q", 1, 2)
    ok(client.post("/v0/topics/q/claim", json={"node": "w"}))
    ok(client.put("/v0/routers/r>1", json={"source": "t0", "dest": "copies"}))
    with Socket(own) as ws, follow(own, {"t0": {}}) as stream:
        stream.event("record")
        ws.ask("publish", topic="t0", records=[{"data": 1}])
        content = text(client)
    judged = promtool(content)
    complaints = {tuple(line.split(" ", 1)) for line in judged.stderr.splitlines()}
    assert {name for name, _ in complaints} <= OF_THE_CONTRACT, judged.stderr
    assert judged.returncode == (3 if complaints else 0), judged
    assert promtool(content + "no metric at all\n").returncode == 1
    assert promtool(content + "# TYPE topics_topics gauge\n").returncode == 1, "a metric in two blocks"


@pytest.mark.parametrize("name", ["topics_wal_fsync_latency_us", "topics_request_duration_seconds"])
def test_histograms_are_cumulative_and_end_at_their_count(client: httpx.Client, topic: str, name: str) -> None:
    put(client, topic, durability="fsync")
    write(client, topic, 1)
    (family,) = [f for f in text_string_to_metric_families(text(client)) if f.name == name]
    assert family.type == "histogram"
    series: dict[str, list[tuple[float, float]]] = {}
    counts, sums = {}, {}
    for sample in family.samples:
        of = sample.labels.get("route", "")
        if sample.name == f"{name}_bucket":
            series.setdefault(of, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name == f"{name}_count":
            counts[of] = sample.value
        else:
            sums[of] = sample.value
    assert set(series) == set(counts) == set(sums)
    assert sum(counts.values()) > 0
    for of, buckets in series.items():
        assert buckets == sorted(buckets), of
        assert buckets[-1] == (float("inf"), counts[of])
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert (sums[of] > 0) == (counts[of] > 0)


def test_topics_records_and_bytes_of_all(own: Service, topic: str) -> None:
    client = own.client
    before = scrape(client)
    classes = ("ephemeral", "memory", "disk", "fsync")
    for durability in classes:
        put(client, f"{topic}-{durability}", durability=durability)
        write(client, f"{topic}-{durability}", "a", "bb")
    put(client, f"{topic}-queue", type="queue")
    put(client, f"{topic}-capped", cap_records=2)
    write(client, f"{topic}-capped", 1, 2, 3, 4, 5)
    after = scrape(client)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("topics_topics") == 6
    assert [grown("topics_topics_by_class", **{"class": name}) for name in classes] == [1, 1, 3, 1]
    assert grown("topics_queue_topics") == 1
    names = [*(f"{topic}-{durability}" for durability in classes), f"{topic}-queue", f"{topic}-capped"]
    states = {name: state(client, name) for name in names}
    assert grown("topics_records_live") == sum(one["count"] for one in states.values()) == 10
    assert grown("topics_bytes_live") == sum(one["bytes"] for one in states.values()) > 0
    for name, one in states.items():
        for series, field in (
            ("head_seq", "head_seq"),
            ("earliest_seq", "earliest_seq"),
            ("records_live", "count"),
            ("bytes_live", "bytes"),
        ):
            assert value(after, f"topics_topic_{series}", topic=name) == one[field], (name, series)
    for name in names:
        ok(client.delete(f"/v0/topics/{name}"))
    gone = scrape(client)
    for series in ("topics_topics", "topics_records_live", "topics_bytes_live", "topics_queue_topics"):
        assert value(gone, series) == value(before, series), series
    assert ("topics_topic_head_seq", (("topic", names[0]),)) not in gone


def test_the_log_counts_what_was_written(own: Service, topic: str) -> None:
    client = own.client
    put(client, topic, durability="fsync")
    before = scrape(client)
    for n in range(5):
        write(client, topic, n, n)
    after = scrape(client)

    def grown(name: str) -> float:
        return value(after, name) - value(before, name)

    assert grown("topics_wal_frames_total") == 10
    assert grown("topics_wal_batches_total") >= 5
    assert grown("topics_wal_fsyncs_total") >= 5
    assert grown("topics_wal_fsync_latency_us_count") >= 5
    assert grown("topics_wal_bytes_written_total") >= state(client, topic)["bytes"]
    assert total(after, "topics_shard_wal_bytes_written_total") == value(after, "topics_wal_bytes_written_total")
    assert value(after, "topics_wal_read_only") == 0
    assert value(after, "topics_wal_queue_depth_peak") >= 1


def test_requests_are_counted_and_timed_by_route(client: httpx.Client, topic: str) -> None:
    before = scrape(client)
    put(client, topic)
    for n in range(3):
        write(client, topic, n)
    diff(client, topic)
    diff(client, topic, from_seq=3, wait_ms=30)
    refused(client.get(f"/v0/topics/{topic}-none"), 404, "topic_not_found")
    scrapes = [before]

    def timed(route: str) -> float:
        name = "topics_request_duration_seconds_count"
        return value(scrapes[-1], name, route=route) - value(before, name, route=route)

    def counted() -> bool:
        """A process says what it has served once the answer is out; another one may be asked before."""
        scrapes.append(scrape(client))
        routes = ("put_topic", "append", "diff", "diff_wait", "get_topic", "metrics")
        # The scrapes before, too; this one is not over.
        return [timed(route) for route in routes] == [1, 3, 1, 1, 1, len(scrapes) - 1]

    poll("the requests to be counted", counted)
    after = scrapes[-1]
    waited = value(after, "topics_request_duration_seconds_sum", route="diff_wait")
    assert (
        waited - value(before, "topics_request_duration_seconds_sum", route="diff_wait") >= 0.029
    )  # its timer counts whole milliseconds
    assert value(after, "topics_requests_total") - value(before, "topics_requests_total") == 7 + timed("metrics")
    errors = "topics_error_responses_total"
    assert value(after, errors, status="4xx") - value(before, errors, status="4xx") == 1
    assert value(after, "topics_records_written_total") - value(before, "topics_records_written_total") == 3
    assert value(after, "topics_records_delivered_total") - value(before, "topics_records_delivered_total") == 3


def test_websocket_commands_are_counted_and_timed_by_their_kind(
    service: Service, client: httpx.Client, topic: str
) -> None:
    put(client, topic)
    before = scrape(client)
    with Socket(service) as ws:
        for n in range(3):
            ws.ask("publish", topic=topic, records=[{"data": n}])
        assert ws.ask("publish", topic=topic, create=False, if_head_seq=77, records=[{"data": 1}])["op"] == "error"
        ws.ask("subscribe", topic=topic, tail=True, request_id=1)
        ws.ask("unsubscribe", topic=topic, request_id=2)
        ws.ask("ping", request_id=3)
        ws.ask("ping", request_id=4)
        ws.wire.send("no command")
        ws.next("error")
    scrapes = [before]

    def grown(name: str, **labels: str) -> float:
        return value(scrapes[-1], name, **labels) - value(before, name, **labels)

    def counted() -> bool:
        """The socket's process may say so after its answer, and another one may be asked before."""
        scrapes.append(scrape(client))
        kinds = ("ws_publish", "ws_subscribe", "ws_unsubscribe", "ws_ping", "other", "append")
        timed = [grown("topics_request_duration_seconds_count", route=kind) for kind in kinds]
        # The upgrade among them, and all scrapes but the last.
        in_all = 10 + len(scrapes) - 1
        errors = grown("topics_error_responses_total", status="4xx")
        return (timed, grown("topics_requests_total"), errors) == ([4, 1, 1, 2, 1, 0], in_all, 2)

    poll("the commands to be counted", counted)
    assert grown("topics_request_duration_seconds_sum", route="ws_publish") > 0


def test_sessions_and_streams(own: Service, topic: str) -> None:
    put(own.client, topic)
    before = scrape(own.client)
    with follow(own, {topic: {}}) as stream:
        stream.event("caught-up")
        watch(own.client, {topic: {}})
        seen: list[Samples] = []

        def counted() -> bool:
            """A process says what it has counted a little later."""
            seen.append(scrape(own.client))
            more = {name: value(seen[-1], name) - value(before, name) for name in wanted}
            frames = value(seen[-1], "topics_sse_frames_total") - value(before, "topics_sse_frames_total")
            return more == wanted and frames > 0

        wanted = {"topics_watch_sessions": 2.0, "topics_sse_connections": 1.0}
        poll("session and stream to be counted", counted)
        during = seen[-1]
        assert total(during, "topics_frontend_sse_connections") == value(during, "topics_sse_connections")
    poll("the stream to be gone", lambda: value(scrape(own.client), "topics_sse_connections") == 0)


def test_the_json_has_the_same_names_and_numbers(own: Service, topic: str) -> None:
    client = own.client
    write(client, topic, 1, 2)
    as_text = scrape(client)
    answer = client.get("/v0/metrics", headers={"Accept": "application/json"})
    body = ok(answer)
    for name in OF_THE_CONTRACT | {"topics_build_info", "topics_process_restarts_total"}:
        assert name in body, name
    for name in ("topics_topics", "topics_records_live", "topics_bytes_live", "topics_ready"):
        assert body[name] == value(as_text, name)
    assert body["topics_topic_head_seq"][topic] == 2
    assert body["topics_topics_by_class"]["disk"] == value(as_text, "topics_topics_by_class", **{"class": "disk"})
    assert body["topics_process_restarts_total"]["walshard"]["1"] == 0
    assert (body["topics"], body["queue_topics"]) == (body["topics_topics"], body["topics_queue_topics"])
    written = {"frames": "frames", "bytes": "bytes_written", "fsyncs": "fsyncs"}
    assert body["wal"] == {short: body[f"topics_wal_{name}_total"] for short, name in written.items()}
    assert body["wal"]["frames"] > 0
    latency = body["topics_wal_fsync_latency_us"]
    assert latency["buckets"]["+Inf"] == latency["count"]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("*/*", "text/plain"),
        ("text/plain", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", "text/plain"),
        ("application/json", "application/json"),
        ("application/json;q=0.2, text/plain", "text/plain"),
    ],
)
def test_what_is_asked_for_is_given(client: httpx.Client, accept: str, content_type: str) -> None:
    answer = client.get("/v0/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == content_type


def test_metrics_are_packed_for_those_who_ask(client: httpx.Client) -> None:
    packed = client.get("/v0/metrics", headers={"Accept-Encoding": "gzip"})
    plain = client.get("/v0/metrics", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(packed.content) / 3
    assert "content-encoding" not in plain.headers
    assert {name for name, _ in samples(packed.text)} == {name for name, _ in samples(plain.text)}


def test_head_and_other_methods(client: httpx.Client) -> None:
    answer = client.head("/v0/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    refused(client.post("/v0/metrics", json={}), 405, "method_not_allowed")


def test_any_frontend_answers_for_the_whole_service(own: Service) -> None:
    for n in range(20):
        write(own.client, f"t{n}", n)
    answered: dict[int, Samples] = {}

    def ask() -> bool:
        before = scrape(own.client)
        connection = Connection(own)
        status, content, _ = connection.send("GET", "/v0/metrics")
        connection.close()
        assert status == 200
        after = scrape(own.client)
        for index in range(own.frontends):
            name, of = "topics_frontend_requests_total", str(index)
            # The client's own connection stays with one frontend, whose count grows by two: its scrape and this.
            if value(after, name, frontend=of) - value(before, name, frontend=of) in (1, 3):
                answered[index] = samples(content.decode())
        return len(answered) >= 2

    poll("both frontends to have answered", ask, 20.0)
    first, second = answered.values()
    for name in ("topics_topics", "topics_records_live", "topics_bytes_live", "topics_watch_sessions"):
        assert value(first, name) == value(second, name)
    assert [value(read, "topics_topics") for read in answered.values()] == [20, 20]
    heads = {key for key in first if key[0] == "topics_topic_head_seq"}
    assert len(heads) == 20
    assert heads == {key for key in second if key[0] == "topics_topic_head_seq"}


def test_a_killed_shard_takes_no_figures_along(own: Service) -> None:
    put(own.client, "f", durability="fsync")
    for n in range(20):
        write(own.client, f"t{n}", n)
        write(own.client, "f", n)
    before = scrape(own.client)
    for index in range(own.shards):
        own.wait_healed(own.kill("walshard", index))
    own.wait_healed(own.kill("frontend", 0))
    after = scrape(own.client)
    for name in ("topics_topics", "topics_records_live", "topics_bytes_live"):
        assert value(after, name) == value(before, name), name
    for (name, labels), number in before.items():
        if name.endswith(("_total", "_count", "_bucket")):
            assert after[name, labels] >= number, (name, labels)
    restarts = "topics_process_restarts_total"
    found = {
        (process, index): value(after, restarts, process=process, index=index)
        for process in ("frontend", "walshard")
        for index in "01"
    }
    assert found == {("frontend", "0"): 1, ("frontend", "1"): 0, ("walshard", "0"): 1, ("walshard", "1"): 1}
    write(own.client, "f", "more")
    grown = scrape(own.client)
    assert value(grown, "topics_wal_fsyncs_total") > value(after, "topics_wal_fsyncs_total")


def test_it_answers_while_shards_do_not(own: Service) -> None:
    for n in range(10):
        write(own.client, f"t{n}", n)
    pids = [own.pid_of("walshard", index) for index in range(own.shards)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        read = scrape(own.client)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert value(read, "topics_topics") == 10
    assert total(read, "topics_topic_head_seq") == 10


def test_series_of_topics_stop_at_their_bound() -> None:
    with Service(env={"TOPICS_MAX_METRIC_TOPICS": "3"}) as service:
        for n in range(5):
            write(service.client, f"t{n}", n)
        read = scrape(service.client)
        assert {dict(labels)["topic"] for name, labels in read if name == "topics_topic_head_seq"} == {"t0", "t1", "t2"}
        assert value(read, "topics_topic_metrics_truncated") == 1
        assert value(read, "topics_topics") == 5


def test_a_key_sees_series_of_topics_within_its_prefixes_only() -> None:
    with Service(env={"TOPICS_API_KEYS": "root,some:r:b.|d.,none:r:zz."}) as service:
        names = ["a", "b.1", "b.2", "c", "d.1", "e"]
        root = httpx.Client(base_url=service.url, headers={"Authorization": "Bearer root"}, timeout=20)
        for name in names:
            put(root, name)
        seen = {}
        for key in ("root", "some", "none"):
            headers = {"Authorization": f"Bearer {key}"}
            read = samples(httpx.get(f"{service.url}/v0/metrics", headers=headers, timeout=20).text)
            seen[key] = sorted(dict(labels)["topic"] for name, labels in read if name == "topics_topic_head_seq")
            assert value(read, "topics_topics") == 6
            assert value(read, "topics_topic_metrics_truncated") == 0
        assert seen == {"root": names, "some": ["b.1", "b.2", "d.1"], "none": []}
        root.close()


def test_pressure_and_what_follows_from_it(client: httpx.Client) -> None:
    read = scrape(client)
    assert 0 <= value(read, "topics_pressure") <= 1
    assert value(read, "topics_deferring") in (0, 1)
    assert value(read, "topics_throttled_total") >= 0
    for process in ("frontend", "walshard"):
        for index in ("0", "1"):
            of = {"process": process, "index": index}
            assert 0 <= value(read, "topics_process_pressure", **of) <= 1
            assert 0 <= value(read, "topics_process_busy_ratio", **of) <= 1
    for frontend in ("0", "1"):
        for name in ("scheduler_wait", "event_loop_lag", "coalesce"):
            assert value(read, f"topics_{name}_seconds", frontend=frontend) >= 0
        for band in "01234":
            assert value(read, "topics_scheduler_band_depth", frontend=frontend, band=band) >= 0
    assert value(read, "topics_shard_commit_window_seconds", shard="0") <= 0.01


def test_a_process_that_stands_still_has_an_old_heartbeat(own: Service) -> None:
    def age_s(process: str) -> float:
        return value(scrape(own.client), "topics_process_heartbeat_age_seconds", process=process, index="0")

    supervisor = own.status()["pid"]
    for process, pid in (("supervisor", supervisor), ("walshard", own.pid_of("walshard"))):
        poll("a young one", lambda: age_s(process) < 1.5)
        os.kill(pid, signal.SIGSTOP)
        try:
            poll("it to age", lambda: age_s(process) > 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        poll("it to beat again", lambda: age_s(process) < 1.5)
