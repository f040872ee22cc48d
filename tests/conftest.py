"""Fixtures that several folders share, and the logs of the services behind a failed test."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import structlog
from httpx._transports import default as transports

from tests import harness
from tests.buckets import SERVERS, ObjectServer, Proxy
from tests.forks import Forks
from tests.harness import Service, open_services

# Its deadline of 200 ms for an example is one for the machine, which may stand still for longer.
hypothesis.settings.register_profile("topics", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("topics")

# Every client reads the certificates of the system, which takes 45 ms: here once a run.
pytest.MonkeyPatch().setattr(transports, "create_ssl_context", functools.cache(httpx.create_ssl_context))

_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Commands that a test calls in this process set up its log: the next test has to see each line again."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The service of all contract tests: two shards, two frontends, heartbeats down to 20 ms."""
    with Service(env={"TOPICS_TEST_MIN_HEARTBEAT_MS": "20"}) as running:
        yield running


@pytest.fixture
def client(service: Service) -> httpx.Client:
    return service.client


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t{next(_numbers)}-{os.urandom(4).hex()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for running in open_services:
            report.sections.append((f"service on port {running.port}", running.log_tail()))
    return report


def pytest_configure(config: Any) -> None:
    harness.forks = Forks()
    # A run ended by SIGTERM takes its fixtures down, as one ended by Ctrl-C does. That is ignored by what a shell has
    # started in the background, and by all that is started by it: also by what a test interrupts.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A service started by a test must never be answered for by a proxy of the developer's shell.
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def object_servers() -> Iterator[Callable[[str], ObjectServer]]:
    """A function that returns the one server of a kind (`buckets.SERVERS`), started when it is first asked for."""
    started: dict[str, ObjectServer] = {}

    def server(kind: str) -> ObjectServer:
        if kind not in started:
            started[kind] = SERVERS[kind]()
        return started[kind]

    yield server
    for running in started.values():
        running.close()


@pytest.fixture
def object_server(request: pytest.FixtureRequest, object_servers: Callable[[str], ObjectServer]) -> ObjectServer:
    """The server of the kind that the test is given by `parametrize(…, indirect=…)`, else moto."""
    return object_servers(getattr(request, "param", "s3"))


@pytest.fixture
def s3(object_server: ObjectServer) -> Iterator[Proxy]:
    """A proxy before the server."""
    proxy = Proxy(object_server)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture
def bucket_url(object_server: ObjectServer) -> str:
    """A bucket and a prefix that no other test uses."""
    return f"{object_server.scheme}://{object_server.new_bucket()}/some/prefix"
