"""CORS as browsers do it, when `TOPICS_CORS_ORIGINS` says so (operations: environment); and not at all otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.contract.asking import envelope, ok, put, write
from tests.contract.stream import Stream, watch
from tests.frontend.http1_server import Client
from tests.harness import Service

APP = "https://app.example"
OTHER = "https://other.example"
PREFIX = "access-control-"
READABLE = "access-control-allow-origin"


@pytest.fixture(scope="module")
def listed() -> Iterator[Service]:
    with Service(frontends=1, shards=1, env={"TOPICS_CORS_ORIGINS": f"{APP},http://localhost:8080"}) as running:
        yield running


@pytest.fixture(scope="module")
def everybody() -> Iterator[Service]:
    with Service(frontends=1, shards=1, env={"TOPICS_CORS_ORIGINS": "*"}) as running:
        yield running


def preflight(service: Service, path: str, origin: str, method: str, headers: str | None = None) -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    if headers is not None:
        asked["Access-Control-Request-Headers"] = headers
    return service.client.options(path, headers=asked)


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith(PREFIX)}


def varies_by_origin(answer: httpx.Response) -> bool:
    return "origin" in [part.strip().lower() for part in answer.headers.get("vary", "").split(",")]


def test_without_the_setting_there_is_none(client: httpx.Client, service: Service, topic: str) -> None:
    put(client, topic)
    for answer in (
        client.get(f"/v0/topics/{topic}", headers={"Origin": APP}),
        preflight(service, f"/v0/topics/{topic}", APP, "POST", "content-type"),
    ):
        assert cors_headers(answer) == {}
        assert not varies_by_origin(answer)


@pytest.mark.parametrize("origin", [APP, "http://localhost:8080"])
@pytest.mark.parametrize(
    ("path", "method", "headers"),
    [
        ("/v0/topics/t", "POST", "content-type"),
        ("/v0/topics/t", "PUT", "Content-Type, Authorization"),
        ("/v0/topics/t", "DELETE", None),
        ("/v0/topics/t/diff", "POST", "content-type,idempotency-key,content-encoding"),
        ("/v0/watch/wid_x", "GET", "last-event-id,cache-control"),
    ],
)
def test_a_preflight_is_answered(listed: Service, origin: str, path: str, method: str, headers: str | None) -> None:
    answer = preflight(listed, path, origin, method, headers)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers[READABLE] == origin
    assert method in answer.headers["access-control-allow-methods"].split(", ")
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert {name.strip().lower() for name in (headers or "").split(",") if name} <= allowed
    assert int(answer.headers["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in answer.headers
    assert varies_by_origin(answer)


@pytest.mark.parametrize(
    ("origin", "method", "headers"),
    [(OTHER, "POST", None), (APP + ".evil", "POST", None), ("null", "GET", None), (APP, "PATCH", None)],
)
def test_a_preflight_for_what_is_not_allowed(listed: Service, origin: str, method: str, headers: str | None) -> None:
    answer = preflight(listed, "/v0/topics/t", origin, method, headers)
    assert answer.status_code == 400
    envelope(answer.content, answer.headers["content-type"], "invalid_request")
    if origin != APP:
        assert READABLE not in answer.headers


def test_answers_are_readable_by_pages_of_a_listed_origin_only(listed: Service) -> None:
    put(listed.client, "t")
    listed.client.headers["Accept-Encoding"] = "gzip"
    write(listed.client, "t", "x" * 5000)
    requests: list[tuple[str, str, dict[str, Any] | None, int]] = [
        ("GET", "/v0/topics/t", None, 200),
        ("POST", "/v0/topics/t", {"records": [{"data": 1}]}, 200),
        ("POST", "/v0/topics/t/diff", {}, 200),
        ("GET", "/v0/topics/none", None, 404),
        ("PATCH", "/v0/topics/t", None, 405),
        ("POST", "/v0/topics/t", {"records": []}, 400),
        ("GET", "/v0/nothing", None, 404),
        ("GET", "/v0/metrics", None, 200),
    ]
    for method, path, body, status in requests:
        for origin, readable in ((APP, APP), (OTHER, None)):
            answer = listed.client.request(method, path, json=body, headers={"Origin": origin})
            may_ask = method == "GET" or origin == APP
            assert answer.status_code == (status if may_ask else 403)
            assert answer.headers.get(READABLE) == readable, (method, path, origin)
            assert "access-control-allow-credentials" not in answer.headers
            assert varies_by_origin(answer)
            if answer.headers.get("content-encoding"):
                assert "accept-encoding" in answer.headers["vary"]
        plain = listed.client.request(method, path, json=body)
        assert cors_headers(plain) == {}
        assert varies_by_origin(plain), "a cache must not give this answer to a page"


@pytest.mark.parametrize("is_h2", [False, True])
def test_a_refusal_of_a_long_target_is_readable(listed: Service, is_h2: bool) -> None:
    """Over HTTP/2 it had no such headers, so the page could not tell it from a service that is away."""
    with httpx.Client(base_url=listed.url, http1=not is_h2, http2=is_h2, timeout=20) as client:
        for origin, readable in ((APP, APP), (OTHER, None)):
            answer = client.get("/v0/topics/" + "a" * 17_000, headers={"Origin": origin})
            envelope(answer.content, answer.headers["content-type"], "uri_too_long")
            assert (answer.status_code, answer.headers.get(READABLE)) == (414, readable)
            assert varies_by_origin(answer)


def test_event_streams_are_readable_as_well(listed: Service) -> None:
    put(listed.client, "s")
    wid = watch(listed.client, {"s": {}})["wid"]
    with Stream(listed.url, wid, {"Origin": APP, "Accept": "text/event-stream"}) as stream:
        assert stream.response.headers[READABLE] == APP
        assert stream.response.headers["cache-control"] == "no-store"
        stream.event("caught-up")
        write(listed.client, "s", 1)
        assert stream.records(1)[0]["data"] == 1


def test_a_star_is_for_everybody_and_never_with_credentials(everybody: Service) -> None:
    put(everybody.client, "t")
    for origin in (APP, OTHER, "null"):
        for answer in (
            everybody.client.get("/v0/topics/t", headers={"Origin": origin, "Cookie": "a=b"}),
            preflight(everybody, "/v0/topics/t", origin, "POST", "content-type"),
        ):
            assert answer.is_success
            assert answer.headers[READABLE] == "*"
            assert "access-control-allow-credentials" not in answer.headers
    refused = preflight(everybody, "/v0/topics/t", APP, "POST", "x-anything")
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("lines", "rest", "status"),
    [
        (["Content-Length: 1000000000000"], b"", 413),
        (["Content-Length: 1", "Expect: a miracle"], b"", 417),
        (["Transfer-Encoding: chunked"], b"no size\r\n", 400),
        (["Host: again"], b"", 400),
        (["X: 1"] * 200, b"", 431),
    ],
    ids=["too long", "expectation", "chunks", "hosts", "headers"],
)
def test_refusals_by_the_parser_are_readable_as_well(
    listed: Service, everybody: Service, lines: list[str], rest: bytes, status: int
) -> None:
    for service, origin, readable in (
        (listed, APP, APP),
        (listed, OTHER, None),
        (listed, None, None),
        (everybody, OTHER, "*"),
    ):
        head = ["POST /v0/topics/t HTTP/1.1", "Host: localhost", *([] if origin is None else [f"oRIGIN:  {origin} "])]
        with Client(service.port) as client:
            client.send("\r\n".join([*head, *lines, "", ""]).encode() + rest)
            answer = client.answer()
        assert answer.status == status
        assert answer.headers.get(READABLE.encode(), b"").decode() == (readable or "")
        assert answer.headers[b"vary"] == b"Origin"


def test_refusals_by_the_parser_have_no_such_headers_without_the_setting(service: Service) -> None:
    with Client(service.port) as client:
        client.post("/v0/topics/t", b"", f"Origin: {APP}", "Host: again")
        assert not {READABLE.encode(), b"vary"} & client.answer().headers.keys()


def test_plain_options_and_requests_of_programs_go_on_as_ever(listed: Service) -> None:
    answer = listed.client.options("/v0/topics/t")
    assert answer.status_code == 204
    assert "PUT" in answer.headers["allow"]
    assert ok(listed.client.put("/v0/topics/t", json={}))["topic"] == "t"


def test_a_preflight_carries_no_key_and_needs_none() -> None:
    with Service(frontends=1, shards=1, env={"TOPICS_CORS_ORIGINS": APP, "TOPICS_API_KEYS": "secret"}) as service:
        assert preflight(service, "/v0/topics/t", APP, "PUT", "authorization,content-type").status_code == 204
        keyless = service.client.put("/v0/topics/t", json={}, headers={"Origin": APP})
        assert keyless.status_code == 401
        assert keyless.headers[READABLE] == APP, "the page is to see why"
        keyed = service.client.put("/v0/topics/t", json={}, headers={"Origin": APP, "Authorization": "Bearer secret"})
        assert (keyed.status_code, keyed.headers[READABLE]) == (201, APP)
