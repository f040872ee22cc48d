"""`topics queue TOPIC claim|ack|nack|extend|counts|redrive|peek`: jobs in a shell."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, get_args

import msgspec

from topics.api.requests import State
from topics.cli import shared
from topics.cli.shared import EXIT_REFUSED, BadLineError, LineBatch, UsageError, print_line, put, say, stdin_batches
from topics.client import ApiError, ClaimedJob, Client, TopicState, calls
from topics.client.calls import Call
from topics.client.errors import api_error
from topics.progress import counted, progress

CLAIM_EVERY_S: Final = 0.5
SETTLE_MAX_JOBS: Final = 1000
SETTLE_MAX_BYTES: Final = 1 << 20
SETTLE_DELAY_S: Final = 0.02
_EXAMPLES: Final = """  topics queue mails claim --max 10 > jobs && ./send < jobs && topics queue mails ack < jobs
  topics queue mails claim | ./work | topics queue mails ack     # ./work prints the lines of what it has done
  topics queue mails nack 7:lease_3eb633b2113a8f7a --delay-ms 60000
  topics queue mails peek --state leased
  topics queue mails redrive --max 100"""
_JOBS_HELP: Final = "seq and lease id of a claimed job; without any, NDJSON of claimed jobs on stdin"


class Lease(msgspec.Struct, frozen=True):
    """The part of a claimed job that settling takes: a line of `claim`, whose other fields are ignored."""

    seq: int = msgspec.field(name="$seq")
    lease_id: str
    node: str | None = None


class JobLine(ClaimedJob, frozen=True, gc=False, kw_only=True):
    """A claimed job as it is printed, with the node that claimed it, since only that node may settle it."""

    claimed_by: str = msgspec.field(name="node")


SettleCall = Callable[[str, str, Sequence[Lease]], Call[list[int]]]
_lease: Final = msgspec.json.Decoder(Lease).decode


def fill(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"examples:\n{_EXAMPLES}\n\n`topics queue TOPIC VERB --help` lists arguments and exit codes of each."
    )
    shared.add_where(parser)
    parser.add_argument("topic", metavar="TOPIC")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = partial(shared.add_verb, verbs, "queue", examples=_EXAMPLES)

    about = (
        "Lease jobs and print them as NDJSON; print nothing when none is ready. A job that is not acknowledged by its "
        "deadline (ms since the epoch) is delivered again."
    )
    claim = verb("claim", _claim, about=about)
    claim.add_argument("--max", dest="max_jobs", metavar="N", type=shared.positive, default=1, help="most jobs (1)")
    claim.add_argument("--lease-ms", metavar="MS", type=shared.positive, help="length of a lease (the queue's)")
    waiting = f"while no job is ready ask again every {CLAIM_EVERY_S:g} s, for so long (0)"
    claim.add_argument("--wait-s", metavar="SECONDS", type=shared.not_negative, default=0.0, help=waiting)
    _add_node(claim)

    ack = verb("ack", partial(_settle, "acked", lambda _: calls.ack), about="Acknowledge jobs: they are done.")
    nacking = partial(_settle, "nacked", lambda options: partial(calls.nack, delay_ms=options.delay_ms))
    nack = verb("nack", nacking, about="Give jobs back, to be delivered again.")
    nack.add_argument("--delay-ms", metavar="MS", type=shared.whole, default=0, help="not before so long from now (0)")
    extending = partial(_settle, "extended", lambda options: partial(calls.extend, lease_ms=options.lease_ms))
    extend = verb("extend", extending, about="Extend leases.")
    extend.add_argument("--lease-ms", metavar="MS", type=shared.positive, required=True, help="new length, from now on")
    for settle in (ack, nack, extend):
        settle.add_argument("jobs", metavar="SEQ:LEASE_ID", nargs="*", type=job_argument, help=_JOBS_HELP)
        _add_node(settle)

    verb(
        "counts", _counts, about="Count jobs: ready, leased, scheduled, and moved to the dead letters so far, as JSON."
    )
    redrive = verb("redrive", _redrive, about="Make dead letters jobs again.")
    redrive.add_argument("--from", dest="dead_letter", metavar="TOPIC", help="dead letters (the queue's dead_letter)")
    redrive.add_argument("--max", dest="max_jobs", metavar="N", type=shared.positive, help="most jobs (all there are)")
    about = "Print jobs without claiming them, each with its state, deliveries, and who has leased it until when."
    peek = verb("peek", _peek, about=about)
    peek.add_argument("-n", dest="count", metavar="N", type=shared.positive, default=10, help="most jobs (%(default)s)")
    peek.add_argument("--state", choices=get_args(State), help="only jobs in this state (all but done)")
    peek.add_argument("--from-seq", metavar="SEQ", type=shared.whole, default=0, help="only jobs behind this seq (0)")


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is no name: leave --node out for that of this machine")
    return text


def _add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node", type=_name, default=f"topics-cli@{socket.gethostname()[:64]}", help="name of the worker (%(default)s)"
    )


def _claim(client: Client, options: argparse.Namespace) -> int:
    queue, begun_s = client.queue(options.topic, node=options.node), time.monotonic()
    style: dict[str, Any] = {"desc": "waiting for a job", "bar_format": "{desc} {bar}| {remaining} left"}
    with progress("s", options.wait_s, **style) as bar:
        while not (jobs := queue.claim(options.max_jobs, options.lease_ms).claimed):
            waited_s = time.monotonic() - begun_s
            if waited_s >= options.wait_s:
                break
            bar.update(waited_s - bar.n)
            time.sleep(min(CLAIM_EVERY_S, options.wait_s - waited_s))
    put(shared.record_lines([JobLine(claimed_by=options.node, **msgspec.structs.asdict(job)) for job in jobs]))
    return 0


def _settle(
    done: str, build: Callable[[argparse.Namespace], SettleCall], client: Client, options: argparse.Namespace
) -> int:
    """Settle jobs, a request for each batch of the same node, and print how many were settled."""
    settled, skipped = 0, list[int]()
    try:
        for jobs in counted(_given_jobs(options), " batches", typed=True):
            for node, group in groupby(jobs, lambda job: job.node or options.node):
                leases = list(group)
                lost = client.call(build(options)(options.topic, node, leases))
                settled += len(leases) - len(lost)
                skipped += lost
    finally:
        print_line({done: settled, "skipped": skipped})
    if not skipped:
        return 0
    named = ", ".join(map(str, skipped[:10])) + (", …" if len(skipped) > 10 else "")
    say(
        "queue",
        f"jobs {named} are not leased to this node under these lease ids: they were settled before, or their leases "
        "ended and they are delivered again",
    )
    return EXIT_REFUSED


def _given_jobs(options: argparse.Namespace) -> Iterator[list[Lease]]:
    """Yield the jobs of the arguments, or those on stdin as they come."""
    if options.jobs:
        for at in range(0, len(options.jobs), SETTLE_MAX_JOBS):
            yield options.jobs[at : at + SETTLE_MAX_JOBS]
        return
    if sys.stdin is not None and sys.stdin.isatty():
        raise UsageError("no jobs: name them as SEQ:LEASE_ID, or give claimed jobs as NDJSON on stdin")
    for batch in stdin_batches(lines_max=SETTLE_MAX_JOBS, bytes_max=SETTLE_MAX_BYTES, delay_s=SETTLE_DELAY_S):
        leases, bad = parse_jobs(batch)
        if leases:
            yield leases
        if bad is not None:
            raise bad


def parse_jobs(batch: LineBatch) -> tuple[list[Lease], BadLineError | None]:
    """Return the leases of claimed jobs up to the first bad line, and the error for that line."""
    leases = []
    for number, text in batch.numbered():
        try:
            leases.append(_lease(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return leases, BadLineError(
                number, text, f'is not a job like {{"$seq": 7, "lease_id": "lease_…"}} ({error})'
            )
    return leases, None


def job_argument(text: str) -> Lease:
    """Parse an argument like `7:lease_3eb633b2113a8f7a`."""
    seq, colon, lease_id = text.partition(":")
    if not colon or not lease_id:
        raise argparse.ArgumentTypeError(f"{text!r} is not SEQ:LEASE_ID, like 7:lease_3eb633b2113a8f7a")
    return Lease(shared.whole(seq), lease_id)


def _counts(client: Client, options: argparse.Namespace) -> int:
    print_line(_state_of_queue(client, options.topic).queue)
    return 0


def _redrive(client: Client, options: argparse.Namespace) -> int:
    dead_letter = options.dead_letter or _state_of_queue(client, options.topic).config["dead_letter"]
    if dead_letter is None:
        raise UsageError(f"queue {options.topic!r} has no dead_letter: name the topic of its dead letters with --from")
    # Move only as many as there are now: jobs that fail again meanwhile must not go round for ever.
    there = client.get_topic(dead_letter, touch=False)
    left = there.count if options.max_jobs is None else min(there.count, options.max_jobs)
    redriven = 0
    queue = client.queue(options.topic)
    from_seq: int | None = 0
    bar = progress(" jobs", left)
    try:
        while left > 0 and from_seq is not None and from_seq < there.head_seq:
            part = queue.redrive(dead_letter, min(left, SETTLE_MAX_JOBS), from_seq)
            redriven += part.redriven
            bar.update(part.redriven)
            left -= part.redriven
            from_seq = part.next_from_seq
    except ApiError as error:
        redriven += error.detail.get("redriven", 0)
        raise
    finally:
        bar.close()
        print_line({"redriven": redriven, "from": dead_letter})
    return 0


def _peek(client: Client, options: argparse.Namespace) -> int:
    queue = client.queue(options.topic)
    left, from_seq = options.count, options.from_seq
    with progress(" jobs", left, shown=True) as bar:
        while left > 0 and from_seq is not None:
            page = queue.peek(options.state, min(left, SETTLE_MAX_JOBS), from_seq)
            put(shared.record_lines(page.jobs))
            left -= len(page.jobs)
            from_seq = page.next_from_seq
            bar.update(len(page.jobs))
    return 0


def _state_of_queue(client: Client, topic: str) -> TopicState:
    """Return the state of a queue; ApiError `not_a_queue` for another topic, as from every call of a queue."""
    state = client.get_topic(topic, touch=False)
    if state.queue is None:
        raise api_error(409, "not_a_queue", f"topic {topic!r} is a {state.type}, not a queue", {"topic": topic})
    return state
