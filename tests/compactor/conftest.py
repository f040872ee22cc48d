from __future__ import annotations

from tests.walshard.conftest import compaction, fs, rig

__all__ = ["compaction", "fs", "rig"]
