"""Random logits with token histories and penalties."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from penstock.kernels.sampling.penalties import Penalties


@dataclass(frozen=True)
class Penalized:
    """Arguments of `apply_penalties_`; some rows have no penalty."""

    logits: torch.Tensor
    tokens: torch.Tensor
    num_prompt: torch.Tensor
    num_tokens: torch.Tensor
    penalties: Penalties


@st.composite
def penalized(draw: st.DrawFn) -> Penalized:
    lengths = st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 3))
    rows = draw(st.lists(lengths, min_size=1, max_size=4))
    numbers = np.random.default_rng(draw(st.integers(0, 2**31)))
    logits = torch.from_numpy(numbers.normal(0, 4, (len(rows), 17)).astype(np.float32))
    num_prompt = torch.tensor([prompt for prompt, _, _ in rows])
    num_tokens = num_prompt + torch.tensor([answer for _, answer, _ in rows])
    tokens = torch.from_numpy(numbers.integers(0, 17, (len(rows), 24)))
    # Kernels must not read tokens beyond the history.
    tokens[torch.arange(24) >= num_tokens[:, None]] = -(10**6)
    kinds = torch.tensor([kind for _, _, kind in rows])
    penalties = Penalties(
        torch.where(kinds == 1, 1.7, 1.0),
        torch.where(kinds == 2, 0.6, 0.0),
        torch.where(kinds == 3, -0.3, 0.0),
    )
    return Penalized(logits, tokens, num_prompt, num_tokens, penalties)


def unpenalized(case: Penalized) -> torch.Tensor:
    """Return a mask of the rows whose penalties have no effect."""
    found = case.penalties
    return (found.repetition == 1) & (found.presence == 0) & (found.frequency == 0)
