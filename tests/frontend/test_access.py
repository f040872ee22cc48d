"""No route without a row in the table of `tests/contract/auth_table.py`, and no row without a route."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from tests.contract.auth_table import PROBES, ROUTES, STREAM, TAIL, WORK
from tests.frontend.hosting import Hosting
from tests.frontend.test_app import Frontend, on_loop
from topics.core.errors import TopicsError
from topics.core.keys import KeyRing, KeyScope, parse_list
from topics.frontend.app import Resource
from topics.frontend.entry.access import LEADER_REQUIRED, Access

PAGES = ("/v0/openapi.json", "/v0/docs", "/v0/docs.js", "/v0/docs.css", "/console", "/console/{build}/{part:path}")
"""Paths of the API's description and of the console, which need no key."""


def test_a_service_that_only_reads_says_what_a_key_may_do_and_answers_probes_that_need_one(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        refusal = TopicsError("not_leader", "it follows another one")
        access = Access(KeyRing(parse_list("k")), frontend.access.limits, lambda: refusal)
        bearer = (b"authorization", b"Bearer k")
        for needed in (KeyScope.NONE, KeyScope.READ):
            access.admit({"headers": [bearer]}, needed)
            with pytest.raises(TopicsError, match="it follows"):
                access.admit({"headers": [bearer, LEADER_REQUIRED]}, needed)
        for needed in (KeyScope.WRITE, KeyScope.READ | KeyScope.WRITE, KeyScope.DELETE, KeyScope.ADMIN):
            with pytest.raises(TopicsError, match="it follows"):
                access.admit({"headers": [bearer]}, needed)

    on_loop(hosting, test)


def test_the_table_has_every_route(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        served = set()
        for route in frontend.app.router.routes:
            assert isinstance(route, Route), f"{route} is not in the table of scopes"
            assert isinstance(route.endpoint, Resource), f"{route} is not in the table of scopes"
            served |= {(method, route.path) for method in route.endpoint._methods if method != "HEAD"}
        served.discard(("GET", "/v0/key"))  # any key will do (`contract/test_0_10_auth.py`)
        served.discard(("GET", "/v0/ws"))  # its commands ask for scopes each (`contract/test_7_7_websocket.py`)
        served -= {("GET", path) for path in PAGES}
        assert served == {(row.method, row.path) for row in (*ROUTES, STREAM, WORK, TAIL, *PROBES)}

    on_loop(hosting, test)
