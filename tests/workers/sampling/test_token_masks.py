"""TokenMasks: bad words as in transformers, allowed tokens, and rows with no token left."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.sampling.token_mask import apply_token_mask_
from penstock.workers.sampling.mask_processors import AllowedTokens
from penstock.workers.sampling.sampler import Sampler
from penstock.workers.sampling.token_masks import TokenMasks
from penstock.workers.scheduling.sequence import Ints
from tests.support.token_tables import Table, one_row_table, table

VOCAB_SIZE = 6
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
TOKENS = st.integers(0, VOCAB_SIZE - 1)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6)
ROWS = st.lists(
    st.tuples(WORDS, st.lists(TOKENS, min_size=1, max_size=8), st.booleans()),
    min_size=1,
    max_size=5,
)


def history_of(texts: list[list[int]]) -> Table:
    tokens = np.full((len(texts), 9), 3, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    ends = np.array([len(text) for text in texts], np.int32)
    return Table(tokens, ends, np.ones_like(ends))


def filtered(masks: TokenMasks, logits: torch.Tensor, rows: Ints, history: Table) -> torch.Tensor:
    found = logits.clone()
    step = masks.take(rows, np.zeros_like(rows), history)
    if step is not None:
        apply_token_mask_(found, torch.from_numpy(step.at), torch.from_numpy(step.words))
    return found


@settings(max_examples=150, deadline=None)
@given(rows=ROWS)
def test_bad_words_are_excluded_as_in_transformers(
    rows: list[tuple[list[list[int]], list[int], bool]],
) -> None:
    masks = TokenMasks(len(rows), VOCAB_SIZE)
    history = history_of([text for _, text, _ in rows])
    logits = torch.randn(len(rows), VOCAB_SIZE)
    expected = logits.clone()
    for row, (words, text, restricted) in enumerate(rows):
        allowed = (1, 4, 5) if restricted else ()
        masks.admit(
            row,
            replace(
                GREEDY, bad_words_token_ids=tuple(map(tuple, words)), allowed_token_ids=allowed
            ),
            None,
        )
        if words:
            one = expected[row : row + 1]
            one[:] = NoBadWordsLogitsProcessor(words)(torch.tensor([text]), one)
        if restricted:
            expected[row, [0, 2, 3]] = -torch.inf
    order = np.random.default_rng(0).permutation(len(rows)).astype(np.int32)
    found = filtered(masks, logits[order], order, history)
    assert torch.equal(found, expected[order])


def greedy_token(params: SamplingParams, logits: list[float], history: Table, index: int) -> int:
    sampler = Sampler(1, len(logits), CPU)
    sampler.admit(0, params, 0)
    row = np.zeros(1, np.int32)
    found = sampler.sample(torch.tensor([logits]), row, np.array([index], np.int32), history)
    return int(found.tokens[0]) if found.finite[0] else -1


def test_last_token_of_a_bad_word_is_excluded_after_its_other_tokens() -> None:
    logits = [5.0, 4.0, 3.0, 2.0]
    params = replace(GREEDY, bad_words_token_ids=((2, 3, 0),))
    for prompt, answer, expected in [
        ([2, 3], [], 1),
        ([2], [3], 1),
        ([1], [2, 3], 1),
        ([3], [2], 0),
        ([3], [], 0),  # the sequence is shorter than the bad word
        ([2, 3], [1], 0),
    ]:
        assert greedy_token(params, logits, one_row_table(prompt, answer), len(answer)) == expected


def test_allowed_stop_tokens_are_excluded_until_min_tokens() -> None:
    params = replace(GREEDY, allowed_token_ids=(1, 2), stop_token_ids=(1,), min_tokens=2)
    tokens = [
        greedy_token(params, [9.0, 8.0, 7.0], one_row_table([0], []), index) for index in range(4)
    ]
    assert tokens == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, allowed_token_ids=(1,), bad_words_token_ids=((0, 1),)),
        replace(GREEDY, allowed_token_ids=(1, 2), stop_token_ids=(2, 1), min_tokens=9),
        SamplingParams(
            allowed_token_ids=(1,), bad_words_token_ids=((1,),), typical_p=0.5, top_p=0.5
        ),
    ],
)
def test_row_with_no_token_left_is_marked_without_affecting_others(params: SamplingParams) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, VOCAB_SIZE)
    history = history_of([[0]] * 3)
    sampler = Sampler(3, VOCAB_SIZE, CPU)
    for row, one in enumerate((SamplingParams(seed=1), params, SamplingParams(typical_p=0.5))):
        sampler.admit(row, one, 0)
    rows, indices = np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
    found = sampler.sample(logits.clone(), rows, indices, history)
    sampler.admit(1, SamplingParams(), 0)
    expected = sampler.sample(logits, rows, indices, history)
    assert found.finite.tolist() == [True, False, True]
    assert found.tokens[[0, 2]].tolist() == expected.tokens[[0, 2]].tolist()


def test_reused_row_keeps_no_filters_of_its_previous_sequence() -> None:
    masks = TokenMasks(2, VOCAB_SIZE)
    strict = replace(
        GREEDY, allowed_token_ids=(1,), bad_words_token_ids=((2,),), stop_token_ids=(1, 99)
    )
    masks.admit(0, strict, None)
    masks.admit(1, strict, None)
    masks.admit(0, GREEDY, None)
    logits = torch.zeros(2, VOCAB_SIZE)
    found = filtered(masks, logits, np.arange(2, dtype=np.int32), table(2, VOCAB_SIZE))
    assert (found > -torch.inf).sum(-1).tolist() == [VOCAB_SIZE, 1]


def test_masks_filled_beside_the_step_are_those_of_the_step() -> None:
    masks = TokenMasks(2, VOCAB_SIZE)
    masks.admit(0, replace(GREEDY, bad_words_token_ids=((1, 2),)), None)
    masks.admit(1, GREEDY, None)
    rows, history = np.arange(2, dtype=np.int32), history_of([[0, 1]] * 2)
    indices = np.ones(2, np.int32)
    masks.begin(rows, indices, history)
    found = masks.take(rows, indices, history)
    second = masks.take(rows, indices, history)  # without a `begin` for this call
    assert found is not None
    assert second is not None
    assert found.at.tolist() == second.at.tolist() == [0]
    assert np.array_equal(found.words, second.words)
    masks.begin(rows, indices, history)
    # `begin` filled the masks of other rows, and row 1 alone needs no mask.
    assert masks.take(rows[1:], indices[1:], history) is None


def test_error_of_a_fill_beside_the_step_is_raised_where_the_masks_are_taken() -> None:
    masks = TokenMasks(1, VOCAB_SIZE)
    masks.admit(0, replace(GREEDY, bad_words_token_ids=((1, VOCAB_SIZE + 90),)), None)
    row, history = np.zeros(1, np.int32), history_of([[1]])
    masks.begin(row, row, history)
    with pytest.raises(IndexError):
        masks.take(row, row, history)


def test_allowed_tokens_of_a_row_outlive_the_grammar_of_a_wider_tokenizer() -> None:
    processor = AllowedTokens([3], 1)
    words = np.full(2, -1, np.int32)  # as wide as for a tokenizer with more tokens than the model
    processor.exclude(words, np.array([3, 3], np.int32), 1)
    assert words.tolist() == [1 << 3, 0]
