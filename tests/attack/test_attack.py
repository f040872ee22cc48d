"""A short attack with a seed of its own; a long one: `make attack`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.attack.campaign import Campaign

ROUNDS = 3
SEED = 20


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_short_attack_finds_nothing(tmp_path: Path) -> None:
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    assert Campaign(SEED, tmp_path if has_compiler else None).run(ROUNDS, round_s=0.3) == []
