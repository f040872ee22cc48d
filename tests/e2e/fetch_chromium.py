"""Fetches a headless Chromium for the tests: `python -m tests.e2e.fetch_chromium DIRECTORY`.

It comes from npm's package @sparticuz/chromium, which carries the browser and the libraries that a small system lacks;
npm itself comes with the development requirements. What was fetched is compared with a checksum that is written here.
Without a way to fetch it this says so and succeeds: the tests that need a browser are then skipped, and say so, too.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import brotli

from tests.e2e.npm_package import CannotFetchError, download

PACKAGE: Final = "@sparticuz/chromium@147.0.0"
SHA256: Final = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
COMMAND: Final = "chromium"
_WRAPPER: Final = """#!/bin/sh
here="$(dirname "$(readlink -f "$0")")"
LD_LIBRARY_PATH="$here/al2023/lib" exec "$here/headless-chromium" "$@"
"""


def fetch(directory: Path) -> None:
    """Makes `directory` with the browser in it, whole or not at all."""
    if (directory / COMMAND).exists():
        return
    package = download(PACKAGE, SHA256)
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        made = Path(work, "made")
        _unpack(package, made)
        made.rename(directory)


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
