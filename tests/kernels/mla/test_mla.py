"""Compares MLA on a CPU, in its absorbed and expanded forms, with the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.linear.op import pack_batch_invariant
from penstock.kernels.mla import op as mla
from penstock.kernels.mla import torch_gather
from penstock.kernels.mla.cpu import mla_attention_cpu
from penstock.kernels.mla.op import (
    MlaPlan,
    mla_attention,
    mla_attention_reference,
    plan_mla,
)
from tests.support.batches import Batch, make_batch, poison

# (H, Q, P, V, R): number of heads; query, rotary and value features of a head; latent rank.
Sizes = tuple[int, int, int, int, int]
SMALL = (3, 5, 4, 7, 11)
DEEPSEEK = (512, 64, 256)  # (R, P, Q + V) of DeepSeek V3, see `Sizes`


def make_inputs(
    lengths: list[tuple[int, int]], sizes: Sizes, block_size: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]:
    num_heads, query_dim, rope_dim, value_dim, rank = sizes
    batch, num_blocks = make_batch(lengths, block_size, seed=len(lengths))
    torch.manual_seed(0)
    layer = torch.randn(1, num_blocks, 1, block_size, rank + rope_dim)
    poison(layer, batch)
    query = torch.randn(int(batch[0][-1]), num_heads, query_dim + rope_dim)
    up = torch.randn(num_heads, query_dim + value_dim, rank) * rank**-0.5
    return query, layer, up, batch


def attend(
    query: torch.Tensor, layer: torch.Tensor, up: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, MlaPlan]:
    plan = plan_mla(*batch, layer, up.shape[2], up.shape[1])
    return mla_attention(query, layer, up, plan, 0.3), plan


def check(lengths: list[tuple[int, int]], sizes: Sizes, block_size: int = 4) -> MlaPlan:
    query, layer, up, batch = make_inputs(lengths, sizes, block_size)
    found, plan = attend(query, layer, up, batch)
    expected = mla_attention_reference(query, layer, up, *batch, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return plan


lengths = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths,
    # If R is smaller than a head's dims, the absorbed form is cheaper even for prefill chunks.
    sizes=st.tuples(*(st.integers(1, 3), *(st.sampled_from([2, 6, 16]) for _ in range(4)))),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_any_ragged_batch(lengths: list[tuple[int, int]], sizes: Sizes, block_size: int) -> None:
    check(lengths, sizes, block_size)


@pytest.mark.parametrize("absorbs", [True, False])
def test_absorbed_and_expanded_forms(monkeypatch: pytest.MonkeyPatch, absorbs: bool) -> None:
    monkeypatch.setattr(mla, "_absorbed_is_cheaper", lambda *sizes: absorbs)
    plan = check([(1, 1), (1, 30), (7, 7), (5, 21), (1, 16), (16, 16), (3, 19)], SMALL)
    assert (len(plan.absorbed), len(plan.expanded)) == ((7, 0) if absorbs else (3, 4))


def test_both_forms_in_one_batch() -> None:
    plan = check([(1, 9), (20, 20), (1, 30), (2, 40), (9, 12)], SMALL)
    assert (len(plan.absorbed), len(plan.expanded)) == (3, 2)


def test_heads_are_expanded_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_gather, "MAX_NAIVE_BYTES", 2 * 2 * 20 * 9 * 4)
    assert [heads.stop for heads in torch_gather._head_groups(3, 2 * 20 * 9 * 4)] == [2, 3]
    check([(20, 20), (9, 12)], SMALL)


@pytest.mark.parametrize(
    ("query_len", "context", "absorbs"),
    [
        (2, 3, True),
        (1, 100_000, True),
        (64, 4096, True),
        (128, 4096, True),
        (256, 4096, False),
        (512, 512, False),
        (4096, 4096, False),
    ],
)
def test_the_form_with_fewer_multiplications_is_chosen(
    query_len: int, context: int, absorbs: bool
) -> None:
    assert mla._absorbed_is_cheaper(query_len, context, *DEEPSEEK) is absorbs


def test_bfloat16() -> None:
    query, layer, up, batch = make_inputs([(1, 40), (9, 30), (12, 12)], SMALL)
    expected = mla_attention_reference(query, layer, up, *batch, 0.3)
    dtype = torch.bfloat16
    found, _ = attend(query.to(dtype), layer.to(dtype), up.to(dtype), batch)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("absorbs", [True, False])
def test_a_bfloat16_cache_is_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch, absorbs: bool
) -> None:
    monkeypatch.setattr(mla, "_absorbed_is_cheaper", lambda *sizes: absorbs)
    query, layer, up, batch = make_inputs([(1, 40), (9, 30), (12, 12), (1, 1)], SMALL)
    narrow = layer.bfloat16()
    found, _ = attend(query, narrow, up, batch)
    assert torch.equal(found, attend(query, narrow.float(), up, batch)[0])
    assert torch.equal(
        attend_in_place(query, narrow, up, batch), attend_in_place(query, narrow.float(), up, batch)
    )


def test_a_single_sequence() -> None:
    check([(6, 6)], SMALL)
    check([(1, 6)], SMALL)


def test_invalid_arguments_are_refused() -> None:
    query, layer, up, batch = make_inputs([(1, 9), (7, 7)], SMALL)
    plan = plan_mla(*batch, layer, 11, 12)
    with pytest.raises(ValueError, match="layer has 15 features: expected more than 15"):
        plan_mla(*batch, layer, 15, 12)
    with pytest.raises(
        ValueError, match=r"layer has shape \[2, .*: expected \[1, N, 1, S, R \+ P\]"
    ):
        plan_mla(*batch, torch.zeros(2, 3, 1, 4, 15), 11, 12)
    with pytest.raises(ValueError, match="layer has "):
        mla_attention(query, layer.transpose(1, 3), up, plan, 0.3)
    with pytest.raises(ValueError, match=r"query has shape \[7, 3, 9\]: expected \[8, 3, Q \+ P\]"):
        mla_attention(query[1:], layer, up, plan, 0.3)
    with pytest.raises(ValueError, match="query has 4 features: expected 5 to 15"):
        mla_attention(query[..., :4], layer, up, plan, 0.3)
    with pytest.raises(ValueError, match=r"up has strides .*: expected a contiguous tensor"):
        mla_attention(query, layer, up[:, ::2], plan, 0.3)
    with pytest.raises(ValueError, match="layer has dtype float64: expected float32"):
        mla_attention(query, layer.double(), up, plan, 0.3)
    assert np.isfinite(mla_attention(query, layer, up, plan, 0.3).numpy()).all()


def attend_in_place(
    query: torch.Tensor, layer: torch.Tensor, up: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """Compute absorbed MLA with the CPU kernels that read the cache in place."""
    rank = up.shape[2]
    query_dim = query.shape[2] - (layer.shape[4] - rank)
    keys = [pack_batch_invariant(each.T, None) for each in up[:, :query_dim]]
    values = [pack_batch_invariant(each, None) for each in up[:, query_dim:]]
    plan = CpuPagedPlan.of(np.arange(len(batch[1])), *batch, window=0)
    return mla_attention_cpu(query, layer, rank, keys, values, plan, 0.3)


@pytest.mark.parametrize("sizes", [SMALL, (2, 16, 6, 2, 16), (5, 2, 2, 16, 6)])
def test_in_place_bits_do_not_depend_on_chunking(sizes: Sizes) -> None:
    lengths = [(1, 1), (20, 20), (1, 30), (9, 40), (3, 12)]
    query, layer, up, batch = make_inputs(lengths, sizes)
    starts, _, tables = batch
    whole = attend_in_place(query, layer, up, batch)
    expected = mla_attention_reference(query, layer, up, *batch, 0.3)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    for b, (length, context) in enumerate(lengths):
        for token in range(length):
            row = int(starts[b]) + token
            context_len = np.array([context - length + token + 1], np.int32)
            one = (np.array([0, 1], np.int32), context_len, tables[b : b + 1])
            assert torch.equal(attend_in_place(query[row : row + 1], layer, up, one)[0], whole[row])
