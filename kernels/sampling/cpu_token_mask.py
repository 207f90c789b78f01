"""Token masks on a CPU, compiled by numba (see `token_mask`)."""

from typing import Any

import numpy as np

from penstock.kernels.cpu_common.magnitude import INFINITY, largest_magnitude_bits
from penstock.kernels.cpu_common.numba_runtime import entry


@entry("void(float32[:,::1], int64[::1], int32[:,::1], boolean[::1])", error_model="numpy")
def apply_token_mask(logits: Any, rows: Any, words: Any, finite: Any) -> None:
    """Set the logits of excluded tokens in the given rows to -inf.

    Before that, set `finite` [R] to True for rows of the logits [R, V] without NaN and Inf. Mask
    words that allow all their tokens are skipped.
    """
    vocab_size = logits.shape[1]
    for at in range(len(logits)):
        finite[at] = largest_magnitude_bits(logits[at]) < INFINITY
    for at in range(len(rows)):
        row = logits[rows[at]]
        for word in range((vocab_size + 31) // 32):
            allowed = words[at, word]
            if allowed != -1:
                first = 32 * word
                for bit in range(min(32, vocab_size - first)):
                    if not (allowed >> bit) & 1:
                        row[first + bit] = -np.inf
