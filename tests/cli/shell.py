"""`topics` as a shell runs it: processes with pipes, signals and exit codes, on this checkout's code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tests.harness import Service, clean_environment

COMMAND = (sys.executable, "-c", "import sys; from topicsd import topics; sys.exit(topics())")
ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
"""Ends what hangs."""


class Shell:
    """Runs the commands for one service."""

    def __init__(self, service: Service) -> None:
        self._environment = clean_environment({"TOPICS_URL": service.url, "PYTHONPATH": str(ROOT)})

    def run(
        self, *arguments: str, given: str | bytes = b"", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """To its end, with `given` on stdin."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=given.encode() if isinstance(given, str) else given,
            capture_output=True,
            env=self._environment | dict(env or {}),
            timeout=DEADLINE_S,
            check=False,
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def ok(self, *arguments: str, given: str | bytes = b"") -> str:
        """Run a command that has to succeed, and silently; return what it prints."""
        done = self.run(*arguments, given=given)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def begin(
        self,
        *arguments: str,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        before: tuple[str, ...] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a command, unbuffered, behind the words of `before`. The caller ends it, best by `with`."""
        return subprocess.Popen(
            [*before, *COMMAND, *arguments], stdin=stdin, stdout=stdout, stderr=stderr, env=self._environment, bufsize=0
        )


def values(lines: str) -> list[Any]:
    """NDJSON, parsed."""
    return [json.loads(line) for line in lines.splitlines()]
