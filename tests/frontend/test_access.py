"""No route without a row in the table of `tests/contract/auth_table.py`, and no row without a route."""

from __future__ import annotations

from starlette.routing import Route

from tests.contract.auth_table import PROBES, ROUTES, STREAM, TAIL, WORK
from tests.frontend.hosting import Hosting
from tests.frontend.test_app import Frontend, on_loop
from topics.frontend.app import Resource

PAGES = ("/v0/openapi.json", "/v0/docs", "/v0/docs.js", "/v0/docs.css", "/console", "/console/{build}/{part:path}")
"""Paths of the API's description and of the console, which need no key."""


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
