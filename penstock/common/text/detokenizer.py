"""Turns the token ids of an answer into text as they arrive, and finds stop strings.

The text depends only on the tokens, however they are split into calls.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.common.text.stop_matcher import StopMatcher
from penstock.common.text.token_bytes import TokenBytes

UTF8 = codecs.getincrementaldecoder("utf-8")
EMPTY = (b"", 0)
"""State of a UTF-8 decoder that holds back no bytes."""


@dataclass(frozen=True, slots=True)
class StopOptions:
    """Options for the text of an answer and for its end. Names and defaults are vLLM's.

    Attributes:
        stop: stop strings. The answer ends where its text first contains one of them.
        include_stop_str_in_output: whether the text contains the matched stop string or the stop
            token.
        skip_special_tokens: whether special tokens are left out of the text.
        min_tokens: the search for stop strings begins with this token of the answer, counted from
            1.
        shown_tokens: special tokens that are never left out of the text.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    shown_tokens: frozenset[int] = frozenset()


class TextDelta(NamedTuple):
    """New text of an answer.

    Attributes:
        text: text that continues the text which earlier calls returned.
        num_tokens: number of the new tokens that belong to the answer. If a stop string has ended
            the answer, later tokens are not counted.
        stop: the stop string that matched, or None.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text as they arrive, and detects stop strings.

    Bytes of an incomplete UTF-8 character are held back until more tokens arrive. Text that may
    become a stop string is held back as well. A leading space of the answer is kept, because the
    answer continues the prompt. Decoding the answer by itself would strip the space.

    Args:
        token_bytes: the bytes of the model's tokens.
        options: the stop strings, and which tokens the text shows.
    """

    __slots__ = (
        "_hidden",
        "_holds_bytes",
        "_matcher",
        "_num_tokens",
        "_options",
        "_token_bytes",
        "_utf8",
        "_whole_texts",
    )

    def __init__(self, token_bytes: TokenBytes, options: StopOptions) -> None:
        self._token_bytes = token_bytes
        self._whole_texts = token_bytes.whole_texts
        self._options = options
        self._hidden = token_bytes.special if options.skip_special_tokens else frozenset()
        if options.shown_tokens:
            self._hidden -= options.shown_tokens
        self._utf8 = UTF8("replace")
        self._holds_bytes = False  # True while `_utf8` holds back the first bytes of a character
        self._matcher = StopMatcher(options.stop) if options.stop else None
        self._num_tokens = 0

    @property
    def finds_stops(self) -> bool:
        """True if the answer has stop strings."""
        return self._matcher is not None

    def feed_token(self, token: int) -> str:
        """Append one token and return the text that it adds.

        This method is faster than `feed`. Use it only if there are no stop strings and the token
        does not end the answer.
        """
        if not self._holds_bytes and token not in self._hidden:
            whole = self._whole_texts[token]
            if whole is not None:
                return whole
        text = self._utf8.decode(self._visible_bytes(token))
        self._holds_bytes = self._utf8.getstate() != EMPTY
        return text

    def feed(self, tokens: Sequence[int], ended: bool = False, stopped: bool = False) -> TextDelta:
        """Append tokens to the answer and return the text that they add.

        Args:
            tokens: the next tokens of the answer.
            ended: whether the last token ends the answer. Held-back text is then returned.
            stopped: whether the last token is a stop token. The text of a stop token is left out
                unless `include_stop_str_in_output` is set.
        """
        keep_last = not stopped or self._options.include_stop_str_in_output
        visible = tokens if keep_last else tokens[:-1]
        if self._matcher is None:
            text = self._utf8.decode(b"".join(map(self._visible_bytes, visible)), ended)
            self._holds_bytes = self._utf8.getstate() != EMPTY
            return TextDelta(text, len(tokens))
        delta = self._feed_matched(self._matcher, visible)
        if delta.stop is not None:
            return delta
        if not ended:
            return TextDelta(delta.text, len(tokens))
        return self._flush(self._matcher, delta.text, len(tokens))

    def _feed_matched(self, matcher: StopMatcher, tokens: Sequence[int]) -> TextDelta:
        """Decode token by token, to find the token that completes a stop string."""
        shown: list[str] = []
        for count, token in enumerate(tokens, start=1):
            self._num_tokens += 1
            text = self._utf8.decode(self._visible_bytes(token))
            if self._num_tokens < self._options.min_tokens:
                shown.append(text)
                continue
            delta = self._match(matcher, text, count)
            shown.append(delta.text)
            if delta.stop is not None:
                return TextDelta("".join(shown), count, delta.stop)
        return TextDelta("".join(shown), len(tokens))

    def _match(self, matcher: StopMatcher, text: str, count: int) -> TextDelta:
        safe, matched = matcher.feed(text)
        if matched is None:
            return TextDelta(safe, count)
        end = matched.end if self._options.include_stop_str_in_output else matched.start
        return TextDelta(safe[:end], count, matched.stop)

    def _flush(self, matcher: StopMatcher, text: str, count: int) -> TextDelta:
        """Return the text at the end of an answer: `text` and the text that was held back.

        A stop string in the held-back text ends the answer earlier.
        """
        last = self._match(matcher, self._utf8.decode(b"", True), count)
        return TextDelta(text + last.text + matcher.rest(), count, last.stop)

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if token in self._hidden else self._token_bytes.bytes_of(token)
