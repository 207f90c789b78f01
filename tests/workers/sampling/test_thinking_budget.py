"""Thinking budgets: the log of tokens alone decides when the end of the reasoning is forced."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import choice
from penstock.common.thinking_budget import ThinkingBudget
from penstock.loadtests.simulator.constraints.vocabulary import END, VOCAB_SIZE, grammars
from penstock.workers.sampling.sampler import Sampler
from penstock.workers.sampling.token_masks import TokenMasks
from tests.support.token_tables import one_row_table

NUM_TOKENS = 8
CLOSE, OPEN, STOP = 5, 6, 7
PROMPT = [OPEN, CLOSE, 1]  # OPEN and CLOSE in the prompt do not count for the answer
ROW = np.zeros(1, np.int32)
STARTS = st.sampled_from(((), (OPEN,), (OPEN, 3)))


def allowed(masks: TokenMasks, answer: list[int]) -> list[int] | None:
    """Return the tokens that may follow an answer; None if no token is excluded."""
    index = np.array([len(answer)], np.int32)
    found = masks.take(ROW, index, one_row_table(PROMPT, answer))
    if found is None:
        return None
    bits = np.unpackbits(found.words[0].view(np.uint8), bitorder="little")[:NUM_TOKENS]
    return None if bits.all() else np.flatnonzero(bits).tolist()


def expected_tokens(budget: ThinkingBudget, answer: list[int]) -> list[int] | None:
    """Compute, token by token, the tokens that may follow an answer; None means all."""
    recent: list[int] = []
    left = budget.num_tokens if not budget.start else None  # None while the reasoning has not begun
    for token in answer:
        recent.append(token)
        if left is None:
            if tuple(recent[-len(budget.start) :]) == budget.start:
                left = budget.num_tokens
        elif token == budget.end:
            return None
        else:
            left -= 1
    return [budget.end] if left is not None and left <= 0 else None


def admitted(params: SamplingParams) -> TokenMasks:
    masks = TokenMasks(1, NUM_TOKENS)
    masks.admit(0, params, None)
    return masks


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 6),
    STARTS,
    st.lists(st.integers(0, NUM_TOKENS - 1), max_size=12),
    st.integers(0, 8),
)
def test_only_the_end_may_follow_reasoning_that_has_used_its_budget(
    most: int, start: tuple[int, ...], answer: list[int], min_tokens: int
) -> None:
    budget = ThinkingBudget(most, CLOSE, start)
    masks = admitted(SamplingParams(thinking_budget=budget, min_tokens=min_tokens))
    for length in range(len(answer) + 1):  # random answers may also ignore a forced token
        assert allowed(masks, answer[:length]) == expected_tokens(budget, answer[:length])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 6),
    STARTS,
    st.lists(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=12), max_size=4),
)
def test_budget_of_a_beam_reads_the_log_that_the_beam_has(
    most: int, start: tuple[int, ...], answers: list[list[int]]
) -> None:
    budget = ThinkingBudget(most, CLOSE, start)
    masks = admitted(SamplingParams(thinking_budget=budget, use_beam_search=True, n=2))
    for answer in answers:  # in any step, a beam may continue another beam's log
        assert allowed(masks, answer) == expected_tokens(budget, answer)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 4),
    STARTS,
    st.lists(st.integers(0, NUM_TOKENS - 1), max_size=16),
    st.integers(0, 16),
    st.booleans(),
)
def test_row_counts_as_unconstrained_after_its_reasoning(
    most: int, start: tuple[int, ...], answer: list[int], min_tokens: int, begins: bool
) -> None:
    budget = ThinkingBudget(most, CLOSE, start)
    params = SamplingParams(thinking_budget=budget, min_tokens=min_tokens, stop_token_ids=(STOP,))
    masks = admitted(params)
    has_ended = False  # True once `masks` has read an answer whose reasoning has ended
    for length in range(len(answer) + 1):
        index, history = np.array([length], np.int32), one_row_table(PROMPT, answer[:length])
        reads = length >= most + len(start) and not has_ended
        assert masks.reads_log(ROW, index) == reads
        assert masks.is_masked(ROW, index).tolist() == [not has_ended or length < min_tokens]
        fresh = admitted(params)  # new masks, which have read no log
        if begins:
            masks.begin(ROW, index, history)
        assert allowed(masks, answer[:length]) == allowed(fresh, answer[:length])
        has_ended = has_ended or (reads and _has_ended(budget, answer[:length]))


def _has_ended(budget: ThinkingBudget, answer: list[int]) -> bool:
    """Return True if the first reasoning of an answer has ended."""
    count = len(budget.start)
    starts = [at for at in range(len(answer)) if tuple(answer[at : at + count]) == budget.start]
    return bool(starts) and budget.end in answer[starts[0] + count :]


def draw_answer(sampler: Sampler, answer: list[int], length: int, seed: int) -> list[int]:
    """Continue an answer to `length` tokens; the logits are a function of the answer so far."""
    answer = list(answer)
    while len(answer) < length:
        numbers = np.random.default_rng([seed, *answer])
        logits = torch.from_numpy(numbers.normal(size=(1, NUM_TOKENS)).astype(np.float32))
        index = np.array([len(answer)], np.int32)
        found = sampler.sample(logits, ROW, index, one_row_table(PROMPT, answer))
        assert found.finite.all()
        answer.append(int(found.tokens[0]))
    return answer


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), STARTS, st.integers(0, 2**32), st.integers(0, 14), st.booleans())
def test_resumed_answer_goes_on_as_the_uninterrupted_one(
    most: int, start: tuple[int, ...], seed: int, cut: int, is_greedy: bool
) -> None:
    budget = ThinkingBudget(most, CLOSE, start)
    params = SamplingParams(
        seed=seed, temperature=0.0 if is_greedy else 1.0, thinking_budget=budget
    )
    whole, resumed = (Sampler(1, NUM_TOKENS, torch.device("cpu")) for _ in range(2))
    for sampler in (whole, resumed):
        sampler.admit(0, params, 0)
    answer = draw_answer(whole, [], 14, seed)
    assert draw_answer(resumed, answer[:cut], 14, seed) == answer
    if not start:
        assert CLOSE in answer[: most + 1]


def test_budget_takes_no_mask_before_it_can_be_used() -> None:
    masks = admitted(SamplingParams(thinking_budget=ThinkingBudget(3, CLOSE, (OPEN,))))
    for length in range(6):
        index = np.array([length], np.int32)
        found = masks.take(ROW, index, one_row_table(PROMPT, [OPEN, 0, 0, 0, 0][:length]))
        assert (found is None) == (length < 4)
        assert masks.reads_log(ROW, index) == (length >= 4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(1, 2)),
        SamplingParams(bad_words_token_ids=((CLOSE,),)),
        SamplingParams(stop_token_ids=(CLOSE,), min_tokens=9),
    ],
)
def test_end_that_other_parameters_exclude_is_not_forced(params: SamplingParams) -> None:
    with_budget = SamplingParams(
        allowed_token_ids=params.allowed_token_ids,
        bad_words_token_ids=params.bad_words_token_ids,
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
        thinking_budget=ThinkingBudget(0, CLOSE),
    )
    assert allowed(admitted(with_budget), [1]) == allowed(admitted(params), [1]) is not None


def test_budget_changes_no_answer_whose_grammar_excludes_reasoning() -> None:
    wanted = grammars().compile(choice(["abcdef", "abx"]))
    texts = []
    for budget in (None, ThinkingBudget(1, VOCAB_SIZE - 1)):
        masks = TokenMasks(1, VOCAB_SIZE)
        params = SamplingParams(stop_token_ids=(END,), thinking_budget=budget)
        masks.admit(0, params, wanted)
        numbers, answer = Random(3), list[int]()
        while END not in answer:
            index = np.array([len(answer)], np.int32)
            found = masks.take(ROW, index, one_row_table(PROMPT, answer))
            assert found is not None
            bits = np.unpackbits(found.words[0].view(np.uint8), bitorder="little")
            answer.append(numbers.choice(np.flatnonzero(bits).tolist()))
            answer += found.forced.get(0, ())
        texts.append(answer)
    assert texts[0] == texts[1]
