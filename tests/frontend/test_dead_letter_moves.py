"""Moves of jobs to the dead letters and back, while others change what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.frontend.live import Live, on_loop
from topics.core.errors import TopicsError
from topics.frontend.queues.dead_letter_moves import DeadLetters
from topics.frontend.queues.dealt_jobs import UnreadableJobs
from topics.shm.append_messages import AppendOptions
from topics.shm.queue_messages import Dealt
from topics.storage.frame import lay_out

LETTER = b'{"$dead_letter_from":"q"}'


@pytest.mark.parametrize("before", ["Reserve", "Remove"])
@pytest.mark.parametrize("type_", ["log", "queue"])
def test_a_redrive_takes_nothing_of_a_topic_that_has_the_name_of_its_dead_letters_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: str, before: str
) -> None:
    async def test(live: Live) -> None:
        await live.put("q", type="queue")
        await live.put("dead", type=type_)
        records = lay_out([(b"", b"", b"1", LETTER)] * 2)
        await live.gateway.submit_append(0, AppendOptions("dead", False), records)
        ask = live.gateway.ask

        async def ask_later(request: Any) -> Any:
            if type(request).__name__ == before:
                await live.delete("dead")
                await live.put("dead", type=type_)
                await live.write("dead", 3)
            return await ask(request)

        with monkeypatch.context() as patched:
            patched.setattr(live.gateway, "ask", ask_later)
            letters = DeadLetters(live.gateway, live.reader, UnreadableJobs())
            with pytest.raises(TopicsError) as gone:
                await letters.redrive("q", "dead", 0, 10)
        assert gone.value.code == "topic_not_found"
        assert live.reader.get("dead").view.records == 3

    on_loop(tmp_path, test)


def test_the_log_tells_once_of_all_dead_letters_that_are_refused_and_at_once_of_what_else_fails(tmp_path: Path) -> None:
    """Each move told, and the shard repeats them every second."""

    async def test(live: Live) -> None:
        await live.put("q", type="queue")
        await live.write("q", 3)
        await live.put("dead", cap_records=1, discard="reject")
        await live.write("dead")
        letters = DeadLetters(live.gateway, live.reader, UnreadableJobs())
        for _ in range(3):
            await letters.start_move("q", Dealt(1, [], 0, 0, [], 0, [1, 2, 3], [1] * 3, [""] * 3, "dead"))
        await live.delete("q")
        await letters.start_move("q", Dealt(1, [], 0, 0, [], 0, [1, 2, 3], [1] * 3, [""] * 3, "dead"))

    with capture_logs() as lines:
        on_loop(tmp_path, test)
    told = [line for line in lines if "dead letter" in line["event"]]
    assert [(line["event"], line["topic"], line.get("seq"), line.get("records")) for line in told] == [
        ("dead letters cannot be written", "dead", 1, 3),
        ("dead letters cannot be moved", "q", None, None),
        ("jobs could not be moved to the dead letters", "q", None, None),
    ]
