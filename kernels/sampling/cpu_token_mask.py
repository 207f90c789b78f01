"""Token masks on a CPU, compiled by numba (see `token_mask`)."""

from typing import Any

import numpy as np

from penstock.kernels.cpu_common.numba_runtime import entry


@entry("void(float32[:,::1], int64[::1], int32[:,::1])", error_model="numpy")
def apply_token_mask(logits: Any, rows: Any, words: Any) -> None:
    """Set excluded logits of the given rows to -inf; skip words that allow all their tokens."""
    vocab_size = logits.shape[1]
    for at in range(len(rows)):
        row = logits[rows[at]]
        for word in range((vocab_size + 31) // 32):
            bits = words[at, word]
            if bits != -1:
                first = 32 * word
                for bit in range(min(32, vocab_size - first)):
                    if not (bits >> bit) & 1:
                        row[first + bit] = -np.inf
