"""Fixtures of the client commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.shell import Shell
from tests.harness import Service
from topics.client import Client


@pytest.fixture
def shell(service: Service) -> Shell:
    return Shell(service)


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client
