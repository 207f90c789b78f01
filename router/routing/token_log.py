"""The log of a request: its answers so far, the truth from which everything can be rebuilt."""

from collections.abc import Sequence
from enum import Enum

from penstock.router.routing.events import (
    Command,
    Deliver,
    DeliverPrompt,
    Finish,
    NewToken,
    Request,
    ScoredPrompt,
)


class AppendResult(Enum):
    """What became of a token."""

    APPENDED = 0  # taken, and nothing else changed
    STATE_CHANGED = (
        1  # the request's state changed: first token of an attempt, end of a choice, ...
    )
    MOVED = 2  # not taken, but the state changed
    DUPLICATE = 3  # known already, or of an old attempt
    GAP = 4  # positions before it are missing, or there is no such choice


class TokenLog:
    """A list of tokens a choice, and which choices have ended."""

    __slots__ = ("_request", "answers", "finished", "prompt_known")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.prompt_known = 1  # prompt positions below it have their logprobs, if they are wanted
        self.answers: list[list[int]] = [[] for _ in range(request.num_choices)]
        for answer, known in zip(self.answers, request.log, strict=False):
            answer.extend(known)
        self.finished = [len(answer) >= request.max_tokens for answer in self.answers]
        for choice, ended in enumerate(request.ended):
            self.finished[choice] |= ended

    def append(self, token: NewToken, out: list[Command]) -> AppendResult:
        """Take a token if it is the next one of its choice, and deliver it."""
        choice, position, finish = token.choice, token.position, token.finish
        if choice >= len(self.answers):
            return AppendResult.GAP
        answer = self.answers[choice]
        if position != len(answer) or self.finished[choice]:
            missing = position > len(answer) and not self.finished[choice]
            return AppendResult.GAP if missing else AppendResult.DUPLICATE
        answer.append(token.token)
        out.append(
            Deliver(self._request.id, choice, position, (token.token,), (token.logprobs,), finish)
        )
        if not finish:
            return AppendResult.APPENDED
        self.finished[choice] = True
        return AppendResult.STATE_CHANGED

    def append_prompt_logprobs(self, scored: ScoredPrompt, out: list[Command]) -> AppendResult:
        """Take logprobs of prompt tokens that are not known yet, and deliver them."""
        if scored.position > self.prompt_known:
            return AppendResult.GAP
        new = scored.logprobs[self.prompt_known - scored.position :]
        if not new:
            return AppendResult.DUPLICATE
        self.prompt_known += len(new)
        out.append(DeliverPrompt(self._request.id, new))
        return AppendResult.APPENDED

    def stop_choice(self, choice: int, length: int) -> bool:
        """End a choice after `length` tokens. False: it has ended already."""
        if choice >= len(self.answers) or self.finished[choice]:
            return False
        del self.answers[choice][length:]
        self.finished[choice] = True
        return True

    def deliver_ends(self, out: list[Command]) -> None:
        """Say of every choice that it has no room for another token."""
        for choice, answer in enumerate(self.answers):
            out.append(Deliver(self._request.id, choice, len(answer), (), (), Finish.LENGTH))

    @property
    def is_complete(self) -> bool:
        return all(self.finished)

    @property
    def num_known(self) -> int:
        """Tokens, of prompt and answers, that a worker has to have computed to go on."""
        answers, _ = self.copy()
        return len(self._request.prompt) + sum(map(len, answers))

    @property
    def num_remaining(self) -> int:
        """The most tokens that any choice may still get."""
        lengths = [
            len(answer)
            for answer, ended in zip(self.answers, self.finished, strict=True)
            if not ended
        ]
        return self._request.max_tokens - min(lengths, default=self._request.max_tokens)

    def copy(self) -> tuple[Sequence[Sequence[int]], Sequence[bool]]:
        """The answers so far and which have ended, for a worker to go on from."""
        if self._request.num_beams:  # a search begins anew, and gives what is known again
            return tuple(() for _ in self.answers), tuple(False for _ in self.answers)
        return tuple(tuple(answer) for answer in self.answers), tuple(self.finished)
