import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.workload import (
    MAX_BLOCK_ID,
    TRACE_BLOCK,
    Lengths,
    Planned,
    Prompts,
    TraceRow,
    arrivals,
    capped,
    drawn_load,
    ordinary_tokens,
    traced_load,
    with_prefixes,
)

seeds = st.integers(0, 2**63 - 1)
bounds = st.tuples(st.integers(1, 5000), st.integers(1, 5000)).map(sorted)
lengths = st.builds(
    lambda pair, kind: Lengths(pair[0], pair[1], kind),
    bounds,
    st.sampled_from(["uniform", "lognormal"]),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128", Lengths(128, 128)),
        ("64-256", Lengths(64, 256)),
        ("lognormal:64-256", Lengths(64, 256, "lognormal")),
        ("uniform:1-2", Lengths(1, 2)),
    ],
)
def test_lengths_are_read(text: str, expected: Lengths) -> None:
    assert Lengths.parse(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "zipf:1-2", "a-b", "1.5", "1-2-3", ":4"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid length"):
        Lengths.parse(text)


@given(lengths, seeds)
def test_drawn_lengths_stay_in_bounds(wanted: Lengths, seed: int) -> None:
    drawn = wanted.draw(50, np.random.default_rng(seed))
    assert drawn.shape == (50,)
    assert drawn.min() >= wanted.low
    assert drawn.max() <= wanted.high


def test_lengths_follow_the_named_distribution() -> None:
    random = np.random.default_rng(1)
    uniform = Lengths(100, 10_000).draw(20_000, random)
    lognormal = Lengths(100, 10_000, "lognormal").draw(20_000, random)
    assert uniform.mean() == pytest.approx(5050, rel=0.02)
    # The median is the geometric mean of the bounds 100 and 10,000.
    assert np.median(lognormal) == pytest.approx(1000, rel=0.05)
    assert ((lognormal > 100) & (lognormal < 10_000)).mean() == pytest.approx(0.95, abs=0.01)


@given(st.integers(1, 300), st.floats(0.01, 1e5), seeds)
def test_arrivals_keep_the_rate(count: int, rate: float, seed: int) -> None:
    times = arrivals(count, rate, seed)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)
    assert (times == arrivals(count, rate, seed)).all()


def test_arrivals_are_a_poisson_process() -> None:
    gaps = np.diff(arrivals(50_000, 10.0, 3))
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    # The gaps are exponential, so their standard deviation equals their mean.
    assert gaps.std() == pytest.approx(0.1, rel=0.02)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.02)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert not arrivals(5, math.inf, 0).any()


@given(st.integers(1, 40), lengths, lengths, seeds)
def test_equal_seeds_give_equal_loads(
    count: int, inputs: Lengths, outputs: Lengths, seed: int
) -> None:
    load = drawn_load(count, 5.0, inputs, outputs, seed)
    assert load == drawn_load(count, 5.0, inputs, outputs, seed)
    assert [planned.number for planned in load] == list(range(count))
    # Another rate gives the same requests at other times.
    slower = drawn_load(count, 1.0, inputs, outputs, seed)
    assert [p.input_len for p in slower] == [p.input_len for p in load]
    assert [p.output_len for p in slower] == [p.output_len for p in load]


def test_different_seeds_give_different_loads() -> None:
    wanted = Lengths(1, 10_000)
    assert drawn_load(20, 5.0, wanted, wanted, 1) != drawn_load(20, 5.0, wanted, wanted, 2)


@pytest.mark.parametrize(
    ("vocab_size", "specials"),
    [
        (1024, range(6)),  # vocabulary of the bundled model
        (32_000, range(259)),  # Llama 2: skip control tokens and byte tokens
        (128_256, range(128_000, 128_256)),  # Llama 3
        (32_768, range(771)),  # Mistral
        (151_936, range(151_643, 151_936)),  # Qwen 2.5: skip special tokens and padding
    ],
)
def test_special_tokens_are_avoided(vocab_size: int, specials: range) -> None:
    tokens = ordinary_tokens(vocab_size)
    assert 0 < tokens.start < tokens.stop < vocab_size
    assert not any(special in tokens for special in specials)
    assert len(tokens) > 0.9 * vocab_size


def test_a_tiny_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        ordinary_tokens(31)


@given(st.integers(32, 200_000), st.integers(0, 100), st.integers(1, 600), seeds)
def test_prompts_have_their_length_and_vocabulary(
    vocab_size: int, number: int, input_len: int, seed: int
) -> None:
    vocabulary = ordinary_tokens(vocab_size)
    tokens = Prompts(vocabulary, seed).tokens(Planned(number, 0.0, input_len, 1))
    assert len(tokens) == input_len
    assert min(tokens) >= vocabulary.start
    assert max(tokens) < vocabulary.stop
    assert tokens == Prompts(vocabulary, seed).tokens(Planned(number, 9.0, input_len, 5))


def test_prompts_without_block_ids_share_no_prefix() -> None:
    prompts = Prompts(ordinary_tokens(1000), 0)
    firsts = {tuple(prompts.tokens(Planned(n, 0.0, 8, 1))) for n in range(200)}
    firsts |= {tuple(prompts.warmup(n, 8)) for n in range(200)}
    firsts |= {tuple(Prompts(ordinary_tokens(1000), 1).tokens(Planned(0, 0.0, 8, 1)))}
    assert len(firsts) == 401


chains = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def traced(blocks: list[int], last_len: int) -> Planned:
    return Planned(0, 0.0, (len(blocks) - 1) * TRACE_BLOCK + last_len, 1, tuple(blocks))


@given(
    chains,
    chains,
    st.integers(16, TRACE_BLOCK),
    st.integers(16, TRACE_BLOCK),
    st.integers(32, 9999),
)
def test_prompts_share_exactly_the_prefix_of_their_block_ids(
    one: list[int], other: list[int], one_last: int, other_last: int, vocab_size: int
) -> None:
    prompts = Prompts(ordinary_tokens(vocab_size), 4)
    first, second = traced(one, one_last), traced(other, other_last)
    pairs = zip(prompts.tokens(first), prompts.tokens(second), strict=False)
    shared = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if same is None:
        assert shared is None  # one prompt is a prefix of the other prompt
    else:
        assert shared is not None
        # No other full block of 16 tokens is shared.
        assert shared // 16 == same * TRACE_BLOCK // 16


@given(st.integers(0, MAX_BLOCK_ID), st.integers(0, MAX_BLOCK_ID))
def test_blocks_are_equal_only_if_their_ids_are(one: int, other: int) -> None:
    prompts = Prompts(ordinary_tokens(64), 0)
    first = prompts.tokens(traced([one], 16))
    assert (first == prompts.tokens(traced([other], 16))) == (one == other)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_caps_cut_lengths_and_keep_prefixes(
    input_len: int, output_len: int, max_input: int, max_output: int
) -> None:
    row = TraceRow(1.5, input_len, output_len, tuple(range(-(-input_len // TRACE_BLOCK))))
    cut = capped(row, max_input, max_output)
    assert (cut.at, cut.input_len) == (1.5, min(input_len, max_input))
    assert cut.output_len == min(output_len, max_output)
    assert cut.blocks == row.blocks[: -(-cut.input_len // TRACE_BLOCK)]
    assert capped(row, None, None) == row


def test_traced_load_keeps_order_lengths_and_block_ids() -> None:
    rows = [TraceRow(0.0, 600, 3, (1, 2)), TraceRow(4.0, 10, 1)]
    assert traced_load(rows, [0.0, 2.0]) == [
        Planned(0, 0.0, 600, 3, (1, 2)),
        Planned(1, 2.0, 10, 1, ()),
    ]


def test_prompts_share_the_prefixes_in_turns_and_nothing_else() -> None:
    plan = with_prefixes(drawn_load(6, 1.0, Lengths(9, 20), Lengths(1, 1), seed=3), 16, 2)
    prompts = Prompts(ordinary_tokens(1000), seed=3)
    made = [prompts.tokens(planned) for planned in plan]
    assert [len(tokens) for tokens in made] == [planned.input_len for planned in plan]
    assert len({tuple(tokens[:16]) for tokens in made}) == 2
    assert made[0][:16] == made[2][:16] != made[1][:16]
    assert len({tuple(tokens[16:]) for tokens in made}) == 6
