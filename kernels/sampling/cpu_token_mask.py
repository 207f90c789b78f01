"""Token masks on a CPU, compiled by numba (see `token_mask`)."""

from typing import Any

import numpy as np

from penstock.kernels.cpu_common.numba_runtime import entry

INFINITY = np.int32(0x7F800000)
"""Bits of infinity as float32. Without the sign bit, the bits of NaN are larger numbers, and the
bits of all finite floats are smaller numbers."""


@entry("void(float32[:,::1], int64[::1], int32[:,::1], boolean[::1])", error_model="numpy")
def apply_token_mask(logits: Any, rows: Any, words: Any, finite: Any) -> None:
    """Set the logits of excluded tokens in the given rows to -inf.

    Before that, set `finite` [R] to True for rows of the logits [R, V] without NaN and Inf. Mask
    words that allow all their tokens are skipped.
    """
    vocab_size = logits.shape[1]
    bits = logits.view(np.int32)
    for at in range(len(logits)):
        largest = np.int32(0)
        for token in range(vocab_size):
            largest = max(largest, np.int32(bits[at, token] & np.int32(0x7FFFFFFF)))
        finite[at] = largest < INFINITY
    for at in range(len(rows)):
        row = logits[rows[at]]
        for word in range((vocab_size + 31) // 32):
            allowed = words[at, word]
            if allowed != -1:
                first = 32 * word
                for bit in range(min(32, vocab_size - first)):
                    if not (allowed >> bit) & 1:
                        row[first + bit] = -np.inf
