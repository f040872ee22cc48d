"""The site is built without a warning, its links lead somewhere, it fits a phone, and it is all on its own host."""

from __future__ import annotations

import re
import subprocess
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.site import DOCS, ENVIRONMENT, ROOT, _kind, foreign, inside_links, main
from tests.e2e.browser import Browser, find_browser
from tests.harness import poll

COMMAND = find_browser()

needs_generator = pytest.mark.skipif(not (ENVIRONMENT / "bin" / "zensical").exists(), reason="run `make docs` once")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    assert main(str(folder)) == 0
    return folder


@needs_generator
@pytest.mark.long
def test_the_site_is_built_strictly(site: Path) -> None:
    built = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")} <= built
    assert {"reference.html", "changelog.html", "decisions/index.html"} <= built
    assert (site / "search.js").exists(), "the search needs its index as a script, to work from files"
    text = (site / "reference.html").read_text()
    assert "/v0/topics/{topic}/diff" in text


@needs_generator
@pytest.mark.long
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    texts = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    for page, text in texts.items():
        for target in re.findall(r'<a\b[^>]*?\bhref="?([^" >]+)', text):
            path, _, anchor = unescape(unquote(target)).partition("#")
            if "://" not in path:
                other = (page.parent / path).resolve() if path else page
                assert other.exists(), f"{page.name}: {target}"
                if anchor and other in texts:
                    assert re.search(rf'\bid="?{re.escape(anchor)}[" >]', texts[other]), f"{page.name}: {target}"
    assert "decisions/index.html" in texts[site / "index.html"], "the navigation has them"


@needs_generator
@pytest.mark.skipif(COMMAND is None, reason="no Chromium on this machine")
@pytest.mark.long
def test_pages_fit_a_desktop_and_a_phone(site: Path) -> None:
    assert COMMAND is not None
    with Browser(COMMAND, (site / "index.html").as_uri()) as tab:
        for page in sorted(site.rglob("*.html")):
            tab.command("Page.navigate", url=page.as_uri())
            shown = f"document.readyState === 'complete' && location.href === {page.as_uri()!r}"
            poll(f"{page.name} to be shown", lambda shown=shown: tab.run(shown), 30)  # type: ignore[misc]
            for width in (1280, 380):
                tab.resize(width, 800)
                assert tab.run("document.documentElement.scrollWidth <= innerWidth"), f"{page.name} at {width} pixels"
            assert tab.run("[...document.images].every((one) => one.naturalWidth > 0)"), f"a picture of {page.name}"


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
    asked = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert "tests.docs.site build/site" in asked.stdout
