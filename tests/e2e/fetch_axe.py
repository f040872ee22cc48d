"""Fetches axe-core, which judges how accessible the console is: `python -m tests.e2e.fetch_axe FILE`.

It is for tests alone and no part of the package. Without a way to fetch it this says so and succeeds.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.e2e.npm_package import CannotFetchError, download

PACKAGE: Final = "axe-core@4.14.1"
SHA256: Final = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
FETCHED: Final = Path(sys.prefix, "axe.min.js")


def main() -> int:
    target = Path(sys.argv[1]) if len(sys.argv) == 2 else FETCHED
    if target.exists():
        return 0
    try:
        with tarfile.open(fileobj=io.BytesIO(download(PACKAGE, SHA256))) as archive:
            file = archive.extractfile("package/axe.min.js")
            assert file is not None
            target.write_bytes(file.read())
    except CannotFetchError as error:
        print(f"fetch_axe: {error}; the tests that need it will be skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
