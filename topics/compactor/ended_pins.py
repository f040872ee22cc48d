"""Pins of batches that are over leave the fold, and so the snapshots and whatever starts from one.

The shard forgets a pin when it is told that its batch is over, and no log says so. A pin is for a stage that could be
published once more, which needs its file, and for the answer that it has been published, which is asked for as long as
its batch is decided. Both files were there before the pin: when neither is there any more, nobody asks for it again.
The stage's file goes only when the batch is over durably, so a power loss does not bring the decision back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from topics.core.topic import Topic
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.txn_files import SinkDamagedError, read_sink_head, stage_name


def unpin_ended(fs: FileSystem, data_dir: str, topics: Iterable[Topic], alive: Callable[[], None]) -> None:
    """What a file or directory that cannot be read, or is not there as a whole, leaves open stays pinned.

    Reads the head of one file for each sink with pins, and lists the stages once; `alive` is called between topics.
    """
    ended: dict[tuple[str, int], bool] = {}
    files: set[str] | None = None
    for topic in topics:
        pinned = topic.idempotency.pinned()
        if pinned:
            alive()
        for sink, batch, stages in pinned:
            if (sink, batch) not in ended:
                ended[sink, batch] = _is_over(fs, data_dir, sink, batch)
            if not ended[sink, batch]:
                continue
            if files is None:
                try:
                    files = set(fs.listdir(layout.stages_dir(data_dir)))
                except OSError:
                    return
            if not any(stage_name(stage) in files for stage in stages):
                topic.idempotency.unpin(sink, batch)


def _is_over(fs: FileSystem, data_dir: str, sink: str, batch: int) -> bool:
    try:
        decided, pending_count = read_sink_head(fs, layout.sinks_dir(data_dir), sink)
    except (OSError, SinkDamagedError):
        return False
    return decided != batch or not pending_count
