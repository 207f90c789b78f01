"""Beam search finds the same answers as `transformers`, on random logits and in the engine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput

from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import BeamResult
from penstock.workers.sampling.beam_search import BeamSearch
from penstock.workers.sampling.sampler import TokenLogprobs
from penstock.workers.scheduling.sequence import FinishReason, Key, NewSequence, Sibling
from penstock.workers.service.codec import SequenceKey
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.engines import greedy_sequence, tokens_of

pytestmark = pytest.mark.slow

PROMPT = [5 + (7 * i) % 290 for i in range(40)]
MANY = tuple(range(2, VOCAB_SIZE, 9))
"""Stop tokens: so many that the searches of random models end at a stop token."""


def params_of(width: int, max_tokens: int, **given: Any) -> SamplingParams:
    given = {"n": width, **given}
    return SamplingParams(best_of=width, use_beam_search=True, max_tokens=max_tokens, **given)


def expected_of(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """Return the answers that the beam search of transformers finds."""
    stops = list(params.stop_token_ids)
    generated = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.num_sequences,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=stops or None,
        pad_token_id=VOCAB_SIZE - 1,
        do_sample=False,
        repetition_penalty=params.repetition_penalty,
        bad_words_ids=[list(word) for word in params.bad_words_token_ids] or None,
    )
    return [_cut(row[len(prompt) :], stops) for row in generated.tolist()]


def _cut(answer: list[int], stops: list[int]) -> list[int]:
    """Return the answer up to its stop token, without padding."""
    ends = [at + 1 for at, token in enumerate(answer) if token in stops]
    answer = answer[: ends[0]] if ends else answer
    while answer[-1] == VOCAB_SIZE - 1:
        answer.pop()
    return answer


# ------------------------------------------------------------------ beam search on random logits


class RandomModel(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
    """A fake model: its random logits depend only on the position and the last token."""

    config_class = transformers.LlamaConfig

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__(transformers.LlamaConfig(vocab_size=vocab_size, num_hidden_layers=1))
        self.generation_config.use_cache = False
        self.table = torch.randn(24, vocab_size, vocab_size, generator=torch.manual_seed(seed))
        self.unused_parameter = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=2 * self.table[input_ids.shape[1]][input_ids])

    def prepare_inputs_for_generation(
        self, input_ids: Any, attention_mask: Any = None, **_: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids}


def search(model: RandomModel, first: int, params: SamplingParams) -> list[list[int]]:
    """Return the answers that Penstock's `BeamSearch` finds with this model."""
    beams = BeamSearch(params, params.max_tokens or 0)
    texts = [[first]] * params.num_sequences
    while True:
        logits = model.forward(torch.tensor(texts)).logits[:, -1]
        scores = logits.log_softmax(-1)
        if len(texts[0]) - 1 < params.min_tokens:
            scores[:, list(params.stop_token_ids)] = -torch.inf
        count = params.num_sequences + len(params.stop_token_ids)
        found = scores.topk(min(count, scores.shape[1]))
        step = beams.advance(found.indices.numpy().astype(np.int32), found.values.numpy())
        if step.is_finished:
            return [each.tokens for each in beams.best]
        pairs = zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
        texts = [[*texts[parent], token] for parent, token in pairs]


@pytest.mark.parametrize("seed", range(40))
def test_search_equals_transformers(seed: int) -> None:
    rng = Random(seed)
    vocab_size = rng.choice([7, 13, 40])
    stops = rng.sample(range(vocab_size - 1), rng.choice([0, 1, 1, 2, 3]))
    width = rng.choice([2, 2, 3, 4, 5])
    max_tokens = rng.randint(1, 14)
    params = params_of(
        width,
        max_tokens,
        n=rng.randint(1, width),
        length_penalty=rng.choice([1.0, 0.0, 0.5, 1.7, -1.0, -0.3, 3.0]),
        early_stopping=rng.choice([True, False, "never"]),
        stop_token_ids=tuple(stops),
        min_tokens=rng.choice([0, 0, 3]),
    )
    params = dataclasses.replace(params, min_tokens=min(params.min_tokens, max_tokens))
    model = RandomModel(vocab_size, seed)
    expected = expected_of(model, [1], params)
    assert search(model, 1, params) == expected


def test_stop_tokens_of_nearly_the_whole_vocabulary() -> None:
    model = RandomModel(7, 0)
    params = params_of(3, 10, stop_token_ids=(0, 1, 2, 4, 5), length_penalty=2.0)
    assert search(model, 3, params) == expected_of(model, [3], params)


def test_search_continues_from_the_only_beam_with_candidates() -> None:
    search = BeamSearch(params_of(3, 4, n=2, stop_token_ids=(9,)), 4)
    tokens = np.tile(np.array([4, 9], np.int32), (3, 1))
    open_only = np.array([[-1, -np.inf]] * 3, np.float32)
    only_first = np.array([[-1, -2], [-np.inf, -np.inf], [-np.inf, np.nan]], np.float32)
    step = search.advance(tokens, open_only)
    assert step.tokens.tolist() == [4, 4, 4]
    step = search.advance(tokens, only_first)
    assert (step.parents.tolist(), step.tokens.tolist(), step.is_finished) == (
        [0, 0, 0],
        [4, 4, 4],
        False,
    )
    assert search.failed
    step = search.advance(tokens, only_first)
    assert not step.is_finished
    assert [each.tokens for each in search.best] == [[4, 4, 9], [4, 9]]
    step = search.advance(tokens, np.full((3, 2), -np.inf, np.float32))
    assert step.is_finished


# ------------------------------------------------------------------ the engine


class EnginePair:
    """An engine, and the transformers model of the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.reference = make_checkpoint(folder, "llama3")
        sizes: Any = {"kv_cache_mib": 1, "max_sequences": 24, "max_batched_tokens": 64}
        self.engine = Engine(WorkerConfig("w", folder, **sizes))

    def expected(self, start: int, stop: int, params: SamplingParams) -> list[list[int]]:
        return expected_of(self.reference, PROMPT[start:stop], params)

    def run(self) -> dict[Key, BeamResult]:
        """Run steps until no work is left; return the finished beam searches by key."""
        found = {}
        while (result := self.engine.step()).output is not None:
            found.update({each.key: each for each in result.beam_results})
            assert not result.failed
        self.engine.batcher.check()
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> EnginePair:
    return EnginePair(tmp_path_factory.mktemp("beams"))


def sequence(key: Key, prompt: list[int], params: SamplingParams) -> NewSequence:
    siblings = tuple(Sibling(choice, prompt) for choice in range(1, params.num_sequences))
    return NewSequence(key, prompt, len(prompt), params, siblings=siblings)


KINDS: list[tuple[int, int, SamplingParams]] = [
    (0, 9, params_of(2, 20)),
    (0, 16, params_of(4, 24, n=2, stop_token_ids=MANY)),
    (3, 20, params_of(5, 18, length_penalty=2.0, stop_token_ids=MANY[:12])),
    (3, 36, params_of(4, 20, length_penalty=0.0, stop_token_ids=MANY, early_stopping=True)),
    (1, 8, params_of(5, 20, length_penalty=-1.0, stop_token_ids=MANY, early_stopping="never")),
    (0, 17, params_of(4, 20, length_penalty=0.4, stop_token_ids=(11,), early_stopping="never")),
    (0, 17, params_of(2, 25, length_penalty=1.5, stop_token_ids=MANY, early_stopping="never")),
    (5, 12, params_of(4, 16, stop_token_ids=MANY, min_tokens=9, early_stopping=True)),
    (5, 6, params_of(2, 1, stop_token_ids=MANY)),
    (2, 33, params_of(3, 12, n=1, repetition_penalty=1.4, stop_token_ids=MANY)),
    (
        2,
        20,
        params_of(3, 12, bad_words_token_ids=((17,), (30, 31)), stop_token_ids=MANY, min_tokens=2),
    ),
]


def answers_of(found: BeamResult) -> list[list[int]]:
    return [answer.tokens for answer in found.answers]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_single_search_of_the_engine_equals_transformers(pair: EnginePair, kind: int) -> None:
    start, stop, params = KINDS[kind]
    pair.engine.submit(sequence("a", PROMPT[start:stop], params))
    found = pair.run()["a"]
    assert answers_of(found) == pair.expected(start, stop, params)
    for answer in found.answers:
        by_stop = answer.tokens[-1] in params.stop_token_ids
        assert answer.finish is (FinishReason.STOP if by_stop else FinishReason.LENGTH)
        assert by_stop or len(answer.tokens) == params.max_tokens


def test_concurrent_searches_with_preemptions_equal_transformers(pair: EnginePair) -> None:
    engine = pair.engine
    engine.reset_scheduler(dataclasses.replace(engine.limits, num_blocks=34, watermark=0))
    for number, (start, stop, params) in enumerate(KINDS):
        engine.submit(sequence(number, PROMPT[start:stop], params))
        engine.submit(greedy_sequence(f"greedy {number}", PROMPT[number : number + 11], 30))
    greedy: dict[Key, list[int]] = {}
    found: dict[Key, BeamResult] = {}
    while (result := engine.step()).output is not None:
        assert len(result.logprobs) == len(result.output.tokens)
        found.update({each.key: each for each in result.beam_results})
        for key, token in tokens_of(result):
            greedy.setdefault(key, []).append(token)
    assert engine.load().preemptions > 0
    engine.batcher.check()
    engine.reset_scheduler(engine.limits)
    for number, (start, stop, params) in enumerate(KINDS):
        assert answers_of(found[number]) == pair.expected(start, stop, params)
        engine.submit(greedy_sequence("alone", PROMPT[number : number + 11], 30))
        expected = [token for _ in range(30) for _, token in tokens_of(engine.step())]
        assert greedy[f"greedy {number}"] == expected


def test_logprobs_belong_to_the_tokens_of_each_answer(pair: EnginePair) -> None:
    params = params_of(3, 10, logprobs=2, stop_token_ids=MANY, length_penalty=0.0)
    pair.engine.submit(sequence("a", PROMPT[:12], params))
    found = pair.run()["a"]
    for answer in found.answers:
        whole = torch.tensor([PROMPT[:12] + answer.tokens])
        logits = pair.reference(whole).logits[0, 11:-1].detach()
        logprobs = logits.log_softmax(-1)
        total = 0.0
        for position, node in enumerate(answer.last.path()):
            entry = node.logprobs
            assert isinstance(entry, TokenLogprobs)
            row = logprobs[position]
            assert entry.chosen == pytest.approx(float(row[node.token]), abs=1e-4)
            assert entry.rank == int((row > row[node.token]).sum()) + 1
            assert entry.tokens == row.topk(2).indices.tolist()
            total += entry.chosen
        assert float(answer.score) == pytest.approx(total, abs=1e-3)


def test_four_beams_use_at_most_half_the_blocks_of_four_sequences(pair: EnginePair) -> None:
    engine = pair.engine
    used: list[list[int]] = [[], []]
    engine.submit(sequence("beams", PROMPT[:32], params_of(4, 96)))
    while engine.step().output is not None:
        used[0].append(engine.load().used_blocks)
    for number in range(4):
        engine.submit(greedy_sequence(number, PROMPT[:32], 96, salt=b"%d" % number))
    while engine.step().output is not None:
        used[1].append(engine.load().used_blocks)
    assert max(used[1]) == 4 * 8
    assert max(used[0]) <= max(used[1]) / 2
    assert sum(used[0]) <= sum(used[1]) / 2


@pytest.mark.parametrize("has_others", [True, False])
@pytest.mark.parametrize("key", ["bad", SequenceKey(1, 2, 3)], ids=["text", "tuple"])
def test_search_with_no_allowed_token_left_fails_without_affecting_others(
    pair: EnginePair, key: Key, has_others: bool
) -> None:
    """Only token 7 is allowed, but not twice in a row, so no beam can have a second token.

    Alone, the search has as many beams as its key has elements, if the key is a tuple.
    """
    params = params_of(3, 8, allowed_token_ids=(7,), bad_words_token_ids=((7, 7),))
    pair.engine.submit(sequence(key, PROMPT[:9], params))
    if has_others:
        pair.engine.submit(sequence("good", PROMPT[:9], KINDS[0][2]))
    failed: list[Key] = []
    found: list[BeamResult] = []
    while (result := pair.engine.step()).output is not None:
        failed += result.failed
        found += result.beam_results
    assert failed == [key]
    expected = [pair.expected(0, 9, KINDS[0][2])] if has_others else []
    assert [answers_of(each) for each in found] == expected
    assert pair.engine.load().used_blocks == 0
    assert key not in pair.engine._searches
