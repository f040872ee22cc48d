"""The job of dramatiq's worker; run by itself, this puts so many of them into the queue."""

from __future__ import annotations

import os
import sys

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

PORT = int(os.environ["PEER_REDIS_PORT"])
PAYLOAD = "x" * 100

broker = RedisBroker(host="127.0.0.1", port=PORT)
dramatiq.set_broker(broker)
counter = redis.Redis(port=PORT)


@dramatiq.actor(max_retries=0)
def job(number: int, payload: str) -> None:
    """Count the job, in steps of a hundred, which costs little."""
    if number % 100 == 0:
        counter.incrby("done", 100)


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        broker.enqueue(job.message(number, PAYLOAD))
