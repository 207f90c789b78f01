"""Compiles grammars for a vocabulary, and computes which tokens may come next in an answer."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from penstock.common.grammar.grammar_text import grammar_text, parser_limits, refusal
from penstock.common.grammar.grammar_tokens import GrammarTokens
from penstock.common.structured_outputs import StructuredOutputs, invalid
from penstock.common.text.tokenizer import ModelTokenizer

Words: TypeAlias = npt.NDArray[np.int32]
"""A bit mask over the vocabulary. Token t is bit t % 32 of word t // 32."""

BITS = 32

_CHARACTER = r'[^"\\\x00-\x1F\x7F]'  # matches a character of a JSON string that needs no escape
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 13, 20, 30)),
    f"{_CHARACTER}+",
)
"""Regular expressions. Each defines the set of tokens that match it.

If a grammar allows all tokens of a set, llguidance adds the whole set to the mask in one step. It
checks only the tokens outside of the largest such set one by one. There are sets for several
maximum lengths, because near the `maxLength` of a string only short tokens are allowed. llguidance
has the lengths 10 and 30 by default. The other lengths reduce the time of the slowest masks
(docs/performance.md) and take 85 MB of memory for 200,000 tokens.
"""


def num_words(vocab_size: int) -> int:
    """Return the number of words in a mask that has one bit per token."""
    return -(-vocab_size // BITS)


class GrammarVocabulary:
    """The tokens of a model in the form that grammars need: bytes, control tokens, end tokens.

    The constructor takes about half a second per 100,000 tokens.

    Args:
        tokenizer: the tokenizer of the model.
        vocab_size: number of logits of the model. Tokens that the tokenizer lacks never match.
        end_tokens: tokens that end an answer. A grammar allows them where the answer may be
            complete.

    Raises:
        ValueError: the model has no end token.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, vocab_size: int, end_tokens: Sequence[int]
    ) -> None:
        if not end_tokens:
            raise ValueError(
                "the model has no end token, which a grammar needs to end an answer: set "
                "eos_token_id in the checkpoint's generation_config.json"
            )
        tokens: Any = GrammarTokens(tokenizer, end_tokens)
        self.tokens = LLTokenizer(
            tokens,
            n_vocab=max(vocab_size, tokenizer.vocab_size),
            eos_token=list(end_tokens),
            slices=list(SLICES),
        )
        self.num_words = num_words(self.tokens.vocab_size)

    def compile(self, wanted: StructuredOutputs) -> "CompiledGrammar":
        """Compile a constraint to a grammar for this vocabulary.

        Raises:
            InvalidParameterError: the constraint is invalid, not supported, or exceeds the limits.
        """
        matcher = LLMatcher(self.tokens, grammar_text(wanted), limits=parser_limits(), log_level=0)
        if matcher.is_error():
            raise refusal(wanted, matcher.get_error())
        return CompiledGrammar(wanted, matcher, self.num_words)


class CompiledGrammar:
    """A grammar compiled for one vocabulary. Any number of answers may share it."""

    def __init__(self, wanted: StructuredOutputs, start: LLMatcher, num_words: int) -> None:
        self.wanted = wanted
        self._start = start
        self.num_words = num_words

    def matcher(self) -> "Matcher":
        """Return a matcher at the start of an answer."""
        return Matcher(self._start.deep_copy(), self.num_words)

    def check_answer(self, tokens: Sequence[int]) -> None:
        """Check that the grammar allows an answer that is not complete yet.

        Raises:
            InvalidParameterError: the grammar does not allow the answer.
        """
        if not self.matcher().advance(tokens):
            raise invalid(
                f"the grammar does not allow the {len(tokens)} tokens of the answer so far: resume "
                "with the tokens and the constraint of the original request"
            )


class Matcher:
    """Position of an answer in its grammar.

    The position depends only on the grammar and the tokens of the answer.
    """

    def __init__(self, inner: LLMatcher, num_words: int) -> None:
        self.inner = inner
        self.num_words = num_words

    def advance(self, tokens: Sequence[int]) -> bool:
        """Consume the next tokens of the answer. Return False if the grammar does not allow them.

        After this method has returned False, `fill` allows no token.
        """
        return self.inner.consume_tokens(list(tokens)) if len(tokens) else not self.is_broken

    @property
    def is_broken(self) -> bool:
        """True after a token that the grammar does not allow, or after a limit was exceeded."""
        return bool(self.inner.is_error())

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows only an end token as the next token."""
        return bool(self.inner.is_stopped()) and not self.is_broken

    def fill(self, words: Words) -> None:
        """Set the bits of the tokens that may come next, and clear all other bits.

        Args:
            words: [W] int32, contiguous, with at least one bit per token.
        """
        fill_masks([self], words[None])


def fill_masks(
    matchers: Sequence[Matcher], words: Words, executor: LLExecutor | None = None
) -> None:
    """Compute a mask for each of several matchers. The computation releases the GIL.

    Args:
        matchers: M matchers.
        words: [M, W] int32, contiguous. It is overwritten with one mask per row.
        executor: threads that share the work, or None if the calling thread does all of it.
    """
    if any(words.shape[1] < matcher.num_words for matcher in matchers):
        needed = max(matcher.num_words for matcher in matchers)
        raise ValueError(f"words has {words.shape[1]} words per mask: expected at least {needed}")
    words[:] = 0
    row_bytes = words.shape[1] * 4
    if executor is not None and len(matchers) > 1:
        pairs = [(each.inner, i) for i, each in enumerate(matchers) if not each.is_broken]
        if pairs:  # llguidance raises ValueError for an empty list
            executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, row_bytes, len(words))
    else:
        first = words.ctypes.data
        for index, matcher in enumerate(matchers):
            if not matcher.is_broken:
                address = first + index * row_bytes
                matcher.inner.unsafe_compute_mask_ptr(address, matcher.num_words * 4)
    for index, matcher in enumerate(matchers):
        # The computation of a mask may have exceeded a limit. The matcher is then broken.
        if matcher.is_broken:
            words[index] = 0
