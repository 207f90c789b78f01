"""How long an engine's steps took: counts by length, as plain numbers."""

from bisect import bisect_left

STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds, rising: a step counts under the first that it does not pass, or past the last."""


LONGEST_DECAY = 0.98
"""With every step the longest of late is so much less long, unless the step was longer."""


class StepTimes:
    """All steps since the start. Belongs to the engine's thread.

    longest: seconds that a step is known to take already.
    """

    def __init__(self, longest: float = 0.0) -> None:
        self.longest = longest  # of late, in seconds: what a next step may well take
        self.seconds = 0.0  # of all steps together
        self.prompt_seconds = 0.0  # of those that computed prompts
        self._counts = [0] * (len(STEP_BOUNDS) + 1)

    def add(self, seconds: float, with_prompts: bool) -> None:
        self.longest = max(seconds, LONGEST_DECAY * self.longest)
        self.seconds += seconds
        self.prompt_seconds += seconds if with_prompts else 0.0
        self._counts[bisect_left(STEP_BOUNDS, seconds)] += 1

    def counts(self) -> tuple[int, ...]:
        """Steps under each bound but not under the one before, then those past all bounds."""
        return tuple(self._counts)
