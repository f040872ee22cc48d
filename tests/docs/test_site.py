"""The site is built without a warning, and a browser that shows it asks no other host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.site import DOCS, ENVIRONMENT, ROOT, _kind, foreign, inside_links, main

needs_generator = pytest.mark.skipif(not (ENVIRONMENT / "bin" / "zensical").exists(), reason="run `make docs` once")


@needs_generator
@pytest.mark.long
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    assert main(str(tmp_path / "site")) == 0
    site = tmp_path / "site"
    built = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")} <= built
    assert {"reference.html", "changelog.html", "decisions/index.html"} <= built
    assert (site / "search.js").exists(), "the search needs its index as a script, to work from files"
    text = (site / "reference.html").read_text()
    assert "/v0/topics/{topic}/diff" in text


def test_every_page_is_in_the_navigation() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert not [page for page in pages if not page.startswith("decisions/") and f": {page}\n" not in configuration]


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<img alt=x src=//cdn.example/x.png>",
        '<link href="https://fonts.example/x.css" rel="stylesheet">',
        "<style>@font-face{src:url(https://fonts.example/x.woff2)}</style>",
        '<style>@import "https://fonts.example/x.css"</style>',
    ],
)
def test_what_comes_from_another_host_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(text)
    assert len(list(foreign(tmp_path))) == 1
    (tmp_path / "page.html").write_text('<a href="https://example.org">there</a><script src="../x.js"></script>')
    assert not list(foreign(tmp_path))


def test_links_out_of_the_site_become_names(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.touch()
    (tmp_path / "README.md").touch()
    text = "[a](../README.md) [b](page.md#x) [c](#y) [d](decisions/) [e](https://example.org)"
    assert inside_links(text, page, page.parent) == (
        "[b](page.md#x)".join(["a (`README.md`) ", " [c](#y) [d](decisions/index.md) [e](https://example.org)"])
    )


def test_types_are_named_in_words() -> None:
    assert _kind({"type": "array", "items": {"$ref": "#/components/schemas/NewRecord"}}) == (
        "list of [NewRecord](#newrecord)"
    )
    assert _kind({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]}) == (
        "integer from 1 to 9 or null"
    )
    assert _kind({}) == "any JSON"


def test_make_knows_how_to_build_it() -> None:
    asked = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "tests.docs.site build/site" in asked.stdout
