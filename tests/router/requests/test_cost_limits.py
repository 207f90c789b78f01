"""The cost of a call, and the bounds on its sizes."""

from dataclasses import replace

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.router.config import RequestBounds
from penstock.router.errors import ServingError
from penstock.router.requests.cost_limits import (
    MAX_LIST_ENTRIES,
    CallSizes,
    check_cost,
    check_least_cost,
    check_sizes,
    check_text,
    default_max_tokens,
    request_cost,
)
from penstock.router.requests.request import GenerationRequest, ModelLimits

BOUNDS = RequestBounds()
MODEL = ModelLimits("m", 100, 50)


def request_of(num_prompt: int, copies: int = 0, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return GenerationRequest([5] * num_prompt, params, prompt_copies=copies)


@pytest.mark.parametrize(
    ("request_", "max_tokens", "cost"),
    [
        (request_of(10), 7, 7),
        (request_of(10, n=3), 7, 21),
        (request_of(10, n=3, logprobs=0), 7, 21),
        (request_of(10, n=3, logprobs=4), 7, 105),
        (request_of(10, n=1, best_of=3, logprobs=4), 7, 105),
        (request_of(10, n=2, best_of=8, use_beam_search=True), 7, 56),
        (request_of(10, copies=3, n=3), 7, 3 * (7 + 10)),
        (request_of(10, copies=3, n=3, logprobs=4, prompt_logprobs=4), 7, 3 * (7 + 10) * 5),
        (request_of(10, copies=1, prompt_logprobs=2), 7, 7 + 10 * 3),
    ],
)
def test_cost_is_the_number_of_entries_in_the_answer(
    request_: GenerationRequest, max_tokens: int, cost: int
) -> None:
    assert request_cost(request_, max_tokens) == cost


def test_cost_at_the_bound_is_allowed_and_above_it_is_refused() -> None:
    one = request_of(1000, copies=4, n=4, logprobs=4, prompt_logprobs=4)
    params = replace(one.sampling, max_tokens=1500)
    cost = 3 * 4 * (1500 + 1000) * 5
    bounds = replace(BOUNDS, max_request_cost=cost)
    check_cost([one] * 3, [params] * 3, bounds)
    with pytest.raises(ServingError, match=rf"costs {cost}; at most {cost - 1} is") as refusal:
        check_cost([one] * 3, [params] * 3, replace(bounds, max_request_cost=cost - 1))
    assert refusal.value.param == "n"


@pytest.mark.parametrize(
    ("sampling", "num_prompts", "param", "action"),
    [
        ({"n": 64, "max_tokens": 16_000}, 1, "n", "reduce n"),
        ({"best_of": 64, "max_tokens": 16_000}, 1, "best_of", "reduce best_of"),
        ({"logprobs": 20, "max_tokens": 48_000}, 1, "logprobs", "reduce logprobs"),
        ({"max_tokens": 1000}, 1024, "prompt", "send fewer prompts"),
        ({"max_tokens": 1_000_001}, 1, "max_tokens", "reduce max_tokens"),
    ],
)
def test_least_cost_is_checked_and_names_a_field(
    sampling: dict[str, int], num_prompts: int, param: str, action: str
) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    with pytest.raises(ServingError, match=f": {action}$") as refusal:
        check_least_cost(params, num_prompts, MODEL, BOUNDS)
    assert refusal.value.param == param


@pytest.mark.parametrize("value", [-(10**40), -1, 0, 10**40])
def test_number_out_of_range_is_refused_as_such_before_it_is_priced(value: int) -> None:
    params = SamplingParams(n=value, max_tokens=value)
    with pytest.raises(ServingError, match="n must be a whole number from 1 to 64"):
        check_least_cost(params, 1, MODEL, BOUNDS)


def test_default_of_max_tokens_is_what_the_call_can_afford() -> None:
    bounds = replace(BOUNDS, max_request_cost=1000)
    assert default_max_tokens(request_of(10), 1, bounds) == 1000
    assert default_max_tokens(request_of(10, logprobs=4, n=2), 1, bounds) == 100
    assert default_max_tokens(request_of(10, copies=1, n=2), 5, bounds) == (200 - 10) // 2
    assert default_max_tokens(request_of(2000, copies=1), 1, bounds) == 1
    given = replace(request_of(10), default_max_tokens=16)
    assert default_max_tokens(given, 1, bounds) == 16


LISTS: dict[str, tuple[dict[str, object], int]] = {
    "allowed_token_ids": ({"allowed_token_ids": (5,) * 4096}, 256),
    "logit_bias": (
        {"logit_bias": dict.fromkeys(range(40), 1.0), "stop_token_ids": (1,) * 24},
        1 << 14,
    ),
    "stop_token_ids": ({"stop_token_ids": (1,) * 256}, 4096),
    "bad_words": ({"bad_words_token_ids": ((1,) * 32,) * 128}, 256),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_counted_once_for_each_prompt(name: str) -> None:
    lists, num_prompts = LISTS[name]
    model = replace(MODEL, vocab_size=4096)
    params = SamplingParams(max_tokens=1, **lists)  # type: ignore[arg-type]
    one = GenerationRequest([5], params)
    check_least_cost(params, num_prompts, model, BOUNDS)
    check_cost([one] * num_prompts, [params] * num_prompts, BOUNDS)
    total = MAX_LIST_ENTRIES // num_prompts * (num_prompts + 1)
    words = f"have {total} entries; at most 1048576 are.*: send fewer prompts or shorten {name}$"
    more = [one] * (num_prompts + 1)
    with pytest.raises(ServingError, match=words) as refusal:
        check_cost(more, [params] * len(more), BOUNDS)
    assert refusal.value.param == name
    with pytest.raises(ServingError, match=words):
        check_least_cost(params, len(more), model, BOUNDS)


def test_one_prompt_may_allow_all_tokens_of_any_vocabulary() -> None:
    params = SamplingParams(allowed_token_ids=(5,) * (MAX_LIST_ENTRIES + 1), max_tokens=1)
    model = replace(MODEL, vocab_size=MAX_LIST_ENTRIES + 1)
    check_least_cost(params, 1, model, BOUNDS)


LIMITS = {
    "prompts": ("prompt", BOUNDS.max_prompts),
    "messages": ("messages", BOUNDS.max_messages),
    "content_pieces": ("messages", BOUNDS.max_content_pieces),
    "logit_bias": ("logit_bias", BOUNDS.max_logit_bias),
    "stop": ("stop", BOUNDS.max_stop_strings),
    "stop_token_ids": ("stop_token_ids", BOUNDS.max_stop_tokens),
    "bad_words": ("bad_words", BOUNDS.max_bad_words),
    "resumed_choices": ("resume_from", BOUNDS.max_choices),
}


@pytest.mark.parametrize(("size", "limit"), LIMITS.items())
def test_lists_are_bounded_in_length(size: str, limit: tuple[str, int]) -> None:
    param, most = limit
    check_sizes(CallSizes(**{size: most}), BOUNDS)
    with pytest.raises(ServingError, match=str(most)) as refusal:
        check_sizes(CallSizes(**{size: most + 1}), BOUNDS)
    assert refusal.value.param == param
    assert param in refusal.value.message


def test_text_longer_than_any_that_fits_is_refused() -> None:
    check_text(1200, MODEL, 12, "prompt")
    with pytest.raises(ServingError, match="1201 characters; at most 1200 can fit") as refusal:
        check_text(1201, MODEL, 12, "prompt")
    assert refusal.value.param == "prompt"
