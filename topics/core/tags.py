"""The tags of records (api §5), indexed so that a delete by tag costs its matches, not the log. Pure.

Only records that are not in a sealed segment are indexed here (a segment has its own postings). Appends cost nothing:
the index catches up, piece by piece, when a delete needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

from topics.core.errors import invalid

FORGET_FROM: Final = 4096
"""Number of entries from which forgetting is worth it."""
TagsOf = Callable[[int, int], tuple[list[tuple[int, bytes]], int]]
"""(first_seq, last_seq) → ascending (seq, tag) of tagged records among these, and the last seq that was looked at."""


class Match(NamedTuple):
    """A condition on tags: `eq` is the tag itself, `glob` every tag that begins with it."""

    op: Literal["eq", "glob"]
    tag: bytes

    def covers(self, tag: bytes) -> bool:
        """True if a record with this tag matches."""
        return tag == self.tag if self.op == "eq" else tag.startswith(self.tag)


def parse_match(given: object, field: str = "match") -> Match:
    """Parse `["tag","Eq","x"]`, `["tag","Glob","x*"]`, or "x" and "x*" for these; `400` names the `field`."""
    if isinstance(given, str):
        return Match("glob", given[:-1].encode()) if given.endswith("*") else Match("eq", given.encode())
    if not isinstance(given, list) or len(given) != 3 or not all(isinstance(part, str) for part in given):
        raise invalid(f'{field} must be a string or ["tag", "Eq" or "Glob", text]', field=field)
    subject, op, text = given
    if subject != "tag":
        raise invalid(f"{field}: only 'tag' can be matched, not {subject!r}", field=field)
    if op == "Eq":
        return Match("eq", text.encode())
    if op != "Glob":
        raise invalid(f"{field}: the operator is 'Eq' or 'Glob', not {op!r}", field=field)
    if not text.endswith("*") or "*" in text[:-1]:
        raise invalid(f"{field}: a Glob ends in its only '*', {text!r} does not", field=field)
    return Match("glob", text[:-1].encode())


class TagIndex:
    """Index from each tag to the ascending seqs of its records. It has all records from some seq to `next_seq` - 1."""

    def __init__(self, first_seq: int) -> None:
        from sortedcontainers import SortedDict  # commands parse matches, and a client's packages lack it

        self._seqs: SortedDict[bytes, list[int]] = SortedDict()
        self._entries = 0
        self.next_seq = first_seq

    def forget_below(self, base_seq: int) -> None:
        """Start over at `base_seq` if most of the entries are below it."""
        if self._entries > FORGET_FROM and self._entries > 2 * (self.next_seq - base_seq):
            self._seqs.clear()
            self._entries = 0
            self.next_seq = base_seq

    def catch_up(self, base_seq: int, last_seq: int, tags_of: TagsOf) -> None:
        """Index the records from `next_seq` up to `last_seq`, or as far as one call of `tags_of` goes."""
        first_seq = max(self.next_seq, base_seq)
        if first_seq > last_seq:
            return
        tagged, last_seq = tags_of(first_seq, last_seq)
        known = self._seqs.get
        for seq, tag in tagged:
            seqs = known(tag)
            if seqs is None:
                self._seqs[tag] = [seq]
            else:
                seqs.append(seq)
        self._entries += len(tagged)
        self.next_seq = last_seq + 1

    def matching(self, match: Match) -> list[bytes]:
        """Return the tags that match."""
        if match.op == "eq":
            return [match.tag]
        return list(self._seqs.irange(match.tag, _behind(match.tag), (True, False)))

    def seqs_of(self, tags: Sequence[bytes], start: int, most: int) -> tuple[list[int], int]:
        """Return (ascending seqs of records with a tag of `tags[start:]`; number of the tag to go on with).

        There may be more than `most`, because the seqs of a tag come together. Some may be deleted already.
        """
        found: list[int] = []
        while start < len(tags) and len(found) < most:
            found += self._seqs.get(tags[start], ())
            start += 1
        return sorted(found), start


def _behind(prefix: bytes) -> bytes | None:
    """Return the least bytes above all that begin with `prefix`; None if there are none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,)) if kept else None
