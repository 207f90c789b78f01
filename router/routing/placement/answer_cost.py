"""Predicts the time to generate an answer on a worker, from measured times of decode steps.

Workers of one machine may share its cores (`workers/rank/core_sharing.py`). A step may then take
longer while another worker of the machine computes. Such steps are measured separately. GPU workers
share no cores and have no such steps.
"""

from collections.abc import Sequence
from math import exp

from penstock.common.worker_load import WorkerLoad

DECAY = 0.99
"""Each measurement multiplies earlier weights by this, so about the last 100 measurements count."""
CALIBRATED_STEPS = 8.0
BUSY_MEMORY_SECONDS = 10.0
"""Time constant of the moving average in `prompt_fraction`."""
SHARED_MEMORY_SECONDS = 60.0
"""Step times that were measured while other workers computed count as recent for this long."""
MAX_PROMPT_FRACTION = 0.95
STALL_TOKENS = 64
"""The delay by waiting prompts is divided by this number of answer tokens."""
MIN_GAIN = 0.1
"""Fraction by which one worker must be faster than several to get all answers."""
MAX_GROWTH = 2.0
"""A worker's step times are predicted only up to about this multiple of its mean batch size."""


class StepTimeModel:
    """Linear model of a decode step's duration as a function of its number of sequences.

    The model is fitted by least squares.
    """

    __slots__ = ("_count", "_line", "_products", "_seconds", "_sizes", "_squares", "is_calibrated")

    def __init__(self) -> None:
        self._count = self._sizes = self._seconds = self._squares = self._products = 0.0
        self.is_calibrated = False  # whether there are enough measurements to predict step times
        # Intercept and slope of the model, or None if they must be fitted again.
        self._line: tuple[float, float] | None = (0.0, 0.0)

    def add(self, num_sequences: int, seconds: float) -> None:
        """Add a step that took `seconds`."""
        self._count = DECAY * self._count + 1
        self._sizes = DECAY * self._sizes + num_sequences
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + num_sequences * num_sequences
        self._products = DECAY * self._products + num_sequences * seconds
        self._line = None
        self.is_calibrated = self._count > CALIBRATED_STEPS - 0.5

    @property
    def mean_size(self) -> float:
        """Mean number of sequences of the measured steps; 0 before the first one."""
        return self._sizes / self._count if self._count else 0.0

    def line(self) -> tuple[float, float]:
        """Return intercept and slope of the model, each at least 0; 0 before the first step.

        The slope is 0 if all steps had the same number of sequences.
        """
        if self._line is None:
            slope = self._fitted_slope()
            fixed = (self._seconds - slope * self._sizes) / self._count
            self._line = (max(fixed, 0.0), slope)
        return self._line

    def _fitted_slope(self) -> float:
        if not self._sizes:
            return 0.0
        variance = self._squares - self._sizes * self._sizes / self._count
        if variance <= 1e-6 * self._squares:
            return 0.0
        together = self._products - self._sizes * self._seconds / self._count
        return min(max(together / variance, 0.0), self._seconds / self._sizes)

    def seconds(self, num_sequences: float) -> float:
        """Return the expected duration in seconds of a step of `num_sequences` sequences.

        The duration is 0 before the first measured step.
        """
        fixed, slope = self.line()
        return fixed + slope * num_sequences


class AnswerRate:
    """Measured decode steps of a worker, and the fraction of time in which it computes prompts."""

    __slots__ = ("_busy", "_last", "_shared_at", "_sole", "_updated_at", "_with_others")

    def __init__(self, load: WorkerLoad, now: float) -> None:
        # Load reports contain totals since the worker's start, so keep the previous report.
        self._last = load
        self._sole = StepTimeModel()
        self._with_others = StepTimeModel()
        self._busy = 0.0
        self._updated_at = now
        # Time of the last measured step during which another worker computed.
        self._shared_at = float("-inf")

    def add(self, load: WorkerLoad, now: float, is_shared: bool) -> None:
        """Add the difference between a load report and the previous one.

        Args:
            load: the report.
            now: the time, in seconds of the router's monotonic clock.
            is_shared: whether another worker of the machine computes as well.
        """
        last, self._last = self._last, load
        steps, prompts = load.num_steps - last.num_steps, load.prompt_seconds - last.prompt_seconds
        passed, self._updated_at = now - self._updated_at, max(now, self._updated_at)
        if passed > 0:
            kept = exp(-passed / BUSY_MEMORY_SECONDS)
            self._busy = kept * self._busy + (1 - kept) * min(max(prompts / passed, 0.0), 1.0)
        seconds = load.step_seconds - last.step_seconds
        if steps > 0 and prompts <= 0 and load.running and seconds > 0:
            (self._with_others if is_shared else self._sole).add(load.running, seconds / steps)
            if is_shared:
                self._shared_at = now

    @property
    def is_calibrated(self) -> bool:
        """Whether enough steps have been measured, alone or while another worker computed."""
        return self._sole.is_calibrated or self._with_others.is_calibrated

    def knows_both(self, now: float) -> bool:
        """Return whether steps with and without other workers have enough measurements.

        Measurements of steps during which other workers computed must also be recent. If one worker
        generates all answers for a long time, the result therefore becomes False, so that several
        workers are tried again. Steps without other workers need no such trial, since they are
        measured whenever the other workers are idle.
        """
        is_recent = now - self._shared_at < SHARED_MEMORY_SECONDS
        return is_recent and self._sole.is_calibrated and self._with_others.is_calibrated

    def model(self, is_shared: bool) -> StepTimeModel:
        """Return the model of steps with other workers if `is_shared`, else of steps without them.

        If the chosen model has too few measurements, the other model is returned.
        """
        if is_shared:
            return self._with_others if self._with_others.is_calibrated else self._sole
        return self._sole if self._sole.is_calibrated else self._with_others

    def prompt_fraction(self, now: float) -> float:
        """Return the recent fraction of time in which the worker computed prompts."""
        if not self._busy:
            return 0.0
        kept = exp(-max(now - self._updated_at, 0.0) / BUSY_MEMORY_SECONDS)
        return min(kept * self._busy, MAX_PROMPT_FRACTION)

    def seconds_per_token(
        self, num_running: int, is_shared: bool, now: float, steps: "AnswerRate"
    ) -> float:
        """Return the seconds per token that one more sequence costs all sequences together.

        The new sequence waits for its own steps and for the prompts computed between them. Each of
        the `num_running` sequences waits for the time that the new sequence adds to a step.

        Args:
            num_running: sequences of this worker.
            is_shared: whether another worker of the machine computes as well.
            now: the time, in seconds of the router's monotonic clock.
            steps: the measured step times: those of this worker, or of another worker if this
                worker has none.
        """
        fixed, slope = steps.model(is_shared).line()
        own = (fixed + slope * (num_running + 1)) / (1 - self.prompt_fraction(now))
        return own + num_running * slope

    def token_seconds(
        self, num_running: int, is_shared: bool, now: float, stall_seconds: float = 0.0
    ) -> float:
        """Return the predicted time in seconds per token of `num_running` answers.

        Args:
            num_running: sequences in each step.
            is_shared: whether another worker of the machine computes as well.
            now: the time, in seconds of the router's monotonic clock.
            stall_seconds: time to compute the waiting prompts, which delays the answers.
        """
        step = self.model(is_shared).seconds(num_running)
        return step / (1 - self.prompt_fraction(now)) + stall_seconds / STALL_TOKENS


def prefers_one_worker(rates: Sequence[AnswerRate], num_running: Sequence[int], now: float) -> bool:
    """Return whether a machine's answers are generated faster by one worker than by all.

    The step of a single worker that has all cores and all sequences is compared with the step of
    workers that share the cores and divide the sequences evenly. Both include one more sequence.

    Args:
        rates: the workers of one machine.
        num_running: the sequences of each of these workers.
        now: the time, in seconds of the router's monotonic clock.

    Returns:
        True if one worker is faster by at least `MIN_GAIN`; False if the times are unknown.
    """
    total = sum(num_running) + 1
    known = [
        rate
        for rate in rates
        if rate.knows_both(now)
        and total <= MAX_GROWTH * (rate.model(is_shared=False).mean_size + 1)
    ]
    if len(rates) < 2 or not known:
        return False
    one = min(rate.model(is_shared=False).seconds(total) for rate in known)
    each = max(rate.model(is_shared=True).seconds(total / len(rates)) for rate in known)
    return one < (1 - MIN_GAIN) * each
