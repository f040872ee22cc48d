"""Runs the blocks of a page in their order, in one folder, as a reader would with some terminals.

- `console`: each line that begins with `$ ` is a command, what follows is its output. A line is compared as JSON, where
  ids and times may be others; `…` stands for anything. A block without a command is more output of the command that
  still runs.
- `python` with a title is a file that is saved; any other one is run. `text` behind it is what it prints.

A command that does not end (`topics-supervisor run`, `tail -f`, a worker) is left running until its output is there and
the page ends. The service is at a port of its own; addresses in the page are replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import httpx

from tests.contract.api_page import Likeness, decode
from tests.docs.blocks import Block
from tests.harness import _stop_with_parent, clean_environment, poll, reserved_port

DEADLINE_S: Final = 240.0
LONG_S: Final = 600.0
ADDRESS: Final = re.compile(r"(?:localhost|127\.0\.0\.1):4000")
SERVICE: Final = re.compile(r"(?:TOPICS_\w+=\S+ )*topics-supervisor run\b")
ENDLESS: Final = re.compile(r"topics tail -f [^|]*|curl -sN .*|python worker\.py")
LOOK: Final = re.compile(r"topics (?:queue \S+ (?:counts|peek)|read|list)\b|topics-supervisor status\b|curl -s \S+$")
"""Commands that change nothing: they are asked again until they show what the page shows."""
LENGTHY: Final = re.compile(r"pip install|python (?:read|write)\.py")
ACTIVATE: Final = re.compile(r"\. (\S+)/bin/activate")


class Running:
    """A command that does not end. Owns its process group; its output goes to a file."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str], number: int) -> None:
        self.command = command
        self.output = folder / f".output-{number}"
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                ["/bin/bash", "-c", f"exec {command}" if "=" not in command.split()[0] else f"exec env {command}"],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_stop_with_parent,  # noqa: PLW1509 - one system call, no lock that a thread could hold
            )

    def lines(self) -> list[str]:
        """Return the whole lines that it has printed so far."""
        return self.output.read_text().split("\n")[:-1]

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, signal_number: int) -> int:
        """Send it a signal and wait; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal_number)
        try:
            return self._process.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


class PageRunner:
    """One page that is being run. Owns its folder, its service and all commands that still run."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], programs: Path = Path(sys.executable).parent
    ) -> None:
        self._placeholder, self._port = reserved_port()
        self._folder = folder
        self._environment = clean_environment(
            {
                "TOPICS_PORT": str(self._port),
                "TOPICS_URL": f"http://127.0.0.1:{self._port}",
                "TOPICS_WAL_SHARDS": "1",
                "TOPICS_FRONTENDS": "1",
                "TOPICS_SHUTDOWN_GRACE_MS": "30000",
                "PYTHONUNBUFFERED": "1",
                "PATH": f"{programs}:{os.environ['PATH']}",
                **environment,
            }
        )
        self._likeness = Likeness()
        self._service: Running | None = None
        self._others: list[Running] = []
        self._awaited: list[tuple[Running, list[str]]] = []
        self._printed: list[str] = []
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._placeholder.close()
        if error is not None and self._service is not None:
            error.add_note("\n".join(self._service.lines()[-40:]))
        for other in self._others:
            other.end(signal.SIGINT)
        if self._service is not None and not self._service.ended():
            code = self._service.end(signal.SIGTERM)
            assert kind is not None or code == 0, f"the service ended with {code}"

    def run(self, block: Block, prelude: str = "") -> None:
        """Run a block; AssertionError when it does not do what the page shows."""
        try:
            if block.language == "console":
                self._console(block)
            elif block.language == "text":
                assert block.text.splitlines() == self._printed, self._printed
            elif block.title is not None:
                (self._folder / block.title).write_text(self._addressed(block.text))
            else:
                self._python(prelude + block.text)
        except BaseException as failure:
            failure.add_note(f"{block.page}, the block at line {block.line}")
            raise

    def finish(self) -> None:
        """Wait until each command that does not end has printed what the page shows."""
        for running, shown in self._awaited:
            self._await(running, shown)

    def start_service(self, command: str = "topics-supervisor run") -> None:
        """Start the service of this page and wait until it is ready."""
        self._service = self._start(command)
        address = f"http://127.0.0.1:{self._port}/v0/ready"
        service = self._service

        def is_ready() -> bool:
            assert not service.ended(), "\n".join(service.lines())
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(address, timeout=2.0).status_code == 200
            return False

        poll("the service to be ready", is_ready, DEADLINE_S)

    def _console(self, block: Block) -> None:
        if not block.text.startswith("$ "):
            assert self._awaited, "output of no command"
            running, awaited = self._awaited[-1]
            awaited += block.text.splitlines()
            self._await(running, awaited)
            return
        for command, shown in commands(block.text):
            self._command(command, shown)

    def _command(self, command: str, shown: list[str]) -> None:
        if (activated := ACTIVATE.fullmatch(command)) is not None:
            folder = self._folder / activated[1] / "bin"
            assert (folder / "activate").exists()
            self._environment["PATH"] = f"{folder}:{os.environ['PATH']}"
        elif SERVICE.match(command):
            self.start_service(command)
        elif ENDLESS.fullmatch(command):
            running = self._start(self._addressed(command))
            self._others.append(running)
            self._awaited.append((running, shown))
            self._await(running, shown)
        elif LOOK.match(command):
            self._look(command, shown)
        else:
            self._compare(command, shown, self._shell(command))

    def _look(self, command: str, shown: list[str]) -> None:
        failure = AssertionError()

        def as_shown() -> bool:
            nonlocal failure
            try:
                self._compare(command, shown, self._shell(command))
            except AssertionError as error:
                failure = error
                return False
            return True

        try:
            poll(command, as_shown, 10.0, 0.2)
        except AssertionError:
            raise failure from None

    def _await(self, running: Running, shown: list[str]) -> None:
        def is_there() -> bool:
            return len(running.lines()) >= len(shown) or running.ended()

        with contextlib.suppress(AssertionError):
            poll("its output", is_there, DEADLINE_S)
        self._compare(running.command, shown, running.lines()[: len(shown)])

    def _start(self, command: str) -> Running:
        self._started += 1
        return Running(command, self._folder, self._environment, self._started)

    def _shell(self, command: str) -> list[str]:
        done = subprocess.run(
            ["/bin/bash", "-c", self._addressed(command)],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONG_S if LENGTHY.search(command) else DEADLINE_S,
            check=False,
        )
        return done.stdout.splitlines()

    def _python(self, program: str) -> None:
        assert self._service is None or not self._service.ended(), "the page has stopped its service before this"
        program = program.replace("Client()", 'Client("http://127.0.0.1:4000")')
        self._printed = self._shell(shlex.join(["python", "-c", self._addressed(program)]))
        assert not any(line.startswith("Traceback") for line in self._printed), "\n".join(self._printed)

    def _addressed(self, text: str) -> str:
        return ADDRESS.sub(f"127.0.0.1:{self._port}", self._likeness.said(text))

    def _compare(self, command: str, shown: list[str], printed: list[str]) -> None:
        if shown == ["…"]:
            assert printed, f"{command}: printed nothing"
            return
        assert len(shown) == len(printed), f"{command}: printed\n" + "\n".join(printed)
        for expected, actual in zip(shown, printed, strict=True):
            self._compare_line(command, expected, actual)

    def _compare_line(self, command: str, expected: str, actual: str) -> None:
        for prefix in ("data: ", ""):
            if expected.startswith(prefix + "{") and actual.startswith(prefix + "{"):
                try:
                    one = decode(expected.removeprefix(prefix))
                except ValueError:
                    break
                self._likeness.attempt(one, decode(actual.removeprefix(prefix)))
                return
        if expected.startswith("id: ") and actual.startswith("id: "):
            return
        pattern = ".*".join(re.escape(part) for part in expected.split("…"))
        assert re.fullmatch(pattern, actual), f"{command}: printed {actual!r}, not {expected!r}"


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (command, output) of a console block. Open quotes, or a backslash at the end, make a command go on."""
    found: list[tuple[str, list[str]]] = []
    is_open = False
    for line in text.splitlines():
        if is_open:
            command, shown = found[-1]
            found[-1] = (f"{command}\n{line}", shown)
        elif line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
            continue
        is_open = found[-1][0].endswith("\\") or found[-1][0].count("'") % 2 == 1
    return found
