"""`docs/api.md` is true: every example of it is run, and what it should name is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.contract.api_page import (
    PAGE,
    Conversation,
    Exchange,
    Likeness,
    PageError,
    Section,
    Spelled,
    decode,
    sections,
)
from tests.contract.socket_client import Socket
from tests.contract.stream import READ_TIMEOUT_S, Frame
from tests.harness import Service, poll
from topics.core.config import TopicConfig
from topics.core.errors import STATUS_BY_CODE
from topics.frontend.live.wording import ADVISORY, FINAL, SHUTTING_DOWN
from topics.frontend.routes.operations import LOST, common_codes
from topics.settings import Settings

TEXT = PAGE.read_text()
SECTIONS = sections(TEXT)
ROOT = PAGE.parents[1]
ASK_AGAIN_S = 10.0
"""Time within which a GET has to answer what is shown: segments are sealed some time after a write."""


@pytest.fixture(scope="module")
def common() -> Iterator[Service]:
    """The service of all sections that name none."""
    with Service() as running:
        yield running


# --- the examples


@pytest.mark.parametrize("section", [one for one in SECTIONS if one.examples], ids=lambda one: one.number)
def test_its_examples_are_what_the_service_says(common: Service, section: Section) -> None:
    with ExitStack() as stack:
        service = common if section.settings is None else stack.enter_context(Service(env=section.settings))
        likeness = Likeness()
        for example in section.examples:
            try:
                if isinstance(example, Conversation):
                    converse(service, example, likeness)
                elif "text/event-stream" in example.answer_headers.get("Content-Type", "") or (
                    example.answer.startswith("retry:")
                ):
                    follow(service, example, likeness)
                else:
                    exchange(service, example, likeness)
            except BaseException as failure:
                failure.add_note(f"{PAGE.name}, the example at line {example.line}")
                raise


def exchange(service: Service, example: Exchange, likeness: Likeness) -> None:
    if example.method != "GET":
        check(example, ask(service, example, likeness), likeness)
        return
    failure = AssertionError()

    def as_shown() -> bool:
        nonlocal failure
        try:
            check(example, ask(service, example, likeness), likeness)
        except AssertionError as error:
            failure = error
            return False
        return True

    try:
        poll("the answer that is shown", as_shown, ASK_AGAIN_S)
    except AssertionError:
        raise failure from None


def ask(service: Service, example: Exchange, likeness: Likeness) -> httpx.Response:
    headers = dict(example.headers)
    if example.body:
        headers.setdefault("Content-Type", "application/json")
    body = likeness.said(example.body).encode() or None
    return service.client.request(example.method, likeness.said(example.path), content=body, headers=headers)


def check(example: Exchange, answer: httpx.Response, likeness: Likeness) -> None:
    assert answer.status_code == example.status, answer.text
    for name, value in example.answer_headers.items():
        assert answer.headers.get(name) == value, (name, answer.headers)
    if answer.headers["content-type"] != "application/json":
        check_series(example.answer, answer.text)
        return
    shown, actual = decode(example.answer), decode(answer.text)
    if answer.is_success and "performance" not in shown:
        # api §0.7: it is everywhere, and shown once.
        assert isinstance(actual.pop("performance")["server_total_ms"], Spelled | int)
    likeness.attempt(shown, actual)


def check_series(shown: str, actual: str) -> None:
    """Metrics: every line that is shown is there, with whatever number."""
    lines = {line if line.startswith("#") else line.rpartition(" ")[0] for line in actual.splitlines()}
    for line in shown.splitlines():
        assert (line if line.startswith("#") else line.rpartition(" ")[0]) in lines, line


def follow(service: Service, example: Exchange, likeness: Likeness) -> None:
    """Follow a stream for as many frames as are shown, then close the connection."""
    blocks = [block.encode() for block in example.answer.split("\n\n")]
    timeout = httpx.Timeout(10.0, read=READ_TIMEOUT_S)
    with service.client.stream("GET", likeness.said(example.path), headers=example.headers, timeout=timeout) as answer:
        assert answer.status_code == example.status, answer.read()
        for name, value in example.answer_headers.items():
            assert answer.headers.get(name) == value, (name, answer.headers)
        frames = split(answer)
        for block in blocks:
            frame = next(frames)
            while frame.raw.startswith(b": hb ") and not block.startswith(b":"):
                frame = next(frames)  # the machine was slow
            check_frame(Frame(block), frame, likeness)


def split(answer: httpx.Response) -> Iterator[Frame]:
    pending = b""
    for chunk in answer.iter_bytes():
        pending += chunk
        *whole, pending = pending.split(b"\n\n")
        yield from map(Frame, whole)


def check_frame(shown: Frame, actual: Frame, likeness: Likeness) -> None:
    outside = re.compile(rb"(?m)^data: .*$|(?<=^: hb )\d+$")
    assert outside.sub(b"", shown.raw) == outside.sub(b"", actual.raw), actual.raw
    if shown.field("data") is not None:
        likeness.check(decode(shown.data.decode()), decode(actual.data.decode()))


def converse(service: Service, example: Conversation, likeness: Likeness) -> None:
    with Socket(service) as socket:
        for to_service, text in example.messages:
            if to_service:
                socket.wire.send(likeness.said(text))
                continue
            shown, actual = decode(text), decode(socket.text())
            if shown["op"] == "ack":
                assert isinstance(actual.pop("performance")["server_total_ms"], Spelled | int)
            likeness.check(shown, actual)


# --- what it names


def test_every_section_that_is_cited_is_there() -> None:
    numbers = {one.number for one in SECTIONS}
    assert len(numbers) == len(SECTIONS), "a number is there twice"
    cited: dict[str, str] = {}
    citation = re.compile(r"api §(\d+(?:\.\d+)?)((?:(?:, | and | to )§\d+(?:\.\d+)?)*)")
    for path in files_of_ours():
        for first, others in citation.findall(path.read_text()):
            for number in (first, *re.findall(r"§(\d+(?:\.\d+)?)", others)):
                cited.setdefault(number, str(path.relative_to(ROOT)))
    assert len(cited) > 20
    assert not {number: where for number, where in cited.items() if number not in numbers}
    within = set(re.findall(r"§(\d+(?:\.\d+)?)", TEXT))
    assert within <= numbers, within - numbers


def files_of_ours() -> Iterator[Path]:
    for folder in ("topics", "tests", "bench", "examples", "docs"):
        for suffix in ("py", "md", "html", "js"):
            yield from (ROOT / folder).rglob(f"*.{suffix}")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that is there, and a heading in it."""
    for name, anchor in re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", page.read_text()):
        target = page.parent / name
        assert target.exists(), name
        if anchor:
            headings = re.findall(r"(?m)^#+ (.+)$", target.read_text())
            slugs = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, (name, anchor, sorted(slugs))


def test_every_error_code_is_in_its_table_with_its_status() -> None:
    rows = re.findall(r"(?m)^\| (\d{3}) \| `(\w+)` \|", TEXT)
    assert {code: int(status) for status, code in rows} == STATUS_BY_CODE
    assert len(rows) == len(STATUS_BY_CODE)


def test_every_error_code_of_streams_is_in_their_tables() -> None:
    """A WebSocket's `server_shutting_down` was nowhere."""
    of_streams = set(re.findall(r"(?m)^\| `error` with code `?(\w+)`? \|", TEXT))
    assert of_streams == {str(ADVISORY), str(FINAL), SHUTTING_DOWN.decode()}
    (of_sockets,) = re.findall(r"(?m)^\| `error` \| `code` \(of §0\.6, or `(\w+)`", TEXT)
    assert of_sockets == SHUTTING_DOWN.decode()


@pytest.fixture(scope="module")
def document(common: Service) -> dict[str, Any]:
    body: dict[str, Any] = common.client.get("/v0/openapi.json").json()
    return body


def test_every_route_is_named(document: dict[str, Any]) -> None:
    routes = {f"{method.upper()} {path}" for path, of in document["paths"].items() for method in of}
    named = set(re.findall(r"`(?:\*\*)?((?:GET|PUT|POST|DELETE) /[^`\s?]+)", TEXT))
    assert len(routes) > 40
    assert routes - named == set()
    assert named - routes == set()


def words(text: str) -> set[str]:
    """Return the words that a text names as code, in a sentence or a table: an example alone explains nothing."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    return {word for span in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"[$\w-]+", span)}


def section_texts() -> list[str]:
    return re.split(r"(?m)^(?=#{2,3} \d)", TEXT)[1:]


OF_ANY_ROUTE = {*common_codes(has_body=True), *LOST}


def test_what_a_route_takes_and_refuses_is_in_its_section(document: dict[str, Any]) -> None:
    """The fields of its body, its query and its own errors, if they are not explained for all routes in §0."""
    texts = re.split(r"(?m)^(?=#{2,3} \d)", TEXT)[1:]
    for_all = words("".join(text for text in texts if re.match(r"#+ 0", text)))
    texts = [text for text in texts if not re.match(r"#+ 0", text)]
    unsaid = []
    looked_at = 0
    for path, of in document["paths"].items():
        for method, one in of.items():
            route = f"{method.upper()} {path}"
            (section,) = [text for text in texts if re.search(rf"`{re.escape(route)}`", text)]
            body = one.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            schema = document["components"]["schemas"].get(body.get("$ref", "").rpartition("/")[2], {})
            fields = set(schema.get("properties", ())) | {
                parameter["name"] for parameter in one.get("parameters", ()) if parameter["in"] == "query"
            }
            codes = {
                code
                for status, response in one["responses"].items()
                if int(status) >= 400
                for code in response["description"].removeprefix("`error.code`: ").split(", ")
            }
            said = words(section)
            unsaid += [(route, name) for name in sorted((fields - said - for_all) | (codes - said - OF_ANY_ROUTE))]
            looked_at += len(fields)
    assert looked_at > 100
    assert not unsaid


def test_every_field_is_named(document: dict[str, Any]) -> None:
    """The page names every field of requests, answers and queries."""
    named = words(TEXT)
    fields = {
        field for schema in document["components"]["schemas"].values() for field in schema.get("properties", ())
    } | {
        parameter["name"]
        for of in document["paths"].values()
        for one in of.values()
        for parameter in one.get("parameters", ())
    }
    assert len(fields) > 120
    assert fields - named == set()


SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "bytes": 1}


def test_every_limit_is_the_default_of_its_setting() -> None:
    defaults = {field.encode_name: field.default for field in msgspec.structs.fields(Settings)}
    rows = re.findall(r"(?m)^\|[^|]+\| (\d+)(?: (KiB|MiB|bytes))? \| `TOPICS_(\w+)`", TEXT)
    assert len(rows) > 15
    for number, unit, setting in rows:
        assert int(number) * SIZES.get(unit, 1) == defaults[setting.lower()], setting


def test_every_field_of_a_configuration_has_its_default() -> None:
    table = TEXT[TEXT.index("## 1 Topics") : TEXT.index("**`PUT /v0/topics/{topic}`**")]
    shown = {
        name: default
        for names, default in re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \| ([^|]+) \|", table)
        for name in re.findall(r"`(\w+)`", names)
    }
    config = TopicConfig()
    assert set(shown) == {*config.__struct_fields__, "durable"}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        text = {None: "null", True: "true", False: "false"}.get(value) if value in (None, True, False) else str(value)
        if isinstance(value, int) and not isinstance(value, bool):
            text = str(value)
        assert re.sub(r"`|( = off)", "", shown[name]) == text, name


# --- the tests themselves: what would be wrong is found


@pytest.mark.parametrize(
    "block",
    [
        "```json\n{}\n```",
        "```\nGET /v0/topics\n```",
        "```http\nGET /v0/topics\n```",
        "```http\ncurl localhost\n→ 200\n{}\n```",
        "```websocket\nGET /v0/ws\n{}\n```",
        "```sh\nrm -r data\n```",
        "```http\nGET /v0/topics\n→ 200\n{}",
        "#### Without a number",
    ],
)
def test_what_nobody_would_run_is_an_error(block: str) -> None:
    with pytest.raises(PageError):
        sections(f"## 1 Topics\n\n{block}\n")


@pytest.mark.parametrize(
    ("shown", "actual"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 4.50}', '{"a": 4.5}'),
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ('{"a": 1, …}', '{"b": 2}'),
        ('{"a": {"b": 1, …}}', '{"a": {"b": 1}, "c": 1}'),
        ('{"a": [1]}', '{"a": [1, 2]}'),
        ('{"$ts": 1}', '{"$ts": null}'),
        ('{"x": [{"epoch": "aa"}, {"epoch": "aa"}]}', '{"x": [{"epoch": "bb"}, {"epoch": "cc"}]}'),
        ('{"x": [{"epoch": "aa"}, {"epoch": "ab"}]}', '{"x": [{"epoch": "bb"}, {"epoch": "bb"}]}'),
    ],
)
def test_what_is_not_what_is_shown_is_found(shown: str, actual: str) -> None:
    with pytest.raises(AssertionError):
        Likeness().check(decode(shown), decode(actual))


def test_times_ids_and_what_is_not_shown_may_be_others() -> None:
    likeness = Likeness()
    likeness.check(
        decode('{"$ts": 1, "wid": "wid_1", "url": "/v0/watch/wid_1", "performance": {"server_total_ms": 0.1}, …}'),
        decode('{"$ts": 7, "wid": "wid_9", "url": "/v0/watch/wid_9", "performance": {"server_total_ms": 3}, "x": 1}'),
    )
    assert likeness.said("GET /v0/watch/wid_1") == "GET /v0/watch/wid_9"
