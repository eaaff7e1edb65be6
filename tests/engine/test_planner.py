"""The layout of windows, as properties."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.window.planner import Run, causal_runs, question_runs, question_tails, spread_evenly

masks = st.lists(st.booleans(), max_size=80).map(lambda flags: np.array(flags, dtype=bool))


@settings(deadline=None)
@given(mask=masks, system=st.integers(0, 9), row=st.integers(0, 5))
def test_runs_cover_exactly_the_computed_tokens(mask: np.ndarray, system: int, row: int) -> None:
    slots = np.flatnonzero(mask) + system
    runs = [run.moved(row) for run in causal_runs(slots)]
    covered = [slot for run in runs for slot in range(run.tail, run.stop)]
    assert covered == slots.tolist()
    assert [r for run in runs for r in range(run.row, run.row + run.count)] == list(range(row, row + len(slots)))
    for run in runs:
        # Exact causality: the last row sees up to itself, and a run is bottom-right aligned.
        assert run.prefix == run.tail == run.stop - run.count
    # Neighbouring runs do not touch: each is as long as it can be.
    assert all(a.stop < b.tail for a, b in itertools.pairwise(runs))


@settings(deadline=None)
@given(mask=masks, system=st.integers(0, 9))
def test_attended_pairs_are_those_of_causal_attention(mask: np.ndarray, system: int) -> None:
    slots = np.flatnonzero(mask) + system
    assert sum(run.attended for run in causal_runs(slots)) == int((slots + 1).sum())


@settings(deadline=None)
@given(
    window=st.integers(0, 50),
    questions=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=5),
)
def test_questions_see_the_window_and_themselves(window: int, questions: list[tuple[int, int]]) -> None:
    tails = question_tails(window, [tokens for tokens, _ in questions], [room for _, room in questions])
    assert tails[0].start == window
    assert all(a.stop == b.start for a, b in itertools.pairwise(tails))
    runs = question_runs(window, tails)
    assert [run.row for run in runs] == np.cumsum([0, *(run.count for run in runs)])[:-1].tolist()
    for run, tail in zip(runs, tails, strict=True):
        assert (run.prefix, run.tail, run.stop) == (window, tail.start, tail.start + tail.tokens)
        assert run.count == tail.tokens


def test_attended_of_one_decoded_token() -> None:
    assert Run(row=0, count=1, prefix=10, tail=14, stop=20).attended == 16


@settings(deadline=None)
@given(count=st.integers(1, 300), share=st.floats(0, 1))
def test_evenly_spread_indices(count: int, share: float) -> None:
    size = round(count * share)
    indices = spread_evenly(count, size)
    assert len(set(indices.tolist())) == size
    assert all(0 <= index < count for index in indices)
    if size > 1:
        gaps = np.diff(indices)
        assert gaps.max() - gaps.min() <= 1
