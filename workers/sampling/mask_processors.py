"""Mask processors: each excludes tokens from one sequence's next token.

A processor is a function of the sequence's parameters and its token log. A sequence that continues
on another worker therefore gets the same masks.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.common.grammar.matcher import BITS, CompiledGrammar, Matcher, Words
from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import Ints

Tokens: TypeAlias = npt.NDArray[np.int64]

WILDCARD = -1  # in a pattern: matches any token, and also BEFORE_START
BEFORE_START = -2  # in place of a token: the position is before the first token of the sequence


class MaskProcessor(Protocol):
    """Excludes tokens by clearing bits; see `penstock.kernels.sampling.token_mask`."""

    reads_log: bool  # whether the mask depends on the tokens, and not only on their number

    def is_active(self, index: int) -> bool:
        """Return whether the mask of the answer's token `index` may exclude a token."""

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        """Clear the bits of tokens that may not come next.

        Args:
            words: [W] int32.
            log: [L] prompt and answer so far.
            num_prompt: length of the prompt.
        """


class AllowedTokens:
    """Excludes all tokens except the allowed ones."""

    reads_log = False

    def __init__(self, tokens: Sequence[int], num_words: int) -> None:
        self._words = np.zeros(num_words, np.int32)
        _set_bits(self._words, np.unique(np.array(tokens, np.int64)))

    def is_active(self, index: int) -> bool:
        return True

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        words &= self._words


class BadWords:
    """Excludes the last token of a bad word where the log ends with the word's other tokens.

    A bad word of one token is always excluded.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        width = max(map(len, words))
        rows = [[WILDCARD] * (width - len(word)) + list(word) for word in words]
        self._patterns: Tokens = np.array(rows, np.int64)
        self.reads_log = width > 1

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

    The matcher consumes each token of the answer once, and never goes back.
    """

    reads_log = True

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.matcher: Matcher = grammar.matcher()
        self._num_seen = 0  # tokens of the answer that the matcher has consumed

    def is_active(self, index: int) -> bool:
        return True

    def advance(self, log: Ints, num_prompt: int) -> None:
        """Consume the tokens of the answer that the matcher has not seen."""
        answer = log[num_prompt + self._num_seen :]
        if len(answer):
            self.matcher.advance(answer.tolist())
            self._num_seen += len(answer)

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        self.advance(log, num_prompt)
        allowed = np.zeros_like(words)
        self.matcher.fill(allowed)
        words &= allowed


class MinTokens:
    """Excludes stop tokens until an answer has `min_tokens` tokens.

    An answer may end earlier if its grammar allows only an end token.
    """

    reads_log = False

    def __init__(self, stops: Tokens, min_tokens: int, grammar: GrammarMask | None) -> None:
        self._stops = stops
        self._min_tokens = min_tokens
        self._grammar = grammar

    def is_active(self, index: int) -> bool:
        return index < self._min_tokens

    def exclude(self, words: Words, log: Ints, num_prompt: int) -> None:
        if self._grammar is None or not self._grammar.matcher.is_complete:
            _clear_bits(words, self._stops)


def mask_processors(
    params: SamplingParams, vocab_size: int, num_words: int, grammar: CompiledGrammar | None
) -> tuple[MaskProcessor, ...]:
    """Return the processors of a sequence, in the order in which they are applied.

    Token ids in `params`, except stop tokens, must be within the vocabulary.
    """
    found: list[MaskProcessor] = []
    constrained = None if grammar is None else GrammarMask(grammar)
    if constrained is not None:
        found.append(constrained)
    if params.allowed_token_ids:
        found.append(AllowedTokens(params.allowed_token_ids, num_words))
    if params.bad_words_token_ids:
        found.append(BadWords(params.bad_words_token_ids))
    stops = np.array(params.stop_token_ids, np.int64)
    stops = stops[(stops >= 0) & (stops < vocab_size)]
    if params.min_tokens and len(stops):
        found.append(MinTokens(stops, params.min_tokens, constrained))
    return tuple(found)


def _set_bits(words: Words, tokens: Tokens) -> None:
    np.bitwise_or.at(words, tokens // BITS, _bits(tokens))


def _clear_bits(words: Words, tokens: Tokens) -> None:
    np.bitwise_and.at(words, tokens // BITS, ~_bits(tokens))


def _bits(tokens: Tokens) -> Words:
    return (np.uint32(1) << (tokens % BITS).astype(np.uint32)).view(np.int32)
