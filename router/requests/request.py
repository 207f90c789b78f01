"""A client's request, independent of the protocol, and its validation."""

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.common.block_hash import MAX_SALT_BYTES
from penstock.common.number_text import number_text
from penstock.common.sampling_params import (
    ContextLengthError,
    InvalidParameterError,
    SamplingParams,
)
from penstock.common.sampling_params import check_bad_words as check_bad_word_strings
from penstock.common.text.detokenizer import StopOptions
from penstock.common.token_ids import check_token_ids
from penstock.router.config import RequestBounds
from penstock.router.errors import CONTEXT_LENGTH_EXCEEDED, invalid
from penstock.router.requests.slices import Slices

TOKENS_PER_CHECK = 64 << 10
"""Number of token ids of a prompt that are checked without a pause, in about 1 ms."""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """Tokens of one choice that the client has from an earlier call."""

    tokens: Sequence[int] = ()
    finish: str = ""  # "stop" or "length", or empty if the choice had not ended


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt with its sampling parameters, tenant and time limit."""

    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout: float | None = None  # time limit in seconds; None: the router's default
    # Default of `max_tokens`. None means that an answer may fill the rest of the context.
    default_max_tokens: int | None = None
    tenant: str = ""
    priority: int = 0  # as in vLLM, a tenant's requests with lower values go first
    request_id: str = ""
    # Tokens of an earlier call, by choice.
    resume_from: Mapping[int, ResumeState] = field(default_factory=dict)
    cache_salt: str = ""  # requests share KV only if tenant and salt are equal
    # Special tokens that the text of the answer contains.
    shown_tokens: frozenset[int] = frozenset()
    prompt_copies: int = 0  # how often the answers repeat the prompt (see `cost`)

    @property
    def salt(self) -> bytes:
        """Salt of the prefix cache: the tenant, and the request's `cache_salt` if it has one."""
        own = b"\0" + self.cache_salt.encode() if self.cache_salt else b""
        return self.tenant.encode() + own


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_tokens: frozenset[int] = frozenset()  # end tokens, as reported by workers


def check_priority(priority: int) -> None:
    """Refuse a priority that has more than 32 bits."""
    if not -(2**31) <= priority < 2**31:
        raise invalid(
            f"priority must be an integer from {-(2**31)} to {2**31 - 1}, not "
            f"{number_text(priority)}",
            "priority",
        )


def check_timeout(seconds: float) -> None:
    """Refuse a time limit that is not positive and finite."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise invalid(
            f"the timeout must be a finite number of seconds above 0, not {seconds:g}", "timeout"
        )


def safe_request_id(name: str) -> str:
    """Return a client's request id, cut to 128 characters.

    If these characters are unsafe for logs, the result is an empty string.
    """
    name = name[:128]
    return name if name.isascii() and name.isprintable() else ""


async def check_prompt(prompt: Sequence[int], model: ModelLimits, slices: Slices) -> None:
    """Refuse a prompt that is empty, leaves no room for an answer, or has unknown token ids."""
    if not prompt:
        raise invalid("the prompt is empty: send at least one token", "prompt")
    check_prompt_length(len(prompt), model)
    for start in range(0, len(prompt), TOKENS_PER_CHECK):
        check_vocabulary(prompt[start : start + TOKENS_PER_CHECK], model, "prompt")
        await slices.pause()


def check_prompt_length(num_tokens: int, model: ModelLimits) -> None:
    """Refuse a prompt of `num_tokens` if it leaves no room for an answer."""
    if num_tokens >= model.max_model_len:
        raise invalid(
            f"this model's maximum context length is {model.max_model_len} tokens, the answer "
            f"included, and the prompt has {num_tokens} tokens: shorten the prompt",
            "prompt",
            CONTEXT_LENGTH_EXCEEDED,
        )


def check_cache_salt(request: GenerationRequest) -> None:
    """Refuse a `cache_salt` that workers would refuse for its length."""
    excess = len(request.salt) - MAX_SALT_BYTES
    if excess > 0:
        most = len(request.cache_salt.encode()) - excess
        raise invalid(
            f"cache_salt has {most + excess} bytes; at most {most} are allowed", "cache_salt"
        )


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


def check_sampling(sampling: SamplingParams, model: ModelLimits, bounds: RequestBounds) -> None:
    """Refuse invalid sampling parameters."""
    try:
        sampling.validate(bounds, model.vocab_size)
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def resolve_sampling(
    request: GenerationRequest,
    model: ModelLimits,
    bounds: RequestBounds,
    default_max_tokens: int | None = None,
    is_valid: bool = False,
) -> SamplingParams:
    """Return validated sampling parameters with defaults filled in; raise INVALID on failure.

    `is_valid` is True if the sampling parameters have already been validated.
    """
    if not is_valid:
        check_sampling(request.sampling, model, bounds)
    try:
        return request.sampling.resolve(
            len(request.prompt),
            model.max_model_len,
            bounds,
            seed=secrets.randbits(63),
            default_max_tokens=default_max_tokens,
        )
    except ContextLengthError as error:
        raise invalid(str(error), error.param, CONTEXT_LENGTH_EXCEEDED) from error
    except InvalidParameterError as error:
        raise invalid(str(error), error.param) from error


def stop_options(params: SamplingParams, shown_tokens: frozenset[int] = frozenset()) -> StopOptions:
    """Return the parameters that the detokenizer needs."""
    return StopOptions(
        params.stop,
        params.include_stop_str_in_output,
        params.skip_special_tokens,
        params.min_tokens,
        shown_tokens,
    )
