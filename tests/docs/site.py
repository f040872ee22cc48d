"""Build the site of docs/: `python -m tests.docs.site DIR`, or `make docs`.

The pages are laid out in a folder of their own, with those that are generated: the reference of the HTTP API from the
document that a service prints, the list of decisions, the changelog. Then Zensical builds them, strictly. Nothing of
the site comes from another host; the last step holds every file against that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.harness import Service

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
ENVIRONMENT: Final = ROOT / ".venv-docs"
BUILD_TIMEOUT_S: Final = 300
SHIM: Final = re.compile(r"https://unpkg\.com/iframe-worker/shim")
"""The script that the generator loads from another host; docs/assets/iframe-worker.js is the same."""
LOADED: Final = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload|preconnect|modulepreload))"""
    r"""[^>]*?\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?((?:https?:)?//[^"')]+)|@import\s+["']((?:https?:)?//[^"']+)"""
)
"""An address of another host that a browser asks by itself. A link that a reader may click is none."""


class SiteError(Exception):
    """The site could not be built as it should be; says why."""


def build(site: Path, document: dict[str, Any]) -> None:
    """Build the site into the folder `site`, which is replaced; raise SiteError at any warning."""
    program = ENVIRONMENT / "bin" / "zensical"
    if not program.exists():
        raise SiteError(f"there is no {program}: run `make docs`")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder, document)
        done = subprocess.run(
            [program, "build", "--strict", "--clean"],
            cwd=folder,
            env=os.environ | {"NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if done.returncode or re.search(r"(?i)\bwarning|\berror", done.stdout):
            raise SiteError(done.stdout)
        keep_local(folder / "site")
        if found := list(foreign(folder / "site")):
            raise SiteError("loaded from another host: " + ", ".join(found))
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(folder / "site", site)


def lay_out(folder: Path, document: dict[str, Any]) -> None:
    """Put the configuration and all pages, the generated ones too, into a folder."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "CHANGELOG.md", folder / "docs" / "changelog.md")
    (folder / "docs" / "reference.md").write_text(reference(document))
    (folder / "docs" / "decisions" / "index.md").write_text(decisions())
    for page in (folder / "docs").rglob("*.md"):
        page.write_text(inside_links(page.read_text(), page, folder / "docs"))


def decisions() -> str:
    """Return the page that lists the decisions."""
    rows = []
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}]({page.name})")
    return "# Decisions\n\nEach page says what was decided, what was measured, and what would change our mind.\n\n" + (
        "\n".join(rows) + "\n"
    )


def inside_links(text: str, page: Path, root: Path) -> str:
    """Return a page whose links stay within the site: a link to another file of the repository becomes its name."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target.endswith("decisions/"):
            return f"[{label}]({target}index.md)"
        if target.endswith("CHANGELOG.md"):
            return f"[{label}]({os.path.relpath(root / 'changelog.md', page.parent)})"
        name, _, _ = target.partition("#")
        if not name or (page.parent / name).resolve().is_relative_to(root.resolve()):
            return match[0]
        named = os.path.relpath((page.parent / name).resolve(), root.resolve().parent)
        return label if label.strip("`") == named else f"{label} (`{named}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)\s]+)\)", link, text)


# --- the reference


def reference(document: dict[str, Any]) -> str:
    """Return the page of all routes and types of an OpenAPI document."""
    lines = [
        "# HTTP API: every route",
        "",
        f"This page is generated from the document that topics {document['info']['version']} prints at",
        "`/v0/openapi.json`. [HTTP API, explained](api.md) has the rules and an example of each route.",
        "",
    ]
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    for tag, operations in by_tag.items():
        lines += [f"## {tag.capitalize()}", ""]
        for method, path, operation in operations:
            lines += _route(method, path, operation)
    lines += ["## Types", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _type(name, schema)
    return "\n".join(lines)


def _route(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### `{method} {path}`", "", operation["summary"].rstrip(".") + ".", ""]
    if "description" in operation:
        lines += [operation["description"], ""]
    parameters = operation.get("parameters", [])
    if parameters:
        lines += ["| parameter | in | type | |", "|---|---|---|---|"]
        lines += [
            f"| `{one['name']}` | {one['in']} | {_cell(_kind(one['schema']))} | {_cell(one.get('description', ''))} |"
            for one in parameters
        ]
        lines.append("")
    if "requestBody" in operation:
        body = operation["requestBody"]
        kinds = ", ".join(f"{_kind(of['schema'])} (`{media}`)" for media, of in body["content"].items())
        lines += [f"Body{'' if body['required'] else ', optional'}: {kinds}.", ""]
    lines += ["| answer | | body |", "|---|---|---|"]
    for status, answer in operation["responses"].items():
        kinds = "; ".join(_kind(of["schema"]) for of in answer.get("content", {}).values())
        lines.append(f"| {status} | {_cell(answer['description'])} | {_cell(kinds)} |")
    return [*lines, ""]


def _type(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if "description" in schema:
        lines += [schema["description"].split("\n\n")[0].replace("\n", " "), ""]
    required = schema.get("required", [])
    lines += ["| field | type | always there, or required | default |", "|---|---|---|---|"]
    for field, one in schema.get("properties", {}).items():
        default = f"`{_json(one['default'])}`" if "default" in one else ""
        lines.append(f"| `{field}` | {_cell(_kind(one))} | {'yes' if field in required else ''} | {_cell(default)} |")
    return [*lines, ""]


def _json(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if value in (None, True, False) else str(value)


def _kind(schema: dict[str, Any]) -> str:
    """Return the type of a schema in a few words, with a link to the types of this page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_kind(one) for one in schema[union])
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return "list of " + _kind(schema.get("items") or {})
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return "map to " + _kind(schema["additionalProperties"])
    bounds = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([str(kind), *bounds])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- nothing from elsewhere


def keep_local(site: Path) -> None:
    """Replace the script that the generator takes from another host by our copy of it."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        local = os.path.relpath(site / "assets" / "iframe-worker.js", page.parent)
        page.write_text(SHIM.sub(local, text))


def foreign(site: Path) -> Iterator[str]:
    """Yield each address of another host that a page or a style sheet has a browser ask."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            for found in LOADED.findall(path.read_text()):
                yield f"{path.relative_to(site)}: {next(filter(None, found))}"


def main(site: str) -> int:
    """Build the site with the document of a service that is started for it."""
    with Service(shards=1, frontends=1) as service:
        document = service.client.get("/v0/openapi.json").json()
    try:
        build(Path(site), document)
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{site}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
