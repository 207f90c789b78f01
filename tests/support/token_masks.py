"""Random logits and token masks, as cases for tests."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class MaskCase:
    logits: torch.Tensor  # [R, V]: R rows, a vocabulary of V tokens
    rows: torch.Tensor  # [M]: the rows to mask
    words: torch.Tensor  # [M, W]: a mask for each of these rows, as words of 32 bits


@st.composite
def mask_cases(draw: st.DrawFn) -> MaskCase:
    """Draw logits with NaN and infinities, and masks as wide as the vocabulary or wider."""
    num_rows = draw(st.integers(1, 4))
    vocab_size = draw(st.sampled_from((1, 31, 32, 33, 300, 1024, 2101)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits[draw(st.integers(0, num_rows - 1)), draw(st.integers(0, vocab_size - 1))] = draw(
        st.sampled_from((torch.nan, torch.inf, -torch.inf, 0.0))
    )
    rows = torch.tensor(
        draw(st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows)),
        dtype=torch.int64,
    )
    width = -(-vocab_size // 32) + draw(st.integers(0, 2))
    words = torch.randint(-(2**31), 2**31, (len(rows), width), generator=generator)
    if draw(st.booleans()):
        words[:, ::2] = draw(st.sampled_from((0, -1)))
    return MaskCase(logits, rows, words.to(torch.int32))
