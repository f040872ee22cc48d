"""What waits until its time comes."""

from __future__ import annotations

from topics.frontend.live.pulse import DueItems


def test_in_the_order_of_their_times() -> None:
    held: DueItems[object] = DueItems()
    early, late, same = object(), object(), object()
    held.add(late, 7.5)
    held.add(early, 2.0)
    held.add(same, 7.5)
    assert held.next_ms == 2.0
    assert held.take_due(1.9) == []
    assert held.take_due(7.4) == [early]
    assert held.take_due(7.5) == [late, same]
    assert held.next_ms is None
    assert len(held) == 0
