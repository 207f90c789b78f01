"""Compares logprobs on a CPU with their reference."""

import torch

from penstock.kernels.sampling.logprobs import logprobs, logprobs_reference


def test_logprobs_match_the_reference() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(5, 301) * 4, torch.randint(0, 301, (5,))
    tokens[0] = logits[0].argmax()
    found, expected = logprobs(logits, tokens, 7), logprobs_reference(logits, tokens, 7)
    torch.testing.assert_close(found.chosen.double(), expected.chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.values.double(), expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.ranks, expected.ranks)
    assert int(found.ranks[0]) == 1
    assert torch.equal(found.tokens, expected.tokens)
    assert logprobs(logits, tokens, 400).values.shape == (5, 301)
