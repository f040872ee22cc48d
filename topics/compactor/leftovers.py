"""Files of segments that nothing names any more: found, waited for, removed.

A file goes only when neither of the two snapshots that are kept can ask for it: it is found at one snapshot and removed
at the next one, if it still belongs to nothing then. And only if it is known why it is there: its topic or its seqs are
gone, a newer version counts, a segment that counts has its seqs, or it lies behind everything that was ever committed.
Anything else is said, not removed. And only when no pin holds it (`storage/pins.py`). What one holds, or cannot be
removed, needs no further snapshot: it is tried again now and then.

The exception is a full disk: `make_room`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
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
    """The files that a topic needs. `segments` None: the topic was deleted."""

    def __init__(self, segments: SegmentList | None, earliest_seq: int) -> None:
        self.segments = segments
        self.earliest_seq = earliest_seq

    def is_cold(self, name: SegmentName) -> bool:
        """True if its data in the cold directory count."""
        of_same_seq = self.segments.at(name.first_seq) if self.segments is not None else None
        return (
            of_same_seq is not None
            and bool(of_same_seq.flags & COLD)
            and (of_same_seq.first_seq, of_same_seq.version) == name
        )

    def superfluous(self, name: SegmentName) -> frozenset[str] | None:
        """Returns which of a segment's files may go; None when nothing says why they are there."""
        if self.segments is None:
            return _ALL
        of_same_seq = self.segments.at(name.first_seq)
        if of_same_seq is not None and of_same_seq.first_seq == name.first_seq:
            if of_same_seq.version == name.version:
                return _DATA if of_same_seq.flags & COLD else frozenset()
            return _ALL
        if of_same_seq is not None:
            return _ALL  # written, never told of, and written again with another beginning
        if name.first_seq < self.earliest_seq or name.first_seq > self.segments.last_seq:
            return _ALL
        return None

    def gone_for_good(self, name: SegmentName) -> frozenset[str]:
        """Returns which of a segment's files are gone for good: no state asks for them that the log, read to where it
        is now, can lead to, and no reader of it does.

        An older version stays: it is read for the deletions in it. Files that nobody was told of stay as well: somebody
        may be told any moment.
        """
        if self.segments is None:
            return _ALL
        if self.is_cold(name):
            return _DATA
        is_below = name.first_seq < self.earliest_seq and self.segments.at(name.first_seq) is None
        return _ALL if is_below else frozenset()


FilesOf = Callable[[int], TopicFiles | None]
"""Topic id → the files it needs; None for a topic that no log ever created."""


class Swept(NamedTuple):
    """The segments that went, by topic id (not those of which only the data went), and the failures: files that could
    not be removed, or looked at. They are tried again.
    """

    removed: list[tuple[int, SegmentName]]
    failures: list[OSError]


class Leftovers:
    """Finds and removes superfluous segment files of all topics in the data directory; touches nothing else in
    there.
    """

    def __init__(self, fs: FileSystem, data_dir: str, read_pinned: ReadPinned = nothing_pinned) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._read_pinned = read_pinned
        self._look: set[int] = set()
        self._look_again: set[int] = set()
        """Topics that could not be looked at or tidied up. They are no reason for a snapshot before it is known what is
        there.
        """
        self._found: dict[int, dict[SegmentName, frozenset[str]]] = {}
        """Files that one snapshot found superfluous. For a topic without any, its directory is to go."""
        self._due: dict[int, dict[SegmentName, frozenset[str]]] = {}
        """Files that two snapshots found superfluous."""
        self._unexplained: dict[int, set[SegmentName]] = {}

    @property
    def waiting(self) -> bool:
        """True if the next snapshot would let something go."""
        return bool(self._found or self._look)

    @property
    def unexplained(self) -> int:
        """Segments that belong to nothing and stay."""
        return sum(map(len, self._unexplained.values()))

    def look_at(self, topic_id: int) -> None:
        """Its segments may have become fewer or other ones."""
        self._look.add(topic_id)

    def look_at_all(self) -> None:
        """What former lives left. Raises OSError."""
        self._look.update(layout.discover_topics(self._fs, self._data_dir))

    def sweep(self, files_of: FilesOf, in_snapshot: Callable[[int], bool], alive: Callable[[], None]) -> Swept:
        """Once a snapshot: removes what was found at the one before and is still superfluous, then looks anew. Topics
        that this snapshot says nothing new of (`in_snapshot`) wait for one that does. One file that cannot be removed
        keeps no other.
        """
        for topic_id in [topic_id for topic_id in self._found if in_snapshot(topic_id)]:
            self._make_due(topic_id, self._found.pop(topic_id))
        look = {topic_id for topic_id in self._look | self._look_again if in_snapshot(topic_id)}
        self._look -= look
        self._look_again -= look
        swept = self._remove_all(self._due, files_of, alive)
        for topic_id, found in self._look_at_each(look, files_of, swept, alive):
            self._found[topic_id] = found
        return swept

    def tidy(self, files_of: FilesOf, alive: Callable[[], None]) -> Swept:
        """Without a snapshot, removes what two of them agree on, as far as it is still superfluous, and looks where it
        could not look so far. Files that it finds there wait for the next snapshot to find them: the last one may still
        ask for them.
        """
        again, self._look_again = self._look_again, set()
        swept = self._remove_all(self._due, files_of, alive)
        self._look.update(topic_id for topic_id, _ in self._look_at_each(again, files_of, swept, alive))
        return swept

    def make_room(self, topic_ids: Iterable[int], files_of: FilesOf, alive: Callable[[], None]) -> Swept:
        """Removes files that are gone for good, whatever snapshots say: those of these topics, and of topics that were
        to be looked at anyway. The logs that `files_of` follows are synced. A topic that it does not know stays.
        """
        gone: dict[int, dict[SegmentName, frozenset[str]]] = {}
        failures: list[OSError] = []
        for topic_id in sorted({*topic_ids, *self._look, *self._found}):
            needed = files_of(topic_id)
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                if needed is None or not self._fs.exists(directory):
                    continue
                names = layout.discover_segments(self._fs, directory)
            except OSError as error:
                failures.append(error)
                continue
            kinds_of = {name: needed.gone_for_good(name) & kinds for name, kinds in names.items()}
            if any(kinds_of.values()):
                gone[topic_id] = {name: kinds for name, kinds in kinds_of.items() if kinds}
            alive()
        swept = self._remove_all(gone, files_of, alive)
        for topic_id, name in swept.removed:
            self._found.get(topic_id, {}).pop(name, None)
        for topic_id, kept in gone.items():
            # Some files of these may have gone: no other listing shows the segment as it was.
            self._make_due(topic_id, kept)
        return Swept(swept.removed, failures + swept.failures)

    def _make_due(self, topic_id: int, names: dict[SegmentName, frozenset[str]]) -> None:
        """Makes these files go as soon as they can, without any further snapshot."""
        due = self._due.setdefault(topic_id, {})
        for name, kinds in names.items():
            due[name] = due.get(name, frozenset()) | kinds

    def _remove_all(
        self, found: dict[int, dict[SegmentName, frozenset[str]]], files_of: FilesOf, alive: Callable[[], None]
    ) -> Swept:
        """Removes the files in `found`; those that stay for now are in it afterwards."""
        swept = Swept([], [])
        if not found:
            return swept
        try:
            pinned = self._read_pinned()
        except OSError as error:
            return Swept([], [error])
        for topic_id, names in list(found.items()):
            left = self._remove_found(topic_id, names, files_of(topic_id), pinned, swept)
            if left is None:
                del found[topic_id]
            else:
                found[topic_id] = left
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
    ) -> dict[SegmentName, frozenset[str]] | None:
        """Removes files of one topic. Returns those that stay for now; None when all is done."""
        left: dict[SegmentName, frozenset[str]] = {}
        for name, kinds in names.items():
            if (topic_id, name) in pinned:
                left[name] = kinds
                continue
            now = needed.superfluous(name) if needed is not None else None
            going = kinds & now if now else None
            if not going:
                continue
            try:
                self._remove(topic_id, name, going)
            except OSError as error:
                swept.failures.append(error)
                left[name] = kinds  # also files that are gone: the segment is told of as a whole
            else:
                if "idx" in going:
                    swept.removed.append((topic_id, name))
        if not left and needed is not None and needed.segments is None:
            try:
                self._remove_directory(topic_id)
            except OSError as error:
                swept.failures.append(error)
                return {}
        return left or None

    def _look_at_each(
        self, topic_ids: set[int], files_of: FilesOf, swept: Swept, alive: Callable[[], None]
    ) -> Iterator[tuple[int, dict[SegmentName, frozenset[str]]]]:
        """Yields topics of which something may go, and the files."""
        for topic_id in sorted(topic_ids):
            try:
                found = self._look_at(topic_id, files_of(topic_id), swept)
            except OSError as error:
                swept.failures.append(error)
                self._look_again.add(topic_id)
            else:
                if found is not None:
                    yield topic_id, found
            alive()

    def _look_at(
        self, topic_id: int, needed: TopicFiles | None, swept: Swept
    ) -> dict[SegmentName, frozenset[str]] | None:
        """Returns the files that may go; empty: the directory may. None: nothing may."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        if not self._fs.exists(directory):
            return None
        due = self._due.get(topic_id, {})
        found: dict[SegmentName, frozenset[str]] = {}
        unexplained: set[SegmentName] = set()
        for name, kinds in layout.discover_segments(self._fs, directory).items():
            superfluous = needed.superfluous(name) if needed is not None else None
            if superfluous is None:
                unexplained.add(name)
            elif new := superfluous & kinds - due.get(name, frozenset()):
                found[name] = new
        for name in unexplained - self._unexplained.pop(topic_id, set()):
            log.error("files of a segment that belong to nothing: left alone", directory=directory, segment=tuple(name))
        if unexplained:
            self._unexplained[topic_id] = unexplained
        for name_in in self._fs.listdir(directory):
            if name_in.endswith(layout.TMP_SUFFIX):  # it never came to be
                try:
                    self._fs.unlink(os.path.join(directory, name_in))
                except OSError as error:
                    swept.failures.append(error)
                    self._look_again.add(topic_id)
        is_to_go = needed is not None and needed.segments is None and topic_id not in self._due
        return found if found or is_to_go else None

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
