"""A router's view of a request to batchers with hash models; every token is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.hash_model import reference_answer
from penstock.loadtests.simulator.model.hash_model_beams import reference_beams
from penstock.workers.scheduling.sequence import FinishReason, Key, NewSequence, Sibling

if TYPE_CHECKING:
    from tests.support.batcher_worker import BatcherWorker


@dataclass(eq=False)
class BatcherRequest:
    """A request with its reference answers; lists have one entry per choice."""

    number: int
    prompt: list[int]
    params: SamplingParams
    salt: bytes
    answers: list[tuple[list[int], FinishReason]]  # reference answers, one per choice
    worker: BatcherWorker  # worker that runs the current attempt
    logs: list[list[int]]
    ended: list[bool]
    known: int = 1  # the prompt logprobs of all positions below this one are known
    attempt: int = 0
    state: str = "submitted"  # "submitted", "receiving", "yielded" or "done"
    lease: tuple[BatcherWorker, Key, int] | None = None  # (worker, key, kv_len) of the lease

    @classmethod
    def new(
        cls,
        number: int,
        worker: BatcherWorker,
        prompt: list[int],
        params: SamplingParams,
        num_choices: int,
        max_model_len: int,
    ) -> BatcherRequest:
        """Return a request with its reference answers."""
        if params.use_beam_search:
            answers = reference_beams(prompt, params, max_model_len)
        else:
            choices = range(num_choices)
            answers = [reference_answer(prompt, params, max_model_len, at) for at in choices]
        logs, ended = [list[int]() for _ in answers], [False] * len(answers)
        return cls(number, prompt, params, b"", answers, worker, logs, ended)

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.attempt

    @property
    def open_choices(self) -> list[int]:
        """The choices that have not ended."""
        return [choice for choice, ended in enumerate(self.ended) if not ended]

    def to_sequence(self, yield_after: int, source_len: int) -> NewSequence:
        """Return the sequence that continues all open choices."""
        if self.params.prompt_logprobs is not None and self.known < len(self.prompt):
            # The whole prompt is recomputed, because some of its logprobs are missing.
            source_len = 0
        logs = {choice: self.logs[choice] for choice in self.open_choices}
        if self.params.use_beam_search:
            logs = {choice: [] for choice in range(self.params.num_sequences)}
        first, *others = [Sibling(choice, self.prompt + log) for choice, log in logs.items()]
        return NewSequence(
            key=self.key,
            tokens=first.tokens,
            choice=first.choice,
            siblings=tuple(others),
            num_prompt=len(self.prompt),
            params=self.params,
            yield_after=yield_after,
            salt=self.salt,
            source_len=source_len,
            prompt_known=self.known,
        )

    def accept_token(self, choice: int, index: int, token: int, finish: FinishReason) -> None:
        """Append a token; assert that it is the next one of the reference answer."""
        answer, ending = self.answers[choice]
        assert self.params.prompt_logprobs is None or self.known >= len(self.prompt)
        assert not self.ended[choice], "the choice has ended already"
        assert index == len(self.logs[choice]), "each index once, in order"
        assert token == answer[index]
        self.ended[choice] = index == len(answer) - 1
        assert finish == (ending if self.ended[choice] else FinishReason.NONE)
        self.logs[choice].append(token)

    def accept_beams(self, answers: list[tuple[list[int], FinishReason]]) -> None:
        """Take the result of a beam search; assert that it equals the reference."""
        assert answers == self.answers
        assert not any(self.ended)
        self.logs = [tokens for tokens, _ in answers]
        self.ended = [True] * len(answers)

    def accept_prompt_logprob(self, position: int) -> None:
        """Assert that prompt logprobs are computed once per position, in order."""
        assert self.params.prompt_logprobs is not None
        assert position + 1 == self.known < len(self.prompt)
        self.known += 1

    def check_yield(self, kv_len: int) -> None:
        """Assert that a lease holds only positions whose KV was computed and can be reused."""
        lengths = [len(self.logs[choice]) for choice in self.open_choices]
        assert kv_len < len(self.prompt) + max(lengths)
        assert len(lengths) == 1 or kv_len <= len(self.prompt)
        assert not self.params.use_beam_search or kv_len < len(self.prompt)

    def num_tokens_at_most(self, max_model_len: int) -> int:
        """Return an upper bound on the number of tokens that one run of all choices computes."""
        if self.params.use_beam_search:
            answers = [self.params.answer_limit(0, max_model_len)] * len(self.answers)
        else:
            answers = [len(answer) for answer, _ in self.answers]
        return sum(len(self.prompt) + 1 + answer for answer in answers)
