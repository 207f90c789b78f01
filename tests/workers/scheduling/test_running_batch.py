"""Division of a step's token budget among the running sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.running_batch import split_token_budget


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 60))
def test_budget_goes_to_decodes_and_then_to_prompts_in_row_order(
    remaining: list[int], spare: int
) -> None:
    budget = len(remaining) + spare
    counts = split_token_budget(np.array(remaining, np.int32), budget)
    assert counts.dtype == np.int32
    assert counts.sum() == min(budget, sum(remaining))  # the budget is used up while tokens remain
    chunks = [(c, r) for c, r in zip(counts.tolist(), remaining, strict=True) if r > 1]
    assert all(c == 1 for c, r in zip(counts.tolist(), remaining, strict=True) if r == 1)
    complete = [c == r for c, r in chunks]
    # In row order: complete prompts, at most one partial prompt, then prompts without tokens.
    assert complete == sorted(complete, reverse=True)
    assert sum(0 < c < r for c, r in chunks) <= 1
