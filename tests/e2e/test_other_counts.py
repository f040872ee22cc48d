"""A start with another shard count on what a killed service left: topics come and go while it takes snapshots."""

from __future__ import annotations

import random

import pytest

from tests.contract.asking import diff, ok, put, write
from tests.e2e.test_kill_points import verify
from tests.harness import Service

ROUNDS = 6


@pytest.mark.long
def test_topics_made_and_deleted_around_a_snapshot_stop_no_start() -> None:
    seed = random.SystemRandom().randrange(1, 1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kept = 0
    with Service(shards=1, frontends=1, env={"TOPICS_CHECKPOINT_INTERVAL_MS": "20"}) as service:
        for _ in range(ROUNDS):
            for _ in range(chance.randrange(5, 60)):
                put(service.client, "gone")
                assert ok(service.client.delete("/v0/topics/gone"))["deleted"]
                kept = write(service.client, "kept", kept + 1)["head_seq"]
            service.kill_group()
            verify(service.data_dir)
            service.shards = 3 - service.shards
            service.start()
            records = diff(service.client, "kept", from_seq=max(0, kept - 1000), limit=1000)["records"]
            assert [record["data"] for record in records] == list(range(max(0, kept - 1000) + 1, kept + 1))
