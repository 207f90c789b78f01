"""Estimates prefill rates and durations of KV transfers from recent measurements."""

from math import exp

from penstock.common.worker_load import WorkerLoad

MEMORY_SECONDS = 20.0
"""Decay time of prefill measurements, in seconds of prompt computation."""
CALIBRATED_SECONDS = 0.5
"""A worker's prefill rate is used after this many seconds of prompt computation."""
DECAY = 0.98
"""Each KV transfer multiplies earlier weights by this, so about the last 50 transfers count."""
CALIBRATED_TRANSFERS = 3.0


class PrefillRate:
    """Moving averages of one worker's prefill rate and prefix cache hit rate.

    The weight of a measurement decays exponentially with its age.
    """

    __slots__ = (
        "_hits",
        "_last",
        "_seconds",
        "_tokens",
        "is_calibrated",
        "tokens_per_second",
        "uncached_fraction",
    )

    def __init__(self, load: WorkerLoad) -> None:
        # Load reports contain totals since the worker's start, so keep the previous report.
        self._last = load
        self._tokens = self._hits = self._seconds = 0.0
        # Whether there are enough measurements for an estimate of the rates.
        self.is_calibrated = False
        # Uncached prompt tokens that the worker computes per second of prompt work; 0 if unknown.
        self.tokens_per_second = 0.0
        # Fraction of the prompt tokens that were not in the prefix cache; 1 if unknown.
        self.uncached_fraction = 1.0

    def add(self, load: WorkerLoad) -> None:
        """Add the difference between a load report and the previous one."""
        last, self._last = self._last, load
        seconds = load.prompt_seconds - last.prompt_seconds
        if seconds <= 0:
            return
        kept = exp(-seconds / MEMORY_SECONDS)
        self._tokens = kept * self._tokens + max(
            load.prompt_tokens_computed - last.prompt_tokens_computed, 0
        )
        self._hits = kept * self._hits + max(
            load.prompt_tokens_cached - last.prompt_tokens_cached, 0
        )
        self._seconds = kept * self._seconds + seconds
        self.is_calibrated = self._seconds >= CALIBRATED_SECONDS and self._tokens > 0
        self.tokens_per_second = self._tokens / self._seconds
        taken = self._tokens + self._hits
        self.uncached_fraction = self._tokens / taken if taken else 1.0


class TransferCostModel:
    """Duration of a KV transfer as a linear function of its tokens, fitted by least squares.

    The intercept is the fixed time of a transfer, and the slope is the time per token. The
    intercept is 0 if all transfers had the same length, because intercept and slope cannot be
    separated then.
    """

    __slots__ = (
        "_bytes",
        "_count",
        "_lengths",
        "_products",
        "_seconds",
        "_squares",
        "fixed_seconds",
        "is_calibrated",
        "seconds_per_token",
    )

    def __init__(self) -> None:
        self._count = self._lengths = self._seconds = self._squares = self._products = 0.0
        self._bytes = 0.0
        self.seconds_per_token = 0.0  # slope of the model; 0 before the first transfer
        self.fixed_seconds = 0.0  # intercept of the model; 0 before the first transfer
        # Whether there are enough measurements to predict transfer times.
        self.is_calibrated = False

    def add(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Add a completed KV transfer; `seconds` is the time from Submit or Ready to Received."""
        self._count = DECAY * self._count + 1
        self._lengths = DECAY * self._lengths + num_tokens
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + num_tokens * num_tokens
        self._products = DECAY * self._products + num_tokens * seconds
        self._bytes = DECAY * self._bytes + num_bytes
        self.seconds_per_token = self._fitted_slope()
        rest = self._seconds - self.seconds_per_token * self._lengths
        self.fixed_seconds = max(rest / self._count, 0.0)
        # The weights of older transfers are slightly below 1, hence the margin of 0.5.
        self.is_calibrated = self._count > CALIBRATED_TRANSFERS - 0.5 and self._lengths > 0

    def _fitted_slope(self) -> float:
        if not self._lengths:
            return 0.0
        # The slope is largest if the fixed time of a transfer is 0.
        steepest = self._seconds / self._lengths
        variance = self._squares - self._lengths * self._lengths / self._count
        if variance <= 1e-9 * self._squares:
            return steepest
        together = self._products - self._lengths * self._seconds / self._count
        return min(max(together / variance, 0.0), steepest)

    @property
    def bytes_per_token(self) -> float:
        """Mean KV bytes per token of recent transfers; 0 before the first transfer."""
        return self._bytes / self._lengths if self._lengths else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Estimated bandwidth of KV transfers in bytes per second; 0 if unknown."""
        slope = self.seconds_per_token
        return self.bytes_per_token / slope if slope else 0.0

    def seconds(self, num_tokens: float) -> float:
        """Return the expected duration in seconds of a KV transfer of `num_tokens` tokens."""
        return self.fixed_seconds + self.seconds_per_token * num_tokens
