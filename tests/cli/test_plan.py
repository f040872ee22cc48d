"""Plans of `topics apply`, without a service: a plan that is carried out leaves nothing to plan."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.cli.apply import Declaration, Deployed, Step, config_changes, plan, render
from topics.cli.create import parse_fields
from topics.cli.shared import UsageError
from topics.core.config import parse_config
from topics.core.routers import parse_router
from topics.terminal import plain

NAMES = ("a", "b", "shop.c", "shop.d")
configs = st.fixed_dictionaries(
    {},
    optional={
        "ttl_ms": st.integers(0, 5),
        "cap_records": st.integers(0, 5),
        "lease_ms": st.integers(0, 200),  # clamped: the service keeps another value than it was sent
        "priority": st.sampled_from((None, -5000, 3)),
        "durable": st.booleans(),
        "dead_letter": st.sampled_from((None, "shop.dead")),
        "on_ack": st.sampled_from(("keep", "delete")),
    },
)
routers = st.fixed_dictionaries(
    {"source": st.sampled_from(("a", "b")), "dest": st.sampled_from(("shop.c", "shop.d"))},
    optional={"filter": st.sampled_from((None, "x*", ["tag", "Eq", "y"])), "preserve_tag": st.booleans()},
)
cursors = st.fixed_dictionaries(
    {}, optional={"persist_every": st.integers(1, 3), "tail": st.booleans(), "consistency": st.just("strictly_at_once")}
)
manifests = st.fixed_dictionaries(
    {},
    optional={
        "topics": st.dictionaries(st.sampled_from(NAMES), configs),
        "routers": st.dictionaries(st.sampled_from(("r", "shop.r")), routers),
        "cursors": st.dictionaries(st.sampled_from(NAMES), st.dictionaries(st.sampled_from(("x", "y")), cursors)),
        "prefix": st.sampled_from((None, "shop.")),
    },
).map(lambda given: msgspec.convert(given, Declaration))


def carry_out(steps: list[Step], now: Deployed) -> Deployed:
    """Do what the service would do for these calls."""
    now = copy.deepcopy(now)
    for step in steps:
        places: dict[str, dict[Any, Any]] = {"topic": now.topics, "router": now.routers, "cursor": now.cursors}
        place = places[step.kind]
        name: Any = tuple(step.name.split()) if step.kind == "cursor" else step.name
        if step.action == "delete":
            assert step.call.method == "DELETE"
            del place[name]
            continue
        assert step.call.method == "PUT"
        body = json.loads(step.call.body or b"{}")
        if step.kind == "topic":
            config, has_type = parse_config(body, step.name)
            kind = config.type if has_type or name not in place else place[name]["type"]
            place[name] = msgspec.structs.replace(config, type=kind).echo()
        elif step.kind == "router":
            place[name] = parse_router(step.name, body).echo()
        else:
            before = place.get(name, {"consistency": "at_least_once", "persist_every": 1, "cursor_seq": 0})
            place[name] = before | {field: body[field] for field in ("consistency", "persist_every") if field in body}
    return now


NOTHING = Deployed({}, {}, {})


@given(manifests, manifests)
def test_a_plan_that_is_carried_out_leaves_nothing_to_do(first: Declaration, second: Declaration) -> None:
    now = carry_out(plan(first, NOTHING)[0], NOTHING)
    assert plan(first, now)[0] == []
    steps, undeclared = plan(second, now)
    assert all(step.action != "delete" for step in steps)
    assert all(step.action == "delete" for step in undeclared)
    now = carry_out(steps, now)
    assert plan(second, now)[0] == []
    assert plan(second, carry_out(undeclared, now)) == ([], [])


@given(manifests, manifests)
def test_only_what_the_file_answers_for_is_undeclared(first: Declaration, second: Declaration) -> None:
    now = carry_out(plan(first, NOTHING)[0], NOTHING)
    for step in plan(second, now)[1]:
        if step.kind == "topic":
            assert second.prefix == "shop."
            assert step.name.startswith("shop.")
            assert step.name not in second.topics


def test_a_plan_as_text() -> None:
    manifest = msgspec.convert(
        {"topics": {"a": {"cap_records": 5}, "b": {}}, "routers": {"r": {"source": "a", "dest": "b", "filter": "x*"}}},
        Declaration,
    )
    a = parse_config({"cap_records": 9}, "a")[0].echo()
    now = Deployed({"a": a}, {}, {("a", "old"): {"consistency": "at_least_once", "persist_every": 1}})
    assert render(*plan(manifest, now), plain) == (
        "~ topic a\n    cap_records: 9 → 5 (takes records at once)\n+ topic b\n+ router r\n"
        '    source: "" → "a"\n    dest: "" → "b"\n    filter: null → "x*"\n'
        "  cursor a old is not in the file; --prune deletes it\n2 to create, 1 to change\n"
    )
    assert render([], [], plain) == "nothing to do: the service is as declared\n"


def test_words_on_what_takes_records() -> None:
    now = parse_config({"cap_records": 9, "ttl_ms": 0}, "t")[0].echo()
    assert config_changes("t", {"cap_records": 10}, now) == ["cap_records: 9 → 10"]
    assert config_changes("t", {}, now) == ["cap_records: 9 → 0"]
    assert config_changes("t", {"ttl_ms": 1, "cap_records": 9}, now) == ["ttl_ms: 0 → 1 (takes records at once)"]
    assert config_changes("t", {"cap_records": 9}, now) == []
    assert config_changes("t", {"cap_records": 9}, None) == ["cap_records: 0 → 9"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"typ": "queue"}, "no field 'typ'"),
        ({"ttl_ms": "soon"}, "ttl_ms"),
        ({"type": "queue"}, "cannot become a queue"),
        ({"dead_letter": "t"}, "dead_letter"),
    ],
)
def test_a_configuration_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config_changes("t", given, parse_config({}, "t")[0].echo())


def test_a_router_that_cannot_be() -> None:
    for fields, said in (({"source": "a", "dest": "a"}, "another topic"), ({"sorce": "a"}, "'sorce'"), ({}, "source")):
        with pytest.raises(UsageError, match=said):
            plan(Declaration(routers={"r": fields}), NOTHING)


def test_fields_are_json_or_text() -> None:
    assert parse_fields(["ttl_ms=5", "durability=fsync", "dead_letter=null", "a=b=c", "tag="]) == {
        "ttl_ms": 5,
        "durability": "fsync",
        "dead_letter": None,
        "a": "b=c",
        "tag": "",
    }
    for bad in (["ttl_ms"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="FIELD=VALUE"):
            parse_fields(bad)
