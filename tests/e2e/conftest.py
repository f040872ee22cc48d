from __future__ import annotations

from pathlib import Path

import pytest

SHORT = {"test_a_replay_and_a_follower_outlive_every_kill"}
"""A round of crashes, for `make test`. All other tests of this folder are long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and getattr(item, "originalname", "") not in SHORT:
            item.add_marker(pytest.mark.long)
