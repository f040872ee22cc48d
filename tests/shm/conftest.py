from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from topics.shm import shm_names


@pytest.fixture
def identity() -> Iterator[str]:
    """An identity of its own, whose objects are gone afterwards."""
    identity = secrets.token_hex(8)
    yield identity
    shm_names.unlink_all(identity)
