"""Files of segments that nothing names any more: found, waited for, removed.

A file goes only when neither of the two snapshots that are kept can ask for it: it is found at one snapshot and removed
at the next one, if it still belongs to nothing then. And only if it is known why it is there: its topic or its seqs are
gone, a newer version counts, or it lies behind everything that was ever committed. Anything else is said, not removed.
And only when no pin holds it (`storage/pins.py`): what one does is looked at again at every snapshot.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

from topics.core.segment_list import COLD, SegmentInfo
from topics.log import get_logger
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import reached
from topics.storage.layout import SegmentName
from topics.storage.pins import Pinned, ReadPinned, nothing_pinned

_DATA: Final = frozenset(("data",))
_ALL: Final = frozenset(("data", "idx", "tags"))

log = get_logger()


class TopicFiles:
    """Which files a topic needs. `segments` None: it was deleted."""

    def __init__(self, segments: list[SegmentInfo] | None, earliest_seq: int) -> None:
        self.segments = segments
        self.earliest_seq = earliest_seq

    def superfluous(self, name: SegmentName) -> frozenset[str] | None:
        """Which of a segment's files may go; None when nothing says why they are there."""
        if self.segments is None:
            return _ALL
        of_same_seq = next((info for info in self.segments if info.first_seq == name.first_seq), None)
        if of_same_seq is not None:
            if of_same_seq.version == name.version:
                return _DATA if of_same_seq.flags & COLD else frozenset()
            return _ALL
        last_seq = self.segments[-1].last_seq if self.segments else 0
        if name.first_seq < self.earliest_seq or name.first_seq > last_seq:
            return _ALL
        return None


FilesOf = Callable[[int], TopicFiles | None]
"""Topic id → what it needs; None for one that no log ever created."""


class Leftovers:
    """Of the data directory. `look_at` says where, `sweep` is called once a snapshot."""

    def __init__(self, fs: FileSystem, data_dir: str, read_pinned: ReadPinned = nothing_pinned) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._read_pinned = read_pinned
        self._look: set[int] = set()
        self._found: dict[int, dict[SegmentName, frozenset[str]]] = {}
        self._unexplained: dict[int, set[SegmentName]] = {}

    @property
    def waiting(self) -> bool:
        """Whether the next snapshot would let something go."""
        return bool(self._found or self._look)

    @property
    def unexplained(self) -> int:
        """Segments that belong to nothing and stay."""
        return sum(map(len, self._unexplained.values()))

    def look_at(self, topic_id: int) -> None:
        """Its segments may have become fewer or other ones."""
        self._look.add(topic_id)

    def look_at_all(self) -> None:
        """What former lives left."""
        self._look.update(layout.discover_topics(self._fs, self._data_dir))

    def sweep(self, files_of: FilesOf, alive: Callable[[], None]) -> list[tuple[int, SegmentName]]:
        """Removes what was found last time and is still superfluous, then looks anew. Returns which segments went, by
        topic id; those of which only the data did are none of them.

        Raises OSError; what is left is found again.
        """
        found, self._found = self._found, {}
        look, self._look = self._look, set()
        try:
            return self._sweep(found, look, files_of, alive, self._read_pinned() if found else frozenset())
        except OSError:
            self._look |= look | found.keys()
            raise

    def _sweep(
        self,
        found: dict[int, dict[SegmentName, frozenset[str]]],
        look: set[int],
        files_of: FilesOf,
        alive: Callable[[], None],
        pinned: Pinned,
    ) -> list[tuple[int, SegmentName]]:
        removed: list[tuple[int, SegmentName]] = []
        for topic_id, names in found.items():
            needed = files_of(topic_id)
            held = [name for name in names if (topic_id, name) in pinned]
            if held:
                look.add(topic_id)
            for name, kinds in names.items():
                if name in held:
                    continue
                now = needed.superfluous(name) if needed is not None else None
                going = kinds & now if now else None
                if going:
                    self._remove(topic_id, name, going)
                    if "idx" in going:
                        removed.append((topic_id, name))
            if needed is not None and needed.segments is None and not held:
                self._remove_directory(topic_id)
            alive()
        for topic_id in sorted(look):
            self._look_at(topic_id, files_of(topic_id))
            alive()
        if removed:
            reached("drop.done")
        return removed

    def _look_at(self, topic_id: int, needed: TopicFiles | None) -> None:
        directory = layout.topic_dir(self._data_dir, topic_id)
        if not self._fs.exists(directory):
            return
        found: dict[SegmentName, frozenset[str]] = {}
        unexplained: set[SegmentName] = set()
        for name, kinds in layout.discover_segments(self._fs, directory).items():
            superfluous = needed.superfluous(name) if needed is not None else None
            if superfluous is None:
                unexplained.add(name)
            elif superfluous & kinds:
                found[name] = superfluous & frozenset(kinds)
        for name in unexplained - self._unexplained.pop(topic_id, set()):
            log.error("files of a segment that belong to nothing: left alone", directory=directory, segment=tuple(name))
        if unexplained:
            self._unexplained[topic_id] = unexplained
        for name_in in self._fs.listdir(directory):
            if name_in.endswith(layout.TMP_SUFFIX):  # never came to be
                self._fs.unlink(os.path.join(directory, name_in))
        if found or (needed is not None and needed.segments is None):
            self._found[topic_id] = found

    def _remove(self, topic_id: int, name: SegmentName, kinds: frozenset[str]) -> None:
        directory = layout.topic_dir(self._data_dir, topic_id)
        paths = {
            "data": layout.segment_data_path(directory, *name),
            "idx": layout.segment_idx_path(directory, *name),
            "tags": layout.segment_tags_path(directory, *name),
        }
        for kind in sorted(kinds):
            if self._fs.exists(paths[kind]):
                self._fs.unlink(paths[kind])
                reached("drop.some")

    def _remove_directory(self, topic_id: int) -> None:
        directory = layout.topic_dir(self._data_dir, topic_id)
        try:
            self._fs.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            log.warning("the directory of a deleted topic holds files of others: left alone", directory=directory)
