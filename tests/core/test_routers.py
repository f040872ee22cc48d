"""Routers that may exist beside each other, and the origin that a copy names."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.cost import lines_of
from topics.core.errors import TopicsError
from topics.core.routers import (
    DEST_ROUTERS_MAX,
    FoldedRouters,
    Router,
    RouterRegistry,
    RouterSpec,
    encode_router,
    parse_router,
    with_origin,
)

TOPICS = "abcdef"
topic = st.sampled_from(TOPICS)


@st.composite
def specs(draw: st.DrawFn) -> tuple[str, RouterSpec]:
    source = draw(topic)
    dest = draw(topic.filter(lambda name: name != source))
    return draw(st.sampled_from("0123456789")), RouterSpec(source, dest, allow_cycle=draw(st.booleans()))


def edges(registry: RouterRegistry) -> set[tuple[str, str]]:
    return {(router.spec.source, router.spec.dest) for router in registry.by_name.values()}


def round_of(registry: RouterRegistry, start: str) -> list[Router] | None:
    """The routers of the cycle that `start` is on, one for each step."""
    steps: list[Router] = []
    at = start
    while (found := registry.into(at)) and len(steps) <= len(TOPICS):
        steps.append(found[0])
        at = found[0].spec.source
        if at == start:
            return steps
    return None


@given(st.lists(st.one_of(specs(), st.sampled_from("0123456789")), max_size=40))
def test_every_dest_has_one_source_and_every_cycle_an_end(changes: list[tuple[str, RouterSpec] | str]) -> None:
    registry = RouterRegistry()
    ids: set[int] = set()
    for change in changes:
        before = dict(registry.by_name)
        if isinstance(change, str):
            registry.remove(change)
            continue
        name, spec = change
        try:
            router, created = registry.plan(name, spec)
        except TopicsError as refusal:
            assert registry.by_name == before
            detail = refusal.detail or {}
            if refusal.code == "router_cycle":
                assert not spec.allow_cycle
                cycle = detail["cycle"]
                assert (cycle[0], cycle[1], cycle[-1]) == (spec.source, spec.dest, spec.source)
                others = {(r.spec.source, r.spec.dest) for r in before.values() if r.name != name}
                assert set(itertools.pairwise(cycle[1:])) <= others
            elif refusal.code != "topic_exists_incompatible" or detail["reason"] != "router_dest_fan_in":
                raise
            else:
                assert any(r.spec.dest == spec.dest and r.spec.source != spec.source for r in before.values())
            continue
        assert created == (name not in before)
        if router != before.get(name):
            same = name in before and router.id == before[name].id
            assert same or router.id not in ids
            assert not same or router.version == before[name].version + 1
        ids.add(router.id)
        registry.put(router)
        sources: dict[str, str] = {}
        for source, dest in edges(registry):
            assert sources.setdefault(dest, source) == source
        for start in TOPICS:
            steps = round_of(registry, start)
            assert steps is None or any(
                all(one.counts_hops for one in registry.into(step.spec.dest)) for step in steps
            ), "a cycle that nothing ends"
            assert next(iter(registry.upstream(start))) == start


def test_the_same_edge_again_is_never_a_cycle_and_changes_nothing() -> None:
    registry = RouterRegistry()
    for name, spec in (("1", RouterSpec("a", "b")), ("2", RouterSpec("b", "a", allow_cycle=True))):
        registry.put(registry.plan(name, spec)[0])
    again, created = registry.plan("2", RouterSpec("b", "a", allow_cycle=True))
    assert (again, created) == (registry.by_name["2"], False)
    narrowed, _ = registry.plan("2", RouterSpec("b", "a"))
    assert (narrowed.id, narrowed.version, narrowed.counts_hops) == (again.id, 2, True)


def test_two_routers_of_one_edge_in_a_cycle_both_count() -> None:
    registry = RouterRegistry()
    registry.put(registry.plan("1", RouterSpec("a", "b"))[0])
    registry.put(registry.plan("2", RouterSpec("b", "a", allow_cycle=True))[0])
    registry.put(registry.plan("3", RouterSpec("b", "a", allow_cycle=True))[0])
    assert [router.counts_hops for router in registry.into("a")] == [True, True]


@given(
    st.one_of(st.none(), st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=4)),
    st.sampled_from(["", " ", "\n\t"]),
    st.integers(1, 3),
)
def test_a_copy_names_its_last_origin_alone(meta: dict[str, str] | None, space: str, times: int) -> None:
    payload = b'"data":{"meta":{"k":1}}'
    if meta is not None:
        payload += b',"meta":{' + space.encode() + json.dumps(meta)[1:-1].encode() + space.encode() + b"}"
    has_meta = meta is not None
    for at in range(times):
        payload = with_origin(payload, has_meta, f"r>{at}", f"s{at}", 7, 100 + at)
        has_meta = True
    found = json.loads(b"{" + payload + b"}")
    origin = found["meta"].pop("_topics_router")
    last = times - 1
    assert origin == {
        "router": f"r>{last}",
        "source_topic": f"s{last}",
        "source_seq": 100 + last,
        "idempotency_key": f"router:r>{last}:7:1:{100 + last}",
    }
    assert found["meta"] == (meta or {})
    assert found["data"] == {"meta": {"k": 1}}
    assert payload.count(b"_topics_router") == 1 or b"_topics_router" in str(meta).encode()


def test_a_value_that_looks_like_an_origin_stays() -> None:
    meta = json.dumps({"k": '"_topics_router":{"x":1}'})
    payload = with_origin(f'"data":1,"meta":{meta}'.encode(), True, "r", "s", 1, 1)
    assert json.loads(b"{" + payload + b"}")["meta"]["k"] == '"_topics_router":{"x":1}'


def test_the_state_of_the_log_is_the_last_word() -> None:
    state = FoldedRouters()
    for router_id, version, source in ((1, 1, "a"), (1, 2, "a"), (2, 1, "b")):
        state.created(encode_router(Router(router_id, version, "r", RouterSpec(source, "d"))))
    assert state.routers["r"] == Router(2, 1, "r", RouterSpec("b", "d"))
    state.deleted(1)
    assert "r" in state.routers
    state.deleted(2)
    assert (state.routers, state.last_id) == ({}, 2)


step = st.tuples(st.sampled_from(["made", "changed", "deleted", "again", "kept", "moved"]), st.integers(0, 7))


@given(st.lists(step, max_size=60))
def test_the_state_of_the_log_is_that_of_a_look_at_all_routers(steps: list[tuple[str, int]]) -> None:
    state, expected, last_id = FoldedRouters(), dict[str, Router](), 0
    frames: list[Router | int] = []

    def fold(frame: Router | int) -> None:
        nonlocal expected, last_id
        if isinstance(frame, Router):
            state.created(encode_router(frame))
            expected[frame.name] = frame
            last_id = max(last_id, frame.id)
        else:
            state.deleted(frame)
            expected = {name: router for name, router in expected.items() if router.id != frame}
            last_id = max(last_id, frame)

    for what, number in steps:
        name, count = f"r{number}", len(frames)
        match what:
            case "made":
                frames.append(Router(last_id + 1, 1, name, RouterSpec("a", f"d{last_id}")))
            case "changed" if name in expected:
                former = expected[name]
                frames.append(Router(former.id, former.version + 1, name, former.spec))
            case "deleted":
                frames.append(max(0, last_id - number))
            case "again":  # as when a log file is copied into the next one
                count -= min(count, number)
            case "kept":
                state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=FoldedRouters)
            case "moved":
                former_state, state = state, FoldedRouters()
                state.add_routers(former_state)
        for frame in frames[count:]:
            fold(frame)
        assert (state.routers, state.last_id) == (expected, last_id)
        by_id = {router.id: router for router in expected.values()}
        assert all(state.find(id) == by_id.get(id) for id in range(last_id + 2))


def test_a_deletion_in_the_log_costs_the_same_however_many_routers_there_are() -> None:
    def cost(count: int) -> int:
        state = FoldedRouters()
        for id in range(1, count + 1):
            state.created(encode_router(Router(id, 1, f"r{id}", RouterSpec("a", f"d{id}"))))
        return lines_of(lambda: state.deleted(count // 2))

    assert cost(1000) == cost(10) > 0


def test_a_chain_grows_at_its_ends_at_the_same_cost_however_long_it_is() -> None:
    registry = RouterRegistry()

    def cost(name: str, source: int, dest: int) -> int:
        spec, planned = RouterSpec(f"t{source}", f"t{dest}"), list[Router]()
        lines = lines_of(lambda: planned.append(registry.plan(name, spec)[0]))
        registry.put(planned[0])
        return lines

    behind = [cost(f"r{at}", at, at + 1) for at in range(1000, 1200)]
    before = [cost(f"r{at}", at, at + 1) for at in range(999, 800, -1)]
    assert behind[0] > 0
    assert max(behind) == behind[0]
    assert max(before[1:]) == before[1]


def test_a_cycle_of_many_topics_is_found_in_as_many_steps() -> None:
    def cost(count: int) -> int:
        registry = RouterRegistry()
        for at in range(count):
            registry.put(registry.plan(f"r{at}", RouterSpec(f"t{at}", f"t{at + 1}"))[0])
        closing = RouterSpec(f"t{count}", "t0", allow_cycle=True)
        assert registry.plan("closing", closing)[0].counts_hops
        return lines_of(lambda: registry.plan("closing", closing))

    assert cost(400) < 5 * cost(100)


ENDS = ("", "source", "dest")
changes = st.lists(st.tuples(st.text("ab>", min_size=1, max_size=4), st.sampled_from(["ax", "ay", "bx", ""])))


@given(changes, st.text("ab>", max_size=2), st.text("ab>", max_size=3), st.sampled_from(ENDS))
def test_routers_are_found_by_name_as_by_a_look_at_all_of_them(
    changes: list[tuple[str, str]], prefix: str, after: str, end: str
) -> None:
    registry, topic = RouterRegistry(), {"": "", "source": "a", "dest": "x"}[end]
    for id, (name, ends) in enumerate(changes, 1):
        registry.put(Router(id, 1, name, RouterSpec(*ends))) if ends else registry.remove(name)
        found = [one.name for one in registry.by_name.values() if not end or getattr(one.spec, end) == topic]
        expected = sorted(name for name in found if name.startswith(prefix) and name > after)
        for most in (1, 3, 100):
            assert [router.name for router in registry.named(prefix, after, most, end, topic)] == expected[:most]


@pytest.mark.parametrize("end", ENDS)
def test_a_page_of_a_list_costs_the_same_however_many_routers_there_are(end: str) -> None:
    def cost(count: int) -> int:
        registry = RouterRegistry()
        for id in range(1, count + 1):
            registry.put(Router(id, 1, f"r{id:04}", RouterSpec("a", "b")))
        topic = {"": "", "source": "a", "dest": "b"}[end]
        assert len(registry.named("r", "r0005", 10, end, topic)) == 10  # the first one sorts them
        return lines_of(lambda: registry.named("r", "r0005", 10, end, topic))

    assert cost(1000) == cost(100) > 0


def test_a_topic_has_a_bounded_number_of_routers_into_it() -> None:
    registry = RouterRegistry()
    for at in range(DEST_ROUTERS_MAX):
        registry.put(registry.plan(f"r{at}", RouterSpec("a", "b"))[0])
    registry.put(registry.plan("other", RouterSpec("a", "c"))[0])
    for name in ("new", "other"):  # one that is made, one that is led to this topic
        with pytest.raises(TopicsError, match="256 routers lead to topic 'b', the most") as refusal:
            registry.plan(name, RouterSpec("a", "b"))
        assert (refusal.value.code, refusal.value.detail) == ("throttled", {"limit": "dest_routers", "max": 256})
    assert registry.plan("r7", RouterSpec("a", "b", filter="x"))[0].version == 2, "what is there may change"
    assert registry.plan("r7", RouterSpec("a", "c"))[1] is False, "and go elsewhere"
    registry.remove("r7")
    assert registry.plan("new", RouterSpec("a", "b"))[1] is True


@pytest.mark.parametrize(
    "given_fields", [{}, {"source": "a"}, {"source": "a", "dest": "a"}, {"source": 1, "dest": "b"}]
)
def test_what_is_no_router(given_fields: dict[str, object]) -> None:
    with pytest.raises(TopicsError) as refusal:
        parse_router("r", given_fields)
    assert refusal.value.code == "invalid_request"
