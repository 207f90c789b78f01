"""Any client input gives parameters that a worker accepts, or an error that names the field."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import RANGES, SamplingParams
from penstock.router.config import RequestBounds
from penstock.router.errors import Code, ServingError
from penstock.router.requests.request import (
    TOKENS_PER_CHECK,
    GenerationRequest,
    ModelLimits,
    check_bad_words,
    check_prompt,
    resolve_sampling,
    safe_request_id,
)
from penstock.router.requests.slices import Slices

MODEL = ModelLimits("m", 100, 50)
BOUNDS = RequestBounds()
INTEGERS = st.integers() | st.integers(-(10**40), 10**40) | st.sampled_from([2**31, 2**32, 2**64])
NUMBERS = st.floats() | st.sampled_from([1e-320, 5e-324, 1e308, -0.0]) | st.integers()
SAMPLINGS = st.builds(
    SamplingParams,
    **{name: NUMBERS for name in RANGES},
    top_k=INTEGERS,
    seed=st.none() | INTEGERS,
    max_tokens=st.none() | INTEGERS,
    min_tokens=INTEGERS,
    stop_token_ids=st.lists(INTEGERS, max_size=3).map(tuple),
    logprobs=st.none() | INTEGERS,
    n=INTEGERS,
    logit_bias=st.dictionaries(INTEGERS, NUMBERS, max_size=3),
    bad_words_token_ids=st.lists(st.lists(INTEGERS, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(INTEGERS, max_size=3).map(tuple),
    use_beam_search=st.booleans(),
    length_penalty=NUMBERS,
    early_stopping=st.sampled_from([False, True, "never", "unknown"]),
)


def changed(name: str, value: Any) -> SamplingParams:
    return replace(SamplingParams(), **{name: value})


@given(SAMPLINGS, st.lists(INTEGERS, max_size=5))
def test_any_numbers_are_accepted_or_refused_by_name(
    sampling: SamplingParams, prompt: list[int]
) -> None:
    refusal: ServingError | None = None
    try:
        asyncio.run(check_prompt(prompt, MODEL, Slices()))
        resolve_sampling(GenerationRequest(prompt, sampling), MODEL, BOUNDS)
    except ServingError as error:
        refusal = error
    if refusal is not None:
        assert refusal.code is Code.INVALID
        assert refusal.param is not None
        assert "\n" not in refusal.message


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_non_finite_or_huge_number_is_refused_by_name(name: str, value: float) -> None:
    request = GenerationRequest([5], changed(name, value))
    with pytest.raises(ServingError) as refusal:
        resolve_sampling(request, MODEL, BOUNDS)
    assert refusal.value.param == name


@pytest.mark.parametrize(("name", "bounds"), RANGES.items())
def test_ends_of_the_ranges_are_accepted(name: str, bounds: tuple[float, float]) -> None:
    for value in bounds:
        params = resolve_sampling(GenerationRequest([5], changed(name, value)), MODEL, BOUNDS)
        assert getattr(params, name) == pytest.approx(value)
    # A small positive limit must not be rounded to 0 on the wire: workers may divide by it.
    if bounds[0] > 0:
        params = resolve_sampling(GenerationRequest([5], changed(name, bounds[0])), MODEL, BOUNDS)
        assert getattr(params, name) > 0


LIMITS = [
    ("logprobs", 20, 21),
    ("logprobs", 0, -1),
    ("max_tokens", 97, 98),
    ("max_tokens", 1, 0),
    ("min_tokens", 97, 98),
    ("min_tokens", 0, -1),
    ("top_k", 2**31 - 1, 2**31),
    ("top_k", -1, -2),
    ("seed", 2**64 - 1, 2**64),
    ("seed", -(2**63), -(2**63) - 1),
    ("n", 64, 65),
    ("n", 1, 0),
    ("best_of", 64, 65),
    ("best_of", 1, 0),
    ("n", 1, 0),
    ("stop_token_ids", (49,), (50,)),
    ("stop_token_ids", (0,), (-1,)),
    ("stop_token_ids", (3,) * 256, (3,) * 257),
    ("logit_bias", {49: 100.0}, {49: 100.5}),
    ("logit_bias", {0: -100.0}, {0: -100.5}),
    ("logit_bias", {49: 1.0}, {50: 1.0}),
    ("bad_words_token_ids", ((49,),), ((50,),)),
    ("bad_words_token_ids", ((4, 0),), ((4, -1),)),
    ("bad_words_token_ids", ((3,) * 32,), ((3,) * 33,)),
    ("bad_words_token_ids", ((3,),), ((),)),
    ("bad_words_token_ids", ((3,),) * 128, ((3,),) * 129),
    ("allowed_token_ids", (0, 49), (0, 50)),
    ("allowed_token_ids", (0,), (-1,)),
    ("allowed_token_ids", (3,) * 50, (3,) * 51),
    ("allowed_token_ids", None, ()),
]


@pytest.mark.parametrize(("name", "good", "bad"), LIMITS)
def test_value_at_its_limit_is_accepted_and_one_beyond_it_is_refused(
    name: str, good: object, bad: object
) -> None:
    prompt = [5, 6, 7]
    resolve_sampling(GenerationRequest(prompt, changed(name, good)), MODEL, BOUNDS)
    with pytest.raises(ServingError):
        resolve_sampling(GenerationRequest(prompt, changed(name, bad)), MODEL, BOUNDS)


async def test_limits_of_prompts() -> None:
    await check_prompt([49] * 99, MODEL, Slices())
    for prompt in ([], [5] * 100, [50], [-1]):
        with pytest.raises(ServingError):
            await check_prompt(prompt, MODEL, Slices())


async def test_long_prompts_are_checked_with_pauses() -> None:
    """Checking 2,000,000 token ids takes 25 ms."""

    class Counter(Slices):
        num_pauses = 0

        async def pause(self) -> None:
            self.num_pauses += 1

    slices, model = Counter(), replace(MODEL, max_model_len=10**6)
    prompt = [49] * (2 * TOKENS_PER_CHECK + 1)
    await check_prompt(prompt, model, slices)
    assert slices.num_pauses == 3
    for index in (0, TOKENS_PER_CHECK - 1, TOKENS_PER_CHECK, 2 * TOKENS_PER_CHECK):
        wrong = [*prompt[:index], 50, *prompt[index + 1 :]]
        with pytest.raises(ServingError, match="prompt contains the token id 50"):
            await check_prompt(wrong, model, slices)


def test_limits_of_stop_strings() -> None:
    resolve_sampling(GenerationRequest([5], SamplingParams(stop=("x" * 256,) * 16)), MODEL, BOUNDS)
    for stop in (("x",) * 17, ("x" * 257,), ("",)):
        with pytest.raises(ServingError) as refusal:
            resolve_sampling(GenerationRequest([5], SamplingParams(stop=stop)), MODEL, BOUNDS)
        assert refusal.value.param == "stop"


def test_limits_of_bad_words() -> None:
    check_bad_words(["x" * 256] * 64, BOUNDS)
    for words in (["x"] * 65, ["x" * 257], [""], [" \t"]):
        with pytest.raises(ServingError) as refusal:
            check_bad_words(words, BOUNDS)
        assert refusal.value.param == "bad_words"


def test_bad_words_must_leave_an_allowed_token() -> None:
    words = ((3,), (4, 5), (6,))
    good = SamplingParams(bad_words_token_ids=words, allowed_token_ids=(3, 5, 6))
    resolve_sampling(GenerationRequest([5], good), MODEL, BOUNDS)
    with pytest.raises(ServingError) as refusal:
        resolve_sampling(
            GenerationRequest([5], replace(good, allowed_token_ids=(3, 6))), MODEL, BOUNDS
        )
    assert refusal.value.param == "bad_words"


def test_default_max_tokens_is_limited_by_the_context() -> None:
    assert resolve_sampling(GenerationRequest([5] * 10), MODEL, BOUNDS).max_tokens == 90
    for num_prompt, limit in ((10, 16), (95, 5)):
        request = GenerationRequest([5] * num_prompt)
        assert resolve_sampling(request, MODEL, BOUNDS, 16).max_tokens == limit


def test_supported_beam_search_settings_are_accepted() -> None:
    kinds: list[tuple[int, float, bool | str]]
    kinds = [(2, -5.0, False), (64, 5.0, True), (7, 0.0, "never")]
    for best_of, length_penalty, stopping in kinds:
        sampling = SamplingParams(
            n=2,
            best_of=best_of,
            temperature=0.0,
            top_k=-1,
            use_beam_search=True,
            length_penalty=length_penalty,
            early_stopping=stopping,
        )
        params = resolve_sampling(GenerationRequest([5], sampling), MODEL, BOUNDS)
        assert (params.num_generated, params.num_sequences) == (2, best_of)
        assert params.length_penalty == length_penalty
        assert params.for_worker().logprobs is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5.01, -5.01])
def test_a_length_penalty_out_of_its_range_is_refused(value: float) -> None:
    for use_beam_search in (False, True):
        sampling = SamplingParams(n=2, use_beam_search=use_beam_search, length_penalty=value)
        with pytest.raises(ServingError) as refusal:
            resolve_sampling(GenerationRequest([5], sampling), MODEL, BOUNDS)
        assert refusal.value.param == "length_penalty"


def test_a_negative_seed_keeps_its_bits() -> None:
    assert (
        resolve_sampling(GenerationRequest([5], SamplingParams(seed=-1)), MODEL, BOUNDS).seed
        == 2**64 - 1
    )


def test_unsafe_request_ids_are_dropped_and_long_ones_cut() -> None:
    assert safe_request_id("order-66") == "order-66"
    assert safe_request_id("two\nlines") == safe_request_id("ünicode") == ""
    assert len(safe_request_id("x" * 1000)) == 128
