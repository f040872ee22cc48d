"""Web pages that may act here, and host names under which a service without keys is served."""

from __future__ import annotations

import pytest

from tests.kept import items_kept
from topics.core.errors import TopicsError
from topics.frontend.entry.access import Access, Pages, host_name
from topics.settings import load


class _Access(Access):
    """The keys of a frontend, of which only matters whether there are any."""

    def __init__(self, has_keys: bool) -> None:
        self._has_keys = has_keys

    @property
    def on(self) -> bool:
        return self._has_keys


def pages(has_keys: bool = False, **settings: str) -> Pages:
    environ = {f"TOPICS_{name.upper()}": value for name, value in settings.items()}
    return Pages(load(environ | {"TOPICS_ALLOW_INSECURE_NO_AUTH": "true"}), _Access(has_keys))


def passes(pages: Pages, method: str = "POST", path: str = "/v0/topics/t", type_: str = "http", **headers: str) -> bool:
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        pages.check({"type": type_, "method": method, "path": path, "headers": listed})
    except TopicsError as error:
        return error.code != "forbidden"
    return True


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost:4000", True),
        ("LOCALHOST", True),
        ("app.localhost:4000", True),
        ("127.0.0.1:4000", True),
        ("127.3.2.1", True),
        ("[::1]:4000", True),
        ("listed.example:4000", True),
        ("evil.example", False),
        ("listed.example.evil.example", False),
        ("localhost.evil.example:4000", False),
        ("10.0.0.1:4000", False),
        ("", False),
    ],
)
def test_hosts_without_keys(host: str, served: bool) -> None:
    own = pages(allowed_hosts="listed.example")
    for _ in range(2):
        assert passes(own, "GET", host=host) == served
        assert passes(own, "GET", "/v0/health", host=host), "a probe says nothing of the data"
    assert passes(pages(has_keys=True), "GET", host=host), "a page does not know the key"
    assert passes(pages(allowed_hosts="*"), "GET", host=host)


def test_an_address_is_a_host_where_other_machines_may_ask() -> None:
    reachable = pages(host="0.0.0.0")
    assert passes(reachable, "GET", host="10.0.0.1:4000")
    assert not passes(reachable, "GET", host="evil.example")


def test_good_hosts_are_kept_but_not_for_ever() -> None:
    own = pages(allowed_hosts="*")
    assert all(passes(own, host=f"h{number}") for number in range(1000))
    assert items_kept(own) < 200


HOST = "127.0.0.1:4000"
OWN = f"http://{HOST}"
APP = "https://app.example"


@pytest.mark.parametrize("has_keys", [False, True])
def test_pages_of_other_origins(has_keys: bool) -> None:
    own = pages(has_keys, cors_origins=APP)
    for method, path, type_, acts in [
        ("POST", "/v0/topics/t/cursors/c/read", "http", True),
        ("PUT", "/v0/topics/t", "http", True),
        ("DELETE", "/v0/topics/t", "http", True),
        ("GET", "/v0/topics/t/work", "http", True),
        ("GET", "/v0/ws", "websocket", True),
        ("GET", "/v0/topics/t", "http", False),
        ("OPTIONS", "/v0/topics/t", "http", False),
    ]:
        for headers, is_own in [
            ({}, True),
            ({"origin": OWN}, True),
            ({"origin": APP}, True),
            ({"origin": APP, "sec_fetch_site": "cross-site"}, True),
            ({"sec_fetch_site": "same-origin"}, True),
            ({"sec_fetch_site": "none"}, True),
            ({"sec_fetch_site": "cross-site"}, False),
            ({"sec_fetch_site": "same-site"}, False),
            ({"origin": "null"}, False),
            ({"origin": "http://127.0.0.1:3000", "sec_fetch_site": "same-site"}, False),
            ({"origin": f"{OWN}.evil.example"}, False),
        ]:
            answer = passes(own, method, path, type_, host=HOST, **headers)
            assert answer == (is_own or not acts), (method, path, headers)


def test_of_two_origins_neither_is_believed() -> None:
    headers = [(b"host", HOST.encode()), (b"origin", OWN.encode()), (b"origin", OWN.encode())]
    with pytest.raises(TopicsError, match="TOPICS_CORS_ORIGINS"):
        pages().check({"type": "http", "method": "POST", "path": "/v0/topics/t", "headers": headers})


def test_every_origin_may_be_allowed() -> None:
    own = pages(cors_origins="*")
    assert passes(own, origin="https://any.example", host=HOST)
    assert passes(own, sec_fetch_site="cross-site", host=HOST)


@pytest.mark.parametrize(
    ("host", "name"),
    [("a", "a"), ("a:1", "a"), ("[::1]:1", "::1"), ("[::1]", "::1"), ("::1", "::1"), ("1.2.3.4:5", "1.2.3.4")],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name
