"""CPU loop of `checksum`, compiled by numba: one pass over the words, without temporary arrays."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import numba
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]


@numba.njit("int64(int64[::1], int64[::1])", nogil=True, cache=True)
def sum_words(words: Words, weights: Words) -> np.int64:
    """Compute `checksum.sum_words` for [n] words and at least n + 1 weights."""
    total = np.int64(0)
    for i in range(len(words)):
        total += words[i] * weights[i] + (words[i] >> 32) * weights[i + 1]
    return total
