"""Completions of both programs, asked for in bash, zsh and fish as somebody at a keyboard would.

A shell that this system lacks is the one that `make test` has fetched. Where it could fetch none, the scripts for that
shell are read: they name every command, verb and option.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import clean_environment
from topics.cli.main import COMMANDS, make_parser
from topics.supervisor.command import _parser as supervisor_parser
from topics.terminal import SHELLS, arguments_of, completions

ROOT = Path(__file__).parents[2]
FETCHED = Path(sys.prefix, "shells")
PROGRAMS = {
    "topics": "import sys; from topics.cli.main import main; sys.exit(main())",
    "topics-supervisor": "import sys; from topics.supervisor.command import main; sys.exit(main())",
}
TIMEOUT_S = 240
OVERLAY = 'mount -t overlay -o "lowerdir=$0:/usr" overlay /usr && exec "$@"'


def is_there(shell: str) -> bool:
    return shutil.which(shell) is not None or (FETCHED / shell).exists()


def command_of(shell: str) -> list[str]:
    """The words that start a shell of this system or a fetched one."""
    if shutil.which(shell):
        return [shell]
    namespace = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    return ["unshare", *namespace, "/bin/sh", "-c", OVERLAY, str(FETCHED / shell), shell]


class Completing:
    """A shell with the completions of both programs, and a `topics` that knows the topics `orders` and `other`."""

    def __init__(self, shell: str, folder: Path) -> None:
        self.shell, self._folder = shell, folder
        self.environment = clean_environment({"PYTHONPATH": str(ROOT), "HOME": str(folder), "TERM": "dumb"})
        self.scripts = []
        for program, source in PROGRAMS.items():
            done = subprocess.run(
                [sys.executable, "-c", source, "completion", shell],
                env=self.environment,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            script = folder / f"{program}.{shell}"
            script.write_bytes(done.stdout)
            self.scripts.append(script)
        fake = folder / "topics"
        fake.write_text("#!/bin/sh\n[ \"$1 $2\" = 'list --names' ] && printf 'orders\\nother\\n'\n")
        fake.chmod(0o755)
        self.environment["PATH"] = f"{folder}:{os.environ['PATH']}"

    def run(self, text: str) -> str:
        """Have the shell run a program of its own; return what it prints."""
        command = [*command_of(self.shell), *({"fish": ["--no-config"], "zsh": ["-f"]}.get(self.shell, [])), "-c", text]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    def complete(self, line: str) -> set[str]:
        """Return what the last word of a line may be completed to."""
        return {"bash": self._bash, "zsh": self._zsh, "fish": self._fish}[self.shell](line)

    def _fish(self, line: str) -> set[str]:
        sources = "\n".join(f"source {script}" for script in self.scripts)
        shown = self.run(f"{sources}\ncomplete -C {line!r}")
        return {found.partition("\t")[0] for found in shown.splitlines()}

    def _bash(self, line: str) -> set[str]:
        words = line.split(" ")
        script = self.scripts[list(PROGRAMS).index(words[0])]
        function = re.search(rf"complete .*-F (\S+) {words[0]}$", script.read_text(), re.MULTILINE)
        assert function is not None
        given = " ".join(f"'{word}'" for word in words)
        shown = self.run(f"""
            source {script}
            COMP_WORDS=({given}) COMP_CWORD={len(words) - 1}
            {function[1]} {words[0]} '{words[-1]}' '{words[-2]}'
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """)
        return set(shown.split())

    def _zsh(self, line: str) -> set[str]:
        """Press TAB at a terminal, then have the line, as it is now, printed."""
        pid, terminal = pty.fork()
        if pid == 0:
            command = [*command_of(self.shell), "-f", "-i"]
            os.execvpe(command[0], command, self.environment)
        functions = self._folder / "functions"
        functions.mkdir()
        for script, program in zip(self.scripts, PROGRAMS, strict=True):
            shutil.copy(script, functions / f"_{program}")
        begin = f"PS1=; fpath=({functions} $fpath); autoload -Uz compinit; compinit -u -D; print '[rea''dy]'"
        found: re.Match[bytes] | None = None
        try:
            for typed in (f"{begin}\n", f"{line}\t\x01print '[\x05]'\n"):
                shown = b""
                os.write(terminal, typed.encode())
                while not (found := re.search(rb"\n\[(.*)\]", shown)):
                    shown += os.read(terminal, 4096)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)
        assert found is not None
        return {found[1].decode().split()[-1]}


@pytest.fixture(params=[shell for shell in SHELLS if is_there(shell)])
def completing(request: pytest.FixtureRequest, tmp_path: Path) -> Completing:
    return Completing(request.param, tmp_path)


def words_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the commands, verbs and long options of a program."""
    words: set[str] = set()
    for action, verbs in arguments_of(parser):
        if action.help == argparse.SUPPRESS:
            continue
        words |= {option[2:] for option in action.option_strings if option.startswith("--")}
        words |= set(verbs).union(*map(words_of, verbs.values()))
    return words


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("parser", [make_parser(COMMANDS), supervisor_parser()], ids=list(PROGRAMS))
def test_a_script_names_every_command_and_option(parser: argparse.ArgumentParser, shell: str) -> None:
    words = words_of(parser)
    assert len(words) > 10
    assert words <= set(re.findall(r"[a-z][a-z0-9-]*", completions(parser, shell, {})))


def test_scripts_are_of_their_shell(completing: Completing) -> None:
    for script in completing.scripts:
        completing.run(f"{completing.shell} -n {script}")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("topics cr", "create"),
        ("topics lag --ov", "--over"),
        ("topics read or", "orders"),
        ("topics-supervisor sta", "status"),
        ("topics-supervisor status --wat", "--watch"),
    ],
)
def test_tab(completing: Completing, line: str, found: str) -> None:
    assert completing.complete(line) == {found}
