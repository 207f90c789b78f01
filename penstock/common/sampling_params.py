"""Sampling parameters: one validated record of how the tokens of a request are generated.

Protocol adapters construct the record, `validate` checks it, and `resolve` fills in the values that
depend on the prompt. The router, the scheduler, the sampler and the simulator read it. Names and
defaults are vLLM's, except that `max_tokens` defaults to the space left in the context.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.common.invalid_parameter import InvalidParameterError as InvalidParameterError
from penstock.common.number_text import number_text
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.thinking_budget import ThinkingBudget
from penstock.common.token_ids import check_token_ids

UINT64_MAX = 2**64 - 1


def _float32(value: float) -> float:
    """Round a number to float32, because parameters are sent to workers as float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (_float32(1e-6), 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (_float32(1e-6), 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (_float32(0.01), 10.0),
}
"""Smallest and largest allowed value of each parameter. All bounds are float32 values, so that an
allowed value is still allowed after rounding to float32."""

MAX_LOGIT_BIAS = 100.0
MAX_LENGTH_PENALTY = 5.0
EARLY_STOPPING = (False, True, "never")

BEAM_SEARCH_VALUES: Mapping[str, Collection[object]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "seed": (None,),
}
"""Allowed values of the parameters that have no effect in a beam search."""


class ContextLengthError(InvalidParameterError):
    """The prompt and the answer together do not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Upper bounds on the sizes of sampling parameters."""

    max_choices: int = 64  # limit of `n`, of `best_of`, and of the number of beams
    max_beam_tokens: int = 8192  # limit of the tokens of all answers of a beam search
    max_stop_strings: int = 16
    max_stop_chars: int = 256  # limit of the characters of one stop string
    max_stop_tokens: int = 256
    max_logit_bias: int = 1024  # limit of the number of entries of `logit_bias`
    max_bad_words: int = 64
    max_bad_word_chars: int = 256
    max_bad_word_tokens: int = 32
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of one request: how its tokens are sampled, and when its answers end.

    An answer may be continued on another worker or in another call. `min_tokens` and `max_tokens`
    count the whole answer, with the tokens that were generated before.

    Attributes:
        n: number of answers (choices) to return.
        best_of: number of answers to generate. The `n` likeliest of them are returned. In a beam
            search, this is the number of beams. None stands for `n`.
        temperature: temperature of sampling. 0 stands for greedy decoding.
        top_p: total probability of the likeliest tokens that are kept. 1 keeps all tokens.
        top_k: number of the likeliest tokens that are kept. 0 and -1 keep all tokens.
        min_p: smallest probability of a kept token, relative to the likeliest. 0 keeps all tokens.
        typical_p: mass of locally typical sampling, as in transformers. 1 keeps all tokens.
        presence_penalty: subtracted once from the logits of tokens that the answer contains.
        frequency_penalty: subtracted from a token's logit for each occurrence in the answer.
        repetition_penalty: positive logits of tokens that the prompt or the answer contains are
            divided by this number. Negative logits of such tokens are multiplied by it.
        logit_bias: numbers that are added to the logits, by token id.
        bad_words_token_ids: token sequences that an answer must not contain.
        allowed_token_ids: the only tokens that may be generated, or None for all tokens.
        seed: seed of the sampling noise. If it is None, `resolve` sets a seed.
        max_tokens: maximum length of an answer. None stands for the space left in the context.
        min_tokens: length that an answer must have before end tokens and stop strings end it.
        stop_token_ids: ids of the tokens that end an answer. On a worker, the list also has the
            model's own end tokens, unless `ignore_eos` is set (see `with_end_tokens`).
        ignore_eos: whether the model's own end tokens do not end an answer.
        logprobs: number of likeliest tokens per position whose log probabilities are returned,
            besides that of the generated token. None returns no log probabilities.
        prompt_logprobs: the same number as `logprobs`, but for the positions of the prompt.
        stop: strings that end an answer. The router matches them, so they are not sent to workers.
        include_stop_str_in_output: whether the matched stop string is kept in the text.
        skip_special_tokens: whether special tokens are left out of the text.
        use_beam_search: whether to use a beam search instead of sampling.
        length_penalty: exponent of the length by which a beam search divides its scores.
        early_stopping: when a beam search ends, as in transformers: False, True or "never".
        structured_outputs: form that every answer must have, or None for any form.
        thinking_budget: limit of the tokens of reasoning, or None for no limit.
        encoded_lists: the lists in the form that is sent to workers, or None if not encoded yet.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_outputs: StructuredOutputs | None = None
    thinking_budget: ThinkingBudget | None = None
    encoded_lists: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def num_sequences(self) -> int:
        """Number of answers or beams to generate. The best `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_generated(self) -> int:
        """Number of answers that a worker returns: `n` in a beam search, else `num_sequences`."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def is_ranked(self) -> bool:
        """True if the answers are ranked. They can then be returned only after all have ended."""
        return self.use_beam_search or self.num_sequences > self.n

    def answer_limit(self, num_prompt: int, max_model_len: int) -> int:
        """Return the maximum length of an answer in a context of `max_model_len` tokens."""
        free = max_model_len - num_prompt
        return free if self.max_tokens is None else min(self.max_tokens, free)

    # ------------------------------------------------------------ validation

    def validate(self, limits: SamplingLimits, vocab_size: int) -> None:
        """Check all parameters and their combinations.

        Raises:
            InvalidParameterError: a parameter is invalid. The error names the first invalid one.
        """
        _check_ranges(self, limits)
        _check_token_lists(self, limits, vocab_size)
        _check_token_choice(self, limits, vocab_size)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _wrong("max_tokens", f"must be at least 1, not {number_text(self.max_tokens)}")
        if self.use_beam_search:
            _check_beam_search(self, limits)
        elif self.length_penalty != 1 or self.early_stopping is not False:
            name = "early_stopping" if self.length_penalty == 1 else "length_penalty"
            raise _wrong(
                name, f"needs a beam search: set use_beam_search to true, or leave out {name}"
            )
        if self.min_tokens < 0:
            raise _wrong("min_tokens", f"must be at least 0, not {number_text(self.min_tokens)}")
        if self.max_tokens is not None:
            _check_count("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_stop_strings(self, limits)
        if self.structured_outputs is not None:
            _check_structured_outputs(self, self.structured_outputs)
        if self.thinking_budget is not None:
            self.thinking_budget.validate(vocab_size)

    # ------------------------------------------------------------ derived parameters

    def resolve(
        self,
        num_prompt: int,
        max_model_len: int,
        limits: SamplingLimits,
        seed: int,
        default_max_tokens: int | None = None,
    ) -> Self:
        """Return a copy in which `max_tokens` and `seed` have values. Call `validate` before.

        Args:
            num_prompt: number of tokens of the prompt, which is less than `max_model_len`.
            max_model_len: largest number of tokens of prompt and answer together.
            limits: its `max_beam_tokens` limits the default of `max_tokens` in a beam search.
            seed: the seed if none is set.
            default_max_tokens: the value of `max_tokens` if none is set, limited to the space left
                in the context. None stands for all of that space.

        Raises:
            InvalidParameterError: `max_tokens` or `min_tokens` is too large for the context.
        """
        free = max_model_len - num_prompt
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = free if default_max_tokens is None else min(free, default_max_tokens)
            if self.use_beam_search:
                max_tokens = min(max_tokens, limits.max_beam_tokens // self.n)
        elif max_tokens > free:
            raise ContextLengthError(
                f"max_tokens is {number_text(max_tokens)}, but the prompt has {num_prompt} tokens, "
                f"and this model's maximum context length is {max_model_len}: at most {free} fit",
                "max_tokens",
            )
        _check_count("min_tokens", self.min_tokens, 0, max_tokens)
        seed = (seed if self.seed is None else self.seed) & UINT64_MAX
        return replace(self, max_tokens=max_tokens, seed=seed)

    def for_worker(self) -> Self:
        """Return these parameters, which must be resolved, in the form that is sent to a worker.

        Without a beam search, the router selects the best `n` of `best_of` answers. The worker
        therefore gets `best_of` as its `n`, and returns log probabilities for the ranking. `stop`,
        `include_stop_str_in_output` and `skip_special_tokens` remain, but are not sent.
        """
        if not (self.use_beam_search or self.best_of is not None or self.top_k < 0):
            return self
        changed: dict[str, Any] = {
            "n": self.num_generated,
            "best_of": self.num_sequences if self.use_beam_search else None,
            "top_k": max(self.top_k, 0),
            "seed": None if self.use_beam_search else self.seed,
        }
        if self.num_generated > self.n and self.logprobs is None:
            changed["logprobs"] = 0
        return replace(self, **changed)

    def with_end_tokens(self, end_token_ids: Collection[int]) -> Self:
        """Return these parameters with the model's end tokens added to `stop_token_ids`.

        If `ignore_eos` is set, no tokens are added.
        """
        ends = () if self.ignore_eos else end_token_ids
        stops = tuple(dict.fromkeys((*self.stop_token_ids, *ends)))
        return self if stops == self.stop_token_ids else replace(self, stop_token_ids=stops)


def _wrong(name: str, problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} {problem}", name)


def check_bad_words(words: Sequence[str], limits: SamplingLimits) -> None:
    """Raise `InvalidParameterError` if `bad_words` has too many, blank or too long words."""
    _check_size("bad_words", len(words), limits.max_bad_words, "words")
    most = limits.max_bad_word_chars
    for index, word in enumerate(words):
        if not word.strip() or len(word) > most:
            found = f"has {len(word)} characters" if word.strip() else "is blank"
            problem = f"bad_words[{index}] {found}: expected 1 to {most} characters"
            raise InvalidParameterError(problem, "bad_words")


def _check_count(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        bounds, given = f"from {low} to {number_text(high)}", number_text(value)
        raise _wrong(name, f"must be a whole number {bounds}, not {given}")


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _wrong(name, f"must be a number from {low:g} to {high:g}, not {number_text(value)}")


def _check_size(name: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise _wrong(name, f"takes at most {most} {unit}, not {size}")


def _check_ranges(params: SamplingParams, limits: SamplingLimits) -> None:
    for name, (low, high) in RANGES.items():
        _check_number(name, getattr(params, name), low, high)
    _check_count("top_k", params.top_k, -1, 2**31 - 1)
    _check_count("n", params.n, 1, limits.max_choices)
    _check_count("best_of", params.best_of, params.n, limits.max_choices)
    _check_count("seed", params.seed, -(2**63), UINT64_MAX)
    _check_count("logprobs", params.logprobs, 0, limits.max_logprobs)
    _check_count("prompt_logprobs", params.prompt_logprobs, 0, limits.max_logprobs)


def _check_token_lists(params: SamplingParams, limits: SamplingLimits, vocab_size: int) -> None:
    for name, tokens, most in (
        ("stop_token_ids", params.stop_token_ids, limits.max_stop_tokens),
        ("logit_bias", params.logit_bias, limits.max_logit_bias),
    ):
        _check_size(name, len(tokens), most, "entries")
        check_token_ids(name, tokens, vocab_size)
    for token, value in params.logit_bias.items():
        if not abs(value) <= MAX_LOGIT_BIAS:
            bounds = f"from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            problem = f"of token {token} must be a number {bounds}, not {number_text(value)}"
            raise _wrong("logit_bias", problem)


def _check_token_choice(params: SamplingParams, limits: SamplingLimits, vocab_size: int) -> None:
    """Check that bad words and allowed tokens are valid, and together leave at least one token."""
    words, most = params.bad_words_token_ids, limits.max_bad_word_tokens
    # The list has one or two token sequences for each bad word.
    _check_size("bad_words", len(words), 2 * limits.max_bad_words, "token sequences")
    for word in words:
        if not 0 < len(word) <= most:
            raise _wrong("bad_words", f"has a word of {len(word)} tokens; 1 to {most} are allowed")
        check_token_ids("bad_words", word, vocab_size)
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    name = "allowed_token_ids"
    if not 0 < len(allowed) <= vocab_size:
        raise _wrong(name, f"must have 1 to {vocab_size} token ids, not {len(allowed)}")
    check_token_ids(name, allowed, vocab_size)
    if {word[0] for word in words if len(word) == 1}.issuperset(allowed):
        banned = f"bans all {len(allowed)} tokens of {name}, so no token is left"
        raise _wrong("bad_words", f"{banned}: remove a word from bad_words")


def _check_beam_search(params: SamplingParams, limits: SamplingLimits) -> None:
    if params.num_sequences < 2:
        name = "n" if params.best_of is None else "best_of"
        raise InvalidParameterError(
            f"use_beam_search needs {name} from 2 to {limits.max_choices}, not "
            f"{params.num_sequences}: {name} is the number of beams",
            name,
        )
    for name, harmless in BEAM_SEARCH_VALUES.items():
        if getattr(params, name) not in harmless:
            kept = " or ".join(f"{value:g}" for value in harmless if isinstance(value, float | int))
            which = f"leave {name} at {kept}" if kept else f"leave out {name}"
            raise InvalidParameterError(
                f"use_beam_search cannot be combined with {name}, which is for sampling: {which}",
                name,
            )
    if params.stop:
        raise InvalidParameterError(
            "use_beam_search supports stop_token_ids but not stop strings: leave out 'stop'", "stop"
        )
    _check_number("length_penalty", params.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if params.early_stopping not in EARLY_STOPPING:
        given = f"{params.early_stopping!r:.40}"
        raise _wrong("early_stopping", f'must be true, false or "never", not {given}')
    longest = limits.max_beam_tokens // params.n
    if params.max_tokens is not None and params.max_tokens > longest:
        raise InvalidParameterError(
            f"max_tokens is {number_text(params.max_tokens)}, but the {params.n} answers of a beam "
            f"search may have at most {limits.max_beam_tokens} tokens in all: set max_tokens to at "
            f"most {longest}",
            "max_tokens",
        )


def _check_stop_strings(params: SamplingParams, limits: SamplingLimits) -> None:
    _check_size("stop", len(params.stop), limits.max_stop_strings, "strings")
    for index, stop in enumerate(params.stop):
        if not 0 < len(stop) <= limits.max_stop_chars:
            raise InvalidParameterError(
                f"stop[{index}] has {len(stop)} characters; a stop string must have 1 to "
                f"{limits.max_stop_chars}",
                "stop",
            )


def _check_structured_outputs(params: SamplingParams, wanted: StructuredOutputs) -> None:
    wanted.validate()
    for name in ("use_beam_search", "ignore_eos"):
        if getattr(params, name):
            raise InvalidParameterError(
                f"structured_outputs cannot be combined with {name}: leave out one of them", name
            )
