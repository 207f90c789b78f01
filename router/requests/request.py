"""A client's request, independent of the protocol, and its validation."""

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
    """Tokens of one choice that the client has from an earlier call."""

    tokens: Sequence[int] = ()
    finish: str = ""  # "stop" or "length"; empty: the choice had not ended


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt with its sampling parameters, tenant and time limit."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout: float | None = None  # seconds
    default_max_tokens: int | None = None  # if max_tokens is absent; None: rest of the context
    tenant: str = ""
    request_id: str = ""
    resume_from: Mapping[int, ResumeState] = field(default_factory=dict)  # known tokens by choice


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_tokens: frozenset[int] = frozenset()  # as reported by workers


def safe_request_id(name: str) -> str:
    """Return a client's request id cut to 128 characters, or '' if it is unsafe for logs."""
    return name[:128] if name.isascii() and name.isprintable() else ""


def check_prompt(prompt: Sequence[int], model: ModelLimits) -> None:
    """Refuse a prompt that is empty, leaves no room for an answer, or has unknown token ids."""
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
    """Refuse token ids outside the model's vocabulary; `name` is the request field."""
    try:
        check_token_ids(name, tokens, model.vocab_size)
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def check_bad_words(words: Sequence[str], bounds: RequestBounds) -> None:
    """Refuse too many or too long bad words (as text), before they are tokenized."""
    try:
        check_bad_word_strings(words, bounds)
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def resolve_sampling(
    request: GenerationRequest, model: ModelLimits, bounds: RequestBounds
) -> SamplingParams:
    """Return validated sampling parameters with defaults filled in; raise INVALID on failure."""
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
    """Return the parameters that the detokenizer needs."""
    return StopOptions(
        params.stop,
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.min_tokens,
    )
