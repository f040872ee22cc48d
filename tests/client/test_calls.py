"""Calls as data: what a request has, and how its answer is decoded."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from topics.client import calls

held = []

def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        held.append(calls._BUILDING.locked())

sys.setprofile(watch)
calls.get_topic("orders")
calls.diff("orders", 0)
answer = b'{"topic": "mails", "skipped": [], "performance": {"server_total_ms": 1}}'
calls.ack("mails", "node", []).decode(answer)
sys.setprofile(None)
print(len(held) > 3 and all(held))
"""


def test_types_of_answers_are_completed_by_one_thread_at_a_time() -> None:
    """msgspec completes a type with its first decoder. Threads that share a client make their first calls at once, and
    one that decodes by a type that is half done kills the process.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)
