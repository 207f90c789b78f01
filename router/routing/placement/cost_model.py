"""What moving a prompt's work costs, learned from what workers and KV transfers took."""

from math import exp

from penstock.common.worker_load import WorkerLoad

MEMORY_SECONDS = 20.0
"""Of computing prompts: what a worker did longer ago counts less and less."""
CALIBRATED_SECONDS = 0.5
"""Of computing prompts, before a worker's speed is believed."""
DECAY = 0.98
"""What a KV transfer still counts for when the next one has arrived: some fifty are remembered."""
CALIBRATED_TRANSFERS = 3.0


class PrefillRate:
    """How fast one worker computes prompts, and how much of them it finds in its cache."""

    __slots__ = ("_hits", "_last", "_seconds", "_tokens")

    def __init__(self, load: WorkerLoad) -> None:
        self._last = load  # totals are since the worker's start, which may be long ago
        self._tokens = self._hits = self._seconds = 0.0

    def add(self, load: WorkerLoad) -> None:
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

    @property
    def is_calibrated(self) -> bool:
        return self._seconds >= CALIBRATED_SECONDS and self._tokens > 0

    @property
    def tokens_per_second(self) -> float:
        """A second, while it computes prompts."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def uncached_fraction(self) -> float:
        """The share of its prompts that it had to compute; 1 where nothing is known."""
        taken = self._tokens + self._hits
        return self._tokens / taken if taken else 1.0


class TransferCostModel:
    """Seconds that a KV transfer takes, as a line over its tokens: fitted by least squares.

    The height of the line is what every KV transfer costs, its slope the bandwidth. Where all were
    of one length, nothing tells the two apart: then all of it is bandwidth.
    """

    __slots__ = ("_bytes", "_count", "_lengths", "_products", "_seconds", "_squares")

    def __init__(self) -> None:
        self._count = self._lengths = self._seconds = self._squares = self._products = 0.0
        self._bytes = 0.0

    def add(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """One has arrived, `seconds` after it was asked for."""
        self._count = DECAY * self._count + 1
        self._lengths = DECAY * self._lengths + num_tokens
        self._seconds = DECAY * self._seconds + seconds
        self._squares = DECAY * self._squares + num_tokens * num_tokens
        self._products = DECAY * self._products + num_tokens * seconds
        self._bytes = DECAY * self._bytes + num_bytes

    @property
    def is_calibrated(self) -> bool:
        # Three, each of which counts a little less than the one after it.
        return self._count > CALIBRATED_TRANSFERS - 0.5 and self._lengths > 0

    @property
    def seconds_per_token(self) -> float:
        if not self._lengths:
            return 0.0
        steepest = self._seconds / self._lengths  # steeper, and none of it would be fixed
        variance = self._squares - self._lengths * self._lengths / self._count
        if variance <= 1e-9 * self._squares:
            return steepest
        together = self._products - self._lengths * self._seconds / self._count
        return min(max(together / variance, 0.0), steepest)

    @property
    def fixed_seconds(self) -> float:
        if not self._count:
            return 0.0
        rest = self._seconds - self.seconds_per_token * self._lengths
        return max(rest / self._count, 0.0)

    @property
    def bytes_per_token(self) -> float:
        return self._bytes / self._lengths if self._lengths else 0.0

    @property
    def bytes_per_second(self) -> float:
        slope = self.seconds_per_token
        return self.bytes_per_token / slope if slope else 0.0

    def seconds(self, num_tokens: float) -> float:
        """That a KV transfer of so many tokens is expected to take."""
        return self.fixed_seconds + self.seconds_per_token * num_tokens
