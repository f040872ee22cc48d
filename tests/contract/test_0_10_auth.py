"""api §0.10: who may do what, over real HTTP. The table of routes is `auth_table.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cases import case
from tests.contract.asking import diff, ok, put, refused, state, write
from tests.contract.auth_table import (
    DEAD,
    KEYS,
    PROBES,
    ROOT,
    ROUTER,
    ROUTES,
    SCOPES,
    STREAM,
    TOPIC,
    WORK,
    RouteRow,
    TableKey,
)
from tests.contract.stream import Stream, until_streams_are_over, watch
from tests.contract.working import Work
from tests.harness import COMMAND, Service

MARKER = f"s3cr3t{os.urandom(6).hex()}"
AWKWARD = MARKER + "+a%2Bb?&=#|'\""
"""A key with every character that a form or a shell takes for something else."""


FEW_KEYS = [key for key in KEYS if key.prefix == "covering" or key.scopes == ROOT.scopes]
"""Keys with each set of scopes, and with each prefix."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def header(key: TableKey) -> dict[str, str]:
    return bearer(key.text(MARKER))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """All keys of the table, one half by the variable, the other by the file, and one more."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    entries = [key.entry(MARKER) for key in KEYS]
    file.write_text("# the second half\n\n" + "\n".join(entries[1::2]) + f"\n{AWKWARD}:rw\n")
    env = {
        "TOPICS_API_KEYS": ", ".join(entries[::2]),
        "TOPICS_API_KEYS_FILE": str(file),
        "TOPICS_LOG_LEVEL": "debug",
        "TOPICS_TEST_MIN_HEARTBEAT_MS": "20",
    }
    with Service(env=env, command=COMMAND) as running:  # whose own command line a test looks at
        yield running


@pytest.fixture
def root(guarded: Service) -> Iterator[httpx.Client]:
    """A client that may do everything; TOPIC exists, a queue with a cursor, dead letters and a router."""
    with httpx.Client(base_url=guarded.url, headers=header(ROOT), timeout=20) as client:
        make_what_is_asked_for(client)
        yield client


def make_what_is_asked_for(client: httpx.Client) -> None:
    put(client, TOPIC, type="queue")
    put(client, DEAD)
    ok(client.put(f"/v0/topics/{TOPIC}/cursors/c", json={}))
    ok(client.put(f"/v0/routers/{TOPIC}", json=ROUTER))


def remake(client: httpx.Client, row: RouteRow) -> None:
    """Make again what a request that succeeded may have deleted."""
    if row.method == "DELETE":
        make_what_is_asked_for(client)


@pytest.fixture
def nobody(guarded: Service, root: httpx.Client) -> httpx.Client:
    """A client without a key; TOPIC exists."""
    return guarded.client


def path_of(row: RouteRow, name: str) -> str:
    """The path, about this name whatever kind of thing it names."""
    return row.path.format(topic=name, router=name, sink=name, cursor="c", pin=f"pin_{22 * 'a'}")


def ask(client: httpx.Client, row: RouteRow, topic: str = TOPIC, **headers: str) -> httpx.Response:
    as_json = {"Accept": "application/json"}
    return client.request(row.method, path_of(row, topic), json=row.json, headers=as_json | headers)


def challenged(response: httpx.Response) -> dict[str, Any]:
    """A 401 with all that belongs to it."""
    error = refused(response, 401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    return error


def _id(key: TableKey) -> str:
    return f"{'+'.join(sorted(key.scopes))}:{key.prefix}"


# --- names outside the prefixes of a key


def test_an_error_of_a_router_names_only_what_its_key_may_see(guarded: Service, root: httpx.Client) -> None:
    hidden, dest, far = "out.source", "in.dest", "in.far"
    ok(root.put("/v0/routers/out.fan-in", json={"source": hidden, "dest": dest}))
    ok(root.put("/v0/routers/out.back", json={"source": far, "dest": hidden}))
    caller = header(TableKey(frozenset(SCOPES), "covering"))
    asked = {
        "topic_exists_incompatible": {"source": "in.other", "dest": dest},
        "router_cycle": {"source": dest, "dest": far},
    }
    for code, spec in asked.items():
        refused(root.put("/v0/routers/in.new", json=spec), 409, code)
        answer = root.put("/v0/routers/in.new", json=spec, headers=caller)
        refused(answer, 409, code)
        assert "out." not in answer.text, answer.text
    ok(root.put("/v0/routers/in.half", json={"source": hidden, "dest": "in.half-dest"}))
    for method in ("GET", "PUT", "DELETE"):
        answer = root.request(method, "/v0/routers/in.half", json={"source": "in.a", "dest": "in.b"}, headers=caller)
        refused(answer, 403, "forbidden")
        assert "out." not in answer.text, answer.text


# --- the table


@pytest.mark.parametrize(
    "keys", [pytest.param(KEYS, id="all", marks=pytest.mark.long), pytest.param(FEW_KEYS, id="few")]
)
def test_every_route_for_every_key(root: httpx.Client, keys: list[TableKey]) -> None:
    for row in ROUTES:
        with case(row.method, row.path):
            for key in keys:
                with case(key):
                    answer = ask(root, row, **header(key))
                    if not row.needs <= key.scopes:
                        error = refused(answer, 403, "forbidden")
                        assert error["detail"] == {"missing_scopes": sorted(row.needs - key.scopes)}
                    elif row.named and not key.covers:
                        assert refused(answer, 403, "forbidden")["detail"] == {"name": TOPIC}
                    else:
                        ok(answer)
                        remake(root, row)


INVALID = [
    None,
    "",
    "Bearer",
    "Bearer =",
    f"Bearer {MARKER}",
    "Bearer " + ROOT.text(MARKER)[:-1],
    "Bearer " + ROOT.text(MARKER) + "x",
    "Bearer " + ROOT.text(MARKER).upper(),
    "Bearer " + ROOT.entry(MARKER),
    "Basic " + ROOT.text(MARKER),
    ROOT.text(MARKER),
    f"Bearer {ROOT.text(MARKER)}, Bearer {ROOT.text(MARKER)}",
]
"""Values of an Authorization header, None for no header."""


def test_every_route_without_a_valid_key(nobody: httpx.Client) -> None:
    for row in ROUTES:
        with case(row.method, row.path):
            for value in INVALID:
                with case(value):
                    challenged(ask(nobody, row, **({} if value is None else {"Authorization": value})))


def test_a_refusal_changes_and_reveals_nothing(root: httpx.Client) -> None:
    """The answer is as if the body had never come, and the same whether or not the topic exists."""
    for row in ROUTES:
        with case(row.method, row.path):
            before = state(root, TOPIC)
            outsider = header(TableKey(frozenset(SCOPES), "another"))
            for headers in ({"Authorization": ""}, outsider):
                if not row.named and headers is outsider:
                    continue
                there = ask(root, row, **headers)
                assert there.status_code in (401, 403)
                if "{topic}" in row.path:
                    absent = ask(root, row, "in.absent", **headers)
                    assert absent.text == there.text.replace(TOPIC, "in.absent")
                    refused(root.get("/v0/topics/in.absent"), 404, "topic_not_found")
            now = state(root, TOPIC)
            assert [now[field] for field in ("head_seq", "count", "config", "last_read_ts")] == [
                before[field] for field in ("head_seq", "count", "config", "last_read_ts")
            ]


def test_the_scheme_is_any_case_and_may_be_followed_by_more_blanks(root: httpx.Client) -> None:
    for row in ROUTES:
        with case(row.method, row.path):
            for scheme in ("bearer ", "BEARER ", "Bearer   "):
                ok(ask(root, row, Authorization=scheme + ROOT.text(MARKER)))
            remake(root, row)


def test_two_different_keys_are_a_400(nobody: httpx.Client) -> None:
    """They were no key, `401`, though api §0.1 says of every header with one value what two of them are."""
    for row in ROUTES:
        with case(row.method, row.path):
            twice = [("Authorization", f"Bearer {ROOT.text(MARKER)}"), ("Authorization", f"Bearer {MARKER}")]
            for headers in (twice, twice[::-1]):
                answer = nobody.request(row.method, path_of(row, TOPIC), json=row.json, headers=headers)
                assert refused(answer, 400, "invalid_request")["detail"]["field"] == "Authorization"


def test_the_same_key_twice_is_one(nobody: httpx.Client) -> None:
    twice = [("Authorization", f"Bearer {ROOT.text(MARKER)}")] * 2
    assert ok(nobody.get("/v0/key", headers=twice))["keys"] is True


def test_a_token_in_the_query_is_no_key(nobody: httpx.Client) -> None:
    for row in ROUTES:
        with case(row.method, row.path):
            answer = nobody.request(row.method, path_of(row, TOPIC), json=row.json, params={"token": ROOT.text(MARKER)})
            challenged(answer)


@pytest.mark.parametrize("row", PROBES, ids=lambda row: row.path)
def test_probes_are_open(nobody: httpx.Client, row: RouteRow) -> None:
    assert ask(nobody, row).status_code == 200
    assert ask(nobody, row, Authorization="Bearer wrong").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v0/nothing", 404, "not_found"), ("PATCH", "/v0/topics/in.side", 405, "method_not_allowed")],
)
def test_what_is_no_route_is_told_to_anyone(
    nobody: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    refused(nobody.request(method, path), status, code)


def test_head_needs_what_get_needs_and_options_nothing(root: httpx.Client) -> None:
    for row in ROUTES:
        with case(row.method, row.path):
            path = path_of(row, TOPIC)
            assert root.options(path, headers={"Authorization": ""}).status_code == 204
            if row.method == "GET":
                assert root.head(path).status_code == 200
                assert root.head(path, headers={"Authorization": ""}).status_code == 401
                assert root.head(path, headers=header(TableKey(frozenset({"write"}), "any"))).status_code == 403


def test_http2_as_well(guarded: Service, root: httpx.Client) -> None:
    with httpx.Client(base_url=guarded.url, http1=False, http2=True, timeout=20) as client:
        challenged(client.get(f"/v0/topics/{TOPIC}"))
        refused(client.get(f"/v0/topics/{TOPIC}", headers=header(KEYS[3])), 403, "forbidden")
        answer = client.get(f"/v0/topics/{TOPIC}", headers=header(ROOT))
        assert answer.http_version == "HTTP/2"
        ok(answer)


def test_a_large_body_without_a_key_is_not_waited_for(nobody: httpx.Client) -> None:
    content = b'{"records":[' + b",".join([b'{"data":"%b"}' % (b"x" * 1000)] * 3000) + b"]}"
    answer = nobody.post(f"/v0/topics/{TOPIC}", content=content, headers={"Content-Type": "application/json"})
    challenged(answer)
    assert nobody.get("/v0/health").status_code == 200


# --- names in bodies, lists


def test_one_topic_outside_forbids_the_watch(root: httpx.Client) -> None:
    put(root, "out.side")
    key = header(TableKey(frozenset({"read"}), "covering"))
    for outside in ("out.side", "out.absent"):
        for query in ("", "?lenient=true"):
            body: dict[str, Any] = {"topics": {TOPIC: {}, outside: {}}}
            error = refused(root.post(f"/v0/watch{query}", json=body, headers=key), 403, "forbidden")
            assert error["detail"] == {"name": outside}


def test_a_dead_letter_topic_is_a_name_too(root: httpx.Client) -> None:
    limited = header(TableKey(frozenset(SCOPES), "covering"))
    config = {"type": "queue", "dead_letter": "out.side"}
    for answer in (
        root.put("/v0/topics/in.queue", json=config, headers=limited),
        root.post("/v0/topics/in.queue", json={"records": [{"data": 1}], "config": config}, headers=limited),
    ):
        assert refused(answer, 403, "forbidden")["detail"] == {"name": "out.side"}
    refused(root.get("/v0/topics/in.queue"), 404, "topic_not_found")
    put(root, "in.queue")
    ok(root.post("/v0/topics/in.queue", json={"records": [{"data": 1}], "config": config}, headers=limited))
    assert state(root, "in.queue")["config"]["dead_letter"] is None


def test_who_deletes_a_topic_hears_of_those_routers_alone_that_its_key_covers(root: httpx.Client) -> None:
    routers = {"in.shown": ("in.a", "in.b"), "out.name": ("in.a", "in.c"), "in.far": ("in.a", "out.d")}
    for name, (source, dest) in routers.items():
        ok(root.put(f"/v0/routers/{name}", json={"source": source, "dest": dest}))
    limited = header(TableKey(frozenset(SCOPES), "covering"))
    assert ok(root.delete("/v0/topics/in.a", headers=limited))["routers_removed"] == ["in.shown"]
    for name in routers:
        refused(root.get(f"/v0/routers/{name}"), 404, "router_not_found")


def names(client: httpx.Client, key: TableKey, **params: Any) -> list[str]:
    """All pages of a list."""
    found: list[str] = []
    while True:
        page = ok(client.get("/v0/topics", params=params, headers=header(key)))
        found += [entry["topic"] for entry in page["topics"]]
        if "next_cursor" not in page:
            return found
        params["cursor"] = page["next_cursor"]


def test_lists_show_what_the_key_covers(root: httpx.Client) -> None:
    made = ["in", "in.", "in.a", "in.s", "in.sa", TOPIC, "in.side.b", "in.t", "inn", "out.side", "zy", "zz", "zzz"]
    for name in made:
        put(root, name)
    read = frozenset({"read"})
    everything = names(root, ROOT)
    assert set(made) <= set(everything)
    assert everything == sorted(everything)
    covered = {
        "any": ("",),
        "covering": ("in.",),
        "one-of-two": ("zz", "in.s"),
        "another": ("out.",),
        "longer": ("in.side.",),
    }
    for prefix, beginnings in covered.items():
        for asked in ("", "i", "in.", "in.s", "in.side.b", "z", "zz", "out", "none"):
            expected = [name for name in everything if name.startswith(beginnings) and name.startswith(asked)]
            for page_size in (1, 2, 100):
                assert names(root, TableKey(read, prefix), prefix=asked, page_size=page_size) == expected


# --- streams


def session(client: httpx.Client, key: TableKey, **body: Any) -> str:
    return str(ok(client.post("/v0/watch", json={"topics": {TOPIC: {}}, **body}, headers=header(key)))["wid"])


MAKERS = [key for key in KEYS if "read" in key.scopes and key.covers]


@pytest.mark.parametrize(
    "maker", [pytest.param(key, marks=[] if key in FEW_KEYS[-5:] else pytest.mark.long) for key in MAKERS], ids=_id
)
def test_a_session_belongs_to_the_key_that_made_it(guarded: Service, root: httpx.Client, maker: TableKey) -> None:
    wid = session(root, maker)
    path = STREAM.path.format(wid=wid)
    for key in KEYS:
        if key != maker:
            challenged(root.get(path, headers=header(key)))
    challenged(root.get(path, headers={"Authorization": ""}))
    challenged(root.get(path, headers=bearer("wrong")))
    with Stream(guarded.url, wid, header(maker)) as stream:
        stream.until_caught_up(1)


@pytest.mark.parametrize("wid", ["wid_AAAAAAAAAAAAAAAAAAAAAA", "wid_", "x"])
def test_an_unknown_wid_is_404_for_any_key_and_401_without_one(nobody: httpx.Client, wid: str) -> None:
    """Anybody could ask without a key which sessions there are."""
    path = f"/v0/watch/{wid}"
    refused(nobody.get(path, headers=header(ROOT)), 404, "not_found")
    refused(nobody.get(path, params={"token": ROOT.text(MARKER)}), 404, "not_found")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Accept": "application/json"}):
        for query in ("", "?token=wrong"):
            challenged(nobody.get(path + query, headers=headers))


def test_who_only_knows_the_wid_does_not_disturb_it(guarded: Service, root: httpx.Client) -> None:
    put(root, TOPIC, cap_records=0)
    head = write(root, TOPIC, 1, 2, 3)["head_seq"]
    wid = session(root, ROOT)
    other = header(TableKey(frozenset({"read"}), "any"))
    with Stream(guarded.url, wid, header(ROOT)) as stream:
        frame = stream.event("record")
        assert frame.json["to_seq"] == head
        challenged(root.get(f"/v0/watch/{wid}", headers=other))
        write(root, TOPIC, 4)
        assert stream.records_to(head + 1) == head + 1
    # The end was in order, so the session knows how far it came: an id that is ahead is ignored.
    until_streams_are_over(guarded, root)
    challenged(root.get(f"/v0/watch/{wid}", headers=other | {"Last-Event-ID": frame.id}))
    write(root, TOPIC, 5)
    with Stream(guarded.url, wid, header(ROOT)) as stream:
        assert [record["data"] for record in stream.records(1)] == [5]


def streams(guarded: Service, path: str, **headers: str) -> bool:
    """Return whether the answer is a stream; otherwise it is a whole 401."""
    with (
        httpx.Client(base_url=guarded.url, timeout=10) as client,
        client.stream("GET", path, headers=headers) as answer,
    ):
        if answer.status_code == 200:
            return next(answer.iter_raw()).startswith(b"retry: 2000\n\n")
        answer.read()
        challenged(answer)
        return False


def test_a_token_opens_a_stream_as_a_form_value(guarded: Service, root: httpx.Client) -> None:
    wid = ok(root.post("/v0/watch", json={"topics": {TOPIC: {}}}, headers=bearer(AWKWARD)))["wid"]
    path = f"/v0/watch/{wid}"
    encoded = str(httpx.QueryParams({"token": AWKWARD}))
    assert streams(guarded, f"{path}?{encoded}")
    assert streams(guarded, f"{path}?x=1&{encoded}&y"), "among others"
    for other in ("wrong", ""):
        assert not streams(guarded, f"{path}?token={other}")
        for twice in (f"{encoded}&token={other}", f"token={other}&{encoded}"):
            answer = httpx.get(f"{guarded.url}{path}?{twice}")
            assert (answer.status_code, answer.json()["error"]["detail"]) == (400, {"field": "token"})
    assert not streams(guarded, f"{path}?Token={encoded.removeprefix('token=')}")
    every_byte = "".join(f"%{byte:02x}" for byte in AWKWARD.encode())
    assert streams(guarded, f"{path}?token={every_byte}")
    assert not streams(guarded, f"{path}?token={AWKWARD.partition('+')[0]}+{every_byte}"), "a plus is a blank"


def test_the_header_wins_over_the_token(guarded: Service, root: httpx.Client) -> None:
    wid = session(root, ROOT)
    token = httpx.QueryParams({"token": ROOT.text(MARKER)})
    assert streams(guarded, f"/v0/watch/{wid}?{token}")
    assert not streams(guarded, f"/v0/watch/{wid}?{token}", Authorization="Bearer wrong")
    assert streams(guarded, f"/v0/watch/{wid}?token=wrong", **header(ROOT))
    assert streams(guarded, f"/v0/watch/{wid}?{token}", Authorization="Basic cHJveHk6"), "that one is a proxy's"


# --- silence


def test_no_key_is_ever_said(guarded: Service, root: httpx.Client) -> None:
    token = str(httpx.QueryParams({"token": ROOT.text(MARKER)}))
    wid = session(root, ROOT)
    answers = [
        root.get(f"/v0/nothing?{token}"),
        root.get(f"/v0/topics/{TOPIC}?touch={MARKER}", headers=header(KEYS[0])),
        root.get(f"/v0/watch/{wid}?{token}", headers={"Accept": "text/html"}),
        root.get(f"/v0/watch/{wid}", headers=header(KEYS[0])),
        root.post(f"/v0/topics/{TOPIC}?{token}", content=b"{", headers={"Content-Type": "application/json"}),
        root.post("/v0/watch", json={"topics": {TOPIC: {}}}, headers={"Authorization": f"Bearer {MARKER}"}),
    ]
    assert [answer.status_code for answer in answers] == [404, 400, 406, 401, 400, 401]
    assert streams(guarded, f"/v0/watch/{wid}?{token}")
    assert not [answer.text for answer in answers[2:] if MARKER in answer.text]
    assert answers[1].text.count(MARKER) == answers[1].text.count("touch must be"), "what the client sent as a value"
    log = guarded.log_path.read_text()
    assert MARKER not in log
    said = {line["event"]: line for line in guarded.said()}
    assert said["starting"]["settings"]["api_keys"] == f"{len(KEYS[::2])} masked"
    assert said["authentication is on"]["keys"] == len(KEYS) + 1
    assert not [event for event in said if "AUTHENTICATION IS OFF" in event]
    assert MARKER not in json.dumps(guarded.status())
    for pid in guarded.family():
        assert MARKER not in " ".join(psutil.Process(pid).cmdline())


def test_digests_are_not_said_either(guarded: Service) -> None:
    starting = next(line for line in guarded.said() if line["event"] == "starting")
    assert "digest" not in json.dumps(starting)


# --- start


def checked(arguments: list[str] | None = None, **env: str) -> tuple[int, str]:
    """Exit code of `check` and all it said."""
    service = Service(frontends=1, shards=1, env=env)
    try:
        answer = service.run("check", *(arguments or []))
        return answer.returncode, answer.stdout + answer.stderr
    finally:
        service.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("entries", "position", "what"),
    [
        ("", "entry 1", "it has no key"),
        ("{k},", "entry 2", "it has no key"),
        ("{k},,{k}2", "entry 2", "it has no key"),
        (":read", "entry 1", "it has no key"),
        ("{k}1,{k}2:{k}3", "entry 2", "its scopes must be"),
        ("{k}:reed", "entry 1", "its scopes must be"),
        ("{k}:READ", "entry 1", "its scopes must be"),
        ("{k}:read+", "entry 1", "its scopes must be"),
        ("{k}:read|write", "entry 1", "its scopes must be"),
        ("{k}:r:in|", "entry 1", "its prefixes must be"),
        ("{k}:r:in*", "entry 1", "its prefixes must be"),
        ("{k}:r:-in", "entry 1", "its prefixes must be"),
        ("{k} {k}:r", "entry 1", "its key has characters"),
        ("{k}é", "entry 1", "its key has characters"),
        ("{k}:r,{k}1,{k}:w", "entry 3", "the same key as entry 1"),
    ],
)
def test_a_malformed_list_is_refused_by_position(entries: str, position: str, what: str) -> None:
    code, said = checked(TOPICS_API_KEYS=entries.format(k=MARKER))
    assert code == 2
    assert f"topics-supervisor: TOPICS_API_KEYS: {position}: {what}" in said
    assert MARKER not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "it has no key"),
        ("# nothing yet\n\n", "it has no key"),
        ("{k}:r\n\n# x\n{k}2:x\n", "line 4: its scopes must be"),
        ("{k}:r,{k}2:x\n", "line 1, entry 2: its scopes must be"),
        ("{k}\n{k}:r\n", "line 2: the same key as line 1"),
        ("{k}\né\n", "has a byte that is not ASCII at offset"),
        (None, "cannot be read: No such file or directory"),
        ("{k}-listed", "has a key that is in TOPICS_API_KEYS, too"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_keys_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, what: str, command: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content.format(k=MARKER))
    env = {"TOPICS_API_KEYS_FILE": str(file), "TOPICS_API_KEYS": f"{MARKER}-listed:r"}
    service = Service(frontends=1, shards=1, env=env)
    try:
        answer = service.run(command)
        assert answer.returncode == 2
        assert answer.stderr.startswith(f"topics-supervisor: TOPICS_API_KEYS_FILE={file}: {what}")
        assert MARKER not in answer.stdout + answer.stderr
        assert not service.data_dir.exists()
    finally:
        service.close()


def test_something_other_than_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, what in ((tmp_path / "fifo", "is not a regular file"), (tmp_path, "cannot be read: Is a directory")):
        code, said = checked(TOPICS_API_KEYS_FILE=str(path))
        assert code == 2
        assert f"TOPICS_API_KEYS_FILE={path}: {what}" in said


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--api-keys", MARKER], [f"--api-keys={MARKER}"], ["--api-keys"]])
@pytest.mark.parametrize("command", ["run", "check"])
def test_keys_are_no_flag(arguments: list[str], command: str) -> None:
    service = Service(frontends=1, shards=1)
    try:
        answer = service.run(command, *arguments)
        assert answer.returncode == 2
        assert "TOPICS_API_KEYS_FILE" in answer.stderr
        assert MARKER not in answer.stdout + answer.stderr
    finally:
        service.close()


def test_without_keys_it_says_so_loudly_and_serves_everybody(service: Service, topic: str) -> None:
    (loud,) = [line for line in service.said() if "AUTHENTICATION IS OFF" in line["event"]]
    assert loud["level"] == "warning"
    assert "TOPICS_API_KEYS" in loud["way_out"]
    put(service.client, topic)
    assert diff(service.client, topic)["records"] == []
    ok(service.client.get(f"/v0/topics/{topic}", headers=bearer("any")))
    with Stream(service.url, watch(service.client, {topic: {}})["wid"], bearer("another")) as stream:
        assert stream.event("caught-up").json["topic"] == topic


def test_probe_auth_asks_for_any_key_and_needs_one_to_ask_for() -> None:
    with pytest.MonkeyPatch.context() as patch:
        probed = Service(frontends=1, shards=1, env={"TOPICS_API_KEYS": f"{MARKER}:d:x", "TOPICS_PROBE_AUTH": "1"})

        def is_ready() -> bool:
            try:
                return httpx.get(f"{probed.url}/v0/ready", headers=bearer(MARKER), timeout=20).is_success
            except httpx.TransportError:
                return False

        patch.setattr(probed, "is_ready", is_ready)
        with probed:
            for row in PROBES:
                challenged(ask(probed.client, row))
                challenged(ask(probed.client, row, **bearer("wrong")))
                assert ask(probed.client, row, **bearer(MARKER)).status_code == 200
    code, said = checked(TOPICS_PROBE_AUTH="1")
    assert code == 2
    assert "TOPICS_PROBE_AUTH=1: there are no keys to ask for" in said


# --- a worker's stream


@pytest.mark.long
@pytest.mark.parametrize("key", [key for key in KEYS if key.prefix in ("any", "covering", "another")], ids=_id)
def test_work_is_for_who_may_read_and_write(guarded: Service, root: httpx.Client, key: TableKey) -> None:
    allowed = WORK.needs <= key.scopes and key.covers
    for headers, token in ((header(key), {}), ({}, {"token": key.text(MARKER)})):
        with Work(guarded.url, TOPIC, headers=headers, **token) as work:
            assert work.response.status_code == (200 if allowed else 403)
    with Work(guarded.url, TOPIC) as work:
        assert work.response.status_code == 401


def test_a_key_learns_what_it_may_do_and_ranks_what_it_covers() -> None:
    with Service(env={"TOPICS_API_KEYS": "root,reader:read:in.|on."}) as service:
        root, reader = ({"Authorization": f"Bearer {key}"} for key in ("root", "reader"))
        for name in ("in.a", "out.b", "on.c"):
            ok(service.client.put(f"/v0/topics/{name}", headers=root))
        rights = ok(service.client.get("/v0/key", headers=reader))
        assert (rights["keys"], rights["scopes"], rights["prefixes"]) == (True, ["read"], ["in.", "on."])
        assert ok(service.client.get("/v0/key", headers=root))["scopes"] == ["read", "write", "delete", "admin"]
        assert service.client.get("/v0/key").status_code == 401
        ranked = ok(service.client.get("/v0/topics", params={"sort": "topic"}, headers=reader))
        assert ([one["topic"] for one in ranked["topics"]], ranked["matched"]) == (["in.a", "on.c"], 2)
