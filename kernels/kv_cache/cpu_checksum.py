"""CPU loop of `checksum`, compiled by numba: one pass over the words, without temporary arrays."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import numba
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]


@numba.njit("int64(int64[::1], int64[::1], int64[::1])", nogil=True, cache=True)
def sum_words(words: Words, weights: Words, chunk_weights: Words) -> np.int64:
    """Compute the same as `checksum.sum_words`. A chunk has len(weights) - 1 words."""
    chunk, total = len(weights) - 1, np.int64(0)
    for number in range((len(words) + chunk - 1) // chunk):
        part = words[number * chunk : (number + 1) * chunk]
        found = np.int64(0)
        for i in range(len(part)):
            found += part[i] * weights[i] + (part[i] >> 32) * weights[i + 1]
        total += found * chunk_weights[number] + (found >> 32) * chunk_weights[number + 1]
    return total
