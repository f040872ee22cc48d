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
from typing import Final, NamedTuple

from topics.core.segment_list import COLD, SegmentList
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

    def __init__(self, segments: SegmentList | None, earliest_seq: int) -> None:
        self.segments = segments
        self.earliest_seq = earliest_seq

    def is_cold(self, name: SegmentName) -> bool:
        """Whether its data in the cold directory count."""
        of_same_seq = self.segments.at(name.first_seq) if self.segments is not None else None
        return (
            of_same_seq is not None
            and bool(of_same_seq.flags & COLD)
            and (of_same_seq.first_seq, of_same_seq.version) == name
        )

    def superfluous(self, name: SegmentName) -> frozenset[str] | None:
        """Which of a segment's files may go; None when nothing says why they are there."""
        if self.segments is None:
            return _ALL
        of_same_seq = self.segments.at(name.first_seq)
        if of_same_seq is not None and of_same_seq.first_seq == name.first_seq:
            if of_same_seq.version == name.version:
                return _DATA if of_same_seq.flags & COLD else frozenset()
            return _ALL
        if name.first_seq < self.earliest_seq or name.first_seq > self.segments.last_seq:
            return _ALL
        return None


FilesOf = Callable[[int], TopicFiles | None]
"""Topic id → what it needs; None for one that no log ever created."""


class Swept(NamedTuple):
    """Which segments went, by topic id (those of which only the data did are none of them), and what could not be
    removed, or looked at: that is found again.
    """

    removed: list[tuple[int, SegmentName]]
    failures: list[OSError]


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

    def sweep(self, files_of: FilesOf, alive: Callable[[], None]) -> Swept:
        """Removes what was found last time and is still superfluous, then looks anew. One file that cannot be removed
        keeps no other.
        """
        found, look = self._found, self._look
        try:
            pinned = self._read_pinned() if found else frozenset()
        except OSError as error:
            return Swept([], [error])
        self._found, self._look = {}, set()
        swept = Swept([], [])
        for topic_id, names in found.items():
            if not self._remove_found(topic_id, names, files_of(topic_id), pinned, swept):
                look.add(topic_id)
            alive()
        for topic_id in sorted(look):
            try:
                self._look_at(topic_id, files_of(topic_id), swept)
            except OSError as error:
                swept.failures.append(error)
                self._look.add(topic_id)
            alive()
        if swept.removed:
            reached("drop.done")
        return swept

    def _remove_found(
        self,
        topic_id: int,
        names: dict[SegmentName, frozenset[str]],
        needed: TopicFiles | None,
        pinned: Pinned,
        swept: Swept,
    ) -> bool:
        """False when some of it has to be found again."""
        is_done = True
        for name, kinds in names.items():
            if (topic_id, name) in pinned:
                is_done = False
                continue
            now = needed.superfluous(name) if needed is not None else None
            going = kinds & now if now else None
            if not going:
                continue
            try:
                self._remove(topic_id, name, going)
            except OSError as error:
                swept.failures.append(error)
                is_done = False
            else:
                if "idx" in going:
                    swept.removed.append((topic_id, name))
        if is_done and needed is not None and needed.segments is None:
            try:
                self._remove_directory(topic_id)
            except OSError as error:
                swept.failures.append(error)
                is_done = False
        return is_done

    def _look_at(self, topic_id: int, needed: TopicFiles | None, swept: Swept) -> None:
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
        if found or (needed is not None and needed.segments is None):
            self._found[topic_id] = found
        for name_in in self._fs.listdir(directory):
            if name_in.endswith(layout.TMP_SUFFIX):  # never came to be
                try:
                    self._fs.unlink(os.path.join(directory, name_in))
                except OSError as error:
                    swept.failures.append(error)
                    self._look.add(topic_id)

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
