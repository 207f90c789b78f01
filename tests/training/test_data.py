"""Batches are packed as described, and what they weigh is what the assistant says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer

from training import chat
from training.data import PROMPT_WEIGHT, Batch, BatchMaker
from training.train import MODELS

TOKENIZER = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
BEGIN, END, ASSISTANT = map(chat.SPECIAL_TOKENS.index, (chat.BEGIN, chat.END, chat.ASSISTANT))


def make_batch(kind: str) -> Batch:
    """A batch of the maker's method `kind`."""
    make: Callable[[int, int], Batch] = getattr(BatchMaker(TOKENIZER, seed="0"), kind)
    return make(4, 256)


@pytest.mark.parametrize("kind", ["short", "long"])
def test_targets_are_the_tokens_that_follow(kind: str) -> None:
    batch = make_batch(kind)
    assert batch.tokens.shape == batch.targets.shape == batch.weights.shape == (4, 256)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_conversation_does_not_see_the_one_before() -> None:
    batch = make_batch("short")
    begins = torch.eq(batch.tokens, BEGIN)
    row, column = torch.nonzero(begins)[-1].tolist()
    assert not batch.mask[row, 0, column, :column].any()
    assert batch.mask[row, 0, column, column]
    assert not batch.mask[row, 0, column, column + 1 :].any()


@pytest.mark.parametrize("kind", ["short", "long"])
def test_every_turn_of_the_assistant_counts_and_counts_most(kind: str) -> None:
    batch = make_batch(kind)
    weights: dict[bool, list[float]] = {True: [], False: []}
    for row in range(len(batch.tokens)):
        speaks = False
        for token, weight in zip(
            batch.tokens[row].tolist(), batch.weights[row].tolist(), strict=True
        ):
            # From the marker on, to the prediction of the end.
            speaks = token == ASSISTANT or (speaks and token != END)
            weights[speaks].append(weight)
    assert min(weights[True]) > PROMPT_WEIGHT == max(weights[False])


def test_a_part_of_the_prompts_counts() -> None:
    counted = make_batch("short").weights == PROMPT_WEIGHT
    assert 0.05 < counted.float().mean() < 0.3


def test_no_token_predicts_the_next_conversation() -> None:
    batch = make_batch("short")
    begins = torch.eq(batch.targets, BEGIN)
    assert batch.weights[begins].sum() == 0
