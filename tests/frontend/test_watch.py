"""Watch sessions at a real shard, and which Accept headers an event stream satisfies (api §7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frontend.live import Live, on_loop, until
from topics.core.errors import TopicsError
from topics.frontend import sessions as module
from topics.frontend.sessions import SESSION_TTL_MS, Follow, Session, Sessions
from topics.frontend.watch import accepts_event_stream
from topics.shm.watch_messages import Hello

SESSION = Session({"t": Follow(1, 5)}, [b"me"], 256, 1000, 15_000, False, True, True, False, b"")


@pytest.mark.parametrize(
    ("accept", "allowed"),
    [
        (b"text/event-stream", True),
        (b"TEXT/Event-Stream; charset=utf-8", True),
        (b"*/*", True),
        (b"text/*", True),
        (b"application/json, */*;q=0.1", True),
        (b"text/event-stream;q=0.001", True),
        (b"*/*;q=0, text/event-stream", True),
        (b"text/event-stream;q=0", False),
        (b"text/event-stream;q=0.000, */*", False),
        (b"text/*; q=0, */*", False),
        (b"application/json", False),
        (b"text/html, application/*", False),
        (b"text/event-streams", False),
        (b"", False),
    ],
)
def test_accept(accept: bytes, allowed: bool) -> None:
    assert accepts_event_stream(accept) is allowed


async def refusal(sessions: Sessions, wid: str) -> TopicsError:
    with pytest.raises(TopicsError) as raised:
        await sessions.open(wid)
    return raised.value


def sessions_of(live: Live) -> Sessions:
    return Sessions(live.gateway, live.arenas, live.clock)


def test_a_session_comes_back_as_it_was_made(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        opened = await sessions.open(wid)
        assert (opened.session, opened.positions, opened.exact) == (SESSION, {}, True)
        sessions.close(opened, {"t": 9})
        again = await sessions.open(wid)
        assert (again.positions, again.exact) == ({"t": 9}, True)

    on_loop(tmp_path, test)


def test_a_stream_that_never_ended_leaves_the_client_to_know(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        first = await sessions.open(wid)
        sessions.close(first, {"t": 9})
        second = await sessions.open(wid)  # and its frontend dies
        live.gateway.post(0, Hello(2))
        live.clock.ms += 1
        successor = sessions_of(live)
        opened = await successor.open(wid)
        assert (opened.positions, opened.exact) == ({"t": 9}, False)
        assert opened.stream_no > second.stream_no

    on_loop(tmp_path, test)


def test_an_older_stream_of_a_session_no_longer_counts(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        old, new = await sessions.open(wid), await sessions.open(wid)
        assert not new.exact
        sessions.close(new, {"t": 9})
        sessions.close(old, {"t": 7})
        assert (await sessions.open(wid)).positions == {"t": 9}

    on_loop(tmp_path, test)


@pytest.mark.parametrize("told_first", ["old", "new"])
def test_a_restarted_shard_goes_by_the_newest_stream_whoever_tells_first(tmp_path: Path, told_first: str) -> None:
    """Two frontends hold a stream of one session each; the shard hears of them in any order."""

    async def test(live: Live) -> None:
        left, right = sessions_of(live), sessions_of(live)
        wid = await left.create(SESSION)
        old = await left.open(wid)
        live.clock.ms += 5
        new = await right.open(wid)
        live.restart_shard()
        for sessions in (left, right) if told_first == "old" else (right, left):
            sessions._announce()
        right.close(new, {"t": 9})
        left.close(old, {"t": 7})
        again = await left.open(wid)
        assert (again.positions, again.exact) == ({"t": 9}, True)

    on_loop(tmp_path, test)


def test_an_older_stream_told_of_after_the_end_of_the_newer_changes_nothing(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        left, right = sessions_of(live), sessions_of(live)
        wid = await left.create(SESSION)
        old = await left.open(wid)
        live.clock.ms += 5
        new = await right.open(wid)
        live.restart_shard()
        right.close(new, {"t": 9})
        left._announce()
        left.close(old, {"t": 7})
        assert (await right.open(wid)).positions == {"t": 9}

    on_loop(tmp_path, test)


def test_unknown_sessions(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        for wid in ("wid_" + "A" * 22, "wid_", "x", "wid_" + "A" * 21 + "\n", "wid_" + "A" * 23, "wid_" + "\0" * 22):
            assert (await refusal(sessions, wid)).code == "not_found"

    on_loop(tmp_path, test)


def test_a_session_too_large_is_refused(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        nodes = [b"%100d" % n for n in range(5000)]
        large = Session({}, nodes, 1, 1, 1000, False, True, True, False, b"")
        with pytest.raises(TopicsError) as raised:
            await sessions_of(live).create(large)
        assert raised.value.code == "invalid_request"

    on_loop(tmp_path, test)


def test_a_restarted_shard_hears_of_the_open_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take their sessions for idle ones, and collect them."""
    monkeypatch.setattr(module, "RENEW_S", 0.005)

    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid, idle_wid = await sessions.create(SESSION), await sessions.create(SESSION)
        opened = await sessions.open(wid)
        live.restart_shard()
        known = live.rig.shard._sessions._sessions
        assert known[wid].stream is None
        await until(lambda: known[wid].stream == (0, opened.stream_no))
        live.clock.ms += SESSION_TTL_MS + 1
        live.rig.shard.sweep()
        sessions.close(opened, {"t": 9})
        assert (await sessions.open(wid)).positions == {"t": 9}
        assert (await refusal(sessions, idle_wid)).code == "not_found"

    on_loop(tmp_path, test)
