"""Objects of an archive are decoded by several threads at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from topics.storage import archive_objects, logfile

completed = []

def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        completed.append(frame.f_locals["obj"].__name__)

objects = archive_objects
every = [
    objects.Generation(1, "id", 0, [1], "nonce"),
    objects.Piece(1, 0, "nonce", [], [objects.LogEnd(0, 1, logfile.WalPosition(1, 1), b"")]),
    objects.Base(1, 0, 1, [objects.LogStart(0, logfile.WalPosition(1, 1), b"")], [objects.FileRef("a", "b", 1, 1)], 0),
    objects.Removal(1, ["a"]),
]
contents = [objects.encode(one) for one in every]
sys.setprofile(watch)
for one, content in zip(every, contents):
    assert objects.decode(content, type(one), "here")[0] == one
sys.setprofile(None)
print(completed)
"""


def test_no_type_is_completed_by_a_thread_that_decodes() -> None:
    """msgspec completed the type of a piece when the first one was decoded. Another thread that decoded one just then
    met a type that was half done: restores and followers died of SIGSEGV as they began.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
