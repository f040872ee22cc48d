"""Find docstrings without a subject, and literary words: `python -m tests.words [PATH…]` lists file:line of each."""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

DEFAULT_PATHS: Final = ("topics", "bench", "tests", "examples")
SHOWN_CHARACTERS: Final = 90
HINTS: Final = """\
How to write them (docs/decisions and the code of `topics/core` have examples):

  module, class   what it is, what it owns, what it guarantees:
                  "Queue of frames for one WebSocket. It owns the frames until the transport has them."
  function        a verb first: "Return…", "Forget a connection (caught up or closed). Idempotent."
  attribute       a noun phrase with its unit: "Monotonic ms at which the lease ends."
                  "So much is read at once."       -> "Bytes that one read takes at most."
                  "By topic id."                   -> "Claims of this group, by topic id."
                  "None while nobody waits."       -> "End of the pause in ms; None while nobody waits."
  test            what holds: "A retry is answered from the log."
  any             "Of a claimed job, what settling takes." -> "The part of a claimed job that settling takes."
                  "Whether the topic is full."             -> "Return whether the topic is full."
                  "What waits for room."                   -> "Requests that wait for room."
                  "As `read`, but once."                   -> "Read once; otherwise like `read`."

Who does what comes first, then why. One idea a sentence, short words, present tense. Keep units, errors and guarantees.
"""

_PREPOSITION: Final = (
    "About|Above|After|Against|At|Before|Behind|Below|Between|By|During|For|From|In|Into|On|Out of|Since|Than|Through"
    "|To|Towards|Under|Until|Up to|With|Within|Without"
)
_RELATIVE: Final = "how|what|whatever|when|where|which|whichever|who|whoever|whom|whose"
OPENINGS: Final = (
    r"(Of|As|Those|That|What|Whether|Who|Whom|Whose|Which|How|Where|When|Why)\b",
    r"(What|Who|Whom|Which|How|Where|When)(so)?ever\b",
    r"So (many|much|often|long|far|few|little|large|soon|old)\b",
    rf"({_PREPOSITION}) ({_RELATIVE})\b",
    rf"({_PREPOSITION})( [^\s,;:]+){{1,4}}$",
    r"None (of|while|until|before|when|where|after|at|without|for|as|if|once|unless)\b",
    r"(And|Or|Nor|But|Also|Else|Neither|Not)\b",
    r"Only (of|for|those|while|when|where|if|in|with|to|by|from)\b",
    r"(Until|Unless|While|Because|If|Once)\b[^,;:]*$",
    r"To be\b",
)
"""Beginnings of a first sentence that has no subject, or hides it behind a clause."""
LITERARY: Final = (
    r"indeed|anew|afresh|lest|thereby|thereof|therein|whereby|wherein|whence|thence|hence|henceforth|whilst|amid|upon|shall",
    r"who(so)?ever|whomever",
    r"at hand|in vain|for want of|of old|so to speak|as it were|at one go|of its own accord",
    r"(?<!there )(is|are|was|were) no more(?=[.,;:)]|$| and| or| but)",
    r"(has|have|had) (?!to |let )(\w+ )?go",
    r"lets? (it |them )?go(?! of)|lets go",
    r"one's place|(its|their) stead",
    r"(see|sees|seeing) to(?! it)",
    r"endure[sd]?|stirs|stirred|heed|befalls?",
    r"(?<=, )for (it|they|there|nobody|he|we) (is|are|was|were|may|might|can|has|have|will|would|must|had|could)",
)
"""Words that a colleague would not say; looked for in docstrings and comments."""
_OPENING: Final = re.compile("|".join(f"(?:{one})" for one in OPENINGS))
_LITERARY: Final = re.compile(rf"\b(?:{'|'.join(f'(?:{one})' for one in LITERARY)})(?!\w)", re.IGNORECASE)
_CODE: Final = re.compile(r"`[^`]*`")
_DIRECTIVE: Final = re.compile(r"#\s*(?:noqa|type:|fmt:|pragma)")


class Finding(NamedTuple):
    """A line that is to be rewritten."""

    line: int
    reason: str
    text: str


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of all strings that are statements: docstrings, and those behind an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of all comments that are prose."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            yield token.start[0], token.string.lstrip("#! ")


def first_sentence(text: str) -> str:
    """Return the first sentence in one line, without its full stop."""
    return re.split(r"(?<!e\.g)(?<!i\.e)\.(?=\s|$)", " ".join(text.split()), maxsplit=1)[0]


def opening(text: str) -> str:
    """Return the beginning that hides the subject; empty if there is none."""
    match = _OPENING.match(first_sentence(text))
    return match.group() if match else ""


def literary(text: str) -> list[str]:
    """Return literary words outside of backquotes."""
    return [match.group() for match in _LITERARY.finditer(_CODE.sub("", " ".join(text.split())))]


def findings(source: str) -> list[Finding]:
    """Return all findings in a source file, by line."""
    found = []
    for line, text in docstrings(ast.parse(source)):
        if begin := opening(text):
            found.append(Finding(line, "no subject", first_sentence(text)[: max(SHOWN_CHARACTERS, len(begin))]))
        found += [Finding(line, "literary", word) for word in literary(text)]
    found += [Finding(line, "literary", word) for line, text in comments(source) for word in literary(text)]
    return sorted(found)


def files(paths: Iterable[str]) -> list[Path]:
    """Return the Python files below these paths."""
    return [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.words",
        description="List docstrings without a subject, and literary words in docstrings and comments. Exit 1 if any.",
        epilog=HINTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", default=DEFAULT_PATHS, metavar="PATH", help="files or folders")
    chosen = parser.parse_args(arguments)
    count = 0
    for file in files(chosen.paths):
        for finding in findings(file.read_text()):
            print(f"{file}:{finding.line}: {finding.reason}: {finding.text}")
            count += 1
    if count:
        print(f"{count} to rewrite; --help shows how", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
