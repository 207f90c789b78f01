"""Balance of an MoE model's expert choices, as one number of the worker load."""

from collections.abc import Sequence

import torch
from torch import Tensor

SECONDS_BETWEEN_READS = 10.0  # reading the counts waits for the device
MIN_CHOICES = 16  # mean number per expert; fewer are too few to judge


class ExpertBalance:
    """Balance over the MoE layers of this rank, which counts the choices of all tokens.

    Args:
        counts: for each layer, [E] how often each expert was chosen since the start.
    """

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self._counts = counts
        self._seen = torch.zeros(len(counts), len(counts[0]) if counts else 0, dtype=torch.int64)
        self._read_at: float | None = None
        self._ratio = 0.0

    def ratio(self, now: float) -> float:
        """Return the choices of a layer's busiest expert divided by the mean per expert.

        Averaged over layers, for tokens computed between the last two reads: 1 if all experts are
        chosen equally often, E if it is always the same one, 0 if not known yet.

        Args:
            now: time in seconds, of any clock.
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
