"""api §6 "Atomic commit over topics": stages are invisible, a commit publishes all of them once, whatever is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, missing, ok, put, refused, state, write
from tests.harness import Service, poll
from topics.storage.txn_files import Sink, encode_sink, sink_name

T3 = ("a", "b", "c")


def stage(client: httpx.Client, topic: str, *data: Any, txn: str = "txn", **record: Any) -> str:
    records = [{"data": value, **record} for value in data]
    answer = ok(client.post(f"/v0/stage/{topic}", json={"txn": txn, "records": records}))
    return str(answer["stage"])


def commit(client: httpx.Client, sink: str, batch: int, *stages: str) -> dict[str, Any]:
    return ok(client.post(f"/v0/txn/{sink}/commit", json={"batch": batch, "stages": stages}))


def data(client: httpx.Client, topic: str) -> list[Any]:
    return [record["data"] for record in diff(client, topic)["records"]]


def test_a_stage_is_invisible_until_it_is_committed(client: httpx.Client, topic: str) -> None:
    write(client, topic, "before")
    answer = ok(
        client.post(
            f"/v0/stage/{topic}",
            json={"txn": "t", "node": "n", "records": [{"data": 1.50, "tag": "x", "meta": {"k": "v"}}, {"data": 2}]},
        )
    )
    assert (answer["topic"], answer["txn"], answer["count"]) == (topic, "t", 2)
    assert answer["expires_in_ms"] == 3_600_000
    assert data(client, topic) == ["before"]
    assert state(client, topic)["head_seq"] == 1
    committed = commit(client, f"sink-{topic}", 0, answer["stage"])
    assert (committed["batch"], committed["last_batch"], committed["duplicate"], committed["count"]) == (0, 0, False, 2)
    first, second = diff(client, topic, from_seq=1, include_tags=True)["records"]
    assert {name: first[name] for name in ("$seq", "$tag", "$node", "data", "meta")} == {
        "$seq": 2, "$tag": "x", "$node": "n", "data": 1.50, "meta": {"k": "v"},
    }  # fmt: skip
    assert (second["$seq"], second["data"]) == (3, 2)


def test_a_commit_publishes_all_topics_in_the_order_of_its_stages(client: httpx.Client, topic: str) -> None:
    names = [f"{topic}-{part}" for part in T3]
    stages = [stage(client, name, f"{name}{number}") for number in range(3) for name in names]
    assert commit(client, topic, 0, *stages)["count"] == 9
    for name in names:
        assert data(client, name) == [f"{name}{number}" for number in range(3)]


def test_a_batch_again_is_a_duplicate_and_appends_nothing(client: httpx.Client, topic: str) -> None:
    commit(client, topic, 4, stage(client, topic, 1))
    other = stage(client, topic, "other rows, or the same in another order")
    again = commit(client, topic, 4, other)
    assert (again["duplicate"], again["last_batch"], again["count"]) == (True, 4, 0)
    earlier = commit(client, topic, 2, other)
    assert (earlier["duplicate"], earlier["last_batch"]) == (True, 4)
    assert data(client, topic) == [1]
    assert commit(client, topic, 9, other)["duplicate"] is False, "the stage was not used up by being refused"


def test_of_two_sinks_that_commit_one_stage_at_once_one_has_it(client: httpx.Client, topic: str) -> None:
    rounds = 40

    def commits(sink: str, batch: int, shared: list[str]) -> int:
        in_order = shared if sink == "a" else shared[::-1]
        body = {"batch": batch, "stages": [stage(client, f"{topic}-{sink}", batch), *in_order]}
        return client.post(f"/v0/txn/{topic}-{sink}/commit", json=body).status_code

    with ThreadPoolExecutor(2) as pool:
        for batch in range(rounds):
            shared = [stage(client, topic, batch), stage(client, topic, batch)]
            asked = [pool.submit(commits, sink, batch, shared) for sink in "ab"]
            assert sorted(one.result() for one in asked) == [200, 404]
    assert data(client, topic) == [batch for batch in range(rounds) for _ in range(2)]
    last = [ok(client.get(f"/v0/txn/{topic}-{sink}"))["last_batch"] for sink in "ab"]
    assert max(one for one in last if one is not None) == rounds - 1


def test_an_empty_batch_is_a_batch(client: httpx.Client, topic: str) -> None:
    assert commit(client, topic, 0)["duplicate"] is False
    assert commit(client, topic, 0)["duplicate"] is True


def test_a_sink_can_be_looked_at_and_forgotten(client: httpx.Client, topic: str) -> None:
    assert ok(client.get(f"/v0/txn/{topic}"))["last_batch"] is None
    commit(client, topic, 7, stage(client, topic, 1))
    assert ok(client.get(f"/v0/txn/{topic}"))["last_batch"] == 7
    assert ok(client.delete(f"/v0/txn/{topic}"))["deleted"] is True
    assert ok(client.delete(f"/v0/txn/{topic}"))["deleted"] is False
    assert commit(client, topic, 0, stage(client, topic, 2))["duplicate"] is False
    assert data(client, topic) == [1, 2]


def test_dropped_stages_cannot_be_committed(client: httpx.Client, topic: str) -> None:
    mine, also, other = stage(client, topic, 1), stage(client, topic, 2), stage(client, topic, 3, txn="another")
    both = client.request("DELETE", f"/v0/stage/{topic}", params={"txn": "another"}, json={"txn": "txn"})
    assert refused(both, 400, "invalid_request")["detail"] == {"field": "txn"}
    assert ok(client.delete(f"/v0/stage/{topic}", params={"txn": "txn"}))["dropped"] == 2
    assert ok(client.delete(f"/v0/stage/{topic}", params={"txn": "txn"}))["dropped"] == 0
    for gone in (mine, also):
        refused(client.post(f"/v0/txn/{topic}/commit", json={"batch": 0, "stages": [other, gone]}), 404, "not_found")
    assert ok(client.get(f"/v0/txn/{topic}"))["last_batch"] is None
    assert commit(client, topic, 0, other)["count"] == 1


def test_what_was_staged_for_a_deleted_topic_is_not_committed_into_the_next_one(
    client: httpx.Client, topic: str
) -> None:
    """The records were meant for another topic of that name, so nothing of the batch may be published."""
    write(client, topic, "former")
    mine, other = stage(client, topic, "staged"), stage(client, f"{topic}-other", "other")
    ok(client.delete(f"/v0/topics/{topic}"))
    batch = {"batch": 0, "stages": [other, mine]}
    refused(client.post(f"/v0/txn/{topic}/commit", json=batch), 404, "not_found")
    write(client, topic, "next")
    error = refused(client.post(f"/v0/txn/{topic}/commit", json=batch), 404, "not_found")
    assert error["detail"] == {"topic": topic}
    assert data(client, topic) == ["next"]
    missing(client, f"{topic}-other")
    assert commit(client, topic, 0, other, stage(client, topic, "again"))["count"] == 2
    assert data(client, topic) == ["next", "again"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("stage/t", {"txn": "", "records": [{"data": 1}]}),
        ("stage/t", {"txn": "x" * 257, "records": [{"data": 1}]}),
        ("stage/t", {"txn": "t", "records": []}),
        ("stage/t", {"txn": "t", "records": [{"tag": "x"}]}),
        ("stage/a$b", {"txn": "t", "records": [{"data": 1}]}),
        ("txn/s/commit", {"batch": -1, "stages": []}),
        ("txn/s/commit", {"batch": 2**64, "stages": []}),
        ("txn/s/commit", {"batch": 0}),
        ("txn/s/commit", {"batch": 0, "stages": ["x", "x"]}),
        ("txn/a$b/commit", {"batch": 0, "stages": []}),
    ],
)
def test_what_is_wrong_is_refused(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused(client.post(f"/v0/{path}", json=body), 400, "invalid_request")


def test_a_name_that_is_no_stage_is_not_found(client: httpx.Client, topic: str) -> None:
    for name in ("nothing", "../../meta/x", f"{'0' * 32}-{'0' * 16}"):
        answer = client.post(f"/v0/txn/{topic}/commit", json={"batch": 0, "stages": [name]})
        refused(answer, 404, "not_found")


def test_what_a_topic_could_not_take_is_refused_when_it_is_staged(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=1, discard="reject")
    write(client, topic, 0)
    full = client.post(f"/v0/stage/{topic}", json={"txn": "t", "records": [{"data": 1}]})
    assert refused(full, 422, "topic_full")["detail"] == {"cap_records": 1}
    put(client, f"{topic}-ram", durability="ephemeral")
    ephemeral = client.post(f"/v0/stage/{topic}-ram", json={"txn": "t", "records": [{"data": 1}]})
    assert "ephemeral" in refused(ephemeral, 400, "invalid_request")["message"]


def test_what_a_topic_can_never_take_is_not_said_to_wait_for_room(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=1, discard="reject")
    answer = client.post(f"/v0/stage/{topic}", json={"txn": "t", "records": [{"data": 1}, {"data": 2}]})
    assert refused(answer, 400, "record_too_large")["detail"] == {"cap_records": 1}
    stages = [stage(client, topic, n) for n in (1, 2)]
    answer = client.post(f"/v0/txn/{topic}/commit", json={"batch": 1, "stages": stages})
    assert refused(answer, 400, "record_too_large")["detail"] == {"cap_records": 1}
    assert ok(client.get(f"/v0/txn/{topic}"))["last_batch"] is None


def test_what_a_topic_cannot_take_any_more_is_refused_before_anything_is_decided(
    client: httpx.Client, topic: str
) -> None:
    put(client, topic, cap_records=2, discard="reject")
    stages = [stage(client, f"{topic}-other", "a"), stage(client, topic, 1), stage(client, topic, 2)]
    write(client, topic, 0)
    refused(client.post(f"/v0/txn/{topic}/commit", json={"batch": 1, "stages": stages}), 422, "topic_full")
    assert ok(client.get(f"/v0/txn/{topic}"))["last_batch"] is None
    missing(client, f"{topic}-other")
    ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 2}))
    assert commit(client, topic, 1, *stages)["count"] == 3
    assert (data(client, topic), data(client, f"{topic}-other")) == ([1, 2], ["a"])


def test_a_commit_makes_all_of_its_topics_or_none(topic: str) -> None:
    with Service(env={"TOPICS_MAX_TOPICS": "2"}) as service:
        client = service.client
        put(client, "a")
        stages = [stage(client, name, name) for name in ("a", "b", "c")]
        answer = client.post(f"/v0/txn/{topic}/commit", json={"batch": 0, "stages": stages})
        assert refused(answer, 429, "throttled")["detail"] == {"limit": "max_topics", "max": 2}
        assert data(client, "a") == []
        assert ok(client.get(f"/v0/txn/{topic}"))["last_batch"] is None
        assert commit(client, topic, 0, *stages[:2])["count"] == 2
        assert (data(client, "a"), data(client, "b")) == (["a"], ["b"])
        new = client.post("/v0/stage/d", json={"txn": "t", "records": [{"data": 1}]})
        refused(new, 429, "throttled")


def test_a_commit_needs_a_key_for_every_topic_it_publishes(topic: str) -> None:
    with Service(env={"TOPICS_API_KEYS": "all:rw,mine:w:mine,reader:r"}) as service:
        everything = {"Authorization": "Bearer all"}
        answer = service.client.post("/v0/stage/yours", json={"txn": "t", "records": [{"data": 1}]}, headers=everything)
        body = {"batch": 0, "stages": [ok(answer)["stage"]]}

        def status(path: str, key: str) -> int:
            return service.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code

        assert status("/v0/txn/mine/commit", "mine") == 403
        assert status("/v0/txn/yours/commit", "mine") == 403
        assert status("/v0/txn/yours/commit", "reader") == 403
        assert status("/v0/txn/yours/commit", "all") == 200


@pytest.mark.long
def test_stages_and_batches_outlive_restarts(topic: str) -> None:
    with Service() as service:
        staged = stage(service.client, topic, 1, 2)
        service.restart()
        assert commit(service.client, topic, 0, staged)["count"] == 2
        service.kill_group()
        service.start()
        assert commit(service.client, topic, 0, stage(service.client, topic, 3))["duplicate"] is True
        assert data(service.client, topic) == [1, 2]


@pytest.mark.long
def test_another_number_of_shards_knows_the_same_batches(topic: str) -> None:
    with Service(shards=1) as service:
        sinks = [f"{topic}-{number}" for number in range(6)]
        for sink in sinks:
            commit(service.client, sink, 3, stage(service.client, sink, 1))
        service.stop()
        service.shards = 3
        service.start()
        for sink in sinks:
            assert commit(service.client, sink, 3)["duplicate"] is True
            assert commit(service.client, sink, 4, stage(service.client, sink, 2))["duplicate"] is False
            assert data(service.client, sink) == [1, 2]


def test_an_unfinished_batch_is_finished_without_being_asked(topic: str) -> None:
    """The sink's decision is on the disk, one of three topics has its records: as a crash in between leaves it."""
    with Service() as service:
        names = [f"{topic}-{part}" for part in T3]
        stages = [stage(service.client, name, name) for name in names]
        service.stop()
        sinks = service.data_dir / "txn" / "sinks"
        sinks.mkdir()
        decided = Sink(topic, 0, list(zip(stages, names, strict=True)))
        (sinks / sink_name(topic)).write_bytes(encode_sink(decided))
        service.start()
        for name in names:
            poll(f"{name} to be published", lambda: exists(service, name))
            assert data(service.client, name) == [name]
        left = Path(service.data_dir, "txn", "stages")
        poll("the stages to go", lambda: not list(left.iterdir()))
        assert ok(service.client.get(f"/v0/txn/{topic}"))["last_batch"] == 0


def exists(service: Service, topic: str) -> bool:
    return service.client.get(f"/v0/topics/{topic}").status_code == 200


def test_stages_expire(topic: str) -> None:
    with Service(env={"TOPICS_STAGE_TTL_MS": "1000"}) as service:
        staged = stage(service.client, topic, 1)

        def is_refused() -> bool:
            answer = service.client.post(f"/v0/txn/{topic}-probe/commit", json={"batch": 1, "stages": [staged, "no"]})
            return "expired" in answer.json()["error"]["message"] and staged in answer.json()["error"]["message"]

        poll("the stage to expire", is_refused)
        assert service.client.get(f"/v0/topics/{topic}").status_code == 404


def test_a_bad_name_is_said_of_the_sink(client: httpx.Client) -> None:
    for answer in (client.get("/v0/txn/-s"), client.delete("/v0/txn/-s")):
        error = refused(answer, 400, "invalid_request")
        assert error["detail"]["field"] == "sink"
        assert error["message"].startswith("sink name '-s'")
