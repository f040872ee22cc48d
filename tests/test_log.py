"""Log lines as their collectors find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from topics.log import SPARSE_KINDS_MAX, SparseLines

PROGRAM = """
import logging
from topics.log import configure_log, get_logger, identify
configure_log("info", {format!r})
identify("walshard", 1)
logger = get_logger()
logger.debug("unseen")
logger.info("opened", path="/x", size_bytes=3)
try:
    raise RuntimeError("planned")
except RuntimeError:
    logger.exception("failed")
logging.getLogger("asyncio").error("task %s lost", 5)
logging.getLogger("asyncio").info("unseen as well")
"""


TALKATIVE = """
import sys, types
talkative = types.ModuleType("better_exceptions")
talkative.format_exception = lambda *error: ["every local variable"]
sys.modules["better_exceptions"] = talkative
"""


def output(format: str, before: str = "") -> str:
    return subprocess.run(
        [sys.executable, "-c", before + PROGRAM.format(format=format)], capture_output=True, text=True, check=True
    ).stderr


def test_json_is_one_object_a_line_with_role_and_index() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in output("json").splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("opened", "info"),
        ("failed", "error"),
        ("task 5 lost", "error"),
    ]
    assert all((line["role"], line["index"]) == ("walshard", 1) for line in lines)
    assert all(line["timestamp"].endswith("Z") for line in lines)
    assert (lines[0]["path"], lines[0]["size_bytes"]) == ("/x", 3)
    assert "RuntimeError: planned" in lines[1]["exception"]
    assert lines[2]["logger"] == "asyncio"


def test_console_is_for_people() -> None:
    text = output("console")
    assert "opened" in text
    assert "role=walshard" in text
    assert "RuntimeError: planned" in text
    assert "unseen" not in text


def test_tracebacks_have_no_local_variables_whatever_is_installed() -> None:
    for format in ("console", "json"):
        text = output(format, TALKATIVE)
        assert "RuntimeError: planned" in text
        assert "every local variable" not in text


FAULTY = """
from topics.log import configure_log, get_logger
configure_log("info", "json")

def fail(request):
    if request % 2:
        raise RuntimeError(f"odd request {request}")
    raise RuntimeError("even request")

for request in range(10):
    try:
        fail(request)
    except RuntimeError as error:
        if request < 8:
            get_logger().exception("request failed")
        else:
            get_logger().error("likewise", exc_info=error)
try:
    fail(1)
except RuntimeError:
    get_logger().exception("request failed", by="another way")
try:
    fail(0)
except RuntimeError:
    get_logger().exception("process crashed")
get_logger().error("no fault")
get_logger().error("no fault")
"""


def test_a_fault_that_each_request_meets_is_one_traceback_a_minute_for_each_place() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTY], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = ["request failed", "request failed", "likewise", "likewise", "request failed", "process crashed"]
    assert [line["event"] for line in lines] == told + ["no fault"] * 2
    assert ["even request" in lines[0]["exception"], "odd request 1" in lines[1]["exception"]] == [True, True]


@pytest.mark.parametrize("to", ["a reader that is gone", "a full disk"])
def test_a_log_that_cannot_be_written_ends_nobody(to: str) -> None:
    """Ctrl-C of `topics-supervisor run 2>&1 | tee log` killed all processes, not drained them, as tee goes first."""
    reader, stderr = os.pipe() if to == "a reader that is gone" else (None, os.open("/dev/full", os.O_WRONLY))
    if reader is not None:
        os.close(reader)
    program = PROGRAM.format(format="json") + "print('went on')"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, check=False)
    os.close(stderr)
    assert (done.returncode, done.stdout) == (0, b"went on\n")


def test_lines_that_requests_can_cause_are_counted_between_those_that_are_written() -> None:
    now_s = 0.0
    lines = SparseLines(60, lambda: now_s)
    with capture_logs() as written:
        for now_s in (0.0, 1.0, 59.0, 60.0, 61.0, 120.0):
            lines.warning("one more", at_s=now_s)
        now_s = 180.0
        lines.error("another", at_s=now_s)
    assert [(line["log_level"], line["at_s"], line["more_like_it"]) for line in written] == [
        ("warning", 0.0, 0),
        ("warning", 60.0, 2),
        ("warning", 120.0, 1),
        ("error", 180.0, 0),
    ]


def test_a_line_of_one_topic_or_event_hides_none_of_another() -> None:
    """A queue that fails each second hid for an hour that another one failed every five minutes."""
    now_s = 0.0
    lines = SparseLines(60, lambda: now_s)
    with capture_logs() as written:
        for second in range(600):
            now_s = float(second)
            lines.warning("not moved", topic="a")
            if second % 300 == 30:
                lines.warning("not moved", topic="b")
                lines.warning("not written", topic="a")
    told = [(line["event"], line["topic"], line["more_like_it"]) for line in written]
    assert told.count(("not moved", "b", 0)) == told.count(("not written", "a", 0)) == 2
    assert [one for one in told if one[:2] == ("not moved", "a")] == [("not moved", "a", n) for n in [0] + [59] * 9]


@pytest.mark.parametrize("place", ["topic", "source", "sink"])
def test_a_line_of_one_place_hides_none_of_another(place: str) -> None:
    """A batch that cannot be published hid that those of other sinks cannot, either."""
    lines = SparseLines(60, lambda: 0.0)
    with capture_logs() as written:
        for name in ("a", "b", "a", "b"):
            lines.warning("not published", **{place: name}, batch=1)
            lines.error("not read", **{place: name}, batch=1)
    assert [line[place] for line in written] == ["a", "a", "b", "b"]


def test_topics_without_number_fill_neither_memory_nor_the_log() -> None:
    now_s = 0.0
    lines = SparseLines(60, lambda: now_s)
    with capture_logs() as written:
        for _ in range(3):
            for n in range(4 * SPARSE_KINDS_MAX):
                lines.warning("not moved", topic=n)
        now_s = 60.0
        for n in range(4 * SPARSE_KINDS_MAX, 5 * SPARSE_KINDS_MAX):
            lines.warning("not moved", topic=n)
    told = [line["topic"] for line in written]
    assert told[: SPARSE_KINDS_MAX + 1] == list(range(SPARSE_KINDS_MAX + 1)), "the last one stands for all others"
    assert len(told) <= 2 * (SPARSE_KINDS_MAX + 1)
    assert told[-1] >= 4 * SPARSE_KINDS_MAX, "those of before make room"
