"""`GET /v0/openapi.json` says what the service does: schemathesis makes requests of it, holds answers against it."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.contract.asking import ok, refused, write
from tests.contract.auth_table import PROBES, ROUTES, STREAM, TAIL, WORK
from tests.harness import Service
from topics.core.errors import STATUS_BY_CODE

pytestmark = pytest.mark.long

DOCUMENTATION = {("get", "/v0/openapi.json"), ("get", "/v0/docs"), ("get", "/v0/docs.js"), ("get", "/v0/docs.css")}
KEY = ("get", "/v0/key")
"""It says what a key may do, so every key may ask."""


@pytest.fixture(scope="module")
def document(service: Service) -> dict[str, Any]:
    answer = service.client.get("/v0/openapi.json")
    assert answer.status_code == 200
    body: dict[str, Any] = answer.json()
    return body


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(method, path): one for path, of in document["paths"].items() for method, one in of.items()}


def test_it_is_openapi_3_1(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    for schema in document["components"]["schemas"].values():
        whole = {**schema, "components": document["components"]}
        jsonschema_rs.meta.validate({**whole, "$schema": "https://json-schema.org/draft/2020-12/schema"})
    referenced = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert referenced <= set(document["components"]["schemas"])
    identifiers = [one["operationId"] for one in operations(document).values()]
    assert len(identifiers) == len(set(identifiers))


def test_every_route_of_the_auth_table_is_in_it_and_no_other(document: dict[str, Any]) -> None:
    rows = {(row.method.lower(), row.path) for row in (*ROUTES, STREAM, WORK, TAIL, *PROBES)}
    assert set(operations(document)) == rows | DOCUMENTATION | {KEY, ("get", "/v0/ws")}


def test_what_is_allowed_is_what_is_documented(client: httpx.Client, topic: str, document: dict[str, Any]) -> None:
    """OPTIONS on every path, HEAD where there is GET, 405 for what is left."""
    for path, of in document["paths"].items():
        url = path.replace("{topic}", topic).replace("{wid}", "wid_AAAAAAAAAAAAAAAAAAAAAA")
        options = client.options(url)
        assert (options.status_code, options.content) == (204, b""), url
        allowed = {method.strip().lower() for method in options.headers["allow"].split(",")}
        has_head = "get" in of and path not in (STREAM.path, WORK.path)  # to begin a stream is to take something
        assert allowed == set(of) | {"options"} | ({"head"} if has_head else set()), url
        for method in {"get", "head", "put", "post", "delete", "patch", "trace"} - allowed:
            answer = client.request(method, url)
            assert answer.status_code == 405, (method, url)
            assert answer.headers["allow"] == options.headers["allow"]
        if "get" in of:
            head, get = client.head(url), client.get(url)
            assert head.content == b""
            if has_head:
                assert head.status_code == get.status_code
                assert head.headers["content-type"] == get.headers["content-type"]


def test_errors_are_listed_by_their_codes(document: dict[str, Any]) -> None:
    for key, one in operations(document).items():
        listed = {
            (int(status), code)
            for status, response in one["responses"].items()
            if int(status) >= 400
            for code in response["description"].removeprefix("`error.code`: ").split(", ")
        }
        assert listed, key
        assert all(STATUS_BY_CODE[code] == status for status, code in listed), key


def test_requests_are_described_by_the_types_that_decode_them(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert set(schemas["AppendBody"]["properties"]) >= {"records", "node", "idempotency_key", "create", "config"}
    assert schemas["RecordBody"]["required"] == ["data"]
    assert set(schemas["WatchBody"]["properties"]["consistency"]["enum"]) == {"eventual", "strong"}


def test_the_page_needs_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path, content_type in (("docs", "text/html"), ("docs.js", "text/javascript"), ("docs.css", "text/css")):
        answer = client.get(f"/v0/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(content_type)
        assert "'self'" in answer.headers["content-security-policy"]
        assert not re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", answer.text)
    page = client.get("/v0/docs").text
    for linked in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert client.get(f"/v0/{linked}").status_code == 200
    refused(client.get("/v0/docs.map"), 404, "not_found")


def test_documentation_needs_no_key() -> None:
    with Service(shards=1, frontends=1, env={"TOPICS_API_KEYS": "k"}) as service:
        for _, path in DOCUMENTATION:
            assert service.client.get(path).status_code == 200
        refused(service.client.get("/v0/topics"), 401, "unauthorized")
        refused(service.client.get("/v0/ws"), 426, "upgrade_required")


# --- schemathesis


@pytest.fixture(scope="module")
def api(service: Service) -> Any:
    write(service.client, "existing", 1, 2, 3)
    ok(service.client.get("/v0/topics/existing"))
    return schemathesis.openapi.from_url(f"{service.url}/v0/openapi.json")


CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
)
EXAMPLES = int(os.environ.get("TOPICS_FUZZ_EXAMPLES", "25"))
"""Requests that are made for each operation."""


def test_answers_are_what_the_document_says(api: Any) -> None:
    """Requests that fit the schemas; each answer has a status, a type and a body that are documented."""
    asked = 0
    for found in api.get_all_operations():
        operation = found.ok()
        if operation.path in ("/v0/ws", WORK.path):
            continue  # they do not end by themselves, and have their own tests

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(), st.booleans())
        def ask(case: Any, of_existing: bool) -> None:
            if of_existing and "topic" in (case.path_parameters or {}):
                case.path_parameters["topic"] = "existing"
            if isinstance(case.body, dict):
                case.body.pop("wait_ms", None)  # a long poll is not waited for a hundred times
            case.call_and_validate(checks=CHECKS, timeout=20)

        try:
            ask()
        except BaseException as failure:
            failure.add_note(f"{operation.method.upper()} {operation.path}")
            raise
        asked += 1
    assert asked >= len(ROUTES) + len(PROBES) + 1
