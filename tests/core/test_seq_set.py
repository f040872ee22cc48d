"""Sets of seqs against Python's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics.core.seq_set import SeqSet, runs_of, seqs_of

SEQS = st.integers(1, 40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), SEQS, SEQS),
        st.tuples(st.just("discard"), SEQS, SEQS),
        st.tuples(st.just("below"), SEQS, SEQS),
    ),
    max_size=30,
)


@given(STEPS)
def test_it_is_a_set(steps: list[tuple[str, int, int]]) -> None:
    ours, model = SeqSet(), set[int]()
    for what, one, other in steps:
        first, last = min(one, other), max(one, other)
        if what == "add":
            ours.add(first, last)
            model |= set(range(first, last + 1))
        elif what == "discard":
            ours.discard(one)
            model.discard(one)
        else:
            ours.discard_below(one)
            model = {seq for seq in model if seq >= one}
        assert list(seqs_of(ours.runs())) == sorted(model)
        assert ours.runs() == runs_of(sorted(model))
        assert ours.count == len(model)
        for seq in range(42):
            assert (seq in ours) == (seq in model)
            assert ours.next_absent(seq) == next(at for at in range(seq, 99) if at not in model)
    assert SeqSet(ours.runs()).runs() == ours.runs()
