"""Latencies and throughput of a router over the last 15 minutes, as samples of 5 seconds."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.router.observability.request_metrics import RequestMetrics

SAMPLE_SECONDS = 5.0
NUM_SAMPLES = 180


class Sample(NamedTuple):
    """The measurements of one interval.

    Latencies are in seconds, or None if nothing was measured.

    Attributes:
        number: sequence number of the sample, from 1.
        ttft_p50: median time to the first token.
        ttft_p95: 95th percentile of the time to the first token.
        tpot_p50: median time between two tokens of a choice.
        tpot_p95: 95th percentile of the time between two tokens.
        tokens_per_second: generated tokens.
        requests_per_second: requests that got their first token.
    """

    number: int
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    tokens_per_second: float
    requests_per_second: float


class History:
    """The samples of the last 15 minutes, oldest first.

    Args:
        metrics: the totals of the router, from which the samples are computed.
        now: the time, in seconds of the router's monotonic clock.
    """

    def __init__(self, metrics: RequestMetrics, now: float) -> None:
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._metrics = metrics
        self._at = now
        self._number = 0
        self._counts = self._read()

    def update(self, now: float) -> None:
        """Add a sample if the last one is at least `SAMPLE_SECONDS` old."""
        seconds = now - self._at
        if seconds < SAMPLE_SECONDS:
            return
        before, self._counts, self._at = self._counts, self._read(), now
        first, gaps, (num_tokens,) = (
            [new - old for new, old in zip(counts, known, strict=True)]
            for counts, known in zip(self._counts, before, strict=True)
        )
        bounds = (self._metrics.first_token.bounds, self._metrics.between_tokens.bounds)
        self._number += 1
        self.samples.append(
            Sample(
                self._number,
                quantile(bounds[0], first, 0.5),
                quantile(bounds[0], first, 0.95),
                quantile(bounds[1], gaps, 0.5),
                quantile(bounds[1], gaps, 0.95),
                num_tokens / seconds,
                sum(first) / seconds,
            )
        )

    def _read(self) -> tuple[list[int], list[int], list[int]]:
        """Return the counts of both histograms, and the number of delivered tokens."""
        metrics = self._metrics
        return (
            list(metrics.first_token.counts),
            list(metrics.between_tokens.counts),
            [metrics.num_delivered_tokens],
        )


def quantile(bounds: Sequence[float], counts: Sequence[int], fraction: float) -> float | None:
    """Return a quantile of a histogram, by linear interpolation within its bucket.

    Args:
        bounds: inclusive upper bounds of the buckets, ascending. A last bucket has no bound; its
            values count as equal to the last of `bounds`.
        counts: number of values per bucket, the last bucket included.
        fraction: between 0 and 1.

    Returns:
        The quantile, or None if the histogram is empty.
    """
    rank = fraction * sum(counts)
    if not rank:
        return None
    below, lower = 0, 0.0
    for upper, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return lower
