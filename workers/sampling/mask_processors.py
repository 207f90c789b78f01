"""Mask processors: objects that exclude tokens as the next token of one sequence.

A processor is a function of the sequence's parameters and its token log. A sequence that continues
on another worker therefore gets the same masks.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from penstock.common.grammar.matcher import BITS, CompiledGrammar, Matcher, Words
from penstock.common.sampling_params import SamplingParams
from penstock.common.thinking_budget import ThinkingBudget
from penstock.workers.scheduling.sequence import Ints

Tokens: TypeAlias = npt.NDArray[np.int64]

NEVER = int(np.iinfo(np.int64).max)
"""Answer index beyond the end of any answer."""

WILDCARD = -1  # in a pattern: matches any token and BEFORE_START
BEFORE_START = -2  # stands for positions before the first token of the sequence


class MaskProcessor(Protocol):
    """Excludes tokens by clearing bits; see `penstock.kernels.sampling.token_mask`."""

    reads_log_from: int  # answer index from which the mask depends on the tokens of the answer
    is_done: bool  # True once the processor will exclude no more tokens, however the log continues

    def is_active(self, index: int) -> bool:
        """Return whether the mask of the answer's token `index` may exclude a token."""

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        """Clear the bits of tokens that may not come next.

        Args:
            words: [W] int32 packed bits, one bit per token of the vocabulary.
            log: [L] prompt and answer so far.
            num_prompt: length of the prompt.
        """


class AllowedTokens:
    """Excludes all tokens except the allowed ones."""

    reads_log_from = NEVER
    is_done = False

    def __init__(self, tokens: Sequence[int], num_words: int) -> None:
        self._words = np.zeros(num_words, np.int32)
        _set_bits(self._words, np.unique(np.array(tokens, np.int64)))

    def is_active(self, index: int) -> bool:
        return True

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        # `words` may be wider than this mask: with a grammar, `words` covers the tokenizer's
        # tokens, and the tokenizer may have more tokens than the model.
        own = len(self._words)
        words[:own] &= self._words
        words[own:] = 0


class BadWords:
    """Excludes the last token of a bad word if the log ends with the word's preceding tokens.

    A bad word of one token is always excluded.
    """

    is_done = False

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        width = max(map(len, words))
        rows = [[WILDCARD] * (width - len(word)) + list(word) for word in words]
        self._patterns: Tokens = np.array(rows, np.int64)
        self.reads_log_from = 0 if width > 1 else NEVER

    def is_active(self, index: int) -> bool:
        return True

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        prefixes, last = self._patterns[:, :-1], self._patterns[:, -1]
        count = prefixes.shape[1]
        before = np.full(count, BEFORE_START, np.int64)
        if kept := min(count, len(log)):
            before[count - kept :] = log[len(log) - kept :]
        found = ((prefixes == before) | (prefixes == WILDCARD)).all(-1)
        _clear_bits(words, last[found])


class GrammarMask:
    """Excludes tokens that a grammar does not allow after the answer so far.

    The matcher consumes each token of the answer once, and is never rolled back. If a mask allows
    only one token, the answer must continue with this "forced" token. The matcher may consume
    forced tokens before they are part of the answer.

    Args:
        grammar: the grammar of the answer.
        stops: tokens that end the answer.
    """

    reads_log_from = 0
    is_done = False

    def __init__(self, grammar: CompiledGrammar, stops: Tokens) -> None:
        self.matcher: Matcher = grammar.matcher()
        self._stops = frozenset(stops.tolist())
        self._num_seen = 0  # tokens of the answer that the matcher has consumed
        self._ahead: list[int] = []  # consumed tokens that are not yet in the answer
        self._mask: Words | None = None  # [W] mask of the matcher's position, if it is known
        self._only: int | None = None  # the only token that the mask allows

    def is_active(self, index: int) -> bool:
        return True

    @property
    def needs_fill(self) -> bool:
        """True if `keep` must get the mask of the matcher's position."""
        return self._mask is None

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows nothing but an end token after the answer so far."""
        return self.matcher.is_complete and not self._ahead

    def advance(self, log: Ints, num_prompt: int) -> None:
        """Consume the tokens of the answer that the matcher has not seen."""
        num_ahead = self._num_seen - (len(log) - num_prompt)
        if num_ahead < 0:
            self.matcher.advance(log[num_ahead:].tolist())
            self._num_seen -= num_ahead
            self._mask = self._only = None
        self._ahead = self._ahead[len(self._ahead) - num_ahead :] if num_ahead > 0 else []

    def keep(self, mask: Words, only: int | None) -> None:
        """Keep the mask [W] of the matcher's position. The caller must not change the mask later.

        only: the only token that the mask allows; None if the mask allows none or several.
        """
        self._mask = mask
        self._only = only

    @property
    def single(self) -> int | None:
        """The only token that may come next; None if no token or several tokens may come next."""
        return self._ahead[0] if self._ahead else self._only

    def allowed(self, words: Words) -> None:
        """Set the bits of the tokens that may come next; clear all others."""
        words[:] = 0
        if self._ahead:
            _set_bits(words, np.array(self._ahead[:1], np.int64))
        elif self._mask is not None:
            words[: len(self._mask)] = self._mask

    def consume_forced(self) -> bool:
        """Consume the only token that the kept mask allows, and drop the mask.

        Return False, and do nothing, if the mask allows several tokens, or only a token that ends
        the answer.
        """
        token = self._only
        if (
            self._mask is None
            or token is None
            or token in self._stops
            or not self.matcher.advance([token])
        ):
            return False
        self._ahead.append(token)
        self._num_seen += 1
        self._mask = self._only = None
        return True

    def forced(self) -> list[int]:
        """Return the known forced tokens, with an end token added if only an end may follow."""
        if not self._ahead and self._only is None:
            return []
        end = self._only if self.matcher.is_complete else None
        return self._ahead if end is None else [*self._ahead, end]

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        self.advance(log, num_prompt)
        allowed = np.zeros_like(words)
        if self.needs_fill:
            filled = np.zeros_like(words)
            self.matcher.fill(filled)
            self.keep(filled, only_tokens(filled[None])[0])
        self.allowed(allowed)
        words &= allowed


class MinTokens:
    """Excludes stop tokens until an answer has `min_tokens` tokens.

    An answer may end earlier if its grammar allows only an end token.
    """

    reads_log_from = NEVER
    is_done = False

    def __init__(self, stops: Tokens, min_tokens: int, grammar: GrammarMask | None) -> None:
        self._stops = stops
        self._min_tokens = min_tokens
        self._grammar = grammar

    def is_active(self, index: int) -> bool:
        return index < self._min_tokens

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        if self._grammar is None or not self._grammar.is_complete:
            _clear_bits(words, self._stops)


class ReasoningEnd:
    """Excludes all tokens except the end of the reasoning once the thinking budget is used up.

    If an earlier processor (a grammar) excludes the end of the reasoning, this processor excludes
    nothing. Only the first reasoning of an answer has a budget; the processor is done when that
    reasoning ends.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._start = np.array(budget.start, np.int32)
        self.reads_log_from = budget.num_tokens + len(budget.start)
        self.is_done = False

    def is_active(self, index: int) -> bool:
        return index >= self.reads_log_from

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        answer = log[num_prompt:]
        begin = _end_of_first(answer, self._start)
        self.is_done = begin is not None and bool((answer[begin:] == self._budget.end).any())
        if begin is None or self.is_done or len(answer) - begin < self._budget.num_tokens:
            return
        word, bit = divmod(self._budget.end, BITS)
        if words[word] >> bit & 1:
            words[:] = 0
            _set_bits(words, np.array([self._budget.end], np.int64))


def mask_processors(
    params: SamplingParams, vocab_size: int, num_words: int, grammar: CompiledGrammar | None
) -> tuple[MaskProcessor, ...]:
    """Return the processors of a sequence, in the order in which they are applied.

    Token ids in `params`, except stop tokens, must be within the vocabulary.
    """
    found: list[MaskProcessor] = []
    stops = np.array(params.stop_token_ids, np.int64)
    constrained = None if grammar is None else GrammarMask(grammar, stops)
    if constrained is not None:
        found.append(constrained)
    if params.allowed_token_ids:
        found.append(AllowedTokens(params.allowed_token_ids, num_words))
    if params.bad_words_token_ids:
        found.append(BadWords(params.bad_words_token_ids))
    stops = stops[(stops >= 0) & (stops < vocab_size)]
    if params.min_tokens and len(stops):
        found.append(MinTokens(stops, params.min_tokens, constrained))
    if params.thinking_budget is not None:
        found.append(ReasoningEnd(params.thinking_budget))
    return tuple(found)


def can_force(params: SamplingParams, processors: Sequence[MaskProcessor]) -> bool:
    """Return whether several forced tokens of a sequence may be appended in one step.

    Several tokens cannot be appended if log probabilities are requested, or if another processor
    could exclude one of these tokens. `MinTokens` and `ReasoningEnd` never exclude a forced token.
    `MinTokens` excludes only tokens that end the answer, which `GrammarMask` does not consume
    ahead. `ReasoningEnd` excludes nothing if the grammar allows a single other token.
    """
    quiet = all(isinstance(each, GrammarMask | MinTokens | ReasoningEnd) for each in processors)
    return (
        bool(processors)
        and isinstance(processors[0], GrammarMask)
        and quiet
        and (params.logprobs is None)
    )


def only_tokens(masks: Words) -> list[int | None]:
    """Return the only token that each mask [M, W] allows; None if a mask allows none or several."""
    found: list[int | None] = [None] * len(masks)
    counts = np.count_nonzero(masks, axis=1)
    for index in (counts == 1).nonzero()[0].tolist():
        at = int(masks[index].nonzero()[0][0])
        word = int(masks[index, at]) & 0xFFFFFFFF
        if word & (word - 1) == 0:
            found[index] = at * BITS + word.bit_length() - 1
    return found


def _end_of_first(answer: Ints, pattern: Ints) -> int | None:
    """Return the index after the first occurrence of `pattern`; None if it does not occur."""
    count = len(pattern)
    if count == 0:
        return 0
    if len(answer) < count:
        return None
    found = (sliding_window_view(answer, count) == pattern).all(-1).nonzero()[0]
    return int(found[0]) + count if len(found) else None


def _set_bits(words: Words, tokens: Tokens) -> None:
    np.bitwise_or.at(words, tokens // BITS, _bits(tokens))


def _clear_bits(words: Words, tokens: Tokens) -> None:
    np.bitwise_and.at(words, tokens // BITS, ~_bits(tokens))


def _bits(tokens: Tokens) -> Words:
    return (np.uint32(1) << (tokens % BITS).astype(np.uint32)).view(np.int32)
