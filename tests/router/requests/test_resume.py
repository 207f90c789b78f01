"""Resuming an answer at any position gives exactly the remaining text."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from penstock.router.config import RequestBounds
from penstock.router.errors import Code, ServingError
from penstock.router.requests.request import (
    GenerationRequest,
    ModelLimits,
    ResumeState,
    resolve_sampling,
)
from penstock.router.requests.resume import FinishedChoice, check_resume_state, resume
from penstock.router.requests.slices import Slices
from penstock.router.routing.events import Request
from penstock.router.routing.token_log import TokenLog
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
PIECES = TokenBytes(TOKENIZER)
MODEL = ModelLimits("m", 100, 500, frozenset({2}))
NO_ENDS: frozenset[int] = frozenset()
END = 2


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def params_of(request_: GenerationRequest) -> SamplingParams:
    return resolve_sampling(request_, MODEL, RequestBounds())


def resumed(
    request_: GenerationRequest, options: StopOptions
) -> tuple[list[IncrementalDetokenizer], list[FinishedChoice | None]]:
    params, slices = params_of(request_), Slices()
    asyncio.run(check_resume_state(request_, params, MODEL, slices))
    texts = [IncrementalDetokenizer(PIECES, options) for _ in range(params.n)]
    return texts, asyncio.run(resume(request_, params, MODEL, texts, slices))


def request_of(tokens: list[int], finish: str = "", **sampling: object) -> GenerationRequest:
    fields = {"temperature": 0.0, **sampling}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return GenerationRequest([5], params, resume_from={0: ResumeState(tokens, finish)})


OPTIONS = st.builds(
    StopOptions,
    stop=st.lists(st.sampled_from(["dog d", "日本", "y", "😀 ", "zz"]), max_size=2).map(tuple),
    include_stop_str_in_output=st.booleans(),
    min_tokens=st.integers(0, 9),
)
TEXTS = st.sampled_from(["the lazy dog does 日本 not mind 😀 at all", "yyy dog dog d", "a日😀b"])


@given(TEXTS, OPTIONS, st.data())
def test_resumed_text_continues_at_the_cut(
    text: str, options: StopOptions, data: st.DataObject
) -> None:
    tokens = tokens_of(text)
    whole, delta_texts, end = IncrementalDetokenizer(PIECES, options), [], len(tokens)
    for count, token in enumerate(tokens, start=1):
        delta = whole.feed([token], ended=count == len(tokens))
        delta_texts.append(delta.text)
        if delta.stop is not None:
            end = count
            break
    cut = data.draw(st.integers(0, end - 1))
    request_ = request_of(
        tokens[:cut], max_tokens=len(tokens), min_tokens=min(options.min_tokens, 1)
    )
    (rest,), finished = resumed(request_, options)
    assert finished == [None]
    delta = rest.feed(tokens[cut:], ended=True)
    assert delta.text == "".join(delta_texts[cut:])
    assert delta.num_tokens == end - cut


STOP_OPTIONS = StopOptions(stop=("dog",))
DOG = tokens_of("the dog")


@pytest.mark.parametrize(
    ("request_", "options", "end"),
    [
        (request_of([7, 8], "length"), StopOptions(), FinishedChoice(2, "length")),
        (request_of([7, 8], "stop"), StopOptions(), FinishedChoice(2, "stop")),
        (request_of([7, 8], max_tokens=2), StopOptions(), FinishedChoice(2, "length")),
        (request_of([7, 8], max_tokens=3), StopOptions(), None),
        (request_of([7, END]), StopOptions(), FinishedChoice(2, "stop")),
        (request_of([7, END], ignore_eos=True), StopOptions(), None),
        (request_of([7, END], min_tokens=3), StopOptions(), None),
        (request_of([7, 9], stop_token_ids=(9,)), StopOptions(), FinishedChoice(2, "stop", 9)),
        (
            request_of([7, 9], "stop", stop_token_ids=(9,)),
            StopOptions(),
            FinishedChoice(2, "stop", 9),
        ),
        (request_of(DOG), STOP_OPTIONS, FinishedChoice(len(DOG), "stop", "dog")),
        (request_of(DOG, "stop"), STOP_OPTIONS, FinishedChoice(len(DOG), "stop", "dog")),
        (request_of(DOG[:-1]), STOP_OPTIONS, None),
        (request_of([]), STOP_OPTIONS, None),
    ],
)
def test_finished_choice_is_recognized(
    request_: GenerationRequest, options: StopOptions, end: FinishedChoice | None
) -> None:
    assert resumed(request_, options)[1] == [end]


def test_choices_resume_independently() -> None:
    sampling = SamplingParams(n=3, seed=5)
    request_ = GenerationRequest(
        [5], sampling, resume_from={2: ResumeState([7], "stop"), 1: ResumeState([8, 9])}
    )
    assert resumed(request_, StopOptions())[1] == [None, None, FinishedChoice(1, "stop")]
    log = TokenLog(
        Request(
            1,
            [5],
            SamplingParams(),
            num_choices=3,
            log=[[], [8, 9], [7]],
            ended=[False, False, True],
        )
    )
    assert log.answers == [[], [8, 9], [7]]
    assert log.copy()[1] == (False, False, True)
    assert log.num_remaining == 16


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (request_of([500]), "outside the vocabulary"),
        (
            request_of([7] * 4, max_tokens=3),
            "4 tokens of choice 0, but the answer may have at most 3",
        ),
        (request_of([7] * 100), "but the answer may have at most 99"),
        (request_of([7], "error"), "must be 'stop', 'length' or empty"),
        (request_of([7], temperature=0.5), "set 'seed'"),
        (request_of([7], n=2, best_of=3), "best_of above n returns complete answers"),
        (request_of([], use_beam_search=True, n=2), "a beam search returns complete answers"),
        (
            GenerationRequest([5], SamplingParams(n=2), resume_from={2: ResumeState()}),
            "choice 2, but n is 2",
        ),
        (request_of([*DOG, 9]), "tokens after a stop string, which ends choice 0"),
    ],
)
def test_invalid_resume_state_is_refused(request_: GenerationRequest, words: str) -> None:
    with pytest.raises(ServingError, match=words) as refusal:
        resumed(request_, STOP_OPTIONS)
    assert refusal.value.code is Code.INVALID
    assert "\n" not in refusal.value.message


def test_seed_is_required_only_for_tokens_that_were_sampled() -> None:
    for request_ in (
        request_of([7], temperature=0.5, seed=3),
        request_of([], temperature=0.5),
        request_of([7]),
    ):
        asyncio.run(check_resume_state(request_, params_of(request_), MODEL, Slices()))
