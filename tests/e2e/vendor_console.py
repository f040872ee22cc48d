"""The libraries of the console, as npm has them: `python -m tests.e2e.vendor_console` writes them again.

A test compares the files of the repository with these packages, byte by byte.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from typing import Final, NamedTuple

from tests.e2e.npm_package import download

VENDOR: Final = Path(__file__).parents[2] / "topics" / "frontend" / "operators" / "console" / "vendor"


class Library(NamedTuple):
    """A package: its version, its checksum, and which of its files are here under which names."""

    package: str
    sha256: str
    files: dict[str, str]


LIBRARIES: Final = (
    Library(
        "htm@3.1.1",  # with Preact in the same file
        "2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90",
        {"preact/standalone.module.js": "preact-htm.js", "LICENSE": "LICENSE.htm.txt"},
    ),
    Library(
        "preact@10.29.8",
        "b18cb0a457f3d43c7bb30391a74ade7d13e03bc6e77915e061c70c0fe1123299",
        {"LICENSE": "LICENSE.preact.txt"},
    ),
    Library(
        "uplot@1.6.32",
        "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d",
        {"dist/uPlot.esm.js": "uplot.js", "dist/uPlot.min.css": "uplot.css", "LICENSE": "LICENSE.uplot.txt"},
    ),
    Library(
        "@dagrejs/dagre@3.1.3",
        "12441833c8af49e5a241d94bfd53159875965876b3f4f3214abafe1ed6a9ee4c",
        {"dist/dagre.esm.js": "dagre.js", "LICENSE": "LICENSE.dagre.txt"},
    ),
)


def vendored() -> dict[str, bytes]:
    """Return the files that belong into the folder, by name."""
    found = {}
    for library in LIBRARIES:
        with tarfile.open(fileobj=io.BytesIO(download(library.package, library.sha256))) as archive:
            for path, name in library.files.items():
                file = archive.extractfile(f"package/{path}")
                assert file is not None, path
                found[name] = file.read()
    return found


def main() -> int:
    for name, content in vendored().items():
        (VENDOR / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
