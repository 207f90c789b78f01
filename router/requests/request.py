"""What a client asks, in one form for every protocol, and the checks that it must pass."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.common.sampling_params import (
    InvalidParameterError,
    SamplingParams,
    check_token_ids,
)
from penstock.common.sampling_params import check_bad_words as check_bad_word_strings
from penstock.common.text.detokenizer import StopOptions
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What a client has of one choice already, from an earlier call."""

    tokens: Sequence[int] = ()
    finish: str = ""  # "stop" or "length", if it has ended


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and what is wanted for it."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout: float | None = None  # seconds
    default_max_tokens: int | None = (
        None  # where the client named none: None is what the context leaves
    )
    tenant: str = ""
    request_id: str = ""
    resume_from: Mapping[int, ResumeState] = field(
        default_factory=dict
    )  # by choice; one left out has nothing


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a request to the model."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_tokens: frozenset[int] = frozenset()  # as workers tell them


def safe_request_id(name: str) -> str:
    """A client's own name for its request, fit for log lines."""
    return name[:128] if name.isascii() and name.isprintable() else ""


def check_prompt(prompt: Sequence[int], model: ModelLimits) -> None:
    """Refuse prompts that are empty, leave no room for a token, or hold no tokens of the model."""
    if not prompt:
        raise invalid("the prompt is empty: send at least one token", "prompt")
    if len(prompt) >= model.max_model_len:
        raise invalid(
            f"the prompt has {len(prompt)} tokens and the model's context is "
            f"{model.max_model_len}, the answer included: shorten the prompt",
            "prompt",
        )
    check_vocabulary(prompt, model, "prompt")


def check_vocabulary(tokens: Collection[int], model: ModelLimits, name: str) -> None:
    """Refuse token ids that the model does not have."""
    try:
        check_token_ids(name, tokens, model.vocab_size)
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def check_bad_words(words: Sequence[str], bounds: RequestBounds) -> None:
    """Refuse bad words, still as text, that are too many or too long to be tokenized."""
    try:
        check_bad_word_strings(words, bounds)
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def resolve_sampling(
    request: GenerationRequest, model: ModelLimits, bounds: RequestBounds
) -> SamplingParams:
    """Return the request's sampling parameters, validated and resolved; INVALID otherwise."""
    try:
        request.sampling.validate(bounds, model.vocab_size)
        return request.sampling.resolve(
            len(request.prompt),
            model.max_model_len,
            bounds,
            seed=secrets.randbits(63),
            default_max_tokens=request.default_max_tokens,
        )
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def stop_options(params: SamplingParams) -> StopOptions:
    """Return what the detokenizer needs of a request's parameters."""
    return StopOptions(
        params.stop,
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.min_tokens,
    )
