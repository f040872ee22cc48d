"""`docs/api.md` as the tests read it: its headings, and its examples, each of which is an exchange with the service.

    ```http                                   ```websocket
    PUT /v0/topics/a?x=1                      GET /v0/ws
    Header: value                             → {"op": …}      a message to the service
    {"the": "body"}                           ← {"op": …}      one from it
    → 201                                     ```
    Header: value
    {"the": "answer", …}                      ```sh
                                              TOPICS_X=1 topics-supervisor run
    GET /v0/topics/a                          ```
    → 200                                     the service of this section's examples
    {…}
    ```

`…` stands for members that are not shown. Any other block is an error: what nobody runs may not look like an example.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Final, NamedTuple

PAGE: Final = Path(__file__).parents[2] / "docs" / "api.md"
UNSHOWN: Final = "…"

_HEADING: Final = re.compile(r"#{2,3} (\d+(?:\.\d+)?) (\S.*)")
_REQUEST: Final = re.compile(r"(GET|PUT|POST|DELETE) (/\S*)")
_STATUS: Final = re.compile(r"→ (\d{3})")
_HEADER: Final = re.compile(r"([A-Z][A-Za-z-]+): (.+)")
_SETTING: Final = re.compile(r"(TOPICS_[A-Z_]+)=(.*)", re.S)


class PageError(ValueError):
    """The page has something that is not an example as above; says where."""


class Exchange(NamedTuple):
    """A request, and what it is answered. `line` of the page."""

    line: int
    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int
    answer_headers: dict[str, str]
    answer: str


class Conversation(NamedTuple):
    """The messages of one WebSocket: (whether to the service, its text)."""

    line: int
    messages: list[tuple[bool, str]]


class Section(NamedTuple):
    """One heading with what follows it. `settings`: of a service of its own, None for the common one."""

    number: str
    title: str
    settings: dict[str, str] | None
    examples: list[Exchange | Conversation]


class Spelled(str):
    """A number with a fraction, as it is written: 4.50 is not 4.5 to who promises to keep bytes."""


def decode(text: str) -> Any:
    """JSON of an example; `…` becomes a member of that name."""
    return json.loads(re.sub(r"…(?=\s*\})", f'"{UNSHOWN}": 0', text), parse_float=Spelled)


def sections(page: str) -> list[Section]:
    """Every numbered section of the page, in its order; raises PageError."""
    found: list[Section] = []
    lines = page.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        heading = _HEADING.fullmatch(line)
        if heading is not None:
            found.append(Section(heading[1], heading[2], None, []))
        elif line.startswith("#") and found:
            raise PageError(f"line {at + 1}: a heading without its number: {line}")
        elif line.lstrip().startswith("```"):
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
            if end is None or not found:
                raise PageError(f"line {at + 1}: a block without an end, or before the first section")
            found[-1] = _with_block(found[-1], line, at + 1, lines[at + 1 : end])
            at = end
        at += 1
    return found


def _with_block(section: Section, fence: str, line: int, content: list[str]) -> Section:
    if fence == "```http":
        section.examples.extend(_exchanges(line, content))
    elif fence == "```websocket":
        section.examples.append(_conversation(line, content))
    elif fence == "```sh":
        if section.settings is not None or section.examples:
            raise PageError(f"line {line}: a section has one service, which is named before its examples")
        return section._replace(settings=_settings(line, content))
    else:
        raise PageError(f"line {line}: nobody runs a block {fence!r}: it is http, websocket or sh")
    return section


def _exchanges(line: int, content: list[str]) -> list[Exchange]:
    starts = [
        at for at, text in enumerate(content) if _REQUEST.fullmatch(text) and (at == 0 or not content[at - 1].strip())
    ]
    if not starts or starts[0] != 0:
        raise PageError(f"line {line + 1}: an example begins with a request, as GET /v0/topics")
    ends = [*starts[1:], len(content)]
    return [_exchange(line + 1 + start, content[start:end]) for start, end in zip(starts, ends, strict=True)]


def _exchange(line: int, content: list[str]) -> Exchange:
    arrow = next((at for at, text in enumerate(content) if _STATUS.fullmatch(text)), None)
    if arrow is None:
        raise PageError(f"line {line}: {content[0]} is answered nothing: → and the status are missing")
    request, answer = content[:arrow], content[arrow:]
    method_path, status = _REQUEST.fullmatch(request[0]), _STATUS.fullmatch(answer[0])
    assert method_path is not None
    assert status is not None
    headers, body = _message(request[1:])
    answer_headers, answer_body = _message(answer[1:])
    return Exchange(line, method_path[1], method_path[2], headers, body, int(status[1]), answer_headers, answer_body)


def _message(content: list[str]) -> tuple[dict[str, str], str]:
    """(headers, body)"""
    headers = {}
    at = 0
    while at < len(content) and (header := _HEADER.fullmatch(content[at])) is not None:
        headers[header[1]] = header[2]
        at += 1
    return headers, "\n".join(content[at:]).strip("\n")


def _conversation(line: int, content: list[str]) -> Conversation:
    if not content or content[0] != "GET /v0/ws":
        raise PageError(f"line {line + 1}: a conversation begins with GET /v0/ws")
    messages = []
    for at, text in enumerate(content[1:], line + 2):
        if text[:2] not in ("→ ", "← "):
            raise PageError(f"line {at}: a message is → or ← and its JSON")
        messages.append((text[0] == "→", text[2:]))
    return Conversation(line + 1, messages)


def _settings(line: int, content: list[str]) -> dict[str, str]:
    words = shlex.split("\n".join(content))
    settings = [_SETTING.fullmatch(word) for word in words[:-2]]
    if words[-2:] != ["topics-supervisor", "run"] or not settings or None in settings:
        raise PageError(f"line {line + 1}: a service is named by TOPICS_… topics-supervisor run")
    return {setting[1]: setting[2] for setting in settings if setting is not None}


# --- whether an answer is the one that is shown

IDS: Final = frozenset({"epoch", "wid", "lease_id", "stage", "id", "idx_xxh3"})
"""Fields whose text the service makes up; where the page repeats one, the service repeats its own."""
TIMES: Final = frozenset(
    {"$ts", "deadline", "deliver_at", "deadlines", "first_ts", "last_ts", "last_write_ts", "last_read_ts"}
)
MEASURED: Final = frozenset({"performance", "uptime_ms", "pressure", "durable_seq"})
"""Members whose value depends on how long something took."""


class Likeness:
    """Holds answers of one section against the page, and knows which id of the page is which of the service."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def attempt(self, shown: Any, actual: Any) -> None:
        """Check as `check` does; an answer that is not alike leaves nothing known."""
        before = dict(self._known)
        try:
            self.check(shown, actual)
        except AssertionError:
            self._known = before
            raise

    def said(self, text: str) -> str:
        """A text of the page, with the ids of the service."""
        for shown, actual in self._known.items():
            text = text.replace(shown, actual)
        return text

    def check(self, shown: Any, actual: Any, at: str = "") -> None:
        """AssertionError that says where `actual` is not what is shown; both as `decode` gives them."""
        key = at.rpartition(".")[2]
        if isinstance(shown, dict):
            self._check_members(shown, actual, at)
        elif isinstance(shown, list):
            assert isinstance(actual, list), f"{at}: {actual!r} is no list"
            assert len(shown) == len(actual), f"{at}: has {len(actual)} of them, not {len(shown)}: {actual!r}"
            for number, (one, other) in enumerate(zip(shown, actual, strict=True)):
                self.check(one, other, f"{at}[{number}]")
        elif shown is not None and any(name in (TIMES | MEASURED) for name in at.split(".")):
            assert _kind(shown) == _kind(actual), f"{at}: {actual!r} is not of the kind of {shown!r}"
        elif key in IDS and isinstance(shown, str) and shown not in self._known:
            assert isinstance(actual, str), f"{at}: {actual!r} is no id"
            assert len(actual) == len(shown), f"{at}: {actual!r} is not as long as {shown!r}"
            assert actual not in self._known.values(), f"{at}: {actual!r} is shown by another name"
            self._known[shown] = actual
        else:
            expected = self.said(shown) if type(shown) is str else shown
            assert (type(expected), expected) == (type(actual), actual), f"{at}: is {actual!r}, not {expected!r}"

    def _check_members(self, shown: dict[str, Any], actual: Any, at: str) -> None:
        assert isinstance(actual, dict), f"{at}: {actual!r} is no object"
        whole = UNSHOWN not in shown
        missing = sorted(shown.keys() - actual.keys() - {UNSHOWN})
        more = sorted(actual.keys() - shown.keys()) if whole else []
        assert not missing, f"{at}: lacks {missing}, has {sorted(actual)}"
        assert not more, f"{at}: has {more} as well"
        for name, value in shown.items():
            if name != UNSHOWN:
                self.check(value, actual[name], f"{at}.{name}")


def _kind(value: Any) -> str:
    if isinstance(value, Spelled) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return "number"
    return type(value).__name__
