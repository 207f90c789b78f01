"""SamplingParams: validation errors name the parameter; `resolve` fills in defaults."""

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import (
    EARLY_STOPPING,
    RANGES,
    UINT64_MAX,
    InvalidParameterError,
    SamplingLimits,
    SamplingParams,
)
from penstock.common.structured_outputs import StructuredOutputs, choice
from penstock.common.token_ids import MANY_TOKENS, check_token_ids

LIMITS = SamplingLimits()
VOCAB_SIZE = 50


def validate(params: SamplingParams) -> None:
    params.validate(LIMITS, VOCAB_SIZE)


def resolve(params: SamplingParams, num_prompt: int = 10, **given: Any) -> SamplingParams:
    return params.resolve(num_prompt, 100, LIMITS, **{"seed": 7, **given})


def float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def changed(name: str, value: Any) -> SamplingParams:
    return replace(SamplingParams(), **{name: value})


def formed(kind: str, text: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(kind, text))


BEAMS = SamplingParams(n=2, best_of=4, use_beam_search=True)
INVALID: list[tuple[SamplingParams, str, str]] = [
    *((changed(name, math.nan), name, "from") for name in RANGES),
    *((changed(name, 11.0), name, "from") for name in RANGES),
    (SamplingParams(temperature=-0.1), "temperature", "from 0 to 2"),
    (SamplingParams(top_p=0.0), "top_p", "from 1e-06 to 1"),
    (SamplingParams(repetition_penalty=0.0), "repetition_penalty", "from 0.01 to 10"),
    (SamplingParams(top_k=-2), "top_k", "from -1"),
    (SamplingParams(n=0), "n", "from 1 to 64"),
    (SamplingParams(n=2, best_of=1), "best_of", "from 2 to 64"),
    (SamplingParams(seed=2**64), "seed", "from -9223372036854775808"),
    (SamplingParams(logprobs=21), "logprobs", "from 0 to 20"),
    (SamplingParams(prompt_logprobs=-1), "prompt_logprobs", "from 0 to 20"),
    (SamplingParams(max_tokens=0), "max_tokens", "at least 1"),
    (SamplingParams(min_tokens=-1), "min_tokens", "at least 0"),
    (SamplingParams(max_tokens=5, min_tokens=6), "min_tokens", "from 0 to 5"),
    (SamplingParams(stop_token_ids=(50,)), "stop_token_ids", "outside the vocabulary"),
    (SamplingParams(logit_bias={3: math.nan}), "logit_bias", "from -100 to 100"),
    (SamplingParams(logit_bias={3: -math.inf}), "logit_bias", "from -100 to 100"),
    (SamplingParams(allowed_token_ids=()), "allowed_token_ids", "1 to 50 token ids, not 0"),
    (SamplingParams(bad_words_token_ids=((),)), "bad_words", "word of 0 tokens; 1 to 32"),
    (
        SamplingParams(bad_words_token_ids=((3,),) * 129),
        "bad_words",
        "at most 128 token sequences, not 129",
    ),
    (
        SamplingParams(bad_words_token_ids=((3,),), allowed_token_ids=(3,)),
        "bad_words",
        "remove a word",
    ),
    (SamplingParams(stop=("",)), "stop", "must have 1 to 256"),
    (SamplingParams(stop=("x",) * 17), "stop", "at most 16"),
    (SamplingParams(length_penalty=2.0), "length_penalty", "needs a beam search"),
    (SamplingParams(early_stopping="never"), "early_stopping", "needs a beam search"),
    (SamplingParams(use_beam_search=True), "n", "n from 2 to 64, not 1"),
    (SamplingParams(use_beam_search=True, best_of=1), "best_of", "best_of from 2 to 64, not 1"),
    (replace(BEAMS, temperature=0.5), "temperature", "leave temperature at 0 or 1"),
    (replace(BEAMS, seed=1), "seed", "leave out seed"),
    (replace(BEAMS, stop=("x",)), "stop", "not stop strings"),
    (replace(BEAMS, length_penalty=math.nan), "length_penalty", "from -5 to 5"),
    (replace(BEAMS, early_stopping="soon"), "early_stopping", '"never"'),
    (replace(BEAMS, max_tokens=4097), "max_tokens", "at most 4096"),
    (formed("yaml", "x"), "structured_outputs", "unknown kind 'yaml': expected one of json, "),
    (formed("regex", ""), "structured_outputs", "regex is '': expected a regular expression"),
    (
        formed("json_object", "x"),
        "structured_outputs",
        "json_object is 'x': expected an empty text",
    ),
    (formed("regex", "é" * (1 << 16) + "x"), "structured_outputs", "131073 bytes; at most 131072"),
    (replace(formed("regex", "x"), ignore_eos=True), "ignore_eos", "cannot be combined"),
    (
        replace(BEAMS, structured_outputs=StructuredOutputs("json_object")),
        "use_beam_search",
        "cannot be combined",
    ),
]


@pytest.mark.parametrize(("params", "name", "words"), INVALID)
def test_invalid_parameter_is_refused_by_name(
    params: SamplingParams, name: str, words: str
) -> None:
    with pytest.raises(InvalidParameterError, match=words) as refusal:
        validate(params)
    assert refusal.value.param == name


def test_defaults_and_beam_searches_are_valid() -> None:
    validate(SamplingParams())
    validate(SamplingParams(n=2, best_of=3, structured_outputs=choice(["a", "b"])))
    for early_stopping in EARLY_STOPPING:
        validate(
            replace(BEAMS, early_stopping=early_stopping, length_penalty=-5.0, max_tokens=4096)
        )


@pytest.mark.parametrize("name", RANGES)
@given(data=st.data())
def test_valid_number_stays_valid_as_float32(name: str, data: st.DataObject) -> None:
    low, high = RANGES[name]
    value = data.draw(st.floats(low, high))
    validate(changed(name, value))
    validate(changed(name, float32(value)))
    if low > 0:
        assert float32(low) > 0


def test_max_tokens_is_limited_to_what_fits_in_the_context() -> None:
    assert resolve(SamplingParams()).max_tokens == 90
    assert resolve(SamplingParams(), default_max_tokens=16).max_tokens == 16
    assert resolve(SamplingParams(), 95, default_max_tokens=16).max_tokens == 5
    assert resolve(SamplingParams(max_tokens=90)).max_tokens == 90
    for name in ("max_tokens", "min_tokens"):
        with pytest.raises(InvalidParameterError) as refusal:
            resolve(changed(name, 91))
        assert refusal.value.param == name


def test_beam_search_max_tokens_is_limited_so_that_answers_fit_one_message() -> None:
    beams = replace(BEAMS, n=4)
    limits = SamplingLimits(max_beam_tokens=100)
    assert beams.resolve(10, 1000, limits, seed=0).max_tokens == 25


def test_seed_is_an_unsigned_integer_once_resolved() -> None:
    assert resolve(SamplingParams()).seed == 7
    assert resolve(SamplingParams(seed=0)).seed == 0
    assert resolve(SamplingParams(seed=-1)).seed == UINT64_MAX


def test_answer_limit_is_bounded_by_the_context() -> None:
    assert SamplingParams().answer_limit(10, 100) == 90
    assert SamplingParams(max_tokens=7).answer_limit(10, 100) == 7
    assert SamplingParams(max_tokens=700).answer_limit(10, 100) == 90


def test_worker_generates_all_choices_that_the_router_ranks() -> None:
    params = SamplingParams(n=2, best_of=5, top_k=-1)
    expected = SamplingParams(n=5, logprobs=0)
    assert params.for_worker() == expected
    assert replace(params, logprobs=3).for_worker() == replace(expected, logprobs=3)
    plain = SamplingParams(n=2, logprobs=1, seed=5, stop=("x",))
    assert plain.for_worker() is plain


def test_worker_receives_beam_width_and_number_of_answers() -> None:
    actual = resolve(replace(BEAMS, best_of=None)).for_worker()
    assert (actual.n, actual.best_of, actual.num_sequences, actual.seed) == (2, 2, 2, None)
    validate(actual)


def test_end_tokens_are_added_once_unless_they_are_ignored() -> None:
    params = SamplingParams(stop_token_ids=(5, 3))
    assert params.with_end_tokens((3, 9)).stop_token_ids == (5, 3, 9)
    assert params.with_end_tokens((3,)) is params
    ignored = replace(params, ignore_eos=True)
    assert ignored.with_end_tokens((3, 9)) is ignored


def test_token_ids_below_zero_or_beyond_the_vocabulary_are_refused() -> None:
    check_token_ids("x", (), 5)
    check_token_ids("x", (0, 4), 5)
    for tokens in ((5,), (-1, 3)):
        with pytest.raises(InvalidParameterError, match=r"0 to 4") as refusal:
            check_token_ids("x", tokens, 5)
        assert refusal.value.param == "x"


@pytest.mark.parametrize("count", [3, MANY_TOKENS, 3 * MANY_TOKENS])
@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**32 - 1, 2**32, 2**63, 10**30, -(10**30)])
def test_one_unknown_token_of_a_list_is_named(count: int, wrong: int) -> None:
    tokens = [index % VOCAB_SIZE for index in range(count)]
    check_token_ids("prompt", tokens, VOCAB_SIZE)
    tokens[count // 2] = wrong
    with pytest.raises(InvalidParameterError, match="prompt contains the token id") as error:
        check_token_ids("prompt", tokens, VOCAB_SIZE)
    assert "outside the vocabulary (0 to 49)" in str(error.value)
