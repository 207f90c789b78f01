"""Best-of ranking: returns only the most likely choices of a request."""

from dataclasses import replace

from penstock.router.requests.response_stream import AnswerBuilder, Delta


class BestOfRanker:
    """A buffer for all choices of a request, which returns the most likely ones at the end.

    Choices are ranked by the mean log probability of their tokens, as in `best_of` of OpenAI and
    TGI, so that short answers have no advantage. A beam search already returns exactly the
    requested number of choices, best first; its choices are not ranked again.
    """

    def __init__(self, num_choices: int, num_returned: int, with_logprobs: bool) -> None:
        self._answers = [AnswerBuilder() for _ in range(num_choices)]
        self._sums = [0.0] * num_choices  # sum of the log probabilities of each choice
        self._counts = [0] * num_choices  # number of tokens with a log probability in each choice
        self._num_open = num_choices
        self._num_returned = num_returned
        self._with_logprobs = with_logprobs

    def add(self, delta: Delta) -> list[Delta]:
        """Add a delta; when all choices have ended, return the best ones, renumbered from 0."""
        self._answers[delta.choice].add(delta)
        for entry in delta.logprobs:
            if entry is not None:
                self._sums[delta.choice] += entry.chosen
                self._counts[delta.choice] += 1
        self._num_open -= bool(delta.finish)
        if self._num_open:
            return []
        best = list(range(len(self._answers)))
        if len(best) > self._num_returned:
            best.sort(key=self._mean_logprob, reverse=True)
        return [
            self._renumbered(number, self._answers[choice].build())
            for number, choice in enumerate(best[: self._num_returned])
        ]

    def _renumbered(self, choice: int, answer: Delta) -> Delta:
        logprobs = answer.logprobs if self._with_logprobs else [None] * len(answer.tokens)
        return replace(answer, choice=choice, logprobs=logprobs)

    def _mean_logprob(self, choice: int) -> float:
        return self._sums[choice] / max(self._counts[choice], 1)
