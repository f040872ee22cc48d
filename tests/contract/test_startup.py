"""rules.md "Start-up", operations.md: starting, stopping, starting again; and what a restart keeps."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.contract.asking import diff, diff_records, head_seq, long_polls, ok, put, refused, state, write, write_raw
from tests.harness import COMMAND, Service, poll

pytestmark = pytest.mark.long


@pytest.fixture
def own() -> Iterator[Service]:
    """A service that the test may stop, kill and start again."""
    with Service() as running:
        yield running


# --- start


def test_the_port_file_is_whole_and_leaves_no_temporary(own: Service) -> None:
    host, _, port = own.port_file.read_text().strip().rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    assert {entry.name for entry in own.root.iterdir()} == {"data", "log", "port"}


def test_a_new_directory_says_which_format_it_has(own: Service) -> None:
    mark = own.data_dir / "meta" / "format.json"
    made = mark.stat()
    assert json.loads(mark.read_text()) == {"version": 2}
    own.restart()
    assert mark.stat().st_ino == made.st_ino, "it is made once"


def test_until_recovered_data_routes_say_not_ready(own: Service) -> None:
    """Enough log that recovery takes a while; the socket listens from the start, and requests wait for 1 ms only."""
    own.env["TOPICS_SHARD_WAIT_MS"] = "1"
    for shard_topic in ("big-1", "big-2", "big-3", "big-4"):
        for _ in range(15):
            body = b'{"records":[' + b",".join([b'{"data":0}'] * 10_000) + b"]}"
            assert write_raw(own.client, shard_topic, body).status_code in (200, 201)
    early: list[tuple[httpx.Response, ...]] = []
    for _ in range(5):  # a client that is stopped for as long as recovery takes sees nothing of it
        own.kill_group()
        own.start(wait_ready=False)
        early = answers_while_recovering(own)
        if early:
            break
    assert early, "recovery was over before the first request: make the log longer"
    with httpx.Client(base_url=own.url, timeout=20) as client:
        for answer in early[0]:
            if answer.status_code < 400:
                continue  # recovered between two requests of one turn
            error = refused(answer, 503, "not_ready")
            assert answer.headers["retry-after"].isdigit()
            assert 0 <= error["detail"]["replay_progress"] <= 1
        assert early[0][0].status_code == 503
        assert [head_seq(client, f"big-{n}") for n in (1, 2, 3, 4)] == [150_000] * 4


def test_requests_in_the_first_moments_wait_until_all_is_recovered(own: Service) -> None:
    assert own.client.put("/v0/topics/t", json={}).status_code == 201
    for _ in range(3):
        own.kill_group()
        own.start(wait_ready=False)
        with httpx.Client(base_url=own.url, timeout=20) as client:
            assert client.get("/v0/health").status_code == 200
            assert client.post("/v0/topics/t", json={"records": [{"data": 1}]}).status_code == 200


def answers_while_recovering(service: Service) -> list[tuple[httpx.Response, ...]]:
    """To a probe, a read and a write, one after the other, until the service is ready."""
    early: list[tuple[httpx.Response, ...]] = []
    with httpx.Client(base_url=service.url, timeout=20) as client:
        while (ready := client.get("/v0/ready")).status_code != 200:
            assert client.get("/v0/health").status_code == 200
            early.append(
                (ready, client.get("/v0/topics/big-1"), client.post("/v0/topics/new", json={"records": [{"data": 1}]}))
            )
    return early


def test_a_second_start_is_refused_and_names_the_first(own: Service) -> None:
    write(own.client, "t", 1)
    second = own.run("run", env={"TOPICS_PORT": "0", "TOPICS_PORT_FILE": str(own.root / "second")})
    assert second.returncode != 0
    assert str(own.pid) in second.stderr
    assert str(own.data_dir) in second.stderr
    assert not (own.root / "second").exists()
    assert write(own.client, "t", 2)["first_seq"] == 2


def test_a_taken_port_is_refused_by_name(own: Service) -> None:
    other = Service(port=own.port)
    try:
        refusal = other.run("run")
    finally:
        other.close()
    assert refusal.returncode != 0
    assert f"127.0.0.1:{own.port}" in refusal.stderr
    poll("the first to be asked still", own.is_ready)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOPICS_PORT", "seventy"),
        ("TOPICS_PORT", "70000"),
        ("TOPICS_WAL_SHARDS", "0"),
        ("TOPICS_WAL_SHARDS", "-1"),
        ("TOPICS_FRONTENDS", "many"),
        ("TOPICS_MAX_BODY_BYTES", "-5"),
        ("TOPICS_LOG_LEVEL", "shout"),
        ("TOPICS_LOG_FORMAT", "xml"),
        ("TOPICS_SHUTDOWN_GRACE_MS", "1.5"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_bad_setting_is_refused_by_name_and_value(name: str, value: str, command: str) -> None:
    service = Service(frontends=1, shards=1)
    try:
        refusal = service.run(command, env={name: value})
        assert refusal.returncode == 2
        assert name in refusal.stderr + refusal.stdout
        assert value in refusal.stderr + refusal.stdout
        assert "Traceback" not in refusal.stderr
        assert not service.data_dir.exists() or not any(service.data_dir.rglob("wal-*"))
    finally:
        service.close()


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    service = Service(frontends=1, shards=1)
    try:
        refusal = service.run("check", env={"TOPICS_FRONTEND": "2"})
        assert refusal.returncode == 2
        assert "TOPICS_FRONTEND:" in refusal.stderr
        assert "TOPICS_FRONTENDS" in refusal.stderr
    finally:
        service.close()


def test_an_open_address_without_keys_is_refused() -> None:
    service = Service(frontends=1, shards=1)
    try:
        refusal = service.run("run", env={"TOPICS_HOST": "0.0.0.0"})
        assert refusal.returncode == 2
        assert "TOPICS_ALLOW_INSECURE_NO_AUTH" in refusal.stderr
    finally:
        service.close()


def test_a_data_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    service = Service(frontends=1, shards=1)
    try:
        data_dir = str(tmp_path / "file" / "data")
        refusal = service.run("run", env={"TOPICS_DATA_DIR": data_dir})
        assert refusal.returncode != 0
        assert data_dir in refusal.stderr
        assert "Traceback" not in refusal.stderr
    finally:
        service.close()


def test_check_passes_beside_nothing_and_says_when_the_lock_is_held(own: Service) -> None:
    fresh = Service(frontends=1, shards=1)
    try:
        assert fresh.run("check").returncode == 0
    finally:
        fresh.close()
    held = own.run("check")
    assert held.returncode != 0
    assert str(own.pid) in held.stdout + held.stderr


def test_flags_mirror_the_environment(tmp_path: Path) -> None:
    service = Service()
    try:
        arguments = ["run", "--data-dir", str(tmp_path / "d"), "--port", "0", "--wal-shards", "1", "--frontends", "1"]
        process = subprocess.Popen(
            [str(COMMAND), *arguments],
            env=service.environment() | {"TOPICS_PORT_FILE": str(tmp_path / "port")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            poll("the port file", (tmp_path / "port").exists)
            status = json.loads(service.run("status", "--json", "--data-dir", str(tmp_path / "d")).stdout)
            assert (len(status["shards"]), len(status["frontends"])) == (1, 1)
        finally:
            process.terminate()
            assert process.wait(service.stop_deadline_s) == 0
    finally:
        service.close()


# --- status


def until_running(service: Service) -> None:
    """Every process is ready: `/v0/ready` is about shards, and what a frontend makes it may still be making."""
    poll("the service to run", lambda: service.status()["state"] == "running")


def test_status_of_a_running_and_of_a_stopped_service(own: Service) -> None:
    put(own.client, "t")
    until_running(own)
    answer = own.run("status", "--json")
    assert answer.returncode == 0
    status = json.loads(answer.stdout)
    assert (status["state"], status["pid"]) == ("running", own.pid)
    assert sorted((p["role"], p["index"]) for p in status["processes"] if p["role"] in ("frontend", "walshard")) == [
        ("frontend", 0),
        ("frontend", 1),
        ("walshard", 0),
        ("walshard", 1),
    ]
    assert {p["pid"] for p in status["processes"]} <= set(own.family())
    assert own.run("status").returncode == 0
    own.stop()
    assert own.run("status", "--json").returncode == 3
    own.start()


# --- stop


def test_a_stop_lets_a_waiting_request_finish(own: Service) -> None:
    put(own.client, "t")
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=own.url, timeout=20) as client:
        client.get("/v0/health")
        waiting = pool.submit(client.post, "/v0/topics/t/diff", json={"wait_ms": 30_000})
        poll("the poll to wait", lambda: long_polls(own) == 1)
        own.stop()
        answer = waiting.result()
    # Finished or told to go elsewhere, never cut off.
    if answer.status_code == 503:
        refused(answer, 503, "shutting_down")
    else:
        assert ok(answer)["records"] == []
    own.start()


# --- what a restart keeps


def come_back(service: Service, how: str) -> None:
    """Ends the service, by SIGTERM or by SIGKILL of the whole group, and starts it again."""
    if how == "stop":
        service.stop()
    else:
        service.kill_group()
    service.start()


def test_a_restart_keeps_everything_byte_for_byte(own: Service) -> None:
    payloads = [b'{"a":1.50,"a":[ 1 ]}', b"-0", rb'"\u0041"', b"1e400"]
    records = b",".join(b'{"data":' + data + b',"tag":"x","node":"n","meta":{"k":"v"}}' for data in payloads)
    put(own.client, "configured", durability="fsync", priority=-3, dedupe_node=False)
    for name in ("a", "b", "c", "configured"):
        write_raw(own.client, name, b'{"records":[' + records + b"]}")
    put(own.client, "empty")
    write(own.client, "deleted", 1)
    ok(own.client.delete("/v0/topics/deleted"))
    names = ("a", "b", "c", "configured")
    before = {name: diff_records(own.client, name, include_tags=True) for name in names}
    states = {name: state(own.client, name) for name in (*names, "empty")}
    for how in ("stop", "kill"):
        come_back(own, how)
        for name in names:
            assert diff_records(own.client, name, include_tags=True) == before[name]
            assert [record.data for record in before[name]] == payloads
        for name, old in states.items():
            now = state(own.client, name)
            for key in ("head_seq", "earliest_seq", "next_seq", "count", "bytes", "config", "last_write_ts"):
                assert now[key] == old[key], (how, name, key)
        refused(own.client.get("/v0/topics/deleted"), 404, "topic_not_found")
    assert write(own.client, "a", 1)["first_seq"] == 5


def test_seqs_of_a_recreated_topic_are_not_confused_after_a_restart(own: Service) -> None:
    write(own.client, "t", *range(10))
    ok(own.client.delete("/v0/topics/t"))
    write(own.client, "t", "new")
    own.kill_group()
    own.start()
    assert [record["data"] for record in diff(own.client, "t")["records"]] == ["new"]
    tombstone = diff(own.client, "t", from_seq=10)["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("recreated", 1, 1)


@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_an_idempotency_key_outlives_a_restart(own: Service, durability: str, how: str) -> None:
    put(own.client, "t", durability=durability)
    first = write(own.client, "t", "a", "b", idempotency_key="k")
    come_back(own, how)
    again = write(own.client, "t", "a", "b", idempotency_key="k")
    assert again["deduped"] is True
    assert again["seqs"] == first["seqs"]
    assert head_seq(own.client, "t") == 2


def test_ephemeral_records_go_their_configuration_and_head_stay(own: Service) -> None:
    config = put(own.client, "t", durability="ephemeral", priority=6)["config"]
    write(own.client, "t", *range(7))
    own.restart()
    now = state(own.client, "t")
    assert now["config"] == config
    assert now["head_seq"] >= 7
    assert (now["count"], now["earliest_seq"]) == (0, now["head_seq"] + 1)
    assert write(own.client, "t", "later")["first_seq"] == now["head_seq"] + 1


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 4, 1, 2)], ids=str)
def test_the_shard_count_may_change(counts: tuple[int, ...]) -> None:
    with Service(shards=counts[0], frontends=1) as service:
        names = [f"topic-{n}" for n in range(20)]
        for turn, shards in enumerate(counts):
            if turn:
                service.stop()
                service.shards = shards
                service.start()
            for name in names:
                assert write(service.client, name, f"{name} {turn}", idempotency_key=f"k{turn}")["last_seq"] == turn + 1
            for name in names:
                got = [record["data"] for record in diff(service.client, name)["records"]]
                assert got == [f"{name} {old}" for old in range(turn + 1)]
                assert write(service.client, name, "x", idempotency_key="k0")["deduped"] is True


def test_what_a_killed_predecessor_left_is_cleaned_up(own: Service) -> None:
    write(own.client, "t", 1)
    until_running(own)
    before = len(own.shared_memory())
    for _ in range(3):
        own.kill_group()
        assert own.shared_memory()
        own.start()
    until_running(own)
    assert len(own.shared_memory()) == before
    assert head_seq(own.client, "t") == 1
