from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frontend.hosting import Hosting
from topics.shm import shm_names


@pytest.fixture
def identity() -> Iterator[str]:
    """An identity of its own, whose objects are gone afterwards."""
    identity = secrets.token_hex(8)
    yield identity
    shm_names.unlink_all(identity)


@pytest.fixture
def hosting(identity: str, tmp_path: Path) -> Iterator[Hosting]:
    """Topics of one shard, written by its own code, read by a frontend's."""
    hosting = Hosting(identity, str(tmp_path))
    yield hosting
    hosting.close()
