"""Compares the Triton kernels of logprobs with their reference."""

import pytest
import torch

from penstock.kernels.sampling.logprobs import logprobs, logprobs_reference
from tests.support.poison import poisoned_memory


@pytest.mark.parametrize(("vocab_size", "count"), [(7, 3), (300, 20), (4200, 5), (4200, 0)])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_logprobs_match_the_reference(
    device: torch.device, vocab_size: int, count: int, spread: float
) -> None:
    torch.manual_seed(vocab_size)
    logits, tokens = torch.randn(3, vocab_size) * spread, torch.randint(0, vocab_size, (3,))
    logits[:, 2] = logits[:, 6]  # equal logits of two tokens
    tokens[0], tokens[1] = logits[0].argmax(), vocab_size - 1
    with poisoned_memory():
        found = logprobs(logits.to(device), tokens.to(device), count)
    expected = logprobs_reference(logits, tokens, count)
    torch.testing.assert_close(found.chosen.cpu().double(), expected.chosen, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.values.cpu().double(), expected.values, rtol=2e-6, atol=2e-6)
    assert torch.equal(found.ranks.cpu(), expected.ranks)
    assert torch.equal(found.tokens.cpu(), expected.tokens)


def test_a_row_with_nan_does_not_affect_others(device: torch.device) -> None:
    logits, tokens = torch.randn(3, 90), torch.tensor([4, 5, 6])
    broken = logits.clone()
    broken[1, 8] = torch.nan
    found = logprobs(broken.to(device), tokens.to(device), 4)
    whole = logprobs(logits.to(device), tokens.to(device), 4)
    for row in (0, 2):
        for name in ("chosen", "ranks", "tokens", "values"):
            assert torch.equal(getattr(found, name)[row], getattr(whole, name)[row])
    assert ((found.tokens >= 0) & (found.tokens < 90)).all()


@pytest.mark.parametrize("vocab_size", [90, 4200])
def test_logprobs_of_a_row_do_not_depend_on_the_batch(
    device: torch.device, vocab_size: int
) -> None:
    torch.manual_seed(3)
    logits, tokens = torch.randn(4, vocab_size) * 3, torch.tensor([4, 5, 6, 89])
    batched = logprobs(logits.to(device), tokens.to(device), 4)
    for row in (0, 3):
        one = slice(row, row + 1)
        single = logprobs(logits[one].to(device), tokens[one].to(device), 4)
        for name in ("chosen", "ranks", "tokens", "values"):
            assert torch.equal(getattr(single, name)[0], getattr(batched, name)[row])
