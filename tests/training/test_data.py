"""Training batches: packing, attention masks and loss weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer

from training import chat
from training.data import PROMPT_WEIGHT, Batch, BatchMaker
from training.tasks.tools import FORCED_STARTS
from training.train import MODELS

TOKENIZER = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
BEGIN, END, ASSISTANT = map(chat.SPECIAL_TOKENS.index, (chat.BEGIN, chat.END, chat.ASSISTANT))


def make_batch(kind: str) -> Batch:
    """Return a batch made by the `BatchMaker` method named `kind`."""
    make: Callable[[int, int], Batch] = getattr(BatchMaker(TOKENIZER, seed="0"), kind)
    return make(4, 256)


@pytest.mark.parametrize("kind", ["short", "long"])
def test_targets_are_the_next_tokens(kind: str) -> None:
    batch = make_batch(kind)
    assert batch.tokens.shape == batch.targets.shape == batch.weights.shape == (4, 256)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_a_conversation_does_not_attend_to_the_one_before() -> None:
    batch = make_batch("short")
    begins = torch.eq(batch.tokens, BEGIN)
    row, column = torch.nonzero(begins)[-1].tolist()
    assert not batch.mask[row, 0, column, :column].any()
    assert batch.mask[row, 0, column, column]
    assert not batch.mask[row, 0, column, column + 1 :].any()


@pytest.mark.parametrize("kind", ["short", "long"])
def test_assistant_turns_have_the_highest_loss_weights(kind: str) -> None:
    batch = make_batch(kind)
    weights: dict[bool, list[float]] = {True: [], False: []}
    for row in range(len(batch.tokens)):
        is_answer = False
        for token, weight in zip(
            batch.tokens[row].tolist(), batch.weights[row].tolist(), strict=True
        ):
            # A position belongs to an answer from the answer's marker up to the token before END.
            is_answer = token == ASSISTANT or (is_answer and token != END)
            weights[is_answer].append(weight)
    assert min(weights[True]) > PROMPT_WEIGHT == max(weights[False])


def test_some_prompt_tokens_have_a_loss_weight() -> None:
    weighted = make_batch("short").weights == PROMPT_WEIGHT
    assert 0.05 < weighted.float().mean() < 0.3


def test_the_start_of_a_conversation_has_no_loss_weight() -> None:
    batch = make_batch("short")
    begins = torch.eq(batch.targets, BEGIN)
    assert batch.weights[begins].sum() == 0


def test_a_stage_without_tools_has_no_conversation_with_tools() -> None:
    texts = [TOKENIZER.decode(row) for row in make_batch("short").tokens.tolist()]
    assert not any("Tools:" in text for text in texts)


def test_the_forced_start_of_a_call_has_no_loss_weight() -> None:
    maker = BatchMaker(TOKENIZER, seed="0", tools=1.0)
    starts = [[ASSISTANT, *TOKENIZER.encode(start).ids] for start in FORCED_STARTS]
    batches = [maker.short(8, 512) for _ in range(4)]
    found = 0
    for batch in batches:
        for tokens, weights in zip(batch.targets.tolist(), batch.weights.tolist(), strict=True):
            for at, start in itertools.product(range(512), starts):
                if tokens[at : at + len(start)] == start and at + len(start) < 512:
                    found += 1
                    assert set(weights[at + 1 : at + len(start)]) == {0.0}
                    assert weights[at + len(start)] > PROMPT_WEIGHT
    assert found > 5
