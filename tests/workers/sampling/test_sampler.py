"""Sampler: tokens follow the distribution, and a row's token does not depend on other rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.workers.sampling.sampler import Sampler, TokenLogprobs
from tests.support import token_tables
from tests.support.token_tables import Table, one_row_table

VOCAB_SIZE = 101
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def table(num_rows: int) -> Table:
    return token_tables.table(num_rows, VOCAB_SIZE)


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    indices: list[int] | None = None,
    history: Table | None = None,
) -> list[int]:
    """Sample one token per row; row i of the logits belongs to row i of the table."""
    sampler = Sampler(len(params), logits.shape[1], CPU)
    for row, one in enumerate(params):
        sampler.admit(row, one, choice=row % 3)
    rows = np.arange(len(params), dtype=np.int32)
    token_indices = np.array(indices or [0] * len(params), np.int32)
    found = sampler.sample(logits.clone(), rows, token_indices, history or table(len(params)))
    assert found.finite.all()
    assert found.tokens.dtype == np.int32
    return [int(token) for token in found.tokens]


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.randn(5, VOCAB_SIZE)
    assert draw(logits, [GREEDY] * 5) == logits.argmax(-1).tolist()


def test_sampling_on_the_device_equals_the_host_and_excludes_host_only_params() -> None:
    plain = [GREEDY, SamplingParams(seed=4, top_p=0.9), SamplingParams(temperature=0.7, top_k=5)]
    host_only = [
        SamplingParams(logprobs=0),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias={3: 1.0}),
    ]
    sampler = Sampler(8, VOCAB_SIZE, CPU)
    for row, params in enumerate(plain + host_only):
        sampler.admit(row, params, choice=0)
    logits = torch.randn(3, VOCAB_SIZE)
    logits[2, 9] = torch.nan
    rows, indices = np.arange(3, dtype=np.int32), np.array([0, 4, 1], np.int32)
    assert sampler.can_sample_on_device(rows)
    expected = sampler.sample(logits, rows, indices, table(8))
    tokens, finite, _ = sampler.sample_on_device(logits, rows, indices, table(8))
    assert tokens.dtype == torch.int32
    assert finite.tolist() == expected.finite.tolist() == [True, True, False]
    assert tokens[:2].tolist() == expected.tokens[:2].tolist()
    for row in range(len(plain), len(plain + host_only)):
        assert not sampler.can_sample_on_device(np.array([0, row], np.int32))


def test_masked_rows_are_sampled_on_the_device_as_on_the_host() -> None:
    masked = [
        SamplingParams(seed=4, bad_words_token_ids=((4, 5), (7,))),
        SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(7,)),
        SamplingParams(seed=6, allowed_token_ids=(8, 9, 30)),
        SamplingParams(seed=7, top_p=0.5),
        SamplingParams(allowed_token_ids=(1,), bad_words_token_ids=((1,),)),
        SamplingParams(allowed_token_ids=(1,)),
    ]
    sampler = Sampler(8, VOCAB_SIZE, CPU)
    for row, params in enumerate(masked):
        sampler.admit(row, params, choice=0)
    rows, indices = np.arange(6, dtype=np.int32), np.array([2, 2, 0, 4, 1, 1], np.int32)
    logits = torch.randn(6, VOCAB_SIZE)
    logits[5, 9] = torch.nan
    expected = sampler.sample(logits.clone(), rows, indices, table(8))
    assert sampler.can_sample_on_device(rows)
    tokens, finite, _ = sampler.sample_on_device(logits, rows, indices, table(8))
    assert finite.tolist() == expected.finite.tolist() == [True] * 4 + [False] * 2
    assert tokens[:4].tolist() == expected.tokens[:4].tolist()


def test_empty_batch_draws_nothing() -> None:
    sampler = Sampler(4, VOCAB_SIZE, CPU)
    none = np.empty(0, np.int32)
    found = sampler.sample(torch.empty(0, VOCAB_SIZE), none, none, table(4))
    assert (len(found.tokens), len(found.finite), found.logprobs) == (0, 0, [])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.4, 0.3, 0.2, 0.1]),
        (SamplingParams(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (SamplingParams(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (SamplingParams(top_p=0.8), [4 / 9, 3 / 9, 2 / 9, 0]),
        (SamplingParams(min_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        # The entropy is 1.28. The tokens' surprisals differ from it by 0.36, 0.08, 0.33 and 1.02.
        (SamplingParams(typical_p=0.45), [0, 0.6, 0.4, 0]),
        (SamplingParams(typical_p=0.2, top_k=2), [1, 0, 0, 0]),
        (SamplingParams(allowed_token_ids=(3, 1)), [0, 3 / 4, 0, 1 / 4]),
        (SamplingParams(bad_words_token_ids=((0,),), top_k=2), [0, 3 / 5, 2 / 5, 0]),
        (SamplingParams(logit_bias={3: float(np.log(4))}), [4 / 13, 3 / 13, 2 / 13, 4 / 13]),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    """Apply Pearson's chi-square test, with fixed seeds, token indices and choices."""
    num_rows, num_steps = 200, 100
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(num_rows, 1)
    sampler = Sampler(num_rows, 4, CPU)
    rows = np.arange(num_rows, dtype=np.int32)
    for row in rows.tolist():
        sampler.admit(row, replace(params, seed=row // 4 * 2**33 + 5), choice=row % 4)
    counts = np.zeros(4)
    for index in range(num_steps):
        indices = np.full_like(rows, index)
        drawn = sampler.sample(logits.clone(), rows, indices, table(num_rows))
        counts += np.bincount(drawn.tokens, minlength=4)
    expected_counts = np.array(expected) * num_rows * num_steps
    assert not counts[expected_counts == 0].any()
    likely = expected_counts > 0
    chi_square = float((((counts - expected_counts) ** 2)[likely] / expected_counts[likely]).sum())
    assert chi_square < 16.3  # the 0.1% critical value for three degrees of freedom


MIXED_PARAMS = [
    SamplingParams(seed=1),
    GREEDY,
    SamplingParams(seed=2**64 - 1, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=7, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(temperature=0.0, repetition_penalty=3.0),
    SamplingParams(seed=4, temperature=1.3, min_p=0.02, logit_bias={4: 2.5, 9: -100.0}),
    SamplingParams(seed=5, temperature=5.0, stop_token_ids=(3, 80), min_tokens=50),
    SamplingParams(seed=6, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=0.5),
    SamplingParams(seed=7, temperature=2.0, typical_p=0.4),
    SamplingParams(seed=8, typical_p=0.9, top_k=60, bad_words_token_ids=((3,), (40, 7), (1, 2, 3))),
    SamplingParams(
        seed=9, allowed_token_ids=(80, 3, 3, 41, 7, 99), stop_token_ids=(3,), min_tokens=20
    ),
    SamplingParams(
        temperature=0.0, allowed_token_ids=tuple(range(50)), bad_words_token_ids=((2,), (9, 5))
    ),
]


def test_draw_is_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(1)
    num_rows = len(MIXED_PARAMS)
    history = table(num_rows)
    sampler = Sampler(num_rows, VOCAB_SIZE, CPU)
    for row, params in enumerate(MIXED_PARAMS):
        sampler.admit(row, params, choice=row)
    numbers = np.random.default_rng(2)
    for _ in range(40):
        logits = torch.randn(num_rows, VOCAB_SIZE) * 3
        indices = numbers.integers(0, 60, num_rows).astype(np.int32)
        rows = numbers.permutation(num_rows).astype(np.int32)
        batch = sampler.sample(logits.clone(), rows, indices, history).tokens
        for at in range(num_rows):
            one = slice(at, at + 1)
            single = sampler.sample(logits[one], rows[one], indices[one], history).tokens
            assert single[0] == batch[at]


def test_only_rows_with_changes_are_modified() -> None:
    torch.manual_seed(6)
    num_rows = len(MIXED_PARAMS)
    history, rows = table(num_rows), np.arange(num_rows, dtype=np.int32)
    sampler = Sampler(num_rows, VOCAB_SIZE, CPU)
    for row, params in enumerate(MIXED_PARAMS):
        sampler.admit(row, params, choice=row)
    logits = torch.randn(num_rows, VOCAB_SIZE)
    before = logits.clone()
    sampler.sample(logits, rows, rows, history)
    changed = (logits != before).any(-1).tolist()
    assert changed == [
        params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or bool(params.logit_bias or params.bad_words_token_ids or params.allowed_token_ids)
        or params.min_tokens > 0
        for params in MIXED_PARAMS
    ]


def test_logits_stay_as_they_are_if_a_row_needs_log_probabilities() -> None:
    sampler = Sampler(2, VOCAB_SIZE, CPU)
    sampler.admit(0, SamplingParams(allowed_token_ids=(1, 2), logprobs=2), 0)
    sampler.admit(1, SamplingParams(logit_bias={3: 1.0}), 0)
    logits, rows = torch.randn(2, VOCAB_SIZE), np.arange(2, dtype=np.int32)
    before = logits.clone()
    sampler.sample(logits, rows, rows, table(2))
    assert torch.equal(logits, before)


def test_draws_depend_on_seed_index_and_choice() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)

    def answer(seed: int, choice: int) -> list[int]:
        sampler = Sampler(1, VOCAB_SIZE, CPU)
        sampler.admit(0, SamplingParams(seed=seed), choice)
        row = np.zeros(1, np.int32)
        token_indices = (np.array([index], np.int32) for index in range(30))
        return [int(sampler.sample(logits, row, at, table(1)).tokens[0]) for at in token_indices]

    first = answer(1, 0)
    assert len(set(first)) > 15
    assert first == answer(1, 0)
    assert first != answer(1, 1)
    assert first != answer(2, 0)
    assert first != answer(1 + 2**32, 0)


def test_stop_tokens_are_excluded_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 8], logits[0, 9] = 9.0, 8.0, 7.0
    # A stop token outside the vocabulary is allowed, but never sampled.
    params = replace(GREEDY, stop_token_ids=(7, 8, 10**6), min_tokens=3)
    assert [draw(logits, [params], [index])[0] for index in range(5)] == [9, 9, 9, 7, 7]


def test_only_the_repetition_penalty_counts_prompt_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 1], logits[0, 2], logits[0, 3] = 3.0, 2.9, 2.8
    history = one_row_table(prompt=[1], answer=[2, 2])

    def best(**kwargs: float) -> int:
        params = SamplingParams(temperature=0.0, **kwargs)  # type: ignore[arg-type]
        return draw(logits, [params], [2], history)[0]

    assert best() == 1
    assert best(repetition_penalty=1.5) == 3
    assert best(presence_penalty=2.0) == best(frequency_penalty=2.0) == 1
    assert best(presence_penalty=-0.15) == best(frequency_penalty=-0.08) == 2
    assert best(presence_penalty=-0.05) == best(frequency_penalty=-0.04) == 1


def test_large_logit_bias_decides_the_token() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    biased = replace(GREEDY, logit_bias={17: 100.0})
    assert draw(logits, [biased, GREEDY]) == [17, int(logits[1].argmax())]


@pytest.mark.parametrize("params", MIXED_PARAMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_row_with_non_finite_logits_is_marked_without_affecting_others(
    params: SamplingParams, bad: float
) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, VOCAB_SIZE)
    history = table(3)
    sampler = Sampler(3, VOCAB_SIZE, CPU)
    for row in range(3):
        sampler.admit(row, params, 0)
    rows, indices = np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
    expected = sampler.sample(logits.clone(), rows, indices, history).tokens
    logits[1, 50] = bad
    found = sampler.sample(logits, rows, indices, history)
    assert found.finite.tolist() == [True, False, True]
    assert found.tokens.tolist() == [expected[0], 0, expected[2]]


def test_large_finite_logits_are_accepted() -> None:
    logits = torch.full((2, VOCAB_SIZE), 3e38)
    sampler = Sampler(2, VOCAB_SIZE, CPU)
    rows = np.arange(2, dtype=np.int32)
    sampler.admit(0, GREEDY, 0)
    sampler.admit(1, SamplingParams(), 0)
    assert sampler.sample(logits, rows, rows, table(2)).finite.all()


def test_logprobs_are_computed_from_the_raw_logits() -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, VOCAB_SIZE)
    params = [
        replace(GREEDY, logprobs=3),
        SamplingParams(seed=8, temperature=9.0, logprobs=0, repetition_penalty=2.0),
        GREEDY,
        replace(GREEDY, logprobs=1, logit_bias={40: 100.0}),
    ]
    sampler = Sampler(4, VOCAB_SIZE, CPU)
    for row, one in enumerate(params):
        sampler.admit(row, one, 0)
    rows = np.arange(4, dtype=np.int32)
    found = sampler.sample(logits, rows, rows, table(4))
    expected = logits.double().log_softmax(-1)
    assert found.logprobs[2] is None
    for row, count in ((0, 3), (1, 0), (3, 1)):
        entry = found.logprobs[row]
        assert isinstance(entry, TokenLogprobs)
        assert entry.chosen == pytest.approx(float(expected[row, found.tokens[row]]), abs=1e-5)
        best = expected[row].topk(count)
        assert entry.tokens == best.indices.tolist()
        assert entry.values == pytest.approx(best.values.tolist(), abs=1e-5)
    assert found.tokens[3] == 40


def test_reused_row_keeps_nothing_of_its_previous_sequence() -> None:
    sampler = Sampler(1, VOCAB_SIZE, CPU)
    logits, row = torch.randn(1, VOCAB_SIZE), np.zeros(1, np.int32)
    likeliest = int(logits.argmax())
    sampler.admit(
        0,
        SamplingParams(
            logprobs=2, logit_bias={likeliest: -50}, stop_token_ids=(likeliest,), min_tokens=9
        ),
        3,
    )
    sampler.admit(0, GREEDY, 0)
    found = sampler.sample(logits, row, row, table(1))
    assert found.tokens.tolist() == [likeliest]
    assert found.logprobs == [None]
