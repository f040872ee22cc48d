"""Fetches packages from npm, and accepts the ones whose checksum is written here and no others."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Final

NPM_TIMEOUT_S: Final = 300
TRIES: Final = 3
TRY_AGAIN_S: Final = 5
"""A network that fails once is no reason to leave out tests."""


class CannotFetchError(Exception):
    """The reason why there is no package."""


def download(package: str, sha256: str) -> bytes:
    """Return the archive of `name@version`. Raise CannotFetchError; exit if it is not the archive that was tested."""
    npm = shutil.which("npm") or shutil.which("npm", path=sysconfig.get_path("scripts"))
    if npm is None:
        raise CannotFetchError("there is no npm")
    for left in reversed(range(TRIES)):
        try:
            content = _pack(npm, package)
            break
        except CannotFetchError:
            if not left:
                raise
            time.sleep(TRY_AGAIN_S)
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        sys.exit(f"{package} has SHA-256 {digest}, not {sha256}: it is not the package that was tested")
    return content


def _pack(npm: str, package: str) -> bytes:
    with tempfile.TemporaryDirectory() as work:
        command = [npm, "pack", package, "--silent", "--pack-destination", work]
        environment = os.environ | {"PATH": os.pathsep.join([os.path.dirname(npm), os.environ.get("PATH", "")])}
        try:
            packed = subprocess.run(
                command, cwd=work, env=environment, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise CannotFetchError(f"npm did not answer within {NPM_TIMEOUT_S} s") from None
        files = list(Path(work).glob("*.tgz"))
        if packed.returncode or not files:
            raise CannotFetchError(f"npm pack {package} failed: {packed.stderr.strip()[-500:]}")
        return files[0].read_bytes()
