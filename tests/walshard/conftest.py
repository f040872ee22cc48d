"""A shard in this process, for each test its own, and a compactor beside it.

`@pytest.mark.shard(segment_max_events="8")`, or the same as a `pytestmark`, gives it settings; a fixture `fs` of the
module gives it a file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.faults import FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path, fs: FaultyFileSystem) -> Iterator[Rig]:
    marker = request.node.get_closest_marker("shard")
    rig = Rig(str(tmp_path), fs, **(marker.kwargs if marker is not None else {}))
    yield rig
    rig.close()


@pytest.fixture
def compaction(rig: Rig) -> Compaction:
    return Compaction(rig)
