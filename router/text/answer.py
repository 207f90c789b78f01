"""The text of one answer, from its tokens: a function of the log, whatever the deliveries were."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.router.text.pieces import Pieces
from penstock.router.text.stops import StopMatcher

UTF8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a client said about the text of its answers."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string, or the stop token's text
    keep_special: bool = False
    min_tokens: int = 0  # stop strings are looked for in the text behind so many tokens - 1


class TextDelta(NamedTuple):
    """What some new tokens add to an answer."""

    text: str
    num_tokens: (
        int  # of the tokens fed: fewer than all if a stop string ended the answer among them
    )
    stop: str | None = None  # the stop string that matched


class AnswerText:
    """Detokenizes one answer as it grows and finds its end by stop strings.

    Bytes of an unfinished character and text that may become a stop string are held back. The
    answer goes on from a prompt, so it keeps a leading space that a text of its own would lose.
    """

    def __init__(self, pieces: Pieces, rules: TextRules) -> None:
        self._pieces = pieces
        self._rules = rules
        self._utf8 = UTF8("replace")
        self._matcher = StopMatcher(rules.stops) if rules.stops else None
        self._num_tokens = 0

    def feed(self, tokens: Sequence[int], ended: bool = False, stopped: bool = False) -> TextDelta:
        """New tokens in, new text out.

        Args:
            tokens: the next tokens of the answer.
            ended: whether the last of them ends it.
            stopped: whether that last one is a stop token: its own text is not the answer's.
        """
        spoken = tokens[:-1] if stopped and not self._rules.include_stop else tokens
        if self._matcher is None:
            text = self._utf8.decode(b"".join(map(self._shown, spoken)), ended)
            return TextDelta(text, len(tokens))
        delta = self._feed_watched(self._matcher, spoken)
        if delta.stop is not None:
            return delta
        if not ended:
            return TextDelta(delta.text, len(tokens))
        return self._close(self._matcher, delta.text, len(tokens))

    def _feed_watched(self, matcher: StopMatcher, tokens: Sequence[int]) -> TextDelta:
        shown: list[str] = []
        for count, token in enumerate(tokens, start=1):
            self._num_tokens += 1
            text = self._utf8.decode(self._shown(token))
            if self._num_tokens < self._rules.min_tokens:
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
        end = matched.end if self._rules.include_stop else matched.start
        return TextDelta(safe[:end], count, matched.stop)

    def _close(self, matcher: StopMatcher, text: str, count: int) -> TextDelta:
        """The end without a match: what was held back comes out, unless it completes a match."""
        last = self._match(matcher, self._utf8.decode(b"", True), count)
        return TextDelta(text + last.text + matcher.rest(), count, last.stop)

    def _shown(self, token: int) -> bytes:
        if token in self._pieces.special and not self._rules.keep_special:
            return b""
        return self._pieces.of(token)
