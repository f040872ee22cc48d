from __future__ import annotations

from pathlib import Path

import pytest

SHORT = {"test_what_clients_were_told_holds_whatever_is_killed"}
"""A round of kills, for `make test`. All other tests of this folder are long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and getattr(item, "originalname", "") not in SHORT:
            item.add_marker(pytest.mark.long)
