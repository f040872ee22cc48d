"""Leftovers are superfluous files of segments. This module finds them, waits until no start needs them, removes them.

It removes a file only if
- neither of the two kept snapshots can need it: it was superfluous at one snapshot and still is at the next;
- the reason is known: its topic or its seqs do not exist any more, a newer version or another segment with its seqs
counts, or it lies behind everything that was ever committed. It logs and keeps any other: its log may be missing;
- no pin holds it (`storage/pins.py`).
It tries regularly to remove a file that was pinned or could not be removed, without waiting for another snapshot.

The exception is a full disk, see `make_room`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from topics.core.segment_list import COLD, SegmentKey, SegmentList, SegmentName
from topics.log import get_logger
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import reached
from topics.storage.pins import Pinned, ReadPinned

_DATA: Final = frozenset(("data",))
_ALL: Final = frozenset(("data", "idx", "tags"))
Kinds = dict[SegmentName, frozenset[str]]
"""Kinds of files (data, idx, tags) by their segments."""

log = get_logger()


class TopicFiles(NamedTuple):
    """The files that a topic needs. `segments` None: the topic was deleted."""

    segments: SegmentList | None
    earliest_seq: int

    def is_cold(self, name: SegmentName) -> bool:
        """True if the segment's data are in the cold directory."""
        of_same_seq = self.segments.at(name.first_seq) if self.segments is not None else None
        return (
            of_same_seq is not None
            and bool(of_same_seq.flags & COLD)
            and (of_same_seq.first_seq, of_same_seq.version) == name
        )

    def superfluous(self, name: SegmentName) -> frozenset[str] | None:
        """Return which of a segment's files are superfluous; None when it is not known why they exist."""
        if self.segments is None:
            return _ALL
        of_same_seq = self.segments.at(name.first_seq)
        if of_same_seq is not None and of_same_seq.first_seq == name.first_seq:
            if of_same_seq.version == name.version:
                return _DATA if of_same_seq.flags & COLD else frozenset()
            return _ALL
        if of_same_seq is not None:
            return _ALL  # the segment was never marked, and then written again with another first seq
        if name.first_seq < self.earliest_seq or name.first_seq > self.segments.last_seq:
            return _ALL
        return None

    def superfluous_for_good(self, name: SegmentName) -> frozenset[str]:
        """Return the files of a segment that neither a reader nor a start that reads the log up to here needs.

        Keep an older version, because its deletions are still read. Keep unmarked files: the shard may mark them at any
        moment.
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
    """The removed segments, without those that lost only their data, and failures to repeat."""

    removed: list[SegmentKey]
    failures: list[OSError]


@dataclass(eq=False)
class Leftovers:
    """Finds and removes superfluous segment files of all topics in the data directory; touches no other files there.

    `alive` is called between topics.
    """

    _fs: FileSystem
    _data_dir: str
    _read_pinned: ReadPinned = frozenset
    _alive: Callable[[], None] = lambda: None
    _considered: set[int] = field(default_factory=set)
    """Topics that the next snapshot examines."""
    _unexamined: set[int] = field(default_factory=set)
    """Topics whose directories could not be read or cleared. They alone do not cause a snapshot."""
    _found: dict[int, Kinds] = field(default_factory=dict)
    """Files that one snapshot found superfluous. A topic without files here has a superfluous directory."""
    _due: dict[int, Kinds] = field(default_factory=dict)
    """Files that two snapshots found superfluous."""
    _unexplained: dict[int, set[SegmentName]] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        """True if the next snapshot would remove something."""
        return bool(self._found or self._considered)

    @property
    def unexplained(self) -> int:
        """The number of segments that belong to nothing and stay."""
        return sum(map(len, self._unexplained.values()))

    def consider(self, topic_id: int) -> None:
        """Have the next snapshot examine a topic that may have lost or replaced segments."""
        self._considered.add(topic_id)

    def consider_all(self) -> None:
        """Have the next snapshot examine all topics: former lives may have left files. Raise OSError."""
        self._considered.update(layout.discover_topics(self._fs, self._data_dir))

    def sweep(self, files_of: FilesOf, in_snapshot: Callable[[int], bool]) -> Swept:
        """Remove files that were superfluous at the previous snapshot and still are. Then examine topics for the next
        one. Topics whose state is not new in this snapshot (`in_snapshot`) wait. A file that cannot be removed holds up
        no other.
        """
        for topic_id in [topic_id for topic_id in self._found if in_snapshot(topic_id)]:
            self._make_due(topic_id, self._found.pop(topic_id))
        topic_ids = {topic_id for topic_id in self._considered | self._unexamined if in_snapshot(topic_id)}
        self._considered -= topic_ids
        self._unexamined -= topic_ids
        swept = self._remove_all(self._due, files_of)
        self._found.update(self._examine_all(topic_ids, files_of, swept))
        return swept

    def tidy(self, files_of: FilesOf) -> Swept:
        """Remove files that two snapshots found superfluous, and examine topics that could not be examined before.
        Files that it finds there wait for the next snapshot: the last one may still need them.
        """
        again, self._unexamined = self._unexamined, set()
        swept = self._remove_all(self._due, files_of)
        self._considered.update(topic_id for topic_id, _ in self._examine_all(again, files_of, swept))
        return swept

    def make_room(self, topic_ids: Iterable[int], files_of: FilesOf) -> Swept:
        """Remove files that are superfluous for good, whatever snapshots say. Look at these topics and at topics that
        wait for examination. The logs from which `files_of` answers are synced. Keep topics that it does not know.
        """
        going: dict[int, Kinds] = {}
        failures: list[OSError] = []
        for topic_id in sorted({*topic_ids, *self._considered, *self._found}):
            needed = files_of(topic_id)
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                if needed is None or not self._fs.exists(directory):
                    continue
                names = layout.discover_segments(self._fs, directory)
            except OSError as error:
                failures.append(error)
                continue
            kinds_of = {name: needed.superfluous_for_good(name) & kinds for name, kinds in names.items()}
            if any(kinds_of.values()):
                going[topic_id] = {name: kinds for name, kinds in kinds_of.items() if kinds}
            self._alive()
        swept = self._remove_all(going, files_of)
        for key in swept.removed:
            self._found.get(key.topic_id, {}).pop(key.name, None)
        for topic_id, kept in going.items():
            # Some files of these segments may be removed already, so a later listing would show less.
            self._make_due(topic_id, kept)
        return Swept(swept.removed, failures + swept.failures)

    def _make_due(self, topic_id: int, names: Kinds) -> None:
        """Have these files removed as soon as possible, without a further snapshot."""
        due = self._due.setdefault(topic_id, {})
        for name, kinds in names.items():
            due[name] = due.get(name, frozenset()) | kinds

    def _remove_all(self, found: dict[int, Kinds], files_of: FilesOf) -> Swept:
        """Remove the files in `found`. Only files that stay for now remain in `found`."""
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
            self._alive()
        if swept.removed:
            reached("drop.done")
        return swept

    def _remove_found(
        self, topic_id: int, names: Kinds, needed: TopicFiles | None, pinned: Pinned, swept: Swept
    ) -> Kinds | None:
        """Remove files of one topic. Return those that stay for now; None when all is done."""
        left: Kinds = {}
        for name, kinds in names.items():
            if (topic_id, *name) in pinned:
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
                left[name] = kinds  # with its removed files, because `Swept` reports a segment as a whole
            else:
                if "idx" in going:
                    swept.removed.append(SegmentKey(topic_id, *name))
        if not left and needed is not None and needed.segments is None:
            try:
                self._remove_directory(topic_id)
            except OSError as error:
                swept.failures.append(error)
                return {}
        return left or None

    def _examine_all(self, topic_ids: set[int], files_of: FilesOf, swept: Swept) -> Iterator[tuple[int, Kinds]]:
        """Yield the topics that have something superfluous, and the files."""
        for topic_id in sorted(topic_ids):
            try:
                found = self._examine(topic_id, files_of(topic_id), swept)
            except OSError as error:
                swept.failures.append(error)
                self._unexamined.add(topic_id)
            else:
                if found is not None:
                    yield topic_id, found
            self._alive()

    def _examine(self, topic_id: int, needed: TopicFiles | None, swept: Swept) -> Kinds | None:
        """Return the superfluous files of a topic. Empty: only its directory is superfluous. None: nothing is."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        if not self._fs.exists(directory):
            return None
        due = self._due.get(topic_id, {})
        found: Kinds = {}
        unexplained: set[SegmentName] = set()
        for name, kinds in layout.discover_segments(self._fs, directory).items():
            superfluous = needed.superfluous(name) if needed is not None else None
            if superfluous is None:
                unexplained.add(name)
            elif new := superfluous & kinds - due.get(name, frozenset()):
                found[name] = new
        if unsaid := unexplained - self._unexplained.pop(topic_id, set()):
            what = "no log or snapshot explains these segments, and they are kept: see docs/operations.md"
            log.error(what, directory=directory, first_seqs=sorted({name.first_seq for name in unsaid}))
        if unexplained:
            self._unexplained[topic_id] = unexplained
        for name_in in self._fs.listdir(directory):
            if name_in.endswith(layout.TMP_SUFFIX):  # a file that was never finished
                try:
                    self._fs.unlink(os.path.join(directory, name_in))
                except OSError as error:
                    swept.failures.append(error)
                    self._unexamined.add(topic_id)
        is_to_go = needed is not None and needed.segments is None and topic_id not in self._due
        return found if found or is_to_go else None

    def _remove(self, topic_id: int, name: SegmentName, kinds: frozenset[str]) -> None:
        paths = layout.segment_paths(layout.topic_dir(self._data_dir, topic_id), *name)
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
            log.warning("the directory of a deleted topic has foreign files and is left alone", directory=directory)
