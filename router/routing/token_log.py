"""The token log of a request: its answers so far, from which any worker can continue."""

from collections.abc import Sequence
from enum import Enum

from penstock.router.routing.events import (
    Command,
    DeliverEnd,
    DeliverPrompt,
    Request,
    ScoredPrompt,
)


class AppendResult(Enum):
    """Result of appending a token to a log."""

    APPENDED = 0  # the token was appended, and nothing else changed
    # The token was appended; it is the first token of its attempt, or it ends a choice.
    STATE_CHANGED = 1
    MOVED = 2  # no token was appended, but the request's state changed
    DUPLICATE = 3  # ignored, since the token is already known or of an old attempt
    GAP = 4  # refused, since earlier tokens are missing or the choice does not exist


class TokenLog:
    """The tokens of each choice of a request, and whether each choice has ended."""

    __slots__ = ("_request", "answers", "finished", "prompt_known")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.prompt_known = 1  # the logprobs of the prompt positions [1, prompt_known) are known
        self.answers: list[list[int]] = [[] for _ in range(request.num_choices)]
        for answer, known in zip(self.answers, request.log, strict=False):
            answer.extend(known)
        self.finished = [len(answer) >= request.max_tokens for answer in self.answers]
        for choice, ended in enumerate(request.ended):
            self.finished[choice] |= ended

    def refusal(self, choice: int, position: int) -> AppendResult:
        """Return the result for a token that cannot be appended.

        The result is GAP if earlier tokens are missing or the choice does not exist, otherwise
        DUPLICATE.
        """
        if choice >= len(self.answers):
            return AppendResult.GAP
        missing = position > len(self.answers[choice]) and not self.finished[choice]
        return AppendResult.GAP if missing else AppendResult.DUPLICATE

    def append_prompt_logprobs(self, scored: ScoredPrompt, out: list[Command]) -> AppendResult:
        """Append the prompt logprobs that are not yet known, and deliver them to the client."""
        if scored.position > self.prompt_known:
            return AppendResult.GAP
        start, num_prompt = scored.position, len(self._request.prompt)
        new = scored.logprobs[self.prompt_known - start : num_prompt - start]
        if not new:
            return AppendResult.DUPLICATE
        self.prompt_known += len(new)
        out.append(DeliverPrompt(self._request.id, new))
        return AppendResult.APPENDED

    def stop_choice(self, choice: int, length: int) -> bool:
        """End a choice after `length` tokens. Return False if the choice had already ended."""
        if choice >= len(self.answers) or self.finished[choice]:
            return False
        del self.answers[choice][length:]
        self.finished[choice] = True
        return True

    def deliver_ends(self, out: list[Command]) -> None:
        """Deliver the end of every choice, without tokens."""
        for choice, answer in enumerate(self.answers):
            out.append(DeliverEnd(self._request.id, choice, len(answer)))

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return all(self.finished)

    @property
    def num_known(self) -> int:
        """Number of prompt and answer tokens that a worker needs in its KV cache to continue."""
        num_prompt = len(self._request.prompt)
        if self._request.num_beams:  # a beam search restarts from the prompt
            return num_prompt
        return num_prompt + sum(map(len, self.answers))

    @property
    def num_remaining(self) -> int:
        """Largest number of tokens that an open choice may still get."""
        lengths = [
            len(answer)
            for answer, ended in zip(self.answers, self.finished, strict=True)
            if not ended
        ]
        return self._request.max_tokens - min(lengths, default=self._request.max_tokens)

    def copy(self) -> tuple[Sequence[Sequence[int]], Sequence[bool]]:
        """Return the answers so far, and whether each has ended, for a new Submit."""
        if self._request.num_beams:  # a beam search restarts from the prompt
            return tuple(() for _ in self.answers), tuple(False for _ in self.answers)
        return tuple(tuple(answer) for answer in self.answers), tuple(self.finished)
