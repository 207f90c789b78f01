"""How the tokens of a step are shared between those who run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.running_batch import split_token_budget


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 60))
def test_budget_goes_to_decodes_then_down_the_rows(remaining: list[int], spare: int) -> None:
    budget = len(remaining) + spare
    counts = split_token_budget(np.array(remaining, np.int32), budget)
    assert counts.dtype == np.int32
    assert counts.sum() == min(budget, sum(remaining))  # nothing is left while somebody wants it
    chunks = [(c, r) for c, r in zip(counts.tolist(), remaining, strict=True) if r > 1]
    assert all(c == 1 for c, r in zip(counts.tolist(), remaining, strict=True) if r == 1)
    served = [c == r for c, r in chunks]
    # In order: those who get all they want, one who gets a part, those who get nothing.
    assert served == sorted(served, reverse=True)
    assert sum(0 < c < r for c, r in chunks) <= 1
