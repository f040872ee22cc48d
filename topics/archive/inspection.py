"""Looking at an archive: what it has, whether it is whole, and the removal of what nobody needs any more."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple, TypeVar

import msgspec

from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    Base,
    Generation,
    Piece,
    Removal,
    base_name,
    encode,
    file_name,
    generation_name,
    joined,
    piece_name,
    removal_name,
)

Told = Callable[[int, int], None]
_Proof = Callable[[int, int], bool]
"""(generation, base) -> whether a restore from this base has a moment: its own."""
_Result = TypeVar("_Result")


def tell_nobody(done: int, total: int) -> None: ...


class BaseFigures(msgspec.Struct, frozen=True):
    """A base: from its moment (`taken_ms`) on a service can be restored without any base before it."""

    number: int
    taken_ms: int
    files: int
    size_bytes: int


class GenerationFigures(msgspec.Struct, frozen=True):
    """One generation. Any time from `first_ms` to `last_ms` can be restored; they are None where they are unknown."""

    number: int
    service_id: str
    shards: int
    begun_ms: int
    first_ms: int | None
    last_ms: int | None
    pieces: int
    bases: list[BaseFigures]
    damaged: list[str]
    """A sentence for each of its objects that was looked at and cannot be read."""


class _Found(NamedTuple):
    """A generation as it was found. `numbers` has all its bases, `bases` those that a restore can use, both ascending.
    `damaged` says what is wrong. `last_no` is the last piece, 0 without one, and `last` is None if that is damaged.
    """

    generation: Generation
    numbers: list[int]
    bases: list[Base]
    damaged: list[str]
    last_no: int
    last: Piece | None


class Pruned(msgspec.Struct, frozen=True):
    """The number of objects that were removed, by kind."""

    generations: int = 0
    bases: int = 0
    pieces: int = 0
    files: int = 0
    loans: list[str] = []
    """Names of loans that keep objects which would be removed without them."""
    damaged: list[str] = []
    """A sentence for each object that cannot be read. It may keep other objects, too."""


def figures(archive: Archive, told: Told = tell_nobody) -> list[GenerationFigures]:
    """Return all generations, ascending. `told` hears how many bases of how many were read. Raise OSError."""
    return list(map(_figures, _look(archive, told)))


def _beside_prunings(work: Callable[[], _Result], damaged: Callable[[_Result], list[str]]) -> _Result:
    """Repeat the work until it finds the same damage twice: an object that it lacks may just have been pruned, and a
    disk may fail to read one for a moment.
    """
    found: list[str] = []
    while (now := damaged(result := work())) != found:
        found = now
    return result


def _look(archive: Archive, told: Told) -> list[_Found]:
    look = partial(_look_once, archive, told)
    return _beside_prunings(look, lambda found: [line for one in found for line in one.damaged])


def _look_once(archive: Archive, told: Told) -> list[_Found]:
    work = [(number, archive.bases(number)) for number in archive.generations()]
    found, done, total = [], 0, sum(len(base_numbers) for _, base_numbers in work)
    for number, base_numbers in work:
        bases: list[Base] = []
        damaged: list[str] = []
        last = None
        for base_no in base_numbers:
            try:
                bases.append(archive.base(number, base_no)[0])
            except ArchiveDamagedError as damage:
                damaged.append(f"{damage}; put it back from a copy. A restore uses the base before it, if it can")
            done += 1
            told(done, total)
        last_no = archive.last_piece(number, max(base_numbers, default=0))
        try:
            last = archive.piece(number, last_no)[0] if last_no else None
        except ArchiveDamagedError as damage:
            damaged.append(f"{damage}; put it back from a copy")
        try:
            generation = archive.generation(number)
        except ArchiveDamagedError as damage:
            damaged.append(f"{damage}; put it back from a copy: until then none of its moments can be restored")
            generation, bases = Generation(number, "", 0, [], ""), []
        found.append(_Found(generation, base_numbers, bases, damaged, last_no, last))
    return found


def _figures(found: _Found) -> GenerationFigures:
    generation, _, bases, damaged, last_no, last = found
    return GenerationFigures(
        generation.number,
        generation.service_id,
        generation.shards,
        generation.begun_ms,
        first_ms=bases[0].taken_ms if bases else None,
        last_ms=last.taken_ms if bases and last else None,
        pieces=last_no - bases[0].first_piece + 1 if bases else 0,
        bases=[
            BaseFigures(base.number, base.taken_ms, len(base.files), sum(ref.size_bytes for ref in base.files))
            for base in bases
        ],
        damaged=damaged,
    )


def check(archive: Archive, told: Told) -> list[str]:
    """Read every object that a restore may need. Return what is wrong, a sentence each. Raise OSError.

    `told` hears how many objects of how many were read.
    """
    problems: list[str] = []
    numbers = archive.generations()
    work = [(number, archive.bases(number)) for number in numbers]
    for number, base_numbers in work:
        try:
            archive.generation(number)
        except ArchiveDamagedError as damage:
            if archive.has_generation(number):
                problems.append(str(damage))
        if base_numbers:
            found = list(_check_generation(archive, number, base_numbers, told))
            there = {base_no for base_no in base_numbers if found and archive.has_base(number, base_no)}
            problems += [problem for problem, needed_by in found if needed_by & there]
        elif number == numbers[-1]:
            problems.append(f"{archive.store.place(generation_name(number))}: its first base is not complete")
    return problems


def _check_generation(
    archive: Archive, number: int, base_numbers: list[int], told: Told
) -> Iterator[tuple[str, set[int]]]:
    """Yield (problem, numbers of the bases that it harms). If all these bases are gone by now, there is no problem."""
    bases: list[Base] = []
    for base_no in base_numbers:
        try:
            bases.append(archive.base(number, base_no)[0])
        except ArchiveDamagedError as damage:
            yield (str(damage), {base_no})
    if not bases:
        return
    refs = {ref.name: ref for base in bases for ref in base.files}
    first, last = bases[0].first_piece, max(archive.last_piece(number, base_numbers[-1]), *archive.pieces(number), 0)
    total, done = len(refs) + last - first + 1, 0
    for ref in refs.values():
        try:
            archive.file(ref)
        except ArchiveDamagedError as damage:
            yield (str(damage), {one.number for one in bases for its in one.files if its.name == ref.name})
        done += 1
        told(done, total)
    pieces: dict[int, Piece] = {}
    for piece_no in range(first, last + 1):
        try:
            pieces[piece_no] = archive.piece(number, piece_no)[0]
        except ArchiveDamagedError as damage:
            yield (str(damage), {base.number for base in bases if base.first_piece <= piece_no})
        done += 1
        told(done, total)
    for at, base in enumerate(bases):
        # The piece of the next base may lie behind a hole: a hole is a reason to make a base.
        until = bases[at + 1].number - 1 if at + 1 < len(bases) else last
        until = next((no for no in range(until, base.number, -1) if no in pieces and pieces[no].is_moment), base.number)
        if lacks := gap(base, (pieces[no] for no in range(base.first_piece, until + 1) if no in pieces)):
            place = archive.store.place(piece_name(number, lacks))
            yield (f"{place}: does not go on where piece {lacks - 1} ends", {base.number})


def gap(base: Base, pieces: Iterable[Piece]) -> int:
    """Return the first piece that does not go on where a log of this base ends by then; 0 if all do."""
    ends = {start.shard: start.position for start in base.logs}
    for piece in pieces:
        for part in piece.parts:
            ends[part.shard] = joined(ends[part.shard], part) or ends[part.shard]
        if any(ends[end.shard] < end.position for end in piece.ends):
            return piece.number
    return 0


def prune(archive: Archive, before_ms: int, told: Told = tell_nobody) -> Pruned:
    """Remove objects that only moments before `before_ms` need. The last moment stays whose base and pieces can be
    read; others go only in favour of such a base. Everything stays from the oldest base on that has a loan, because
    restored services still read it. A damaged object keeps all that cannot be judged without it. Backups and other
    prunings may run meanwhile. Raise OSError: the next pruning goes on. `told` hears how many objects of how many go.
    """
    removed: Counter[str] = Counter()
    return _beside_prunings(lambda: _prune(archive, before_ms, removed, told), lambda pruned: pruned.damaged)


def _prune(archive: Archive, before_ms: int, removed: Counter[str], told: Told) -> Pruned:
    held: list[str] = []
    total = removed.total()

    def gone(name: str) -> None:
        removed[name.partition("/")[0].rpartition(".")[2]] += 1
        told(removed.total(), total)

    every = _look(archive, tell_nobody)
    damaged = [damage for found in every for damage in found.damaged]
    readable = {(found.generation.number, base.number): base for found in every for base in found.bases}

    @cache
    def is_proven(generation: int, base_no: int) -> bool:
        try:
            prove(archive, generation, readable[generation, base_no])
        except ArchiveDamagedError as damage:
            if not any(line.startswith(str(damage)) for line in damaged):
                damaged.append(f"{damage}; put it back from a copy: until then an older moment stays, too")
            return False
        return True

    newest = max((number for number, _ in readable), default=0)
    if len(every) > 1:
        proven = (number for number, base_no in sorted(readable, reverse=True) if is_proven(number, base_no))
        newest = next(proven, 0)
    for found in every:
        generation = found.generation.number
        try:
            left = archive.removals(generation)
        except ArchiveDamagedError as damage:
            damaged.append(f"{damage}; remove it: some files that it names then stay as long as their generation")
            continue
        # Generations behind `newest` have no base yet. If the end of one is damaged, nobody knows when it ended.
        has_ended = not found.numbers or (found.last is not None and found.last.taken_ms < before_ms)
        is_over = generation < newest and has_ended
        if not is_over:
            left = [removal for removal in left if _may_go_on(found, removal, is_proven)]
        going, lent = _superfluous(archive, found, before_ms, is_over, is_proven)
        listed = {name for removal in left for name in removal.names}
        if names := [name for name in going if name not in listed]:
            number = max((removal.number for removal in left), default=0) + 1
            try:
                while not archive.store.create(removal_name(generation, number), encode(Removal(number, names))):
                    number += 1  # another pruning has taken this one
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                number = 0  # no room for the note; removing makes some. If this is killed, some objects stay
            left.append(Removal(number, names))
        total += sum(len(removal.names) for removal in left) + is_over
        for removal in left:
            lent += _carry_out(archive, generation, removal, gone)
        held += lent
        if is_over and not lent:
            archive.store.delete(generation_name(generation))
            gone("generations")
    for number in set(range(1, newest)).difference(found.generation.number for found in every):
        # An archiver that stood still while its generation was pruned may have put more files of a base since. But if
        # a base still has its piece, nothing was pruned: the generation's object is lost.
        if archive.has_generation(number) or any(archive.has_piece(number, base) for base in archive.bases(number)):
            continue
        kinds = (base_name(number, 0)[:-12], file_name(number, ""))
        names = [name for kind in kinds for name in archive.store.list(kind)]
        total += len(names)
        for name in names:
            archive.store.delete(name)
            gone(name)
    return Pruned(**removed, loans=list(dict.fromkeys(held)), damaged=damaged)


def _carry_out(archive: Archive, generation: int, removal: Removal, gone: Callable[[str], None]) -> list[str]:
    """Remove the objects of a removal, and call `gone` for each. Return the loans that keep some of them."""
    bases = [name for name in removal.names if _base_of(name)]
    # Bases first, so that no restore begins with them any more. A restore that has begun needs the other objects.
    for names in (bases, [name for name in removal.names if not _base_of(name)]):
        if lent := _loans_of(archive, generation, removal):
            return lent
        for name in names:
            archive.store.delete(name)
            gone(name)
    archive.store.delete(removal_name(generation, removal.number))
    return []


def prove(archive: Archive, generation: int, base: Base, last: int = 0) -> None:
    """Read the pieces that the moment of a base needs, and those up to `last`. Raise ArchiveDamagedError, OSError."""
    pieces = map(partial(archive.piece, generation), range(base.first_piece, base.number + 1))
    if lacks := gap(base, (piece for piece, _ in pieces)):
        place = archive.store.place(piece_name(generation, lacks))
        raise ArchiveDamagedError(f"{place}: does not go on where piece {lacks - 1} ends")
    for number in range(base.number + 1, last + 1):
        archive.piece(generation, number)


def _may_go_on(found: _Found, removal: Removal, is_proven: _Proof) -> bool:
    """Return whether a removal has only files and pieces left, or a base behind its own is whole. Its pruning was
    killed, and what that left may be damaged since.
    """
    last = max((base for base in map(_base_of, removal.names) if base in found.numbers), default=0)
    later = (base.number for base in found.bases if base.number > last)
    return not last or any(is_proven(found.generation.number, number) for number in later)


def _superfluous(
    archive: Archive, found: _Found, before_ms: int, is_over: bool, is_proven: _Proof
) -> tuple[list[str], list[str]]:
    """Return (names of a generation's objects that no remaining moment and no loan needs; loans that keep others)."""
    generation, numbers, bases = found.generation.number, found.numbers, found.bases
    loans = archive.loans(generation)
    early = (base.number for base in reversed(bases) if base.taken_ms <= before_ms and base.number > numbers[0])
    # Bases below this number are removed. The base of this number can be read: nobody knows what others need.
    bound = numbers[-1] + 1 if is_over and numbers else next((no for no in early if is_proven(generation, no)), 0)
    lent = [number for number in numbers if number < bound and number in loans]
    if lent:
        bound = max((base.number for base in bases if base.number <= lent[0]), default=0)
    if (lent or not is_over) and (bound or min(numbers, default=0)) not in [base.number for base in bases]:
        return [], [loans[number] for number in lent]
    kept = [base for base in bases if base.number >= bound]
    # The first base may have come later than the first piece.
    first = 1 if not bases or archive.has_piece(generation, 1) else bases[0].first_piece
    while first > 1 and numbers[0] < bases[0].number and archive.has_piece(generation, first - 1):
        first -= 1  # the pieces of a base that cannot be read
    last = found.last_no
    if found.last is None or found.last.taken_over_by:
        last -= 1  # the last piece stays, so that a late archiver meets it
    pieces = range(first, kept[0].first_piece if kept else last + 1)
    kept_names = {ref.name for base in kept for ref in base.files}
    names = sorted({ref.name for base in bases for ref in base.files} - kept_names)
    if is_over and not lent:
        names = archive.store.list(file_name(generation, ""))
    going = [base_name(generation, number) for number in numbers if number < bound]
    going += [piece_name(generation, piece_no) for piece_no in pieces]
    return going + names, [loans[number] for number in lent]


def _base_of(name: str) -> int:
    """Return the number of the base that an object is; 0 for any other object."""
    kind, _, number = name.partition("/")
    return int(number) if kind.endswith(".bases") else 0


def _loans_of(archive: Archive, generation: int, removal: Removal) -> list[str]:
    """Return the loans of bases that are to be removed, and of older bases, which need newer objects, too."""
    newest = max(map(_base_of, removal.names), default=0)
    return [loan for base, loan in archive.loans(generation).items() if base <= newest]
