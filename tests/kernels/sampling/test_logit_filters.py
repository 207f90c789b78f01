"""Compares logit filters (top-k, top-p, min-p, typical-p) with their references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TypicalLogitsWarper

from penstock.kernels.sampling.logit_filters import (
    FilterParams,
    apply_top_k_top_p_min_p_,
    apply_typical_p_,
    top_k_top_p_min_p_reference,
    typical_p_reference,
)


def filter_params(*rows: tuple[int, float, float]) -> FilterParams:
    top_k, top_p, min_p = zip(*rows, strict=True)
    return FilterParams(torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.1, 1.0, 5.0, 60.0]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 7, 50, 103, 5000]),
            st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
            st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_filters_match_the_reference(
    seed: int, spread: float, rows: list[tuple[int, float, float]]
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), 103) * spread
    logits[:, 5] = logits[:, 80]  # equal logits of two tokens
    expected = top_k_top_p_min_p_reference(logits, filter_params(*rows))
    found = logits.clone()
    apply_top_k_top_p_min_p_(found, filter_params(*rows))
    # Because of rounding, top_p may keep one token more or fewer in each row.
    assert int((found != expected).sum()) <= len(rows)
    kept = found > -torch.inf
    assert torch.equal(found[kept], logits[kept])
    assert bool(kept.gather(1, logits.argmax(-1, keepdim=True)).all())
    for row, (top_k, _, _) in enumerate(rows):
        # Two tokens have equal logits; if both are at the limit, both are kept.
        assert not top_k or int(kept[row].sum()) <= top_k + 1


def test_each_filter_by_itself() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(6, 1)
    apply_top_k_top_p_min_p_(
        logits,
        filter_params(
            (2, 1, 0), (0, 0.8, 0), (0, 0.81, 0), (0, 1, 0.29), (0, 1, 0.31), (3, 0.85, 0)
        ),
    )
    # In the last row, top_k keeps three tokens with 0.95 of the probability.
    # The first two have only 0.84 of this 0.95, so top_p = 0.85 keeps all three.
    assert (logits > -torch.inf).sum(-1).tolist() == [2, 2, 3, 3, 2, 3]


def test_filters_of_a_row_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 5000) * 3
    rows = [(0, 0.9, 0.0), (40, 0.7, 0.0), (0, 1.0, 0.0), (0, 0.9999, 1e-9), (1, 1, 0), (999, 1, 0)]
    batched = logits.clone()
    apply_top_k_top_p_min_p_(batched, filter_params(*rows))
    for row, params in enumerate(rows):
        single = logits[row : row + 1].clone()
        apply_top_k_top_p_min_p_(single, filter_params(params))
        assert torch.equal(single[0], batched[row])


MASSES = [0.05, 0.2, 0.5, 0.9, 0.99]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.1, 1.0, 5.0, 60.0]),
    masses=st.lists(st.sampled_from(MASSES), min_size=1, max_size=5),
    num_removed=st.integers(0, 100),
)
def test_typical_p_matches_the_reference(
    seed: int, spread: float, masses: list[float], num_removed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(masses), 103) * spread
    logits[:, 5] = logits[:, 80]  # equal logits of two tokens
    logits.scatter_(1, torch.rand(logits.shape).topk(num_removed).indices, -torch.inf)
    found = logits.clone()
    apply_typical_p_(found, torch.tensor(masses))
    expected = typical_p_reference(logits, torch.tensor(masses))
    # Rounding may decide whether one token, or two tokens with equal logits, pass the filter.
    assert int((found != expected).sum(-1).max()) <= 2
    kept = found > -torch.inf
    assert kept.any(-1).all()
    assert torch.equal(found[kept], logits[kept])


@pytest.mark.slow
@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("spread", [0.3, 2.0, 10.0])
def test_typical_p_matches_transformers(mass: float, spread: float) -> None:
    torch.manual_seed(7)
    logits = torch.randn(40, 997) * spread
    logits[:, ::3] = -torch.inf
    expected = TypicalLogitsWarper(mass)(torch.empty(0, dtype=torch.long), logits.double())
    found = logits.clone()
    apply_typical_p_(found, torch.full((40,), mass))
    same = (found == expected).all(-1)
    assert int(same.sum()) >= 39  # rounding may change one of the 40 rows
    assert int((found != expected).sum()) <= 1


def test_typical_p_may_remove_the_most_probable_token() -> None:
    # The entropy is 1.47. The nearest surprisal is -log 0.2 = 1.61, so 0.2 is the most typical.
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]])
    logits = probs.log()
    apply_typical_p_(logits, torch.tensor([0.3]))
    assert (logits > -torch.inf).tolist() == [[False, True, True, False, False]]


def test_typical_p_of_a_row_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    for vocab_size in (1001, 40_003):  # above 32768 numbers, torch splits the sum of a row
        logits = torch.randn(7, vocab_size) * 3
        masses = torch.tensor([0.9, 0.2, 0.95, 0.5, 0.999, 0.1, 0.7])
        batched = logits.clone()
        apply_typical_p_(batched, masses)
        for row in range(len(logits)):
            single = logits[row : row + 1].clone()
            apply_typical_p_(single, masses[row : row + 1])
            assert torch.equal(single[0], batched[row])
