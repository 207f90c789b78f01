"""The Triton kernels of sampling: noise as on the CPU, correct filters, independent rows."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.sampling import triton as module
from penstock.kernels.sampling.logit_filters import (
    FilterParams,
    top_k_top_p_min_p_reference,
    typical_p_reference,
)
from penstock.kernels.sampling.op import SamplingTensors, finite_rows, sample
from penstock.kernels.sampling.philox import gumbel_, gumbel_noise
from penstock.kernels.sampling.triton_vocab_scan import compact, scan
from penstock.kernels.triton_common.launch import jit, launch, tl
from tests.support.poison import poisoned_memory

Row = tuple[float, int, float, float, float]  # (temperature, top_k, top_p, min_p, typical_p)
PLAIN: Row = (1.0, 0, 1.0, 0.0, 1.0)
GREEDY: Row = (0.0, 0, 1.0, 0.0, 1.0)


def sampling_tensors(rows: list[Row], device: torch.device) -> SamplingTensors:
    temperature, top_k, top_p, min_p, typical_p = zip(*rows, strict=True)
    numbers = torch.arange(len(rows))
    # As unsigned integers, some of these seeds exceed 2^63.
    seeds = (numbers + 1) * -7_046_029_254_386_353_131
    floats = (
        torch.tensor(each, dtype=torch.float32) for each in (temperature, top_p, min_p, typical_p)
    )
    ints = (torch.tensor(top_k, dtype=torch.int64), seeds, numbers * 70_001, numbers % 3)
    return SamplingTensors(*(each.to(device) for each in (*floats, *ints)))


@jit
def _noise_of(words: Any, out: Any, TILE: tl.constexpr) -> None:
    """Store the Gumbel noise of TILE random words; run by a single program."""
    at = tl.arange(0, TILE)
    tl.store(out + at, module.gumbel(tl.load(words + at).to(tl.uint32, bitcast=True)))


def test_noise_has_the_bits_of_the_cpu_noise(device: torch.device) -> None:
    words = np.random.default_rng(5).integers(0, 2**32, 4096, dtype=np.uint32)
    words[:6] = [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    found = torch.full((4096,), torch.nan, device=device)
    bits = torch.from_numpy(words.view(np.int32)).to(device)
    launch(_noise_of, (1,), bits, found, TILE=4096, enable_fp_fusion=False)
    expected = gumbel_(words.astype(np.float32))
    assert np.array_equal(found.cpu().numpy().view(np.int32), expected.view(np.int32))


def test_sampled_token_is_the_argmax_of_logits_plus_cpu_noise(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4301)
    params = sampling_tensors([(0.3 + row, 0, 1.0, 0.0, 1.0) for row in range(6)], device)
    with poisoned_memory():
        tokens, finite = sample(logits.to(device), params)
    noise = gumbel_noise(
        params.seeds.cpu().numpy().view(np.uint64),
        params.indices.cpu().numpy(),
        params.choices.cpu().numpy(),
        4301,
    )
    expected = (logits / params.temperature.cpu()[:, None] + noise).argmax(-1)
    assert torch.equal(tokens.cpu(), expected)
    assert finite.all()


def thresholds_of(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, ...]:
    """Return the score thresholds of each row: floors, centres and widths, each [R]."""
    filters = FilterParams(params.top_k, params.top_p, params.min_p)
    found = scan(logits, params.temperature, bans=True)
    near = compact(found, filters, params.typical_p, with_tokens=False)
    return module.thresholds(found, near, filters, params.typical_p)


def kept(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Return a mask [R, V] that is True for the tokens that the filters keep."""
    floors, centres, widths = thresholds_of(logits, params)
    scores = logits / params.temperature[:, None]
    keep = (scores >= floors[:, None]) & (scores > -torch.inf)
    return keep & ((scores - centres[:, None]).abs() <= widths[:, None])


ROWS = st.lists(
    st.tuples(
        st.sampled_from([1.0, 0.5]),
        st.sampled_from([0, 1, 7, 103, 5000]),
        st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
        st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
        st.just(1.0),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=10, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.1, 1.0, 5.0, 60.0]),
    vocab_size=st.sampled_from([103, 4150]),
    rows=ROWS,
)
def test_filters_match_the_reference(
    device: torch.device, seed: int, spread: float, vocab_size: int, rows: list[Row]
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size) * spread
    logits[:, 5] = logits[:, 80]  # equal logits of two tokens
    params = sampling_tensors(rows, device)
    with poisoned_memory():
        found = kept(logits.to(device), params).cpu()
    filters = FilterParams(*(each.cpu() for each in (params.top_k, params.top_p, params.min_p)))
    expected = (
        top_k_top_p_min_p_reference(logits / params.temperature.cpu()[:, None], filters)
        > -torch.inf
    )
    # Rounding may decide whether one token, or two tokens with equal logits, pass the filters.
    assert int((found != expected).sum(-1).max()) <= 2
    assert found.gather(1, logits.argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize("typical_p", [0.2, 0.9])
def test_typical_p_matches_the_reference(device: torch.device, typical_p: float) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, 300) * torch.tensor([[0.3], [2.0], [8.0]])
    logits[:, ::3] = -torch.inf
    top_k: list[Row] = [(1.0, top_k, 1.0, 0.0, typical_p) for top_k in (0, 90, 0)]
    found = kept(logits.to(device), sampling_tensors(top_k, device)).cpu()
    filters = FilterParams(torch.tensor([0, 90, 0]), torch.ones(3), torch.zeros(3))
    expected = typical_p_reference(
        top_k_top_p_min_p_reference(logits, filters), torch.full((3,), typical_p)
    )
    assert int((found != (expected > -torch.inf)).sum(-1).max()) <= 1


def test_combined_filters_match_the_reference_if_likely_tokens_are_far_apart(
    device: torch.device,
) -> None:
    """Compare the tokens that all combinations of filters keep, for a Zipf distribution.

    The likely tokens are in different sub-blocks, so nearly all candidates are their sub-block's
    maximum, and the bound of `_compact_kernel` is tight.
    """
    vocab_size = 12_321
    rows: list[Row] = [
        (1.0, top_k, top_p, min_p, typical_p)
        for top_k, top_p, min_p, typical_p in product((0, 50), (1.0, 0.9), (0.0, 0.002), (1.0, 0.9))
    ]
    generator = torch.Generator().manual_seed(8)
    by_rank = torch.arange(1, vocab_size + 1).log() * -1.8
    orders = [torch.randperm(vocab_size, generator=generator) for _ in rows]
    logits = torch.stack([by_rank[order] for order in orders])
    params = sampling_tensors(rows, device)
    with poisoned_memory():
        found = kept(logits.to(device), params).cpu()
    top_k, top_p, min_p, typical_p = (
        each.cpu() for each in (params.top_k, params.top_p, params.min_p, params.typical_p)
    )
    expected = top_k_top_p_min_p_reference(logits, FilterParams(top_k, top_p, min_p))
    filtered = typical_p < 1
    expected[filtered] = typical_p_reference(expected[filtered], typical_p[filtered])
    assert int((found != (expected > -torch.inf)).sum(-1).max()) <= 1


def test_each_filter_by_itself(device: torch.device) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(6, 1).to(device)
    one: list[Row] = [
        *((1.0, 2, 1.0, 0.0, 1.0), (1.0, 0, 0.8, 0.0, 1.0), (1.0, 0, 0.81, 0.0, 1.0)),
        *((1.0, 0, 1.0, 0.29, 1.0), (1.0, 0, 1.0, 0.31, 1.0), (1.0, 3, 0.85, 0.0, 1.0)),
    ]
    # In the last row, top_k keeps three tokens with 0.95 of the probability.
    # The first two have only 0.84 of this 0.95, so top_p = 0.85 keeps all three.
    assert kept(logits, sampling_tensors(one, device)).sum(-1).tolist() == [2, 2, 3, 3, 2, 3]


def test_sampling_of_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    torch.manual_seed(3)
    logits = (torch.randn(5, 4200) * 3).to(device)
    rows: list[Row] = [
        *((1.0, 0, 0.9, 0.0, 1.0), (0.7, 40, 0.7, 0.0, 1.0), GREEDY),
        *((1.0, 0, 0.9999, 1e-9, 1.0), (1.0, 0, 1.0, 0.0, 0.5)),
    ]
    params = sampling_tensors(rows, device)
    batched, _ = sample(logits, params)
    for row in (0, 1, 4):
        single, _ = sample(logits[row : row + 1], select_rows(params, [row]))
        assert int(single[0]) == int(batched[row])
    batched_thresholds = thresholds_of(logits, params)
    for row in (0, 1, 3, 4):
        thresholds = thresholds_of(logits[row : row + 1], select_rows(params, [row]))
        assert all(
            torch.equal(a[0], b[row]) for a, b in zip(thresholds, batched_thresholds, strict=True)
        )
    assert int(batched[2]) == int(logits[2].argmax())


def select_rows(params: SamplingTensors, rows: list[int]) -> SamplingTensors:
    names = ("temperature", "top_p", "min_p", "typical_p", "top_k", "seeds", "indices", "choices")
    return SamplingTensors(*(getattr(params, name)[rows] for name in names))


def test_a_row_with_nan_or_inf_is_flagged_and_does_not_affect_others(device: torch.device) -> None:
    torch.manual_seed(6)
    logits = torch.randn(6, 70)
    rows: list[Row] = [
        PLAIN,
        (1.0, 5, 0.9, 0.0, 0.9),
        GREEDY,
        PLAIN,
        GREEDY,
        (1.0, 3, 1.0, 0.0, 1.0),
    ]
    params = sampling_tensors(rows, device)
    ints, _ = sample(logits.to(device), params)
    logits[1, 3], logits[2, 69], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    tokens, finite = sample(logits.to(device), params)
    assert finite.tolist() == [True, False, False, False, True, True]
    assert finite.tolist() == finite_rows(logits.to(device)).tolist()
    assert tokens[~finite].tolist() == [0, 0, 0]
    assert torch.equal(tokens[finite], ints[finite])


def test_banned_tokens_are_not_sampled_and_not_flagged(device: torch.device) -> None:
    logits = torch.full((4, 130), -torch.inf)
    logits[0, 128], logits[1, [3, 129]], logits[2, 7] = 1.0, torch.tensor([2.0, 2.0]), -4.0
    rows: list[Row] = [PLAIN, GREEDY, (1.0, 50, 0.5, 0.0, 0.9), PLAIN]
    tokens, finite = sample(logits.to(device), sampling_tensors(rows, device), bans=True)
    assert finite.tolist() == [True, True, True, False]
    assert tokens.tolist() == [128, 3, 7, 0]


def test_a_vocabulary_of_one(device: torch.device) -> None:
    logits = torch.zeros(2, 1, device=device)
    tokens, finite = sample(logits, sampling_tensors([PLAIN, (1.0, 1, 0.5, 0.5, 0.5)], device))
    assert tokens.tolist() == [0, 0]
    assert finite.all()


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    logits = torch.zeros(2, 9, device=device)
    with pytest.raises(ValueError, match="seeds has shape"):
        sample(logits, sampling_tensors([PLAIN], device))
    with pytest.raises(ValueError, match=r"logits has dtype .*: expected float32"):
        sample(logits.half(), sampling_tensors([PLAIN] * 2, device))
