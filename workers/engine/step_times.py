"""Statistics of an engine's step times: a histogram, sums and a recent maximum."""

from bisect import bisect_left

STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histogram's buckets, in seconds; a last bucket counts longer steps."""


LONGEST_DECAY = 0.98
"""`StepTimes.longest` is multiplied by this at each step that is not longer."""


class StepTimes:
    """Times of all steps since the start. Only the engine's thread may use this object.

    Args:
        longest: initial value of `longest`, in seconds.
    """

    def __init__(self, longest: float = 0.0) -> None:
        self.longest = longest  # decaying maximum, in seconds: estimate for the next step
        self.seconds = 0.0  # sum over all steps
        self.prompt_seconds = 0.0  # sum over steps that computed prompts
        self._counts = [0] * (len(STEP_BOUNDS) + 1)

    def add(self, seconds: float, with_prompts: bool) -> None:
        self.longest = max(seconds, LONGEST_DECAY * self.longest)
        self.seconds += seconds
        self.prompt_seconds += seconds if with_prompts else 0.0
        self._counts[bisect_left(STEP_BOUNDS, seconds)] += 1

    def counts(self) -> tuple[int, ...]:
        """Return the number of steps in each bucket of `STEP_BOUNDS`, then of all longer steps."""
        return tuple(self._counts)
