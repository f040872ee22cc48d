"""Room in a topic that its caps would not give: what has expired, and acknowledged jobs that stayed, go first."""

from __future__ import annotations

from collections.abc import Callable

from topics.walshard.hosted import Hosted
from topics.walshard.operation import Steps

Make = Callable[[Hosted, int, int], bool]


class MakeRoom:
    def __init__(self) -> None:
        self.expire_for: Make | None = None
        self.give_way_for: Make | None = None

    def expire(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[bool]:
        yield from ()
        return self.expire_for is not None and self.expire_for(hosted, records, size_bytes)

    def give_way(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[bool]:
        yield from ()
        return self.give_way_for is not None and self.give_way_for(hosted, records, size_bytes)
