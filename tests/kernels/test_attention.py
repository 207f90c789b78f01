"""Paged attention against its reference, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.attention import paged_attention, paged_attention_reference, plan_attention
from penstock.kernels.scores import PLAIN, Scores
from tests.support.batches import make_batch, poison


def check(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    window: int,
    scores: Scores = PLAIN,
) -> None:
    num_heads, group, head_dim = heads
    batch, num_blocks = make_batch(lengths, block_size, seed=len(lengths))
    torch.manual_seed(0)
    layer = torch.randn(2, num_blocks, num_heads, block_size, head_dim)
    poison(layer, batch)
    query = torch.randn(int(batch[0][-1]), num_heads * group, head_dim)
    plan = plan_attention(*batch, layer, window)
    found = paged_attention(query, layer, plan, scores)
    expected = paged_attention_reference(query, layer, *batch, window, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


lengths = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths,
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 6, 16])),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([0, 1, 7, 16, 1000]),
)
def test_any_ragged_batch(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, window: int
) -> None:
    check(lengths, heads, block_size, window)


@pytest.mark.parametrize("window", [0, 5, 40])
def test_decodes_alone(window: int) -> None:
    check([(1, 1), (1, 16), (1, 17), (1, 90)], (2, 3, 8), 16, window)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    "scores",
    [
        Scores(scale=0.4),
        Scores(scale=0.9, cap=1.5),
        Scores(sinks=torch.tensor([0.3, -2.0, 4.0, 0.0, 1.0, -torch.inf])),
        Scores(cap=0.7, sinks=torch.arange(6.0)),
    ],
)
def test_bent_scores(scores: Scores, window: int) -> None:
    lengths = [(1, 1), (7, 7), (1, 30), (5, 21), (1, 17)]
    check(lengths, (2, 3, 8), 4, window, scores)


def test_unlike_lengths_are_padded_apart() -> None:
    lengths = [(1, 5), (1, 1500), (1, 30), (1, 1400), (1, 7)]
    batch, num_blocks = make_batch(lengths, 16, 0)
    layer = torch.zeros(2, num_blocks, 4, 16, 64)
    plan = plan_attention(*batch, layer)
    assert len(plan.decodes) == 2
    assert len(plan.gathered) < 2 * 4 * (94 + 94 + 3)
    check(lengths, (4, 1, 64), 16, 0)


def test_narrow_dtypes() -> None:
    batch, num_blocks = make_batch([(1, 40), (9, 30)], 16, 0)
    layer = torch.randn(2, num_blocks, 2, 16, 8)
    poison(layer, batch)
    query = torch.randn(10, 4, 8)
    narrow = layer.to(torch.bfloat16)
    found = paged_attention(query.to(torch.bfloat16), narrow, plan_attention(*batch, narrow))
    expected = paged_attention_reference(query, layer, *batch)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
