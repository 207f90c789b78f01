"""Measures how evenly the experts of an MoE model are chosen, for the worker load."""

from collections.abc import Sequence

import torch
from torch import Tensor

# a long interval, because each read of the counts waits for the device
SECONDS_BETWEEN_READS = 10.0
MIN_CHOICES = 16  # mean number of choices per expert below which no ratio is computed


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

        The ratio is averaged over layers, and covers the tokens computed between the last two reads
        of the counts. 1 means that all experts are chosen equally often, E (the number of experts)
        that all choices are the same expert, and 0 that the ratio is not known yet.

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
