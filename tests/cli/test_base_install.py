"""The commands of a client need no package of the service."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.shell import ROOT
from tests.harness import clean_environment

PROGRAM = """
import importlib, sys, topicsd

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in topicsd.SERVER_MODULES:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
from topics.cli.main import COMMANDS, main
for name, (module, _) in COMMANDS.items():
    if name not in ("verify", "backup", "restore", "archive"):
        importlib.import_module(f"topics.cli.{module}")
sys.exit(main(["completion", "fish"]))
"""


def test_only_commands_on_files_need_the_packages_of_the_service() -> None:
    environment = clean_environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
