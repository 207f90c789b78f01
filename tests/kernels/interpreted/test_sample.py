"""The kernels that draw: the CPU's noise by its bits, the reference's cuts, rows apart."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.sampling import op as module
from penstock.kernels.sampling.logit_filters import (
    FilterParams,
    top_k_top_p_min_p_reference,
    typical_p_reference,
)
from penstock.kernels.sampling.op import SamplingTensors, finite_rows, sample
from penstock.kernels.sampling.philox import gumbel_, gumbel_noise
from penstock.kernels.sampling.vocab_scan import compact, scan
from penstock.kernels.triton_common.launch import jit, launch, tl
from tests.support.poison import poisoned_memory

Row = tuple[float, int, float, float, float]  # temperature, top_k, top_p, min_p, typical_p
PLAIN: Row = (1.0, 0, 1.0, 0.0, 1.0)
GREEDY: Row = (0.0, 0, 1.0, 0.0, 1.0)


def wishes_of(rows: list[Row], device: torch.device) -> SamplingTensors:
    heat, top_k, top_p, min_p, typical_p = zip(*rows, strict=True)
    numbers = torch.arange(len(rows))
    seeds = (numbers + 1) * -7_046_029_254_386_353_131  # beyond 2^63 as unsigned
    floats = (torch.tensor(each, dtype=torch.float32) for each in (heat, top_p, min_p, typical_p))
    whole = (torch.tensor(top_k, dtype=torch.int64), seeds, numbers * 70_001, numbers % 3)
    return SamplingTensors(*(each.to(device) for each in (*floats, *whole)))


@jit
def _noise_of(words: Any, out: Any, TILE: tl.constexpr) -> None:
    at = tl.arange(0, TILE)
    tl.store(out + at, module._gumbel(tl.load(words + at).to(tl.uint32, bitcast=True)))


def test_noise_has_the_bits_of_the_cpus(device: torch.device) -> None:
    words = np.random.default_rng(5).integers(0, 2**32, 4096, dtype=np.uint32)
    words[:6] = [0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    found = torch.full((4096,), torch.nan, device=device)
    bits = torch.from_numpy(words.view(np.int32)).to(device)
    launch(_noise_of, (1,), bits, found, TILE=4096, enable_fp_fusion=False)
    expected = gumbel_(words.astype(np.float32))
    assert np.array_equal(found.cpu().numpy().view(np.int32), expected.view(np.int32))


def test_a_draw_is_the_largest_with_the_cpus_noise(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4301)
    wishes = wishes_of([(0.3 + row, 0, 1.0, 0.0, 1.0) for row in range(6)], device)
    with poisoned_memory():
        tokens, finite = sample(logits.to(device), wishes)
    noise = gumbel_noise(
        wishes.seeds.cpu().numpy().view(np.uint64),
        wishes.indices.cpu().numpy(),
        wishes.choices.cpu().numpy(),
        4301,
    )
    expected = (logits / wishes.temperature.cpu()[:, None] + noise).argmax(-1)
    assert torch.equal(tokens.cpu(), expected)
    assert finite.all()


def limits_of(logits: torch.Tensor, wishes: SamplingTensors) -> tuple[torch.Tensor, ...]:
    """What decides which tokens may be drawn."""
    cuts = FilterParams(wishes.top_k, wishes.top_p, wishes.min_p)
    found = scan(logits, wishes.temperature, bans=True)
    near = compact(found, cuts, wishes.typical_p, with_tokens=False)
    return module._thresholds(found, near, cuts, wishes.typical_p)


def kept(logits: torch.Tensor, wishes: SamplingTensors) -> torch.Tensor:
    """Which tokens may be drawn: [R, V]."""
    floors, centres, widths = limits_of(logits, wishes)
    scores = logits / wishes.temperature[:, None]
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
def test_cuts_as_the_reference(
    device: torch.device, seed: int, spread: float, vocab_size: int, rows: list[Row]
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size) * spread
    logits[:, 5] = logits[:, 80]  # a tie
    wishes = wishes_of(rows, device)
    with poisoned_memory():
        found = kept(logits.to(device), wishes).cpu()
    cuts = FilterParams(*(each.cpu() for each in (wishes.top_k, wishes.top_p, wishes.min_p)))
    expected = (
        top_k_top_p_min_p_reference(logits / wishes.temperature.cpu()[:, None], cuts) > -torch.inf
    )
    # A nucleus may end one token, or two that tie, earlier or later where rounding decides.
    assert int((found != expected).sum(-1).max()) <= 2
    assert found.gather(1, logits.argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize("typical_p", [0.2, 0.9])
def test_typical_as_the_reference(device: torch.device, typical_p: float) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, 300) * torch.tensor([[0.3], [2.0], [8.0]])
    logits[:, ::3] = -torch.inf
    top_k: list[Row] = [(1.0, top_k, 1.0, 0.0, typical_p) for top_k in (0, 90, 0)]
    found = kept(logits.to(device), wishes_of(top_k, device)).cpu()
    cuts = FilterParams(torch.tensor([0, 90, 0]), torch.ones(3), torch.zeros(3))
    expected = typical_p_reference(
        top_k_top_p_min_p_reference(logits, cuts), torch.full((3,), typical_p)
    )
    assert int((found != (expected > -torch.inf)).sum(-1).max()) <= 1


def test_each_cut_alone(device: torch.device) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(6, 1).to(device)
    one: list[Row] = [
        *((1.0, 2, 1.0, 0.0, 1.0), (1.0, 0, 0.8, 0.0, 1.0), (1.0, 0, 0.81, 0.0, 1.0)),
        *((1.0, 0, 1.0, 0.29, 1.0), (1.0, 0, 1.0, 0.31, 1.0), (1.0, 3, 0.85, 0.0, 1.0)),
    ]
    # The last: of the three likeliest, 0.95 in all, two hold 0.84 of it.
    assert kept(logits, wishes_of(one, device)).sum(-1).tolist() == [2, 2, 3, 3, 2, 3]


def test_a_row_is_drawn_alike_in_any_company(device: torch.device) -> None:
    torch.manual_seed(3)
    logits = (torch.randn(5, 4200) * 3).to(device)
    rows: list[Row] = [
        *((1.0, 0, 0.9, 0.0, 1.0), (0.7, 40, 0.7, 0.0, 1.0), GREEDY),
        *((1.0, 0, 0.9999, 1e-9, 1.0), (1.0, 0, 1.0, 0.0, 0.5)),
    ]
    wishes = wishes_of(rows, device)
    crowd, _ = sample(logits, wishes)
    for row in (0, 1, 4):
        alone, _ = sample(logits[row : row + 1], picked(wishes, [row]))
        assert int(alone[0]) == int(crowd[row])
    crowds = limits_of(logits, wishes)
    for row in (0, 1, 3, 4):
        limits = limits_of(logits[row : row + 1], picked(wishes, [row]))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(limits, crowds, strict=True))
    assert int(crowd[2]) == int(logits[2].argmax())


def picked(wishes: SamplingTensors, rows: list[int]) -> SamplingTensors:
    names = ("temperature", "top_p", "min_p", "typical_p", "top_k", "seeds", "indices", "choices")
    return SamplingTensors(*(getattr(wishes, name)[rows] for name in names))


def test_a_broken_row_is_flagged_and_breaks_no_other(device: torch.device) -> None:
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
    wishes = wishes_of(rows, device)
    whole, _ = sample(logits.to(device), wishes)
    logits[1, 3], logits[2, 69], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    tokens, finite = sample(logits.to(device), wishes)
    assert finite.tolist() == [True, False, False, False, True, True]
    assert finite.tolist() == finite_rows(logits.to(device)).tolist()
    assert tokens[~finite].tolist() == [0, 0, 0]
    assert torch.equal(tokens[finite], whole[finite])


def test_what_is_banned_is_not_drawn_and_no_mistake(device: torch.device) -> None:
    logits = torch.full((4, 130), -torch.inf)
    logits[0, 128], logits[1, [3, 129]], logits[2, 7] = 1.0, torch.tensor([2.0, 2.0]), -4.0
    rows: list[Row] = [PLAIN, GREEDY, (1.0, 50, 0.5, 0.0, 0.9), PLAIN]
    tokens, finite = sample(logits.to(device), wishes_of(rows, device), bans=True)
    assert finite.tolist() == [True, True, True, False]
    assert tokens.tolist() == [128, 3, 7, 0]


def test_a_vocabulary_of_one(device: torch.device) -> None:
    logits = torch.zeros(2, 1, device=device)
    tokens, finite = sample(logits, wishes_of([PLAIN, (1.0, 1, 0.5, 0.5, 0.5)], device))
    assert tokens.tolist() == [0, 0]
    assert finite.all()


def test_what_is_wrong_is_named(device: torch.device) -> None:
    logits = torch.zeros(2, 9, device=device)
    with pytest.raises(ValueError, match="seeds: shape"):
        sample(logits, wishes_of([PLAIN], device))
    with pytest.raises(ValueError, match="logits: float32"):
        sample(logits.half(), wishes_of([PLAIN] * 2, device))
