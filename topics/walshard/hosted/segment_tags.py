"""The tags of sealed segments. They come from postings files, or from the frames if the postings are damaged."""

from __future__ import annotations

from collections import OrderedDict
from resource import RLIM_INFINITY
from typing import Final

from topics.core.location import ENTRY_WORDS, FLAGS_SHIFT, LOCATION_GONE
from topics.core.segment_list import SegmentInfo, SegmentKey
from topics.core.tags import Match
from topics.log import get_logger
from topics.storage import layout
from topics.storage.frame import LOCATION_HAS_TAG
from topics.storage.postings import CorruptPostings, Postings, UnknownPostingsVersion
from topics.storage.postings import encode as encode_postings
from topics.storage.segment import CorruptSegment
from topics.storage.segment_reader import SegmentReader

log = get_logger()

_FILES_MAX: Final = 16384
"""Postings that stay open at most. A delete by tag asks the postings of all sealed segments of its topic. If a topic
had more segments than this, each delete would open and check every one again.
"""


def tags_max(open_files: int) -> int:
    """Return how many postings may stay open under this RLIMIT_NOFILE: the rest is for indexes, logs and the like."""
    return _FILES_MAX if open_files == RLIM_INFINITY else min(_FILES_MAX, open_files // 4)


class SegmentTags:
    """Finds tags in the sealed segments of one shard. It keeps up to `files_max` postings open."""

    def __init__(self, data_dir: str, files_max: int) -> None:
        self._data_dir = data_dir
        self._files_max = files_max
        self._open: OrderedDict[SegmentKey, Postings] = OrderedDict()
        """Open postings, the latest used last."""

    def find(self, topic_id: int, info: SegmentInfo, match: Match) -> list[int]:
        """Return the seqs of a sealed segment's records with a matching tag, ascending; some may be deleted meanwhile.

        Missing or damaged postings are made again from the frames. Raise FileNotFoundError or CorruptPostings if the
        frames are not here, too, or the postings are of another release; CorruptSegment if the frames are damaged;
        OSError if a file cannot be read now, for example with too many open files.
        """
        postings = self._postings(topic_id, info)
        try:
            return postings.find(match)
        except CorruptSegment:
            # The file was whole when it was opened. It may have been damaged or replaced since: open it again.
            self.forget(topic_id, info)
            return self._postings(topic_id, info).find(match)

    def forget(self, topic_id: int, info: SegmentInfo) -> None:
        """Forget a segment that was removed or replaced."""
        self._open.pop(info.key_in(topic_id), None)

    def _postings(self, topic_id: int, info: SegmentInfo) -> Postings:
        key = info.key_in(topic_id)
        postings = self._open.get(key)
        if postings is None:
            directory = layout.topic_dir(self._data_dir, topic_id)
            try:
                postings = Postings.open(directory, info.first_seq, info.records, info.version)
            except UnknownPostingsVersion:
                raise
            except (FileNotFoundError, CorruptPostings) as error:
                postings = _of_frames(directory, info, error)
            self._open[key] = postings
            if len(self._open) > self._files_max:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return postings


def _of_frames(directory: str, info: SegmentInfo, error: FileNotFoundError | CorruptPostings) -> Postings:
    """Return postings made from the frames. They stay in memory: only the compactor writes postings files."""
    try:
        reader = SegmentReader.open(directory, info.first_seq, info.records, info.data_bytes, info.version)
    except FileNotFoundError:
        raise error from None
    words = reader.entries(info.first_seq, info.last_seq)[3::ENTRY_WORDS]
    flags = [(seq, word >> FLAGS_SHIFT) for seq, word in enumerate(words, info.first_seq)]
    live = [seq for seq, flag in flags if flag & LOCATION_HAS_TAG and not flag & LOCATION_GONE]
    frames = map(reader.frame, live)
    tagged = [(frame.seq, frame.tag) for frame in frames if frame is not None]
    path = layout.segment_tags_path(directory, info.first_seq, info.version)
    log.error("a segment's tags are taken from its frames", path=path, reason=str(error))
    return Postings(path, encode_postings(info.first_seq, info.records, tagged))
