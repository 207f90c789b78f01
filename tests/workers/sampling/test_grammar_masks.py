"""A matcher that is ahead of its answer gives the same masks as one that is not ahead."""

from random import Random

import numpy as np
import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import choice
from penstock.loadtests.simulator.constraints.random_constraints import draw_constraint
from penstock.loadtests.simulator.constraints.vocabulary import END, VOCAB_SIZE, grammars
from penstock.workers.sampling import sampler as sampler_module
from penstock.workers.sampling.mask_processors import only_tokens
from penstock.workers.sampling.sampler import Sampler
from penstock.workers.sampling.token_masks import StepMasks, TokenMasks
from tests.support.token_tables import one_row_table

PARAMS = SamplingParams(seed=3, stop_token_ids=(END,))
ROW = np.zeros(1, np.int32)


def step_masks(masks: TokenMasks, answer: list[int]) -> StepMasks:
    index = np.array([len(answer)], np.int32)
    found = masks.take(ROW, index, one_row_table([1, 2], answer))
    assert found is not None
    return found


def tokens_of(masks: StepMasks) -> list[int]:
    bits = np.unpackbits(masks.words[0].view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.parametrize("max_forced", [1, 16])
def test_forced_tokens_are_those_of_the_masks_one_at_a_time(max_forced: int) -> None:
    num_forced = 0
    for seed in range(60):
        numbers = Random(seed)
        wanted = draw_constraint(numbers)
        grammar = grammars().compile(wanted)
        plain, ahead = (TokenMasks(1, VOCAB_SIZE, most) for most in (0, max_forced))
        for masks in (plain, ahead):
            masks.admit(0, PARAMS, grammar)
        answer: list[int] = []
        known: list[int] = []
        while len(answer) < 40 and END not in answer:
            expected = step_masks(plain, answer)
            tokens = tokens_of(expected)
            assert not expected.forced
            if not known or numbers.random() < 0.5:  # otherwise, append the forced tokens below
                found = step_masks(ahead, answer)
                assert tokens_of(found) == tokens
                assert found.is_single.tolist() == [len(tokens) == 1]
                forced = found.forced.get(0, ())
                num_forced += len(forced)
                assert len(forced) <= max_forced
                known = known or ([tokens[0], *forced] if found.is_single[0] else [])
            token = numbers.choice(tokens)
            if known:
                assert [token] == tokens == known[:1]
                del known[0]
            answer.append(token)
    assert num_forced > 30


def test_answer_may_take_fewer_tokens_than_are_forced() -> None:
    masks = TokenMasks(1, VOCAB_SIZE)
    masks.admit(0, PARAMS, grammars().compile(choice(["abcdef"])))
    first = step_masks(masks, [])
    whole = [tokens_of(first)[0], *first.forced[0]]
    assert bytes(whole[:-1]) == b"abcdef"
    assert whole[-1] == END
    for taken in (1, 3, 5):
        found = step_masks(masks, whole[:taken])
        assert tokens_of(found) == whole[taken : taken + 1]
        assert found.forced[0] == whole[taken + 1 :]
    assert tokens_of(step_masks(masks, whole[:6])) == [END]


def test_tokens_that_the_model_lacks_are_not_forced() -> None:
    masks = TokenMasks(1, ord("c"))
    masks.admit(0, PARAMS, grammars().compile(choice(["abcd"])))
    assert step_masks(masks, []).forced == {0: [ord("b")]}
    assert tokens_of(step_masks(masks, [*b"a"])) == [ord("b")]
    assert tokens_of(step_masks(masks, [*b"ab"])) == []


def test_only_token_is_found_in_every_word() -> None:
    for token in (0, 31, 32, 95):
        words = np.zeros(3, np.int32)
        words.view(np.uint32)[token // 32] = 1 << token % 32
        several = words.copy()
        several.view(np.uint32)[1] |= 1 << 7
        masks = np.stack([several, words, np.zeros(3, np.int32)])
        assert only_tokens(masks) == [None, token, None]


def test_row_without_a_choice_takes_no_random_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sampler_module, "sample", lambda *args: calls.append(args))
    found = Sampler(1, VOCAB_SIZE, torch.device("cpu"))
    found.admit(0, PARAMS, 0, grammars().compile(choice(["abc"])))
    sampled = found.sample(torch.randn(1, VOCAB_SIZE), ROW, ROW, one_row_table([1], []))
    assert sampled.tokens.tolist() == [ord("a")]
    assert sampled.forced == {0: [*b"bc", END]}
    assert not calls
