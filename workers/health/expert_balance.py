"""How evenly the experts of a mixture are chosen, as one number that a worker can tell."""

from collections.abc import Sequence

import torch
from torch import Tensor

SECONDS_BETWEEN_READS = 10.0  # a look waits for the device
MIN_CHOICES = 16  # of an expert, on average: with fewer, chance makes one look busy


class ExpertBalance:
    """Of the layers that a rank has; every rank counts the choices of all tokens.

    Args:
        counts: of each layer [E]: how often each expert was chosen since the start.
    """

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self._counts = counts
        self._seen = torch.zeros(len(counts), len(counts[0]) if counts else 0, dtype=torch.int64)
        self._read_at: float | None = None
        self._ratio = 0.0

    def ratio(self, now: float) -> float:
        """Choices of a layer's busiest expert over those of its mean one, the mean of the layers:
        1 where all are chosen alike, E where always the same one is. Of what was computed between
        the last two looks; 0: nothing is known. `now` is in seconds, of any clock.
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
