"""The reading of logs when a shard starts: its own, which it repairs, or the log of a service that it follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from topics.core.fold import Fold
from topics.core.topic import Topic
from topics.log import get_logger
from topics.shm.control import ControlPage, ProcessCell
from topics.storage.filesystem import FileSystem
from topics.storage.layout import list_log_files, snapshot_path
from topics.storage.log_fold import fold_frames
from topics.storage.log_tail import LogTail, TailLost
from topics.storage.logfile import RefusedLog, WalEnd, WalPosition, read_first_start
from topics.storage.recovery import Recovery
from topics.storage.snapshot import load_snapshot
from topics.walshard.hosted.topic_index import TopicIndex
from topics.walshard.place import Place

log = get_logger()


class Recovered(NamedTuple):
    """The fold of both logs, and how far each was read. `followed` reads on in the log of the leader; None without."""

    fold: Fold
    end: WalEnd | None
    """The end of the durable log that the shard writes; None if it has none yet."""
    ram_end: WalEnd | None
    followed: LogTail | None
    torn_bytes: int
    report: list[str]
    frames: int
    log_bytes: int
    snapshot_line: str


def read_logs(place: Place, make_index: Callable[[int], TopicIndex]) -> Recovered:
    """Read the logs, and repair their ends. Raise RefusedLog, FoldError, OSError."""
    fold = Fold(make_index)
    start, snapshot_line = _restore(fold, place.fs, place.settings.data_dir, place.directory)
    ram = _ram_recovery(place)
    durable = Recovery(place.fs, place.directory, place.identity, place.settings.accept_data_loss, start=start)
    ram_frames, _ = _fold_log(fold, ram, True, place.cell)
    frames, log_bytes = _fold_log(fold, durable, False, place.cell)
    # While one service lives the machine has not stopped, so the log kept its end. If a former life could not log what
    # was lost before, it still counts as lost.
    same_life = place.cell.get("generation") > 0 and not place.cell.get("lost_tails")
    fold.finish(ram_log_survived=ram.end is not None, has_end=durable.has_end or same_life)
    for topic in fold.topics.values():
        # All that was read from the durable log is on the disk.
        topic.durable_seq = 0 if topic.config.durability == "ephemeral" else topic.head_seq
    report = [*ram.report, *durable.report]
    frames += ram_frames
    return Recovered(fold, durable.end, ram.end, None, durable.torn_bytes, report, frames, log_bytes, snapshot_line)


def may_read_until(page: ControlPage, shard: int) -> WalPosition | None:
    """Return how far a follower's shard may read its log, None while that is not known."""
    word = page.readable(shard)
    return WalPosition.of_word(word) if word else None


def read_followed(place: Place, make_index: Callable[[int], TopicIndex]) -> Recovered:
    """Read the part of the leader's log that the follower's process has fetched. Records that the archive has count as
    durable. Raise RefusedLog, FoldError, TailLost, OSError.
    """
    fold = Fold(make_index)
    start, snapshot_line = _restore(fold, place.fs, place.settings.data_dir, place.directory)
    ram = _ram_recovery(place)
    ram_frames, _ = _fold_log(fold, ram, True, place.cell)  # watch sessions
    until = may_read_until(place.shared.control, place.shard)
    assert until is not None, "the caller has waited for it"
    files = list_log_files(place.fs, place.directory)
    if start is None and not files:
        raise TailLost(f"{place.directory}: has no log file")
    followed = LogTail(place.directory, start or WalPosition(files[0], 0))
    frames = 0
    archived = WalPosition.of_word(place.shared.control.shipped(place.shard))
    for end in (min(until, archived), until):
        for batch in followed.read(end) if end > followed.position else ():
            fold_frames(fold, batch, in_ram=False)
            frames += len(batch.frames)
        if end <= archived:
            for topic in fold.topics.values():
                note_durable(topic)
    # A follower does not have the leader's RAM log: its `ephemeral` topics are empty.
    fold.finish(ram_log_survived=True)
    frames += ram_frames
    return Recovered(fold, None, ram.end, followed, 0, list(ram.report), frames, 0, snapshot_line)


def note_durable(topic: Topic) -> None:
    """Note that everything of a topic is on the disk, and in the archive."""
    if topic.config.durability != "ephemeral":
        topic.durable_seq = topic.archived_seq = topic.head_seq


def _ram_recovery(place: Place) -> Recovery:
    # The RAM log outlives a crash of this process but never a service, so only a killed process leaves a torn end.
    return Recovery(place.fs, place.ram_directory, place.identity, start="lowest")


def _restore(fold: Fold, fs: FileSystem, data_dir: str, directory: str) -> tuple[WalPosition | None, str]:
    """Restore the newest snapshot of this log. Return (position to read the log from, None for all of it; a note)."""
    snapshot = load_snapshot(fs, data_dir)
    if snapshot is None:
        return None, "none"
    for bad in snapshot.skipped:
        log.warning("a snapshot was passed over", reason=str(bad))
    first = read_first_start(fs, directory)
    part = None if first is None else snapshot.part_of(first.log_id)
    if part is None:
        return None, f"{snapshot.number}, nothing of this shard"
    try:
        fold.restore(part.decoded())
    except msgspec.DecodeError as error:
        path = snapshot_path(data_dir, snapshot.number)
        raise RefusedLog(path, f"its state of shard {part.shard} does not decode: {error}") from error
    return part.position, str(snapshot.number)


def _fold_log(fold: Fold, recovery: Recovery, in_ram: bool, cell: ProcessCell) -> tuple[int, int]:
    """Fold the frames of one log, in order; return how many, and their bytes."""
    frames = size_bytes = 0
    for batch in recovery:
        fold_frames(fold, batch, in_ram)
        frames += len(batch.frames)
        if batch.frames:
            last_offset, last_len = batch.frames[-1][:2]
            size_bytes += last_offset + last_len - batch.frames[0][0]
        cell.set("progress_ppm", int(recovery.progress * 1_000_000))
    return frames, size_bytes
