"""api §4: a reader that passes `node` does not get its own records back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, ok, put, refused, write


def written(client: httpx.Client, topic: str) -> None:
    nodes = ["a", "b", None, "a", "A", "ab", ""]
    records = [{"data": n} | ({} if node is None else {"node": node}) for n, node in enumerate(nodes, 1)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))


def data(body: dict[str, Any]) -> list[Any]:
    return [record["data"] for record in body["records"]]


@pytest.mark.parametrize(
    ("node", "delivered"),
    [
        ("a", [2, 3, 5, 6, 7]),
        ("b", [1, 3, 4, 5, 6, 7]),
        ("A", [1, 2, 3, 4, 6, 7]),
        ("nobody", [1, 2, 3, 4, 5, 6, 7]),
        (["a"], [2, 3, 5, 6, 7]),
        (["a", "b"], [3, 5, 6, 7]),
        (["a", "b", "A", "ab"], [3, 7]),
        ([], [1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=json.dumps,
)
def test_own_records_are_left_out_silently(
    client: httpx.Client, topic: str, node: str | list[str], delivered: list[int]
) -> None:
    written(client, topic)
    body = diff(client, topic, node=node)
    assert data(body) == delivered
    assert (body["next_from_seq"], body["caught_up"], body["tombstone"]) == (7, True, None)


def test_without_node_everything_comes(client: httpx.Client, topic: str) -> None:
    written(client, topic)
    assert data(diff(client, topic)) == [1, 2, 3, 4, 5, 6, 7]


def test_bytes_are_compared_as_they_are(client: httpx.Client, topic: str) -> None:
    """Two spellings of one letter are two nodes; an escape in JSON is not another spelling."""
    composed, decomposed = "\u00e9", "e\u0301"
    write(client, topic, "composed", node=composed)
    write(client, topic, "decomposed", node=decomposed)
    assert data(diff(client, topic, node=composed)) == ["decomposed"]
    assert data(diff(client, topic, node=decomposed)) == ["composed"]
    answer = client.post(
        f"/v0/topics/{topic}/diff", content=rb'{"node":"\u00e9"}', headers={"Content-Type": "application/json"}
    )
    assert data(ok(answer)) == ["decomposed"]


def test_a_page_of_only_own_records_still_advances(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(2000), node="me")
    write(client, topic, "theirs", node="you")
    cursor, got = 0, []
    for _ in range(2002):
        body = diff(client, topic, from_seq=cursor, node="me", limit=10)
        assert body["next_from_seq"] > cursor
        cursor = body["next_from_seq"]
        got += data(body)
        if body["caught_up"]:
            break
    assert (got, cursor) == (["theirs"], 2001)


def test_limit_counts_what_is_delivered(client: httpx.Client, topic: str) -> None:
    for n in range(10):
        write(client, topic, n, node="me" if n % 2 else "you")
    body = diff(client, topic, node="me", limit=3)
    assert data(body) == [0, 2, 4]
    assert body["next_from_seq"] in (5, 6)


def test_dedupe_node_false_switches_it_off(client: httpx.Client, topic: str) -> None:
    put(client, topic, dedupe_node=False)
    write(client, topic, "mine", node="me")
    assert data(diff(client, topic, node="me")) == ["mine"]
    put(client, topic, dedupe_node=True)
    assert data(diff(client, topic, node="me")) == []


def test_the_record_keeps_its_node(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, node="n-1")
    assert diff(client, topic)["records"][0]["$node"] == "n-1"


@pytest.mark.parametrize("node", [1, True, {}, [1], ["a", None]], ids=json.dumps)
def test_a_bad_node_is_refused_by_name(client: httpx.Client, topic: str, node: Any) -> None:
    put(client, topic)
    error = refused(client.post(f"/v0/topics/{topic}/diff", json={"node": node}), 400, "invalid_request")
    assert "node" in error["message"]
