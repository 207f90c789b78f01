"""Measures how evenly the experts of an MoE model are chosen, for the worker load."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Interval between reads of the counts; long, because each read waits for the device.
SECONDS_BETWEEN_READS = 10.0
MIN_CHOICES = 16  # below this mean number of choices per expert, no ratio is computed


class ExpertBalance:
    """Measures how evenly tokens choose the experts of this rank's MoE layers.

    Args:
        counts: for each layer, [E] how often each expert was chosen since the start.
    """

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self._counts = counts
        self._seen = torch.zeros(len(counts), len(counts[0]) if counts else 0, dtype=torch.int64)
        self._read_at: float | None = None
        self._ratio = 0.0

    def ratio(self, now: float) -> float:
        """Return the number of choices of a layer's busiest expert, divided by the experts' mean.

        The ratio is averaged over layers. It covers the tokens computed between two reads of the
        counts, which are at least `SECONDS_BETWEEN_READS` apart. A ratio of 1 means that all
        experts are chosen equally often. A ratio of E (the number of experts) means that all
        choices are the same expert. 0 means that the ratio is not known yet.

        Args:
            now: current time in seconds; any clock.
        """
        if not self._counts:
            return 0.0
        if self._read_at is None or now - self._read_at >= SECONDS_BETWEEN_READS:
            self._read_at = now
            self._read_counts()
        return self._ratio

    def _read_counts(self) -> None:
        counts = torch.stack(list(self._counts)).cpu()
        new = (counts - self._seen).double()
        means = new.mean(1)
        if float(means.min()) >= MIN_CHOICES:
            self._seen = counts
            self._ratio = float((new.amax(1) / means).mean())
