"""Renders metrics as the Prometheus text format 0.0.4 and as JSON. Pure, and made piece by piece.

This is not a client library: those keep the metrics of one process and render all of them at once. Ours are read from
shared memory, and may be a hundred thousand lines, between which other requests must have their turn.

    text    # HELP <name> <help> LF  # TYPE <name> <kind> LF  { <name>{<label>="<value>",…} <number> LF } …
    JSON    {"<name>": <number>, "<name>": {"<value>": <number>, …}, …}          one level of objects for each label
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from topics.frontend.entry.responses import encode_json

TEXT_TYPE: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
PIECE_SAMPLES: Final = 256
"""Samples rendered at once, some hundred µs of work."""


class Buckets(NamedTuple):
    """A histogram: `counts[i]` values fit `bounds[i]` and no earlier bound, the last none. `total` is their sum."""

    bounds: list[str]
    counts: list[int]
    total: float


Value = int | float | Buckets
Sample = tuple[tuple[str, ...], Value]


class Family(NamedTuple):
    """One metric. Each sample has a value for each of `labels`. Their characters need no escape in either format."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: list[Sample]

    @property
    def kind(self) -> str:
        if self.samples and isinstance(self.samples[0][1], Buckets):
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


def single(name: str, help: str, value: Value) -> Family:
    return Family(name, help, (), [((), value)])


def text(families: Iterable[Family]) -> Iterator[bytes]:
    for family in families:
        if not family.samples:
            continue
        yield f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n".encode()
        for samples in _pieces(family.samples):
            yield "".join([_line(family, values, value) for values, value in samples]).encode()


def json(families: Iterable[Family]) -> Iterator[bytes]:
    """Yield the members of one JSON object, in pieces, without its braces."""
    for at, family in enumerate(families):
        yield b'%b"%b":' % (b"," if at else b"", family.name.encode())
        if len(family.labels) != 1:
            yield encode_json(_nested(family.samples))
            continue
        opening = b"{"
        for samples in _pieces(family.samples):
            yield opening + encode_json({values[0]: _plain(value) for values, value in samples})[1:-1]
            opening = b","
        yield b"}" if family.samples else b"{}"


def _pieces(samples: list[Sample]) -> Iterator[list[Sample]]:
    return (samples[at : at + PIECE_SAMPLES] for at in range(0, len(samples), PIECE_SAMPLES))


def _line(family: Family, values: tuple[str, ...], value: Value) -> str:
    labels = ",".join([f'{label}="{of}"' for label, of in zip(family.labels, values, strict=True)])
    if isinstance(value, Buckets):
        return _histogram(family.name, labels, value)
    return f"{family.name}{{{labels}}} {value}\n" if labels else f"{family.name} {value}\n"


def _histogram(name: str, labels: str, value: Buckets) -> str:
    before = labels + "," if labels else ""
    own = f"{{{labels}}}" if labels else ""
    lines = [f'{name}_bucket{{{before}le="{bound}"}} {count}\n' for bound, count in _cumulative(value)]
    return "".join([*lines, f"{name}_sum{own} {value.total}\n{name}_count{own} {sum(value.counts)}\n"])


def _cumulative(value: Buckets) -> Iterator[tuple[str, int]]:
    return zip((*value.bounds, "+Inf"), itertools.accumulate(value.counts), strict=True)


def _nested(samples: list[Sample]) -> Any:
    """Return the number, or objects in objects, one level for each label."""
    root: dict[str, Any] = {}
    for values, value in samples:
        if not values:
            return _plain(value)
        level = root
        for key in values[:-1]:
            level = level.setdefault(key, {})
        level[values[-1]] = _plain(value)
    return root


def _plain(value: Value) -> Any:
    if isinstance(value, Buckets):
        return {"buckets": dict(_cumulative(value)), "sum": value.total, "count": sum(value.counts)}
    return value
