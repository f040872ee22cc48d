"""Deliver webhooks from a queue: retries with back-off, dead letters, a quiet end on SIGTERM.

    python -m examples.webhooks work --queue hooks --threads 8
    python -m examples.webhooks send --queue hooks http://127.0.0.1:8000/orders '{"order": 7}'
    python -m examples.webhooks failed --queue hooks
    python -m examples.webhooks again --queue hooks

A job is `{"url": …, "body": …}`. It is done when the receiver answers 2xx. Anything else is a failure: the job rests,
twice as long each time, and after --attempts goes to the dead letters (`<queue>.dead`), from where `again` brings it
back. A job may be delivered twice, when its worker is killed at the wrong moment; its Idempotency-Key is the same then.

The first worker makes the queue; how it was configured since is left alone. So `send` needs a key that may `write`, no
more, and `work` one that may `admin` only where there is no queue yet.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from typing import Any

import httpx

from topics.client import Backoff, Client, ClientError, Job, NotFoundError

SEND_TIMEOUT_S = 10.0


class RefusedError(Exception):
    """The receiver refused a webhook."""


def dead_letters(queue: str) -> str:
    return f"{queue}.dead"


def make_queue(topics: Client, queue: str, attempts: int) -> None:
    """Make the queue where there is none: a PUT replaces the whole configuration, and somebody may have changed it.

    Leases and counts of deliveries are logged as well: a job that kills its worker ends among the dead letters.
    """
    try:
        topics.get_topic(queue, touch=False)
    except NotFoundError:
        topics.put_topic(
            queue, type="queue", max_deliveries=attempts, dead_letter=dead_letters(queue), leases_durable=True
        )


def deliver(http: httpx.Client, job: Job) -> None:
    """Deliver a job once; raise when that failed."""
    hook: dict[str, Any] = job.data
    answer = http.post(hook["url"], json=hook["body"], headers={"Idempotency-Key": job.key})
    if not answer.is_success:
        raise RefusedError(f"{hook['url']} answered {answer.status_code}")


def work(topics: Client, arguments: argparse.Namespace) -> None:
    """Deliver until SIGTERM or SIGINT, then finish the jobs that were begun."""
    backoff = Backoff(first_ms=arguments.backoff_ms, max_ms=arguments.backoff_max_ms)
    with httpx.Client(timeout=SEND_TIMEOUT_S, trust_env=False) as http:
        topics.queue(arguments.queue).run(
            lambda job: deliver(http, job),
            threads=arguments.threads,
            lease_ms=arguments.lease_ms,
            backoff=backoff,
            stop_on=(signal.SIGTERM, signal.SIGINT),
        )


def list_failed(topics: Client, queue: str) -> None:
    for letter in topics.read(dead_letters(queue)):
        print(json.dumps({"job": letter.data, "deliveries": (letter.meta or {}).get("$dead_letter_deliveries")}))


def main() -> int:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with Client(arguments.url, token=arguments.token) as topics:
            if arguments.command == "send":
                appended = topics.append(
                    arguments.queue, [{"url": arguments.receiver, "body": arguments.body}], create=False
                )
                print(f"job {appended.first_seq}")
            elif arguments.command == "work":
                make_queue(topics, arguments.queue, arguments.attempts)
                work(topics, arguments)
            elif arguments.command == "failed":
                list_failed(topics, arguments.queue)
            else:
                print(topics.queue(arguments.queue).redrive(dead_letters(arguments.queue)).redriven, "jobs again")
    except ClientError as error:
        print(f"webhooks: {error}", file=sys.stderr)
        return 1
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="webhooks", allow_abbrev=False, description="Deliver webhooks from a queue.")
    parser.add_argument("--url", default="http://127.0.0.1:4000", help="the service (default %(default)s)")
    parser.add_argument("--token", help="its API key, if it wants one")
    commands = parser.add_subparsers(dest="command", required=True, metavar="send|work|failed|again")
    for name, help in (
        ("send", "put a webhook into the queue"),
        ("work", "deliver what is in the queue"),
        ("failed", "list the dead letters"),
        ("again", "bring the dead letters back"),
    ):
        command = commands.add_parser(name, help=help, allow_abbrev=False)
        command.add_argument("--queue", default="webhooks", help="name of the queue (default %(default)s)")
        if name == "send":
            command.add_argument("receiver", help="where to")
            command.add_argument("body", type=json.loads, help="what, as JSON")
        if name == "work":
            attempts = "deliveries of a job, of a queue that is made now (default %(default)s)"
            command.add_argument("--attempts", type=int, default=5, help=attempts)
            command.add_argument("--threads", type=int, default=4, help="deliveries at a time (default %(default)s)")
            command.add_argument("--lease-ms", type=int, default=30_000, help="lease of a job (default %(default)s)")
            command.add_argument("--backoff-ms", type=int, default=1_000, help="first pause (default %(default)s)")
            command.add_argument("--backoff-max-ms", type=int, default=300_000, help="longest (default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
