"""Follow a topic live: one line per event, across every disconnect, each event once and in order.

python -m examples.follow --topic commits --from 0
python -m examples.follow --count 100 --quiet
"""

from __future__ import annotations

import argparse
import sys
import time

from topics.client import Client, ClientError, NotFoundError, Record, Retry, Tombstone

LOOK_AGAIN_S = 0.5


def show(record: Record) -> None:
    # White space between JSON tokens may hold line breaks; in a string they are always escaped.
    text = bytes(record.raw).replace(b"\n", b" ").replace(b"\r", b" ").decode()
    print(record.seq, record.tag or "", text, sep="\t", flush=True)


def wait_for(topics: Client, topic: str, wait_s: float) -> None:
    """Wait until the topic is there; NotFoundError when it is not after `wait_s`."""
    end = time.monotonic() + wait_s
    while True:
        try:
            topics.get_topic(topic)
            return
        except NotFoundError:
            if time.monotonic() > end:
                raise
        time.sleep(LOOK_AGAIN_S)


def follow(topics: Client, topic: str, position: int, count: int, *, quiet: bool) -> int:
    """Show `count` events, or all until the topic is deleted; return how many there were."""
    seen = 0
    for _, item in topics.follow({topic: position}, tombstones="yield"):
        if isinstance(item, Tombstone):
            print(f"follow: events {item.gap_from} to {item.gap_to} are gone ({item.reason})", file=sys.stderr)
        elif isinstance(item, Record):
            seen += 1
            if not quiet:
                show(item)
            if seen == count:
                break
        else:
            print(f"follow: topic {topic!r} was deleted", file=sys.stderr)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="follow", allow_abbrev=False, description="Follow a topic live, one line per event: seq, tag, data."
    )
    parser.add_argument("--url", default="http://127.0.0.1:4000", help="the service (default %(default)s)")
    parser.add_argument("--token", help="its API key, if it wants one")
    parser.add_argument("--topic", default="commits", help="the topic to follow (default %(default)s)")
    parser.add_argument(
        "--from", dest="position", type=int, default=0, metavar="SEQ", help="start after this seq (default 0)"
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="exit after N events")
    parser.add_argument("--quiet", action="store_true", help="no line per event, only the summary at the end")
    parser.add_argument(
        "--retry-for",
        type=float,
        default=60,
        metavar="S",
        help="give up after S seconds without the service or the topic (default %(default)s)",
    )
    arguments = parser.parse_args()
    with Client(arguments.url, token=arguments.token, retry=Retry(total_s=arguments.retry_for)) as topics:
        try:
            wait_for(topics, arguments.topic, arguments.retry_for)
            seen = follow(topics, arguments.topic, arguments.position, arguments.count, quiet=arguments.quiet)
        except ClientError as error:
            print(f"follow: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print(f"follow: {seen} events of {arguments.topic!r}", file=sys.stderr)
    return 0 if seen >= arguments.count else 1


if __name__ == "__main__":
    sys.exit(main())
