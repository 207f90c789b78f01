"""Resumes answers of an interrupted call: validates them and restores the detokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.common.number_text import number_text
from penstock.common.sampling_params import SamplingParams
from penstock.common.text.detokenizer import IncrementalDetokenizer
from penstock.router.errors import ServingError, invalid
from penstock.router.requests.request import (
    GenerationRequest,
    ModelLimits,
    ResumeState,
    check_vocabulary,
)
from penstock.router.requests.slices import Slices

TOKENS_PER_SLICE = 64  # tokens per slice: with 16 stop strings, one slice takes about 2 ms
FINISHES = ("", "stop", "length")


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """The end of a choice in an earlier call."""

    num_tokens: int
    finish: str
    stop: str | int | None = None  # the client's stop string or stop token that ended the choice


async def check_resume_state(
    request: GenerationRequest, params: SamplingParams, model: ModelLimits, slices: Slices
) -> None:
    """Refuse resume states that an earlier call with these parameters cannot have produced.

    `params` are the resolved sampling parameters of `request`.
    """
    if not request.resume_from:
        return
    sampling = request.sampling
    if sampling.is_ranked:
        what = "a beam search" if sampling.use_beam_search else "best_of above n"
        raise invalid(
            f"{what} returns complete answers at the end and cannot be resumed: "
            "leave out resume_from",
            "resume_from",
        )
    max_tokens = params.answer_limit(len(request.prompt), model.max_model_len)
    for choice, known in request.resume_from.items():
        if choice >= params.n:
            raise invalid(
                f"resume_from has choice {choice}, but n is {params.n}: choices are 0 to "
                f"{params.n - 1}",
                "resume_from",
            )
        if known.finish not in FINISHES:
            raise invalid(
                "finish_reason in resume_from must be 'stop', 'length' or empty, not "
                f"{known.finish[:40]!r}",
                "resume_from",
            )
        if len(known.tokens) > max_tokens:
            raise invalid(
                f"resume_from has {len(known.tokens)} tokens of choice {choice}, but the answer "
                f"may have at most {number_text(max_tokens)} tokens",
                "resume_from",
            )
        check_vocabulary(known.tokens, model, "resume_from")
        await slices.pause()
    is_begun = any(known.tokens for known in request.resume_from.values())
    if is_begun and sampling.temperature > 0 and sampling.seed is None:
        raise invalid(
            "resume_from has sampled tokens, but 'seed' is not set: set 'seed' to the value that "
            "came with the tokens",
            "seed",
        )


async def resume(
    request: GenerationRequest,
    params: SamplingParams,
    model: ModelLimits,
    texts: Sequence[IncrementalDetokenizer],
    slices: Slices,
) -> list[FinishedChoice | None]:
    """Feed the known tokens to the detokenizers `texts` and return the end of each choice.

    The end is None for a choice that has not ended.
    """
    if not request.resume_from:
        return [None] * len(texts)
    ends = frozenset() if params.ignore_eos else model.eos_tokens
    max_tokens = params.answer_limit(len(request.prompt), model.max_model_len)
    nothing = ResumeState()
    return [
        await _resume(
            choice, request.resume_from.get(choice, nothing), params, max_tokens, ends, text, slices
        )
        for choice, text in enumerate(texts)
    ]


async def _resume(
    choice: int,
    known: ResumeState,
    params: SamplingParams,
    max_tokens: int,
    eos_tokens: frozenset[int],
    text: IncrementalDetokenizer,
    slices: Slices,
) -> FinishedChoice | None:
    tokens = known.tokens
    own = frozenset(params.stop_token_ids)
    last = tokens[-1] if tokens and len(tokens) >= params.min_tokens else None
    stopped = last is not None and (last in own or last in eos_tokens)
    ended = bool(known.finish) or stopped or len(tokens) >= max_tokens
    last_start = max(len(tokens) - 1, 0) // TOKENS_PER_SLICE * TOKENS_PER_SLICE
    for start in range(0, last_start, TOKENS_PER_SLICE):
        output = text.feed(tokens[start : start + TOKENS_PER_SLICE])
        if output.stop is not None:
            raise _continues_past_stop(choice, start + output.num_tokens)
        await slices.pause()
    output = text.feed(tokens[last_start:], ended, stopped)
    if last_start + output.num_tokens < len(tokens):
        raise _continues_past_stop(choice, last_start + output.num_tokens)
    if output.stop is not None:
        return FinishedChoice(len(tokens), "stop", output.stop)
    if stopped:
        return FinishedChoice(len(tokens), "stop", last if last in own else None)
    return FinishedChoice(len(tokens), known.finish or "length") if ended else None


def _continues_past_stop(choice: int, num_tokens: int) -> ServingError:
    return invalid(
        f"resume_from has tokens after a stop string, which ends choice {choice} after "
        f"{num_tokens} tokens: leave out the later tokens",
        "resume_from",
    )
