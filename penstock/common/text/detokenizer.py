"""Incremental detokenization of one answer: token ids in, new text and the matched stop string out.

The text is a function of the tokens alone: it does not depend on how they are split into calls.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.common.text.stop_matcher import StopMatcher
from penstock.common.text.token_bytes import TokenBytes

UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class StopOptions:
    """How an answer's text ends and what it shows; names and defaults are those of vLLM.

    Attributes:
        stop: strings that end the answer where the text first contains one of them.
        include_stop_str_in_output: keep the matched stop string, or the stop token's text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: stop strings are only searched for in the text of token `min_tokens` (counted
            from 1) and later tokens.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class TextDelta(NamedTuple):
    """New text of an answer.

    Attributes:
        text: the text to append to what earlier calls returned.
        num_tokens: how many of the tokens passed in belong to the answer; fewer than all of them
            if a stop string ended the answer before the last one.
        stop: the stop string that matched, or None.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text as they arrive and detects stop strings.

    Bytes of an incomplete UTF-8 character and text that may become a stop string are held back
    until more tokens arrive. The answer continues a prompt, so a leading space is kept, which
    decoding the answer as a text of its own would strip.

    Args:
        token_bytes: the bytes of the model's tokens.
        options: stop strings and what the text shows.
    """

    def __init__(self, token_bytes: TokenBytes, options: StopOptions) -> None:
        self._token_bytes = token_bytes
        self._options = options
        self._utf8 = UTF8("replace")
        self._matcher = StopMatcher(options.stop) if options.stop else None
        self._num_tokens = 0

    def feed(self, tokens: Sequence[int], ended: bool = False, stopped: bool = False) -> TextDelta:
        """Append tokens to the answer and return the text they add.

        Args:
            tokens: the next tokens of the answer.
            ended: whether the last of them ends the answer; held-back text is then returned.
            stopped: whether the last of them is a stop token, whose text is left out unless
                `include_stop_str_in_output` is set.
        """
        keep_last = not stopped or self._options.include_stop_str_in_output
        visible = tokens if keep_last else tokens[:-1]
        if self._matcher is None:
            text = self._utf8.decode(b"".join(map(self._visible_bytes, visible)), ended)
            return TextDelta(text, len(tokens))
        delta = self._feed_matched(self._matcher, visible)
        if delta.stop is not None:
            return delta
        if not ended:
            return TextDelta(delta.text, len(tokens))
        return self._flush(self._matcher, delta.text, len(tokens))

    def _feed_matched(self, matcher: StopMatcher, tokens: Sequence[int]) -> TextDelta:
        """Decode token by token, so that a match is attributed to the token that completes it."""
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
        """Return the held-back text at the answer's end, unless it completes a stop string."""
        last = self._match(matcher, self._utf8.decode(b"", True), count)
        return TextDelta(text + last.text + matcher.rest(), count, last.stop)

    def _visible_bytes(self, token: int) -> bytes:
        if self._options.skip_special_tokens and token in self._token_bytes.special:
            return b""
        return self._token_bytes.bytes_of(token)
