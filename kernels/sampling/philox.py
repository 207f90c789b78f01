"""Counter-based Gumbel noise: a pure function of its arguments, bitwise identical on every device.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter
of four 32-bit words and a key of two words into four random words. A token's Gumbel noise is

    g = -log(-log(1 - v)),  v = (word + 1/2) / 2^32

Philox returns four words for the key (seed low, seed high) and the counter (token // 4, index,
choice, purpose); `word` is the word with the number token % 4. The token with the largest logit + g
is a sample from softmax(logits).

The numba version (`sampling/cpu_philox`), the numpy version (this file) and the Triton version
(`gumbel` of `sampling/triton`) are bitwise identical.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba

Words: TypeAlias = npt.NDArray[np.uint32]
Floats: TypeAlias = npt.NDArray[np.float32]

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

CACHED_LANES = 8192
"""Number of lanes (of four tokens each) per pass. The data of these lanes fits in the cache of a
core. This is three times as fast as one pass over all lanes."""

# bits of the float32 numbers 1 and sqrt(1/2), and a mask for the bits of the mantissa
ONE, ROOT_HALF, MANTISSA = 0x3F800000, 0x3F3504F3, 0x7FFFFF
NEAR_ONE = np.float32(1 - 2.0**-24)
SERIES = (0.2857142857, 0.4, 0.6666666667)  # 2/7, 2/5 and 2/3, from the series of 2 artanh(s)
LOG_2 = 0.6931471806

SAMPLE = 0
"""Purpose (last word of the counter) of noise for sampling tokens. Noise for other uses needs other
numbers."""


def philox_reference(counter: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
    """Return four random words [4, ...] for a counter of four words and a key of two words.

    The words of counter and key are int64 tensors that can be broadcast to one shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # A product may overflow int64. Its lower 64 bits are still correct, and the mask removes
        # the sign bits that the shift adds.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (right >> 32) & WORD ^ c1 ^ k0, (left >> 32) & WORD ^ c3 ^ k1
        c1, c3 = right & WORD, left & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack((c0, c1, c2, c3))


def philox(even: Words, odd: Words, key: Words) -> tuple[Words, Words]:
    """Compute `philox_reference` with numpy. Words 0 and 2 are separate from words 1 and 3.

    Args:
        even: counter words 0 and 2, [2, R, n].
        odd: counter words 1 and 3, [2, R, n].
        key: [2, R, 1].

    Returns:
        Random words 0 and 2, and random words 1 and 3, [2, R, n] each.
    """
    shape = np.broadcast_shapes(even.shape, odd.shape)
    steps = np.array(KEY_STEPS, np.uint32)[:, None, None]
    multipliers = np.array(MULTIPLIERS, np.uint64)[:, None, None]
    # There are two buffers, because a round also reads the products of the previous round.
    buffers = np.empty((2, *shape), np.uint64)
    words = np.empty(shape, np.uint32)
    for number in range(NUM_ROUNDS):
        product = buffers[number % 2]
        np.multiply(even, multipliers, out=product)
        # The new words 0 and 1 need the product of word 2, so the order is reversed.
        halves = product.view(np.uint32).reshape(*shape, 2)[::-1]
        even = np.bitwise_xor(halves[..., 1], odd, out=words)
        even ^= key
        odd = halves[..., 0]
        key = key + steps
    return even, odd


def gumbel_noise(
    seeds: npt.NDArray[np.uint64],
    indices: npt.NDArray[np.integer],
    choices: npt.NDArray[np.integer],
    num_tokens: int,
    purpose: int = SAMPLE,
) -> Tensor:
    """Return Gumbel noise [R, num_tokens] float32 for R rows.

    `seeds`, `indices` and `choices` are [R], with the same meaning as in `op.SamplingTensors`.
    """
    num_lanes = -(-num_tokens // 4)
    counters = np.stack((choices, indices, np.full_like(indices, purpose))).astype(np.uint32)
    keys = np.stack((seeds & np.uint64(WORD), seeds >> np.uint64(32))).astype(np.uint32)
    noise = np.empty((len(seeds), 4 * num_lanes), np.float32)
    (_cpu_kernel() or gumbel_noise_reference)(noise, counters, keys)
    return torch.from_numpy(noise[:, :num_tokens])


def load_cpu_kernels() -> None:
    """Load the compiled noise loop, compiling it if it is not in the cache on disk."""
    if has_numba():
        _cpu_kernels().gumbel_noise.load()


@cache
def _cpu_kernel() -> Callable[[Floats, Words, Words], None] | None:
    """Return the numba version of `gumbel_noise_reference`, or None if numba is not installed."""
    return (
        cast("Callable[[Floats, Words, Words], None]", _cpu_kernels().gumbel_noise)
        if has_numba()
        else None
    )


def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.sampling import cpu_philox

    return cpu_philox


def gumbel_noise_reference(noise: Floats, counters: Words, keys: Words) -> None:
    """Fill `noise` [R, 4 * lanes] with Gumbel noise.

    `counters` [3, R] are choice, index and purpose of each row; `keys` [2, R] are its key words.
    """
    num_draws, num_lanes = len(noise), noise.shape[1] // 4
    lanes = np.arange(num_lanes, dtype=np.uint32)
    words = noise.reshape(num_draws, num_lanes, 4)
    step = max(CACHED_LANES // num_lanes, 1)
    for start in range(0, num_draws, step):
        span = slice(start, start + step)
        choice, index, extra = counters[:, span, None]
        even = np.stack(np.broadcast_arrays(lanes, choice))
        pairs = philox(even, np.stack((index, extra)), keys[:, span, None])
        (words[span, :, 0], words[span, :, 2]), (words[span, :, 1], words[span, :, 3]) = pairs
        gumbel_(noise[span])


def gumbel_(words: Floats) -> Floats:
    """Convert random words, as float32, to Gumbel noise, in place.

    The function uses only additions, subtractions, multiplications and divisions, each rounded
    separately. The results of these operations are bitwise identical on all devices. The results of
    library logarithms are not.
    """
    # Words close to 2^32 round up to 2^32. Their noise would be infinite without `np.minimum`.
    uniform = np.minimum(np.multiply(np.add(words, 0.5, out=words), 2.0**-32, out=words), NEAR_ONE)
    # -log(1 - u) is computed as in log1p. With r as the rounded 1 - u, it is -log(r) u / (1 - r),
    # or u if r is 1.
    rest = 1 - uniform
    lost = 1 - rest
    is_zero = lost == 0
    np.copyto(lost, 1, where=is_zero)
    scale = np.divide(uniform, lost, out=lost)
    surprise = np.multiply(_log_(rest, words), scale, out=rest)
    np.negative(surprise, out=surprise)
    np.copyto(surprise, uniform, where=is_zero)
    return np.negative(_log_(surprise, lost), out=words)


def _log_(x: Floats, spare: Floats) -> Floats:
    """Compute the natural logarithm in place; x must be positive and not denormal.

    With x = 2^n m and m near 1, log(x) = n log(2) + 2 artanh(s), where s = (m - 1) / (m + 1).
    """
    bits = x.view(np.int32)
    bits += ONE - ROOT_HALF
    exponent = np.subtract(bits >> 23, 127, dtype=np.int32).astype(np.float32)
    bits &= MANTISSA
    bits += ROOT_HALF
    above = np.add(x, 1, out=spare)
    s = np.divide(np.subtract(x, 1, out=x), above, out=x)
    z = np.multiply(s, s, out=spare)
    series = z * SERIES[0]
    for coefficient in SERIES[1:]:
        series += coefficient
        series *= z
    series += 2
    s *= series
    exponent *= LOG_2
    s += exponent
    return s
