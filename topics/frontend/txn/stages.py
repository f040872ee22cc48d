"""Stages on the disk (`storage/txn_files.py`), as frontends make, find and drop them. Everything here may block: it is
called in threads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from typing import Final

from topics.core.errors import TopicsError
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem, make_dirs, replace_file
from topics.storage.frame import LaidOut
from topics.storage.txn_files import (
    STAGE_HEAD_LEN,
    StageDamagedError,
    StageHead,
    belongs_to_txn,
    decode_stage_head,
    encode_stage,
    is_stage_id,
    new_stage_id,
    stage_name,
    stage_of_name,
)

EXPIRY_MARGIN_MS: Final = 60_000
"""A stage is removed so much later than it may last be committed: no commit that has begun loses its stages."""


class Stages:
    """All stages of the service; `ttl_ms` counts from when one was made."""

    def __init__(self, data_dir: str, ttl_ms: int) -> None:
        self._directory = layout.stages_dir(data_dir)
        self._sinks = layout.sinks_dir(data_dir)
        self._fs = OsFileSystem()
        self.ttl_ms = ttl_ms

    def make(self, topic: str, txn: str, records: LaidOut) -> str:
        """A new stage's id, once it is on the disk. Raises TopicsError."""
        stage = new_stage_id(topic, txn)
        try:
            make_dirs(self._fs, self._directory)
            replace_file(self._fs, self._path(stage), encode_stage(topic, records))
        except OSError as error:
            raise TopicsError(
                "storage_unavailable", f"the stage cannot be written: {error.strerror}", {"cause": error.strerror}
            ) from None
        return stage

    def heads(self, stages: Collection[str]) -> dict[str, StageHead]:
        """Of each, in order. `404 not_found` for one that is not there or may expire any moment."""
        return {stage: self._head(stage) for stage in stages}

    def drop_txn(self, topic: str, txn: str, pending: Collection[str]) -> int:
        """Removes the stages of a transaction in one topic, but for those whose batch is decided; how many."""
        mine = [stage for stage in self._all() if belongs_to_txn(stage, topic, txn) and stage not in pending]
        return self.drop(mine)

    def drop(self, stages: Collection[str]) -> int:
        """How many of them were there."""
        dropped = 0
        for stage in stages:
            try:
                self._fs.unlink(self._path(stage))
            except FileNotFoundError:
                continue
            dropped += 1
        return dropped

    def drop_ended(self, stages: Collection[str]) -> None:
        """Removes those of a batch that its sink's file says is over. Raises TopicsError.

        Whoever wrote that may have ended, or failed, before it was synced; a power loss must not bring the decision
        back when its stages are gone.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                self._fs.fsync_dir(self._sinks)
            self.drop(stages)
        except OSError as error:
            reason = f"what is left of a batch that is over cannot be removed: {error}"
            raise TopicsError("storage_unavailable", reason, {"cause": error.strerror}) from None

    def expired(self) -> list[str]:
        """Those that no commit can name any more. Whether one is part of a decided batch is the caller's to know."""
        return [stage for stage in self._all() if self._age_ms(stage) > self.ttl_ms + EXPIRY_MARGIN_MS]

    def _head(self, stage: str) -> StageHead:
        if not is_stage_id(stage) or self._age_ms(stage) > self.ttl_ms:
            raise TopicsError("not_found", f"there is no stage {stage[:100]!r}: it was dropped or has expired")
        try:
            with open(self._path(stage), "rb") as file:
                return decode_stage_head(file.read(STAGE_HEAD_LEN))
        except FileNotFoundError:
            raise TopicsError("not_found", f"there is no stage {stage!r}: it was dropped or has expired") from None
        except (OSError, StageDamagedError) as error:
            reason = f"{self._path(stage)} cannot be used: {error}"
            raise TopicsError("storage_unavailable", reason, {"cause": "damaged"}) from None

    def _age_ms(self, stage: str) -> float:
        """Infinite for one that is not there."""
        try:
            return (time.time() - os.stat(self._path(stage)).st_mtime) * 1000
        except FileNotFoundError:
            return float("inf")

    def _all(self) -> Iterator[str]:
        try:
            names = self._fs.listdir(self._directory)
        except FileNotFoundError:
            return
        for name in names:
            stage = stage_of_name(name)
            if stage is not None:
                yield stage

    def _path(self, stage: str) -> str:
        return os.path.join(self._directory, stage_name(stage))
