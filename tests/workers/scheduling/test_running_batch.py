"""Division of a step's token budget among the running sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.running_batch import split_token_budget


def split(remaining: list[int], decode_lens: list[int], budget: int) -> list[int]:
    counts = split_token_budget(
        np.array(remaining, np.int32), np.array(decode_lens, np.int32), budget
    )
    assert counts.dtype == np.int32
    # All of the budget is used if there are enough tokens.
    assert counts.sum() == min(budget, sum(remaining))
    return list(map(int, counts))


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 60))
def test_budget_goes_to_decodes_and_then_to_prompts_in_row_order(
    remaining: list[int], spare: int
) -> None:
    budget = len(remaining) + spare
    counts = split(remaining, [1] * len(remaining), budget)
    chunks = [(c, r) for c, r in zip(counts, remaining, strict=True) if r > 1]
    assert all(c == 1 for c, r in zip(counts, remaining, strict=True) if r == 1)
    complete = [c == r for c, r in chunks]
    # In row order: complete prompts, at most one partial prompt, then prompts without tokens.
    assert complete == sorted(complete, reverse=True)
    assert sum(0 < c < r for c, r in chunks) <= 1


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), max_size=20), st.integers(0, 60))
def test_decoding_row_gets_a_token_and_its_forced_tokens_before_prompts(
    rows: list[tuple[int, int]], spare: int
) -> None:
    remaining, decode_lens = [r for r, _ in rows], [d for _, d in rows]
    counts = split(remaining, decode_lens, len(rows) + spare)
    decoding = [(c, r) for c, (r, d) in zip(counts, rows, strict=True) if r <= d]
    assert all(c for c, _ in decoding)
    if any(c for c, (r, d) in zip(counts, rows, strict=True) if r > d):
        assert all(c == r for c, r in decoding)
