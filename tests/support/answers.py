"""Greedy reference answers from transformers."""

from collections.abc import Sequence
from typing import Any

import torch

Expected = tuple[list[list[int]], list[torch.Tensor]]
"""Per prompt: the answer's tokens, and its logits [max_new, vocab_size]."""


def expected_answers(reference: Any, prompts: Sequence[Sequence[int]], max_new: int) -> Expected:
    answers, logits = [], []
    for prompt in prompts:
        out = reference.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers.append(out.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(out.logits))
    return answers, logits


def check(found: Expected, expected: Expected) -> None:
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
