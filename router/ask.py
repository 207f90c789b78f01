"""What a client asks, in one form for every protocol, and the checks that it must pass."""

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.common.text.detokenizer import StopOptions
from penstock.protos import worker_pb2
from penstock.router.config import Bounds
from penstock.router.errors import invalid

UINT64 = 2**64 - 1

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-6, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}
"""Inclusive; a value that is no finite number is in none of them."""

MAX_BIAS = 100.0
MAX_LENGTH_PENALTY = 5.0

EARLY_STOPPING: Mapping[bool | str, worker_pb2.EarlyStopping] = {
    False: worker_pb2.EARLY_STOPPING_FALSE,
    True: worker_pb2.EARLY_STOPPING_TRUE,
    "never": worker_pb2.EARLY_STOPPING_NEVER,
}

DRAWING: Mapping[str, Collection[object]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "seed": (None,),
}
"""What says how tokens are drawn, and the values that a beam search, which draws none, may have."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the client wants its tokens drawn; what it left out has these defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    best_of: int | None = None  # so many are drawn, and the n likeliest given; None: n
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    typical_p: float = 1.0
    bad_words: Sequence[Sequence[int]] = ()  # as their tokens
    allowed_tokens: Sequence[int] | None = None
    use_beam_search: bool = False  # with best_of (or n) beams
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # or "never"

    @property
    def num_sequences(self) -> int:
        """Choices that are drawn, or beams, to give n of them."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_told(self) -> int:
        """Choices that workers tell."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def is_ranked(self) -> bool:
        """Whether nothing can be said before all choices have ended."""
        return self.use_beam_search or self.num_sequences > self.n


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a client has of one choice already, from an earlier call."""

    tokens: Sequence[int] = ()
    finish: str = ""  # "stop" or "length", if it has ended


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and what is wanted for it."""

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    stops: Sequence[str] = ()
    include_stop: bool = False
    keep_special: bool = False
    timeout: float | None = None  # seconds
    default_max_tokens: int | None = (
        None  # where the client named none: None is what the context leaves
    )
    tenant: str = ""
    trace: str = ""
    so_far: Mapping[int, SoFar] = field(default_factory=dict)  # by choice; one left out has nothing


@dataclass(frozen=True, slots=True)
class Model:
    """What bounds a request to the model."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_tokens: frozenset[int] = frozenset()  # as workers tell them


def trace_of(name: str) -> str:
    """A client's own name for its request, fit for log lines."""
    return name[:128] if name.isascii() and name.isprintable() else ""


def check_prompt(prompt: Sequence[int], model: Model) -> None:
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


def check_vocabulary(tokens: Collection[int], model: Model, name: str) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.vocab_size):
        raise invalid(
            f"{name} holds token ids outside the vocabulary (0 to {model.vocab_size - 1})", name
        )


def check_bad_words(words: Sequence[str], bounds: Bounds) -> None:
    """Refuse bad words, still as text, that are too many or too long to be looked at."""
    if len(words) > bounds.max_bad_words:
        raise invalid(f"bad_words takes at most {bounds.max_bad_words} words", "bad_words")
    if any(not word.strip() or len(word) > bounds.max_bad_word_chars for word in words):
        raise invalid(
            f"a word of bad_words must have 1 to {bounds.max_bad_word_chars} characters, "
            "not only spaces",
            "bad_words",
        )


def text_rules(ask: Ask, bounds: Bounds) -> StopOptions:
    """The checked rules for an answer's text."""
    if len(ask.stops) > bounds.max_stop_strings:
        raise invalid(f"at most {bounds.max_stop_strings} stop strings are taken", "stop")
    if any(not 0 < len(stop) <= bounds.max_stop_chars for stop in ask.stops):
        raise invalid(f"a stop string must have 1 to {bounds.max_stop_chars} characters", "stop")
    return StopOptions(
        tuple(ask.stops), ask.include_stop, not ask.keep_special, ask.sampling.min_tokens
    )


def wire_params(ask: Ask, model: Model, bounds: Bounds) -> worker_pb2.SamplingParams:
    """The checked sampling parameters, complete, in the form that workers take."""
    sampling = ask.sampling
    _check_numbers(sampling, bounds)
    _check_lists(sampling, model, bounds)
    _check_choice(sampling, model, bounds)
    max_tokens = _max_tokens(ask, model)
    if sampling.use_beam_search:
        max_tokens = _check_beams(ask, max_tokens, bounds)
    elif sampling.length_penalty != 1 or sampling.early_stopping is not False:
        name = "early_stopping" if sampling.length_penalty == 1 else "length_penalty"
        raise invalid(f"{name} is for beam searches: set use_beam_search, or leave it out", name)
    _check_count("min_tokens", sampling.min_tokens, 0, max_tokens)
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed & UINT64,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop_tokens=sampling.stop_tokens,
        ignore_eos=sampling.ignore_eos,
        # Those who are ranked are ranked by them.
        logprobs=0 if _is_ranked_here(sampling) else sampling.logprobs,
        n=sampling.num_told,
        logit_bias=sampling.logit_bias,
        typical_p=sampling.typical_p,
        bad_words=[worker_pb2.BadWord(tokens=word) for word in sampling.bad_words],
        allowed_tokens=sampling.allowed_tokens,
        prompt_logprobs=sampling.prompt_logprobs,
        beams=_beams(sampling),
    )


def _is_ranked_here(sampling: Sampling) -> bool:
    """Whether log probabilities are needed that the client did not ask for."""
    return sampling.num_told > sampling.n and sampling.logprobs is None


def _beams(sampling: Sampling) -> worker_pb2.BeamSearch | None:
    if not sampling.use_beam_search:
        return None
    return worker_pb2.BeamSearch(
        width=sampling.num_sequences,
        length_penalty=sampling.length_penalty,
        early_stopping=EARLY_STOPPING[sampling.early_stopping],
    )


def _check_beams(ask: Ask, max_tokens: int, bounds: Bounds) -> int:
    """What a beam search cannot do; the most tokens that its answers may have."""
    sampling = ask.sampling
    if sampling.num_sequences < 2:
        name = "n" if sampling.best_of is None else "best_of"
        raise invalid(
            f"use_beam_search takes from 2 to {bounds.max_choices} beams: set {name} so", name
        )
    for name, harmless in DRAWING.items():
        if getattr(sampling, name) not in harmless:
            kept = " or ".join(f"{value:g}" for value in harmless if isinstance(value, float | int))
            which = f"leave {name} at {kept}" if kept else f"leave out {name}"
            raise invalid(f"use_beam_search draws no tokens: {which}", name)
    if ask.stops:
        raise invalid(
            "use_beam_search heeds stop_token_ids, no stop strings: leave out stop", "stop"
        )
    most = MAX_LENGTH_PENALTY
    if not -most <= sampling.length_penalty <= most:
        name = "length_penalty"
        raise invalid(f"{name} must be a number from {-most:g} to {most:g}", name)
    if sampling.early_stopping not in EARLY_STOPPING:
        raise invalid('early_stopping must be true, false or "never"', "early_stopping")
    longest = bounds.max_beam_tokens // sampling.n
    if sampling.max_tokens is None:
        return min(max_tokens, longest)
    if max_tokens > longest:
        raise invalid(
            f"the answers of a beam search may have {bounds.max_beam_tokens} tokens together: with "
            f"n = {sampling.n}, ask for max_tokens of at most {longest}",
            "max_tokens",
        )
    return max_tokens


def _check_numbers(sampling: Sampling, bounds: Bounds) -> None:
    for name, (low, high) in RANGES.items():
        if not low <= getattr(sampling, name) <= high:
            raise invalid(f"{name} must be a number from {low:g} to {high:g}", name)
    _check_count("top_k", sampling.top_k, -1, 2**31 - 1)
    _check_count("n", sampling.n, 1, bounds.max_choices)
    if sampling.best_of is not None:
        _check_count("best_of", sampling.best_of, sampling.n, bounds.max_choices)
    if sampling.seed is not None:
        _check_count("seed", sampling.seed, -(2**63), UINT64)


def _check_lists(sampling: Sampling, model: Model, bounds: Bounds) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None:
            _check_count(name, count, 0, bounds.max_logprobs)
    lists: Sequence[tuple[str, Collection[int], int]] = (
        ("stop_token_ids", sampling.stop_tokens, bounds.max_stop_tokens),
        ("logit_bias", sampling.logit_bias, bounds.max_logit_bias),
    )
    for name, tokens, most in lists:
        if len(tokens) > most:
            raise invalid(f"{name} takes at most {most} entries", name)
        check_vocabulary(tokens, model, name)
    values = sampling.logit_bias.values()
    if any(not math.isfinite(value) or abs(value) > MAX_BIAS for value in values):
        raise invalid(f"logit_bias values must be from -{MAX_BIAS:g} to {MAX_BIAS:g}", "logit_bias")


def _check_choice(sampling: Sampling, model: Model, bounds: Bounds) -> None:
    """The allowed tokens and the bad words must leave something to draw."""
    words, most = sampling.bad_words, bounds.max_bad_word_tokens
    if any(not 0 < len(word) <= most for word in words):
        raise invalid(f"a word of bad_words must have 1 to {most} tokens", "bad_words")
    for word in words:
        check_vocabulary(word, model, "bad_words")
    allowed = sampling.allowed_tokens
    if allowed is None:
        return
    name = "allowed_token_ids"
    if not 0 < len(allowed) <= model.vocab_size:
        raise invalid(f"{name} takes 1 to {model.vocab_size} entries", name)
    check_vocabulary(allowed, model, name)
    if {word[0] for word in words if len(word) == 1}.issuperset(allowed):
        raise invalid("bad_words ban every token of allowed_token_ids: leave one", "bad_words")


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid(f"{name} must be a whole number from {low} to {high}", name)


def _max_tokens(ask: Ask, model: Model) -> int:
    room = model.max_model_len - len(ask.prompt)
    asked = ask.sampling.max_tokens
    if asked is None:
        return room if ask.default_max_tokens is None else min(room, ask.default_max_tokens)
    if asked < 1:
        raise invalid("max_tokens must be at least 1", "max_tokens")
    if asked > room:
        raise invalid(
            f"max_tokens is {asked}, but the prompt has {len(ask.prompt)} tokens and the model's "
            f"context is {model.max_model_len}: ask for at most {room}",
            "max_tokens",
        )
    return asked
