"""Statistics of an engine's steps: histograms of times and tokens, sums, the latest steps."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.workers.scheduling.step_work import StepWork

STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histogram's buckets, in seconds; a last bucket counts longer steps."""

STEP_TOKEN_BOUNDS = (1, *(2**power for power in range(3, 15)))
"""Upper bounds of the buckets of tokens per step, as in vLLM; a last bucket counts larger steps."""


LONGEST_DECAY = 0.98
"""Factor by which `StepTimes.longest` is multiplied at each step, unless the step took longer."""


MAX_RECORDS = 4096
"""Number of latest steps of which a worker keeps records."""


class StepRecord(NamedTuple):
    """Duration and work of one step."""

    number: int  # number of the step, from 1: see `StepTimes.num_steps`
    ended: float  # time of the commit, in seconds of a monotonic clock
    seconds: float
    work: StepWork


class StepTimes:
    """Times and tokens of all steps since the start. Only the engine's thread may use this object.

    Args:
        longest: initial value of `longest`, in seconds.
        last: initial value of `last`, in seconds.
    """

    def __init__(self, longest: float = 0.0, last: float = 0.0) -> None:
        # decaying maximum of the step times, in seconds; estimates the time of the next step
        self.longest = longest
        self.last = last  # time of the last step, in seconds
        self.num_steps = 0
        self.seconds = 0.0  # total time of all steps
        self.prompt_seconds = 0.0  # total time of the steps that computed prompts
        self.num_tokens = 0  # total number of tokens of all steps
        self._counts = [0] * (len(STEP_BOUNDS) + 1)
        self._token_counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, seconds: float, with_prompts: bool) -> None:
        self.longest = max(seconds, LONGEST_DECAY * self.longest)
        self.last = seconds
        self.num_steps += 1
        self.seconds += seconds
        self.prompt_seconds += seconds if with_prompts else 0.0
        self._counts[bisect_left(STEP_BOUNDS, seconds)] += 1

    def add_tokens(self, num_tokens: int) -> None:
        """Count the prompt and generated tokens that the step last passed to `add` computed."""
        self.num_tokens += num_tokens
        self._token_counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def record(self, work: StepWork) -> None:
        """Record the work of the step last passed to `add`. Call this when the step commits."""
        self._records.append(StepRecord(self.num_steps, time.perf_counter(), self.last, work))

    def records(self) -> Sequence[StepRecord]:
        """Return the records of the latest steps, oldest first."""
        return list(self._records)

    def counts(self) -> tuple[int, ...]:
        """Return the number of steps in each bucket of `STEP_BOUNDS`, then of all longer steps."""
        return tuple(self._counts)

    def token_counts(self) -> tuple[int, ...]:
        """Return the number of steps in each bucket of `STEP_TOKEN_BOUNDS`, then of larger ones."""
        return tuple(self._token_counts)
