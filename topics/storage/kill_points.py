"""The steps between which a crash must cost nothing, by name: tests enumerate them and die at each.

A kill point is reached when everything before it is done and nothing behind it has begun. In production `reached` is
a comparison; a test arms one point, in a process of its own (`TOPICS_TEST_KILL_AT`) or in its own process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final, Literal, get_args

KillPoint = Literal[
    "checkpoint.followed",  # a cut has read the log up to where it is going to be a snapshot of, and looked no further
    "checkpoint.copied",  # records are in the segment's files, not synced
    "checkpoint.sealed",  # a segment has its postings; its mark is not in the log
    "checkpoint.synced",  # all segments of a cut are on the disk; the shard has not heard of them
    "checkpoint.marked",  # the shard has answered
    "snapshot.due",  # all shards have answered
    "snapshot.saved",  # the snapshot is on the disk; the logs are as long as before
    "trim.some",  # one shard has removed log files, the next has not
    "trim.done",
    "drop.some",  # one file of a segment that is gone for good is removed, the others are not
    "drop.done",
    "rewrite.fetched",  # the live records of a cold segment are here, under no name
    "rewrite.copied",  # the live records are in new files, which are not synced
    "rewrite.synced",  # they are on the disk; the shard has not heard of them
    "rewrite.marked",  # they take the place of the old ones, which are still there
    "relocate.copied",  # a segment is in the cold directory as well; the shard has not heard of it
    "relocate.marked",  # its cold copy counts; the hot one is still there
    "mark.logged",  # in the shard: the mark is on the disk; the index is as before
    "mark.applied",  # in the shard: the index has it; nobody was told
]
KILL_POINTS: Final[tuple[KillPoint, ...]] = get_args(KillPoint)

_armed: KillPoint | None = None
_action: Callable[[], None]


def reached(point: KillPoint) -> None:
    """To be called at that point."""
    if point == _armed:
        _action()


def arm(point: KillPoint | None, action: Callable[[], None]) -> None:
    """From now on `action` is called when the point is reached; None: at no point."""
    global _armed, _action
    assert point is None or point in KILL_POINTS, point
    _armed, _action = point, action


def arm_as_told(order: str | None, incarnation: int) -> None:
    """`order` is `process:<point>` or `service:<point>`: SIGKILL for this process (in its first life) or for its whole
    process group. Raises ValueError for a point that is none.
    """
    if order is None:
        return
    whose, _, name = order.partition(":")
    point = next((point for point in KILL_POINTS if point == name), None)
    if point is None:
        raise ValueError(f"{name} is no kill point; there are {', '.join(KILL_POINTS)}")
    if whose == "service":
        arm(point, lambda: os.killpg(0, signal.SIGKILL))
    elif incarnation == 1:
        arm(point, lambda: os.kill(os.getpid(), signal.SIGKILL))
