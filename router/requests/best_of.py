"""Best-of ranking: returns only the most likely choices of a request."""

import time
from collections import deque
from dataclasses import replace

from penstock.router.requests.call_once import CallOnce
from penstock.router.requests.response_stream import AnswerBuilder, Delta
from penstock.router.requests.slices import SLICE_SECONDS

TOKENS_PER_STEP = 256
"""Number of tokens whose log probabilities are freed between two looks at the clock."""


class BestOfRanker:
    """A buffer for all choices of a request, which returns the most likely ones at the end.

    Choices are ranked by the mean log probability of their tokens, as in `best_of` of OpenAI and
    TGI, so that short answers have no advantage. A beam search already returns exactly the
    requested number of choices, best first; its choices are not ranked again.

    Without `with_logprobs`, only the sums of the log probabilities are kept.
    """

    def __init__(self, num_choices: int, num_returned: int, with_logprobs: bool) -> None:
        # The answers that were not returned, by choice.
        self._answers = {choice: AnswerBuilder() for choice in range(num_choices)}
        self._sums = [0.0] * num_choices  # sum of the log probabilities of each choice
        self._counts = [0] * num_choices  # number of tokens with a log probability in each choice
        self._num_open = num_choices
        self._num_returned = num_returned
        self._with_logprobs = with_logprobs

    def add(self, delta: Delta) -> list[Delta]:
        """Add a delta; when all choices have ended, return the best ones, renumbered from 0."""
        for entry in delta.logprobs:
            if entry is not None:
                self._sums[delta.choice] += entry.chosen
                self._counts[delta.choice] += 1
        if not self._with_logprobs:
            delta.logprobs = (None,) * len(delta.tokens)
        self._answers[delta.choice].add(delta)
        self._num_open -= bool(delta.finish)
        if self._num_open:
            return []
        best = list(self._answers)
        if len(best) > self._num_returned:
            best.sort(key=self._mean_logprob, reverse=True)
        # The returned answers are the reader's to free, so they are removed here.
        return [
            replace(self._answers.pop(choice).build(), choice=number)
            for number, choice in enumerate(best[: self._num_returned])
        ]

    def free(self, max_tokens: int) -> bool:
        """Free up to `max_tokens` log probabilities or one answer; return whether any are left."""
        if self._answers:
            choice, answer = self._answers.popitem()
            if answer.free_logprobs(max_tokens):
                self._answers[choice] = answer
        return bool(self._answers)

    def _mean_logprob(self, choice: int) -> float:
        return self._sums[choice] / max(self._counts[choice], 1)


class RankerReleaser:
    """Frees the answers that rankers have not returned, in slices.

    A call may have 1,000,000 tokens in such answers. Freeing their log probabilities in one
    callback would hold the event loop for hundreds of milliseconds.
    """

    def __init__(self) -> None:
        self._rankers: deque[BestOfRanker] = deque()
        self._free_soon = CallOnce(self._free_some)

    def release(self, ranker: BestOfRanker) -> None:
        """Free a ranker that is no longer used, in later callbacks of the event loop."""
        self._rankers.append(ranker)
        self._free_soon.schedule()

    def _free_some(self) -> None:
        began = time.perf_counter()
        while self._rankers and time.perf_counter() - began < SLICE_SECONDS:
            if not self._rankers[0].free(TOKENS_PER_STEP):
                self._rankers.popleft()
        if self._rankers:
            self._free_soon.schedule()
