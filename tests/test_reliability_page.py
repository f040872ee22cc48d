"""`docs/reliability.md` names the test of each promise: those are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`([a-z0-9]+/[a-z_0-9]+\.py)`", PAGE))
    assert len(named) > 40
    assert not sorted(name for name in named if not (TESTS / name).is_file())
