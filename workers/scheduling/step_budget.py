"""Chooses the token budget of each step so that running answers keep the SLO of their TPOT.

While answers run, a step computes only as many prompt tokens as fit between two tokens of an
answer. This is the chunked prefill of Sarathi-Serve (arXiv 2403.02310). The size of the chunks
follows from measured step times.
"""

from collections import deque

import numpy as np

from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.running_batch import RunningBatch
from penstock.workers.scheduling.sequence import Ints, StepPlan
from penstock.workers.scheduling.table import SequenceTable

SLO_FRACTION = 0.9
"""Fraction of the SLO that a step may take. The rest is a margin for slower steps."""

MIN_PROMPT_TOKENS = 16
"""Prompt tokens for which a step has room even if the SLO leaves none, so that no prompt waits
until all answers end. Forced tokens of answers count as prompt tokens."""

FIRST_PROMPT_TOKENS = 64
"""Prompt tokens for which a step has room beside answers before any prompt was measured. This is
the case on a decode worker that has received the KV of all its sequences."""

DECAY = 0.8
"""Factor by which the weight of earlier step times falls with each step."""

MAX_RATIO = 4.0
"""If the prompts of a step take longer than this multiple of the expected time, only this multiple
counts. Otherwise, chunks would be small for many steps after a single very long step."""

MIN_PROMPT_FRACTION = 0.1
"""Smallest fraction of the time of a step with answers that counts as time of the prompts."""

NUM_RECENT = 8
"""Number of recent steps with prompts whose rates bound the chunks."""

MAX_RATE_RATIO = 1.5
"""Largest ratio of the used rate to the second largest one. A larger one may be an outlier."""


class StepBudget:
    """Token budget of the next step, from the SLO and the times of earlier steps.

    Args:
        limits: `max_batched_tokens` is the largest budget. It is used for all steps if there is no
            SLO (`tpot_slo_seconds`), and for steps without running answers.
        table: the sequence table.
        batch: the running sequences.
    """

    def __init__(self, limits: SchedulerConfig, table: SequenceTable, batch: RunningBatch) -> None:
        self._max_tokens = limits.max_batched_tokens
        self._enough_prompt = limits.enough_prompt_tokens
        # A sequence gets a token in one of `num_stages` steps.
        self._max_seconds = SLO_FRACTION * limits.tpot_slo_seconds / limits.num_stages
        self._table = table
        self._batch = batch
        self._decode_seconds = 0.0  # decaying mean of the times of steps without prompts
        # Decaying sums over the steps with prompts: the number of prompt tokens, and the seconds by
        # which these steps were longer than steps without prompts.
        self._num_prompt = 0.0
        self._prompt_seconds = 0.0
        # Prompt tokens per second of recent steps, whose time includes that of the answers.
        self._rates: deque[float] = deque(maxlen=NUM_RECENT)

    def tokens(self, rows: Ints) -> int:
        """Return the maximum number of tokens of the next step.

        Args:
            rows: [n] the running rows that the step may contain.
        """
        if not self._max_seconds or not self._num_answers(self._batch.rows):
            return self._max_tokens
        chunk = FIRST_PROMPT_TOKENS
        if self._num_prompt:
            seconds_per_token = self._prompt_seconds / self._num_prompt
            chunk = int((self._max_seconds - self._decode_seconds) / seconds_per_token)
            bound = int(self._max_seconds * self._largest_rate())
            chunk = min(chunk, max(bound, FIRST_PROMPT_TOKENS))
        return min(self._max_tokens, self._num_answers(rows) + max(chunk, MIN_PROMPT_TOKENS))

    def for_new_prompts(self, left: int, num_prompt: int) -> int:
        """Return how many tokens a step has left for new prompts. Only the last one may exceed it.

        Args:
            left: rest of the token budget, without the tokens of running rows.
            num_prompt: number of prompt tokens of running rows in the step.
        """
        return min(left, self._enough_prompt - num_prompt) if self._enough_prompt else left

    def _largest_rate(self) -> float:
        """Return the largest recent rate, but at most `MAX_RATE_RATIO` times the second largest.

        A step of more prompt tokens takes longer, at most in proportion to their number. At this
        rate, a chunk that is larger than that of the measured step therefore keeps the SLO. The
        estimated time per token alone can be far too small for a larger chunk, because reading the
        weights hides the time of a few tokens.
        """
        rates = sorted(self._rates)
        return min(rates[-1], MAX_RATE_RATIO * rates[-2]) if len(rates) > 1 else rates[0]

    def _num_answers(self, rows: Ints) -> int:
        """Return how many of these rows generate an answer."""
        table = self._table
        remaining = table.num_tokens[rows] - table.num_computed[rows]
        return int(np.count_nonzero(remaining <= table.decode_len[rows]))

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Record that the step of a plan took `seconds`."""
        if not self._max_seconds or seconds <= 0:
            return
        num_answers = int(np.count_nonzero(np.diff(plan.query_starts) == 1))
        num_prompt = len(plan.tokens) - num_answers
        if num_prompt:
            if num_answers:  # without prompts, the step would not have been longer
                faster = min(seconds - self._decode_seconds, 0.0)
                self._decode_seconds += (1 - DECAY) * faster
            more = seconds - self._decode_seconds if num_answers else seconds
            self._add_prompt(num_prompt, max(more, MIN_PROMPT_FRACTION * seconds))
            self._rates.append(num_prompt / seconds)
        elif self._decode_seconds:
            self._decode_seconds += (1 - DECAY) * (seconds - self._decode_seconds)
        else:
            self._decode_seconds = seconds

    def _add_prompt(self, num_prompt: int, seconds: float) -> None:
        if self._num_prompt:
            expected = num_prompt * self._prompt_seconds / self._num_prompt
            seconds = min(seconds, MAX_RATIO * expected)
        self._num_prompt = DECAY * self._num_prompt + num_prompt
        self._prompt_seconds = DECAY * self._prompt_seconds + seconds
