"""An answer that goes on: its text from any place is what follows there in the whole answer."""

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


def params_of(ask: GenerationRequest) -> SamplingParams:
    return resolve_sampling(ask, MODEL, RequestBounds())


def resumed(
    ask: GenerationRequest, rules: StopOptions
) -> tuple[list[IncrementalDetokenizer], list[FinishedChoice | None]]:
    params = params_of(ask)
    check_resume_state(ask, params, MODEL)
    texts = [IncrementalDetokenizer(PIECES, rules) for _ in range(params.n)]
    return texts, resume(ask, params, MODEL, texts)


def ask_of(tokens: list[int], finish: str = "", **sampling: object) -> GenerationRequest:
    fields = {"temperature": 0.0, **sampling}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return GenerationRequest([5], params, resume_from={0: ResumeState(tokens, finish)})


RULES = st.builds(
    StopOptions,
    stop=st.lists(st.sampled_from(["dog d", "日本", "y", "😀 ", "zz"]), max_size=2).map(tuple),
    include_stop_str_in_output=st.booleans(),
    min_tokens=st.integers(0, 9),
)
TEXTS = st.sampled_from(["the lazy dog does 日本 not mind 😀 at all", "yyy dog dog d", "a日😀b"])


@given(TEXTS, RULES, st.data())
def test_the_text_goes_on_where_it_was(text: str, rules: StopOptions, data: st.DataObject) -> None:
    tokens = tokens_of(text)
    whole, shown, end = IncrementalDetokenizer(PIECES, rules), [], len(tokens)
    for count, token in enumerate(tokens, start=1):
        told = whole.feed([token], ended=count == len(tokens))
        shown.append(told.text)
        if told.stop is not None:
            end = count
            break
    cut = data.draw(st.integers(0, end - 1))
    ask = ask_of(tokens[:cut], max_tokens=len(tokens), min_tokens=min(rules.min_tokens, 1))
    (rest,), past = resumed(ask, rules)
    assert past == [None]
    told = rest.feed(tokens[cut:], ended=True)
    assert told.text == "".join(shown[cut:])
    assert told.num_tokens == end - cut


STOPS = StopOptions(stop=("dog",))
DOG = tokens_of("the dog")


@pytest.mark.parametrize(
    ("ask", "rules", "end"),
    [
        (ask_of([7, 8], "length"), StopOptions(), FinishedChoice(2, "length")),
        (ask_of([7, 8], "stop"), StopOptions(), FinishedChoice(2, "stop")),
        (ask_of([7, 8], max_tokens=2), StopOptions(), FinishedChoice(2, "length")),
        (ask_of([7, 8], max_tokens=3), StopOptions(), None),
        (ask_of([7, END]), StopOptions(), FinishedChoice(2, "stop")),
        (ask_of([7, END], ignore_eos=True), StopOptions(), None),
        (ask_of([7, END], min_tokens=3), StopOptions(), None),
        (ask_of([7, 9], stop_token_ids=(9,)), StopOptions(), FinishedChoice(2, "stop", 9)),
        (ask_of([7, 9], "stop", stop_token_ids=(9,)), StopOptions(), FinishedChoice(2, "stop", 9)),
        (ask_of(DOG), STOPS, FinishedChoice(len(DOG), "stop", "dog")),
        (ask_of(DOG, "stop"), STOPS, FinishedChoice(len(DOG), "stop", "dog")),
        (ask_of(DOG[:-1]), STOPS, None),
        (ask_of([]), STOPS, None),
    ],
)
def test_what_has_ended_is_seen(
    ask: GenerationRequest, rules: StopOptions, end: FinishedChoice | None
) -> None:
    assert resumed(ask, rules)[1] == [end]


def test_choices_are_apart() -> None:
    sampling = SamplingParams(n=3, seed=5)
    ask = GenerationRequest(
        [5], sampling, resume_from={2: ResumeState([7], "stop"), 1: ResumeState([8, 9])}
    )
    assert resumed(ask, StopOptions())[1] == [None, None, FinishedChoice(1, "stop")]
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
    ("ask", "words"),
    [
        (ask_of([500]), "outside the vocabulary"),
        (ask_of([7] * 4, max_tokens=3), "4 tokens of choice 0, and max_tokens is 3"),
        (ask_of([7] * 100), "and max_tokens is 99"),
        (ask_of([7], "error"), "must be stop, length or empty"),
        (ask_of([7], temperature=0.5), "give the seed"),
        (ask_of([7], n=2, best_of=3), "best_of above n tells its answers whole"),
        (ask_of([], use_beam_search=True, n=2), "a beam search tells its answers whole"),
        (
            GenerationRequest([5], SamplingParams(n=2), resume_from={2: ResumeState()}),
            "choice 2, but n is 2",
        ),
        (ask_of([*DOG, 9]), "behind the stop string that ends choice 0"),
    ],
)
def test_what_cannot_go_on_is_refused(ask: GenerationRequest, words: str) -> None:
    with pytest.raises(ServingError, match=words) as refusal:
        resumed(ask, STOPS)
    assert refusal.value.code is Code.INVALID
    assert "\n" not in refusal.value.message


def test_a_seed_is_needed_only_for_what_was_drawn() -> None:
    for ask in (ask_of([7], temperature=0.5, seed=3), ask_of([], temperature=0.5), ask_of([7])):
        check_resume_state(ask, params_of(ask), MODEL)
