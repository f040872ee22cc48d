"""Watch sessions at a real shard, and which Accept headers an event stream satisfies (api §7)."""

from __future__ import annotations

import asyncio
import errno
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgspec
import pytest

from tests.frontend.live import DEADLINE_S, Live, on_loop, turns, until
from tests.storage.faults import Fault, FaultyFileSystem
from topics.api.requests import StartBody
from topics.core.errors import TopicsError
from topics.core.keys import KeyRing
from topics.frontend.asgi import Receive, Send
from topics.frontend.entry import limits
from topics.frontend.entry.access import Access, KeyLimits
from topics.frontend.live import watch
from topics.frontend.live.delivery import JOIN_STEP
from topics.frontend.live.event_streams import StreamSlots, check_accept
from topics.frontend.live.following import follow
from topics.frontend.live.watch import Follow, Session, SessionClient, WatchRoutes
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards import arenas, gateway
from topics.shm.arena import ArenaReader
from topics.shm.quotas import KeyCounts, Quota
from topics.shm.shm_names import objects
from topics.shm.topic_messages import SESSION_TTL_MS, Hello, SessionClose, SessionOpen

SESSION = Session({"t": Follow(1, 5)}, PageOptions(256, 1000, frozenset((b"me",))), 15_000, False, b"")


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
        (b"", True),
    ],
)
def test_accept(accept: bytes, allowed: bool) -> None:
    with nullcontext() if allowed else pytest.raises(TopicsError, match="rules out"):
        check_accept({b"accept": accept})


class OfTopics:
    """A reader of topics that have ten records each, but for one that does not exist."""

    def __init__(self) -> None:
        self.found = 0

    def find(self, name: str) -> object:
        self.found += 1
        return None if name == "gone" else SimpleNamespace(view=SimpleNamespace(head_seq=10, recreated=0))

    def read_page(self, _ref: object, *_: object) -> object:
        return SimpleNamespace(head_seq=10, earliest_seq=1)


def test_many_topics_are_looked_up_while_others_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    reader, names, seen = OfTopics(), [f"t{number}" for number in range(256)], [0]
    starts = {name: StartBody(tail=True) for name in [*names[:9], "gone", *names[9:]]}

    async def test() -> list[str]:
        part: Any = reader
        following = asyncio.create_task(follow(part, starts, strong=False, lenient=True))
        while not following.done():
            await asyncio.sleep(0)
            seen.append(reader.found)
        found = following.result()
        assert {one.from_seq for one in found.values()} == {10}
        return list(found)

    assert asyncio.run(test()) == names
    assert max(after - before for before, after in pairwise(seen)) <= 1


async def refusal(sessions: SessionClient, wid: str) -> TopicsError:
    with pytest.raises(TopicsError) as raised:
        await sessions.open(wid)
    return raised.value


def sessions_of(live: Live) -> SessionClient:
    return SessionClient(live.gateway, live.clock)


def test_a_session_comes_back_as_it_was_made(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        opened = await sessions.open(wid)
        assert (opened.session, opened.positions, opened.exact) == (SESSION, None, True)
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
        first, second = sessions_of(live), sessions_of(live)
        left, right = (first, second) if told_first == "old" else (second, first)
        wid = await left.create(SESSION)
        old = await left.open(wid)
        live.clock.ms += 5
        new = await right.open(wid)
        live.restart_shard()
        live.gateway.check_restart(0)
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
        live.gateway.post(0, SessionOpen(wid, old.stream_no))
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
        nodes = frozenset(b"%100d" % n for n in range(5000))
        large = Session({}, PageOptions(1, 1, nodes), 1000, False, b"")
        with pytest.raises(TopicsError) as raised:
            await sessions_of(live).create(large)
        assert raised.value.code == "invalid_request"

    on_loop(tmp_path, test)


def test_a_restarted_shard_hears_of_the_open_streams(tmp_path: Path) -> None:
    """Otherwise it would take their sessions for idle ones, and collect them."""

    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid, idle_wid = await sessions.create(SESSION), await sessions.create(SESSION)
        opened = await sessions.open(wid)
        live.restart_shard()
        known = live.rig.parts.sessions.by_wid
        assert known[wid].stream is None
        live.gateway.check_restart(0)
        await until(lambda: known[wid].stream == (0, opened.stream_no))
        live.clock.ms += SESSION_TTL_MS + 1
        live.rig.shard.sweep()
        sessions.close(opened, {"t": 9})
        assert (await sessions.open(wid)).positions == {"t": 9}
        assert (await refusal(sessions, idle_wid)).code == "not_found"

    on_loop(tmp_path, test)


def test_a_restarted_shard_hears_of_many_streams_while_others_have_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of one that ends meanwhile before its end, or it would not take its positions."""
    monkeypatch.setattr(watch, "TOLD_AT_ONCE", 2)

    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        opened = [await sessions.open(await sessions.create(SESSION)) for _ in range(6)]
        post, told = live.gateway.post, list[object]()

        def noted(shard: int, request: Any, may_be_lost: bool = False) -> bool:
            told.append(request)
            return post(shard, request, may_be_lost)

        monkeypatch.setattr(live.gateway, "post", noted)
        live.restart_shard()
        live.gateway.check_restart(0)
        assert told == [SessionOpen(one.wid, one.stream_no) for one in opened[:2]]
        last = opened[-1]
        sessions.close(last, {"t": 9})
        assert told[2:] == [SessionOpen(last.wid, last.stream_no), SessionClose(last.wid, last.stream_no, {"t": 9})]
        seen = [len(told)]
        while len(told) < 7:
            await asyncio.sleep(0)
            seen.append(len(told))
        assert max(after - before for before, after in pairwise(seen)) <= 2
        await turns()
        known = live.rig.parts.sessions.by_wid
        assert [known[one.wid].stream for one in opened] == [(0, one.stream_no) for one in opened[:-1]] + [None]
        assert (await sessions.open(last.wid)).positions == {"t": 9}

    on_loop(tmp_path, test)


# --- a full ring: what ends a stream is kept for the shard, or the session is never collected


def fill(live: Live) -> None:
    """Have the shard stand still and its ring full, at the top of the ladder: every request that may be refused is."""
    live.shard_up = False
    while not live.cell.get("ring_full"):
        live.submit("t", data=b'"%b"' % (b"x" * 100_000)).add_done_callback(lambda future: future.exception())
    live.gateway.pressed = True


def test_the_end_of_a_stream_is_told_however_full_the_ring_is(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        opened = await sessions.open(wid)
        known = live.rig.parts.sessions.by_wid
        assert known[wid].stream == (0, opened.stream_no)
        fill(live)
        sessions.close(opened, {"t": 9})
        live.shard_up = True
        await until(lambda: known[wid].stream is None)
        assert known[wid].positions == {"t": 9}
        live.clock.ms += SESSION_TTL_MS + 1
        live.rig.shard.sweep()
        assert wid not in known

    on_loop(tmp_path, test)


def test_a_stream_that_nobody_waits_for_is_abandoned_however_full_the_ring_is(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        live.shard_up = False
        opening = asyncio.create_task(sessions.open(wid))
        await asyncio.sleep(0)
        fill(live)
        opening.cancel()
        await asyncio.wait([opening])
        live.shard_up = True
        known = live.rig.parts.sessions.by_wid
        await until(lambda: known[wid].newest_stream)
        await until(lambda: known[wid].stream is None)

    on_loop(tmp_path, test)


def cram(live: Live) -> None:
    """The shard stands still for good, and its ring has no room for the shortest request."""
    live.shard_up = False
    ring = live.rig.shared.rings[0][0].requests
    for length_bytes in (10_000, 1000, 100, 10, 1):
        while ring.push(b"x" * length_bytes):
            pass


def posts(live: Live) -> int:
    """Return the number of messages without an answer that wait for room."""
    return len(live.gateway.links[0].requests.posts.messages)


def test_a_stream_that_is_refused_by_a_full_ring_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        cram(live)
        refused = await asyncio.gather(*[refusal(sessions, wid) for _ in range(50)])
        assert {error.code for error in refused} == {"throttled"}
        assert posts(live) == 0

    on_loop(tmp_path, test)


def test_clients_that_do_not_wait_for_a_full_ring_fill_it_with_their_ends_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RING_POSTS", limits.RING_POSTS._replace(most_count=20))
    monkeypatch.setattr(gateway, "ROOM_WAIT_S", DEADLINE_S)

    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        fill(live)
        live.gateway.pressed = False
        for _ in range(30):
            opening = asyncio.create_task(sessions.open(wid))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
        assert posts(live) == 20
        live.shard_up = True
        known = live.rig.parts.sessions.by_wid
        await until(lambda: not posts(live) and known[wid].stream is None)
        assert (await sessions.open(wid)).session == SESSION

    on_loop(tmp_path, test)


def test_where_too_much_waits_a_stream_ends_without_its_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RING_POSTS", limits.RING_POSTS._replace(most_bytes=100_000))
    positions = {f"{n:0255}": n for n in range(256)}

    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wids = [await sessions.create(SESSION) for _ in range(50)]
        streams = [await sessions.open(wid) for wid in wids]
        fill(live)
        for opened in streams:
            sessions.close(opened, positions)
        assert live.gateway.links[0].requests.posts.budget.held_bytes < 100_000 + 70_000 + 50 * 100
        live.shard_up = True
        known = live.rig.parts.sessions.by_wid
        await until(lambda: all(known[wid].stream is None for wid in wids))
        assert {known[wid].exact for wid in wids} == {True, False}

    on_loop(tmp_path, test)


def test_a_restarted_shard_with_a_full_ring_hears_of_the_open_streams(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        opened = await sessions.open(wid)
        live.restart_shard()
        fill(live)
        live.gateway.check_restart(0)
        live.shard_up = True
        known = live.rig.parts.sessions.by_wid
        await until(lambda: known[wid].stream == (0, opened.stream_no))

    on_loop(tmp_path, test)


@pytest.mark.parametrize("room", [True, False], ids=["by reference", "no room for that"])
def test_the_end_of_a_stream_whose_positions_are_too_long_for_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    positions = {f"{n:0255}": n for n in range(256)}
    if not room:
        monkeypatch.setattr(limits, "SPILLS", limits.SPILLS._replace(most_bytes=0))

    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        live.gateway.links[0].requests._ring.message_max_bytes = 16 * 1024
        sessions.close(await sessions.open(wid), positions)
        known = live.rig.parts.sessions.by_wid
        await until(lambda: known[wid].stream is None)
        assert known[wid].positions == (positions if room else None)
        assert [name for name in objects(live.rig.identity) if "spill" in name] == []

    on_loop(tmp_path, test)


def test_a_session_whose_end_cannot_be_logged_is_collected(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        opened = await sessions.open(wid)
        assert isinstance(live.rig.fs, FaultyFileSystem)
        live.rig.fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset(["pwritev"])))
        sessions.close(opened, {"t": 9})
        known = live.rig.parts.sessions.by_wid
        await until(lambda: known[wid].stream is None)
        assert not known[wid].exact

    on_loop(tmp_path, test)


@pytest.mark.parametrize("exact", [True, False])
def test_a_stream_that_sent_nothing_leaves_the_session_as_it_was(tmp_path: Path, exact: bool) -> None:
    async def test(live: Live) -> None:
        sessions = sessions_of(live)
        wid = await sessions.create(SESSION)
        sessions.close(await sessions.open(wid), {"t": 9})
        if not exact:
            await sessions.open(wid)
            live.gateway.post(0, Hello(2))  # its frontend dies
        opened = await sessions.open(wid)
        assert opened.exact is exact
        sessions.abandon(opened)
        again = await sessions.open(wid)
        assert (again.positions, again.exact) == ({"t": 9}, exact)
        assert again.stream_no > opened.stream_no

    on_loop(tmp_path, test)


async def open_stream(live: Live, wid: str) -> None:
    """Ask for the stream of a session. It is to be refused: nothing can be sent."""
    settings = live.rig.settings
    limits = KeyLimits(KeyCounts(live.rig.shared.key_counts, 1, 0), settings)
    slots = StreamSlots(limits, Quota("sse_connections", 0, "sse_admitted", live.cell, [live.cell]))
    catching_up = cast(CatchingUp, None)  # for new sessions only
    access = Access(KeyRing(()), limits)
    routes = WatchRoutes(live.reader, sessions_of(live), live.hub, access, settings, slots, catching_up)
    scope = {"headers": [], "method": "GET", "path_params": {"wid": wid}}
    await routes.stream(scope, cast(Receive, None), cast(Send, None))


def test_a_stream_is_refused_before_its_answer_begins_if_its_last_topic_cannot_be_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins its topics in turns, and in a later turn it could only be cut."""

    async def test(live: Live) -> None:
        names = [f"t{number}" for number in range(JOIN_STEP + 1)]
        for name in names:
            await live.put(name)
        follows = {name: Follow(live.reader.get(name).view.topic_id, 0) for name in names}
        wid = await sessions_of(live).create(msgspec.structs.replace(SESSION, topics=follows))
        require, owner = live.arenas.require, live.gateway.owner

        def of_the_first(shard: int) -> ArenaReader:
            if shard:
                raise TopicsError("not_ready", "the shard reads its log")
            return require(shard)

        monkeypatch.setattr(live.gateway, "owner", lambda name: int(name == names[-1]) or owner(name))
        monkeypatch.setattr(live.arenas, "require", of_the_first)
        with pytest.raises(TopicsError, match="the shard reads its log"):
            await open_stream(live, wid)
        await until(lambda: live.rig.parts.sessions.by_wid[wid].stream is None)

    on_loop(tmp_path, test)


def test_a_stream_that_cannot_be_resumed_gives_its_session_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_ready(*_: object) -> NoReturn:
        raise TopicsError("not_ready", "the shard reads its log")

    monkeypatch.setattr(WatchRoutes, "_resume", not_ready)

    async def test(live: Live) -> None:
        wid = await sessions_of(live).create(SESSION)
        with pytest.raises(TopicsError, match="the shard reads its log"):
            await open_stream(live, wid)
        known = live.rig.parts.sessions.by_wid
        await until(lambda: known[wid].stream is None)

    on_loop(tmp_path, test)
