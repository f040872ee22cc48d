"""Kill points: named places between two steps where a crash must lose nothing. Tests kill a process at each of them.

A process is at a kill point when everything before it is done and nothing after it has begun. In production `reached`
costs one comparison. A test arms one point, in another process (`TOPICS_TEST_KILL_AT`) or in its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final, Literal, get_args

KillPoint = Literal[
    "checkpoint.followed",  # the cut has read the log up to the position of its snapshot
    "checkpoint.copied",  # records are in the segment's files, not synced
    "checkpoint.sealed",  # a segment has its postings; its mark is not in the log
    "checkpoint.synced",  # all segments of a cut are on the disk; the shard does not know them
    "checkpoint.marked",  # the shard has answered
    "snapshot.due",  # all shards have answered
    "snapshot.saved",  # the snapshot is on the disk; the logs are as long as before
    "trim.some",  # one shard has removed log files, the next has not
    "trim.done",
    "drop.some",  # one file of a dropped segment is removed, the others are not
    "drop.done",
    "rewrite.fetched",  # the live records of a cold segment are here, under no name
    "rewrite.copied",  # the live records are in new files, which are not synced
    "rewrite.synced",  # the new files are on the disk; the shard does not know them
    "rewrite.marked",  # the new files count; the old ones are still there
    "relocate.copied",  # a segment is in the cold directory as well; the shard does not know it
    "relocate.marked",  # its cold copy counts; the hot one is still there
    "mark.logged",  # in the shard: the mark is on the disk; the index is as before
    "mark.applied",  # in the shard: the index has the mark; the compactor has no answer
]
KILL_POINTS: Final[tuple[KillPoint, ...]] = get_args(KillPoint)

_armed: KillPoint | None = None
_action: Callable[[], None]


def reached(point: KillPoint) -> None:
    """Run the action that is armed for this point, if any. The code calls this at the point."""
    if point == _armed:
        _action()


def arm(point: KillPoint | None, action: Callable[[], None]) -> None:
    """Call `action` from now on when `point` is reached; None disarms."""
    global _armed, _action
    assert point is None or point in KILL_POINTS, point
    _armed, _action = point, action


def arm_as_told(order: str | None, incarnation: int) -> None:
    """Arm a SIGKILL by `order`: `process:<point>` kills this process (only its first incarnation), `service:<point>`
    its whole process group. Raise ValueError for an unknown point.
    """
    if order is None:
        return
    whose, _, name = order.partition(":")
    point = next((point for point in KILL_POINTS if point == name), None)
    if point is None:
        raise ValueError(f"{name} is no kill point; choose one of {', '.join(KILL_POINTS)}")
    if whose == "service":
        arm(point, lambda: os.killpg(0, signal.SIGKILL))
    elif incarnation == 1:
        arm(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
