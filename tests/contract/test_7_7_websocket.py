"""api §7.7 and rules.md WebSocket: commands and records over one socket, with a client library that is not ours."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.contract.asking import diff, envelope, ok, put, records_of, refused, state, write
from tests.contract.socket_client import Socket
from tests.contract.stream import follow
from tests.harness import Service, poll


@pytest.fixture
def ws(service: Service) -> Iterator[Socket]:
    with Socket(service) as connected:
        yield connected


def refusal(failure: InvalidStatus, status: int, code: str) -> dict[str, Any]:
    """The envelope of an upgrade that was refused."""
    answer = failure.response
    assert answer.status_code == status
    return envelope(bytes(answer.body or b""), answer.headers["content-type"], code)


# --- commands and their answers


@pytest.mark.parametrize("request_id", ["a", "", 7, -1, 2**63 - 1, None])
def test_ping(ws: Socket, request_id: Any) -> None:
    assert ws.ask("ping", request_id=request_id) == {"op": "pong", "request_id": request_id}


@pytest.mark.parametrize(
    "message",
    [
        "",
        "x",
        "null",
        "[]",
        "{}",
        '{"op":1}',
        '{"op":1,"request_id":"r"}',
        '{"op":["ping"],"request_id":"r"}',
        '{"op":"dance","request_id":"r"}',
        '{"op":"ping","request_id":{}}',
        '{"op":"ping","request_id":1e400}',
        '{"op":"ping","request_id":' + "9" * 5000 + "}",
        '{"op":"publish","request_id":"r"}',
        '{"op":"publish","topic":"t","records":[],"request_id":"r"}',
        '{"op":"publish","topic":"t","records":[{}],"request_id":"r"}',
        '{"op":"publish","topic":"bad name","records":[{"data":1}],"request_id":"r"}',
        '{"op":"publish","topic":"t","records":[{"data":1}],"if_head_seq":18446744073709551616,"request_id":"r"}',
        '{"op":"subscribe","request_id":"r"}',
        '{"op":"subscribe","topics":[],"request_id":"r"}',
        '{"op":"subscribe","topic":"a","topics":["b"],"request_id":"r"}',
        '{"op":"subscribe","topics":{"a":{}},"tail":true,"request_id":"r"}',
        '{"op":"subscribe","topic":"a","tail":true,"from_seq":3,"request_id":"r"}',
        '{"op":"subscribe","topic":"a","from_seq":-1,"request_id":"r"}',
        '{"op":"subscribe","topic":"a","limit":18446744073709551616,"request_id":"r"}',
        '{"op":"unsubscribe","request_id":"r"}',
        "[" * 100_000,
        '{"op":"ping","x":' + "[" * 100_000,
    ],
    ids=lambda message: message[:60],
)
def test_a_command_that_is_none_is_an_error_and_the_socket_lives_on(ws: Socket, message: str) -> None:
    ws.wire.send(message)
    error = ws.next("error")
    assert error["code"] == "invalid_request"
    assert error["message"]
    assert error["request_id"] == ("r" if '"request_id":"r"' in message else None)
    assert ws.ask("ping", request_id=1)["op"] == "pong"


def test_binary_is_an_error_and_the_socket_lives_on(ws: Socket) -> None:
    ws.wire.send(b'{"op":"ping"}')
    assert ws.next("error")["code"] == "invalid_request"
    assert ws.ask("ping", request_id=1)["op"] == "pong"


def test_unknown_fields_are_ignored(ws: Socket) -> None:
    assert ws.ask("ping", request_id=1, colour="blue")["op"] == "pong"


def test_http_without_an_upgrade_is_told_so(service: Service) -> None:
    answer = service.client.get("/v0/ws")
    refused(answer, 426, "upgrade_required")
    assert answer.headers["upgrade"] == "websocket"
    refused(service.client.post("/v0/ws", json={}), 405, "method_not_allowed")


def test_other_paths_have_no_websocket(service: Service) -> None:
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus) as failed:
        connect(service.url.replace("http", "ws") + "/v0/topics").close()
    refusal(failed.value, 404, "not_found")


# --- publish


def test_an_ack_says_what_the_http_answer_says(service: Service, ws: Socket, topic: str) -> None:
    ack = ws.ask("publish", request_id="p1", topic=topic, records=[{"data": 1}, {"data": 2}])
    performance = ack.pop("performance")
    assert performance["server_total_ms"] >= 0
    assert ack == {
        "op": "ack",
        "request_id": "p1",
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
        "durability": "disk",
    }
    http = write(service.client, topic, 3)
    assert set(http) == set(ack) - {"op", "request_id"} | {"performance"}


def test_an_ack_without_seqs(ws: Socket, topic: str) -> None:
    ack = ws.ask("publish", topic=topic, records=[{"data": 1}], return_seqs=False)
    assert "seqs" not in ack
    assert (ack["first_seq"], ack["last_seq"], ack["request_id"]) == (1, 1, None)


def test_published_bytes_are_kept(service: Service, ws: Socket, topic: str) -> None:
    data = '{ "a" : 1.50,\n "a":2, "\\u0041": "\u2192" }'
    ws.wire.send(f'{{"op":"publish","topic":"{topic}","records":[{{"data":{data},"tag":"t","node":"n"}}]}}')
    ws.next("ack")
    answer = service.client.post(f"/v0/topics/{topic}/diff", json={"include_tags": True})
    record = records_of(answer.content)[0]
    assert (record.data, record.tag, record.node) == (data.encode(), "t", "n")


def test_publish_fails_as_http_does(service: Service, ws: Socket, topic: str) -> None:
    record = {"data": 1}
    assert ws.ask("publish", request_id=1, topic=topic, records=[record], create=False)["code"] == "topic_not_found"
    put(service.client, topic, cap_records=1, discard="reject")
    assert ws.ask("publish", topic=topic, records=[record] * 2)["code"] == "record_too_large"
    assert ws.ask("publish", topic=topic, records=[record])["op"] == "ack"
    assert ws.ask("publish", topic=topic, records=[record])["code"] == "topic_full"
    mismatch = ws.ask("publish", request_id="m", topic=topic, records=[record], if_head_seq=7)
    assert (mismatch["code"], mismatch["request_id"]) == ("head_mismatch", "m")
    assert mismatch["detail"]["head_seq"] == 1
    assert ws.ask("publish", topic=topic, records=[record] * 10_001)["code"] == "batch_too_large"
    big = {"data": "x" * (1 << 20)}
    assert ws.ask("publish", topic=topic, records=[big])["code"] == "record_too_large"


def test_idempotency_config_and_node(service: Service, ws: Socket, topic: str) -> None:
    fields: dict[str, Any] = {
        "topic": topic,
        "records": [{"data": 1}],
        "idempotency_key": "k",
        "config": {"durability": "fsync"},
        "node": "me",
    }
    first, second = ws.ask("publish", **fields), ws.ask("publish", **fields)
    assert (first["created"], first["deduped"], second["deduped"]) == (True, False, True)
    assert first["seqs"] == second["seqs"] == [1]
    assert state(service.client, topic)["config"]["durability"] == "fsync"
    assert diff(service.client, topic, node="me")["records"] == []


def test_publishes_in_flight_commit_in_the_order_sent(service: Service, ws: Socket, topic: str) -> None:
    for n in range(500):
        ws.send("publish", request_id=n, topic=topic, records=[{"data": n}], return_seqs=False)
    acks = [ws.next("ack") for _ in range(500)]
    assert sorted(ack["request_id"] for ack in acks) == list(range(500))
    assert all(ack["first_seq"] == ack["request_id"] + 1 for ack in acks)
    assert [record["data"] for record in diff(service.client, topic, limit=1000)["records"]] == list(range(500))


# --- subscribe


def test_backlog_caught_up_and_live(service: Service, ws: Socket, topic: str) -> None:
    write(service.client, topic, "a", "b")
    subscribed = ws.ask("subscribe", request_id="s", topic=topic)
    assert subscribed == {
        "op": "subscribed",
        "request_id": "s",
        "topics": {topic: {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}},
    }
    backlog = ws.next("record")
    assert {key: backlog[key] for key in ("topic", "from_seq", "to_seq", "head_seq")} == {
        "topic": topic,
        "from_seq": 0,
        "to_seq": 2,
        "head_seq": 2,
    }
    assert [(record["$seq"], record["data"]) for record in backlog["records"]] == [(1, "a"), (2, "b")]
    assert ws.next() == {"op": "caught_up", "topic": topic, "head_seq": 2}
    write(service.client, topic, "c")
    assert [record["data"] for record in ws.next("record")["records"]] == ["c"]
    ack = ws.ask("publish", topic=topic, records=[{"data": "own"}])
    assert ack["first_seq"] == 4


def test_starts(service: Service, ws: Socket, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(4)]
    for name in names:
        write(service.client, name, 1, 2, 3)
    stamp = diff(service.client, names[3])["records"][0]["$ts"]
    starts: dict[str, Any] = {
        names[0]: {},
        names[1]: {"from_seq": 2},
        names[2]: {"tail": True},
        names[3]: {"from_ts": stamp},
    }
    answer = ws.ask("subscribe", topics=starts)
    assert [answer["topics"][name]["from_seq"] for name in names] == [0, 2, 3, 0]
    seen: dict[str, list[int]] = {name: [] for name in names}
    caught_up: set[str] = set()
    while len(caught_up) < 4:
        message = ws.next()
        if message["op"] == "caught_up":
            caught_up.add(message["topic"])
        else:
            seen[message["topic"]] += [record["$seq"] for record in message["records"]]
    assert seen == {names[0]: [1, 2, 3], names[1]: [3], names[2]: [], names[3]: [1, 2, 3]}
    assert ws.ask("subscribe", topics=names[:2], tail=True)["topics"][names[0]]["from_seq"] == 3


def test_options(service: Service, ws: Socket, topic: str) -> None:
    record = {"data": {"k": 1}, "tag": "t", "node": "n", "meta": {"m": "1"}}
    ok(service.client.post(f"/v0/topics/{topic}", json={"records": [record] * 5}))
    ws.ask("subscribe", topic=topic, limit=2, include_tags=True, include_meta=False, include_data=False)
    sizes = []
    while (message := ws.next())["op"] == "record":
        sizes.append(len(message["records"]))
        assert set(message["records"][0]) == {"$seq", "$ts", "$node", "$tag"}
    assert sizes == [2, 2, 1]
    ws.ask("subscribe", topic=topic, node="n")
    assert ws.next() == {"op": "caught_up", "topic": topic, "head_seq": 5}
    ws.ask("subscribe", topic=topic, max_batch_bytes=1)
    assert len(ws.next("record")["records"]) == 1


def test_strong(service: Service, ws: Socket, topic: str) -> None:
    put(service.client, topic)
    ws.ask("subscribe", topic=topic, consistency="strong")
    ws.next("caught_up")
    for n in range(3):
        write(service.client, topic, n)
        to_seq = ws.next("record")["to_seq"]
        assert state(service.client, topic)["durable_seq"] >= to_seq
    put(service.client, f"{topic}.ram", durability="ephemeral")
    assert ws.ask("subscribe", topic=f"{topic}.ram", consistency="strong")["code"] == "invalid_request"


def test_a_strong_subscription_says_that_its_topic_has_become_ephemeral(
    service: Service, ws: Socket, topic: str
) -> None:
    put(service.client, topic, durability="fsync")
    write(service.client, topic, 1)
    ws.ask("subscribe", topic=topic, consistency="strong")
    ws.next("record")
    ws.next("caught_up")
    put(service.client, topic, durability="ephemeral")
    error = ws.next("error")
    assert (error["request_id"], error["code"], error["topics"]) == (None, "invalid_request", [topic])
    assert error["retry_after_ms"] > 0
    put(service.client, topic, durability="fsync")
    assert ws.next() == {"op": "caught_up", "topic": topic, "head_seq": 1}
    write(service.client, topic, 2)
    assert ws.next("record")["to_seq"] == 2


def test_an_unknown_topic_subscribes_to_nothing(service: Service, ws: Socket, topic: str) -> None:
    put(service.client, topic)
    error = ws.ask("subscribe", request_id="s", topics=[topic, f"{topic}.absent"])
    assert (error["code"], error["request_id"]) == ("topic_not_found", "s")
    assert error["detail"]["topic"] == f"{topic}.absent"
    write(service.client, topic, 1)
    assert ws.ask("ping", request_id=2)["op"] == "pong"
    assert ws.ask("unsubscribe", topic=topic)["topics"] == []


def test_a_tombstone_on_connect_and_live(service: Service, ws: Socket, topic: str) -> None:
    put(service.client, topic, cap_records=3)
    for n in range(5):
        write(service.client, topic, n)
    ws.ask("subscribe", topic=topic)
    assert ws.next() == {
        "op": "tombstone",
        "topic": topic,
        "reason": "from_seq_too_old",
        "gap_from": 1,
        "gap_to": 2,
        "earliest_seq": 3,
        "head_seq": 5,
    }
    assert [record["$seq"] for record in ws.next("record")["records"]] == [3, 4, 5]
    ws.next("caught_up")
    write(service.client, topic, *range(5))
    live = ws.next("tombstone")
    assert (live["reason"], live["gap_from"], live["gap_to"]) == ("cap", 6, 7)
    assert [record["$seq"] for record in ws.next("record")["records"]] == [8, 9, 10]


def test_a_deleted_topic_ends_alone(service: Service, ws: Socket, topic: str) -> None:
    gone, stays = f"{topic}.gone", f"{topic}.stays"
    write(service.client, gone, 1, 2)
    write(service.client, stays, 1)
    ws.ask("subscribe", topics=[gone, stays], tail=True)
    assert {ws.next("caught_up")["topic"] for _ in range(2)} == {gone, stays}
    ok(service.client.delete(f"/v0/topics/{gone}"))
    assert ws.next() == {"op": "topic_deleted", "topic": gone, "head_seq": 2, "reason": "deleted"}
    write(service.client, gone, "of another instance")
    write(service.client, stays, 2)
    assert ws.next("record")["topic"] == stays
    ws.ask("subscribe", topic=gone)
    assert ws.records(1)[0]["data"] == "of another instance"


def test_unsubscribe(service: Service, ws: Socket, topic: str) -> None:
    write(service.client, topic, 1)
    ws.ask("subscribe", topic=topic)
    ws.records(1)
    ws.next("caught_up")
    answer = ws.ask("unsubscribe", request_id="u", topics=[topic, f"{topic}.never"])
    assert answer == {"op": "unsubscribed", "request_id": "u", "topics": [topic]}
    write(service.client, topic, 2)
    assert diff(service.client, topic)["head_seq"] == 2
    assert ws.ask("ping", request_id=1)["op"] == "pong"
    ws.ask("subscribe", topic=topic, from_seq=1)
    assert [record["data"] for record in ws.records(1)] == [2]


def test_a_second_subscription_replaces_the_first(service: Service, ws: Socket, topic: str) -> None:
    write(service.client, topic, *range(5))
    ws.ask("subscribe", topic=topic)
    ws.records(5)
    ws.next("caught_up")
    assert ws.ask("subscribe", topic=topic, from_seq=3)["op"] == "subscribed"
    assert [record["$seq"] for record in ws.records(2)] == [4, 5]
    ws.next("caught_up")
    write(service.client, topic, 5)
    assert [record["$seq"] for record in ws.next("record")["records"]] == [6]
    assert ws.ask("ping", request_id=1)["op"] == "pong"


@pytest.mark.long
def test_at_most_256_topics(service: Service, ws: Socket, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(257)]
    for name in names:
        put(service.client, name)
    assert ws.ask("subscribe", topics=names)["code"] == "invalid_request"
    assert len(ws.ask("subscribe", topics=names[:256])["topics"]) == 256
    assert ws.ask("subscribe", request_id=1, topic=names[256])["code"] == "invalid_request"
    ok(service.client.delete(f"/v0/topics/{names[0]}"))
    while ws.next()["op"] != "topic_deleted":
        pass
    assert ws.ask("subscribe", topic=names[256])["op"] == "subscribed"


# --- back-pressure


@pytest.mark.long
def test_a_slow_reader_holds_nobody_up_and_catches_up(service: Service, topic: str) -> None:
    put(service.client, topic)
    with Socket(service, max_queue=1) as slow, follow(service, {topic: {}}) as quick:
        slow.ask("subscribe", topic=topic)
        for _ in range(30):
            write(service.client, topic, *["x" * 10_000] * 60)
            assert len(quick.records(60)) == 60
        # 18 MB are behind the slow one: more than any socket buffer holds.
        assert [record["$seq"] for record in slow.records(1800)] == list(range(1, 1801))


def frontend_bytes(service: Service) -> int:
    return sum(psutil.Process(service.pid_of("frontend", index)).memory_info().rss for index in range(2))


@pytest.mark.long
def test_a_client_that_reads_no_answers_is_not_read_from(service: Service, topic: str) -> None:
    """The client keeps what it sends: neither commands nor answers pile up in the service."""
    put(service.client, topic, cap_records=10)
    record = {"data": "x" * 200_000}
    with Socket(service, max_queue=1) as ws:
        ws.wire.socket.settimeout(1.0)
        before = frontend_bytes(service)
        ws.send("subscribe", topic=topic, from_seq=0)
        sent = 0
        try:
            for sent in range(2000):
                ws.send("publish", request_id=sent, topic=topic, records=[record], create=False)
        except (TimeoutError, ConnectionClosed):
            pass
        assert 0 < sent < 1999, "400 MB went into the service although nobody read what came back"
        assert frontend_bytes(service) - before < 100 << 20
        assert write(service.client, f"{topic}.other", 1)["first_seq"] == 1


def test_answers_and_records_take_turns(service: Service, topic: str) -> None:
    """A client that publishes without end still gets records, and the other way round."""
    write(service.client, topic, *["x" * 1000] * 2000)
    with Socket(service) as ws:
        commands = [{"op": "subscribe", "topic": topic, "limit": 1}]
        commands += [{"op": "ping", "request_id": n} for n in range(300)]
        # In one piece: else the records might have gone before the pings arrive.
        with ws.wire.protocol_mutex:
            for command in commands:
                ws.wire.protocol.send_text(json.dumps(command).encode())
            ws.wire.socket.sendall(b"".join(ws.wire.protocol.data_to_send()))
        ops: list[str] = []
        while ops.count("pong") < 300:
            ops.append(ws.next()["op"])
        # From the first answer to the last: when the first ping arrives is the network's affair.
        longest = max(len(run) for run in "".join(op[0] for op in ops).strip("r").split("p"))
        assert 20 < ops.count("record") < 1500
        assert longest < 100, "the answers had to wait for the records"


# --- who may


@pytest.fixture(scope="module")
def guarded() -> Iterator[Service]:
    keys = "root,reader:r:in.,writer:w:in.,both:rw:in.,admin:rwa"
    keys = keys.replace("admin:rwa", "admin:r+w+a")
    with Service(env={"TOPICS_API_KEYS": keys}) as running:
        running.client.headers["Authorization"] = "Bearer root"
        write(running.client, "in.t", 1)
        write(running.client, "out.t", 1)
        yield running


@pytest.mark.parametrize("key", [None, "nobody"])
def test_the_upgrade_needs_a_valid_key(guarded: Service, key: str | None) -> None:
    with pytest.raises(InvalidStatus) as failed:
        Socket(guarded, key=key)
    refusal(failed.value, 401, "unauthorized")
    assert failed.value.response.headers["www-authenticate"] == "Bearer"


RECORDS = [{"data": 1}]
COMMANDS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("ping", {}, {"root", "reader", "writer", "both", "admin"}),
    ("subscribe", {"topic": "in.t"}, {"root", "reader", "both", "admin"}),
    ("subscribe", {"topic": "out.t"}, {"root", "admin"}),
    ("subscribe", {"topics": ["in.t", "out.t"]}, {"root", "admin"}),
    ("publish", {"topic": "in.t", "records": RECORDS}, {"root", "writer", "both", "admin"}),
    ("publish", {"topic": "out.t", "records": RECORDS}, {"root", "admin"}),
    ("publish", {"topic": "in.t", "records": RECORDS, "config": {}}, {"root", "admin"}),
    ("publish", {"topic": "in.t", "records": RECORDS, "config": None}, {"root", "writer", "both", "admin"}),
]


@pytest.mark.parametrize("key", ["root", "reader", "writer", "both", "admin"])
def test_scope_and_prefix_are_checked_per_command(guarded: Service, key: str) -> None:
    with Socket(guarded, key=key) as ws:
        for op, fields, may in COMMANDS:
            answer = ws.ask(op, request_id="r", **fields)
            assert answer["request_id"] == "r"
            if key in may:
                assert answer["op"] != "error", (op, fields, answer)
            else:
                assert answer["code"] == "forbidden", (op, fields, answer)


def test_a_key_that_is_taken_away_ends_its_sockets(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("root\nleaves:r\nnarrows:r\n")
    with Service(env={"TOPICS_API_KEYS_FILE": str(file)}) as service:
        service.client.headers["Authorization"] = "Bearer root"
        for name in ("a.t", "b.t"):
            write(service.client, name, 1)
        with Socket(service, key="leaves") as leaves, Socket(service, key="narrows") as narrows:
            for ws in (leaves, narrows):
                ws.ask("subscribe", topics=["a.t", "b.t"], tail=True)
                assert {ws.next("caught_up")["topic"] for _ in range(2)} == {"a.t", "b.t"}
            file.write_text("root\nnarrows:r:b.\n")
            assert service.run("reload").returncode == 0
            with pytest.raises(ConnectionClosed) as closed:
                leaves.next()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008
            error = narrows.next("error")
            assert (error["request_id"], error["code"], error["detail"]) == (None, "forbidden", {"topic": "a.t"})
            write(service.client, "a.t", 2)
            write(service.client, "b.t", 2)
            assert narrows.next("record")["topic"] == "b.t"


def test_pages_of_other_sites_are_refused(service: Service) -> None:
    """A browser asks nobody before a page of any site opens a WebSocket to this machine."""
    with Socket(service, origin=service.url) as same:
        assert same.ask("ping", request_id=1)["op"] == "pong"
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"{service.url}.evil.example"):
        with pytest.raises(InvalidStatus) as failed:
            Socket(service, origin=origin)
        refusal(failed.value, 403, "forbidden")
    with Service(frontends=1, shards=1, env={"TOPICS_CORS_ORIGINS": "https://app.example"}) as open_to:
        Socket(open_to, origin="https://app.example").close()
        with pytest.raises(InvalidStatus):
            Socket(open_to, origin="https://other.example")


# --- ends


def test_sockets_take_places_of_event_streams() -> None:
    with Service(env={"TOPICS_MAX_SSE_CONNECTIONS": "2"}) as service:
        put(service.client, "t")
        with Socket(service), follow(service, {"t": {}}) as stream:
            stream.event("caught-up")
            with pytest.raises(InvalidStatus) as failed:
                Socket(service)
            error = refusal(failed.value, 429, "throttled")
            assert error["detail"] == {"limit": "max_sse_connections", "max": 2}
            assert failed.value.response.headers["retry-after"] == "1"

        def room() -> bool:
            try:
                Socket(service).close()
            except InvalidStatus:
                return False
            return True

        poll("the place of a closed socket to be free", room)


def test_the_first_ping_of_the_protocol_comes_after_an_interval(service: Service) -> None:
    """The first frame is the answer to the first command: a ping at once would be in front of it."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as end:
        upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {}\r\n"
        key = base64.b64encode(bytes(16)).decode()
        end.sendall(f"GET /v0/ws HTTP/1.1\r\nHost: {host}\r\n{upgrade.format(key)}\r\n".encode())
        got = b""
        while b"\r\n\r\n" not in got:
            got += end.recv(4096)
        command = b'{"op":"ping","request_id":1}'
        end.sendall(bytes([0x81, 0x80 | len(command)]) + bytes(4) + command)  # a mask of zeros changes nothing
        frames = got.partition(b"\r\n\r\n")[2]
        while not frames:
            frames = end.recv(4096)
        assert frames[0] == 0x81, f"a whole text message, not {frames[:2]!r}"


def last_words(ws: Socket) -> str | None:
    try:
        return str(ws.next()["op"])
    except ConnectionClosed:
        return None


@pytest.mark.long
def test_a_stop_acknowledges_what_was_sent_and_closes_with_1012() -> None:
    with Service() as service:
        put(service.client, "t")
        with Socket(service) as ws, Socket(service):
            ws.ask("subscribe", topic="t")
            ws.next("caught_up")
            assert ws.ask("publish", topic="t", records=RECORDS)["op"] in ("ack", "record")
            service.stop()
            ops = list(iter(lambda: last_words(ws), None))
            assert set(ops) <= {"ack", "record", "error"}
            assert ops[-1] == "error", "the last message says that the service stops"
            assert ws.wire.close_code == 1012
        service.start()


def connections(service: Service) -> int:
    metrics = service.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
    return int(metrics["topics_ws_connections"])


def open_sockets(pids: list[int]) -> int:
    """Return the number of open sockets of these processes, also those whose other end is gone."""
    count = 0
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    return count


def all_places_free(service: Service, places: int) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(places):
                assert stack.enter_context(Socket(service)).ask("ping", request_id=1)["op"] == "pong"
        except InvalidStatus:
            return False
    return True


@pytest.mark.long
def test_sockets_that_vanish_leave_nothing_behind(service: Service, topic: str) -> None:
    write(service.client, topic, *["x" * 1000] * 5000)
    pids = [service.pid_of("frontend", index) for index in range(2)]
    connections(service)
    before = open_sockets(pids)
    for n in range(40):
        ws = Socket(service)
        ws.send("subscribe", topic=topic)
        ws.send("publish", topic=topic, records=RECORDS)
        if n % 2:
            ws.next()
        ws.wire.socket.shutdown(socket.SHUT_RDWR)
        ws.wire.socket.close()
    poll("their sockets to be gone", lambda: connections(service) == 0, deadline_s=20)
    poll("their files to be closed", lambda: open_sockets(pids) <= before)
    assert write(service.client, topic, 1)["count"] == 1


HANDSHAKE = (
    b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
UPGRADE_TO_H2 = (
    b"GET /v0/topics HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n"
)


@pytest.mark.long
@pytest.mark.parametrize("data", [HANDSHAKE + b"\x81\x85\0\0\0\0hello", HANDSHAKE, HANDSHAKE[:-60], UPGRADE_TO_H2])
def test_a_client_gone_in_its_handshake_leaves_nothing_behind(data: bytes) -> None:
    """Hypercorn does not tell the app in each of these cases; places and sockets would stay for ever."""
    with Service(frontends=1, shards=1, env={"TOPICS_MAX_SSE_CONNECTIONS": "8"}) as service:
        pids = [service.pid_of("frontend")]
        connections(service)
        before = open_sockets(pids)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", service.port), timeout=10) as raw:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
        poll("their places to be free", lambda: all_places_free(service, 8), deadline_s=20)
        poll("their sockets to be closed", lambda: open_sockets(pids) <= before, deadline_s=15)


@pytest.mark.long
def test_a_message_beyond_the_body_limit_closes_the_socket() -> None:
    with Service(frontends=1, shards=1, env={"TOPICS_MAX_BODY_BYTES": "65536"}) as service:
        with Socket(service) as ws:
            ws.wire.send("x" * 70_000)
            with pytest.raises(ConnectionClosed) as closed:
                ws.next()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        assert write(service.client, "t", 1)["first_seq"] == 1


@pytest.mark.long
def test_a_shard_that_dies_answers_when_it_is_back() -> None:
    topic = "t"
    with Service() as service, Socket(service) as ws:
        put(service.client, topic)
        ws.ask("subscribe", topic=topic)
        ws.next("caught_up")
        killed = [service.kill("walshard", index) for index in range(service.shards)]
        answer = ws.ask("publish", request_id="p", topic=topic, records=RECORDS, idempotency_key="once")
        assert answer["op"] in ("ack", "error"), answer
        assert answer["request_id"] == "p"
        for pid in killed:
            service.wait_healed(pid)
        again = ws.ask("publish", request_id="q", topic=topic, records=RECORDS, idempotency_key="once")
        assert again["first_seq"] == 1, json.dumps([answer, again])
