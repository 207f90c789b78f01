"""A sequence table for devices that model only the times of steps."""

import numpy as np

from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.sequence import NEVER, Ints
from penstock.workers.scheduling.table import SequenceTable


class TimedTable(SequenceTable):
    """A sequence table that leaves out prompt tokens from step plans, to save time.

    In a plan with prompt tokens, the arrays `tokens`, `positions` and `slots` have the usual length
    but contain zeros. The batcher reads these arrays in two cases only, and then they are complete:
    if a plan has one token per sequence, or if prompt logprobs are requested.
    """

    @classmethod
    def of(cls, limits: SchedulerConfig) -> "TimedTable":
        """Return an empty table for a batcher with these limits."""
        return cls(limits.max_sequences, limits.max_model_len, limits.block_size)

    def token_arrays(self, rows: Ints, counts: Ints, offsets: Ints) -> tuple[Ints, Ints, Ints]:
        total = int(counts.sum())
        if total == len(rows) or (self.prompt_known[rows] != NEVER).any():
            return super().token_arrays(rows, counts, offsets)
        nothing = np.zeros(total, np.int32)
        return nothing, nothing, nothing
