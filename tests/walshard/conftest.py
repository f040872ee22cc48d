from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.walshard.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(str(tmp_path))
    yield rig
    rig.close()
