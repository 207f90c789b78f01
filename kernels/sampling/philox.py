"""Counter-based noise: a pure function of its arguments, the same wherever it is computed.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a counter
of four 32-bit words and a key of two into four random words. A token's Gumbel noise is

    g = -log(-log(1 - v)),  v = (word + 1/2) / 2^32

with key (seed low, seed high), counter (token // 4, index, choice, purpose) and word token % 4.
The largest of logit + g over the tokens is then a draw from softmax(logits).

On a CPU numba makes it (`sampling/cpu_philox`), on a GPU Triton (`draw`), all of them with the same
bits.
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
"""So many at a time stay in a core's cache: three times as fast as all at once."""

ONE, ROOT_HALF, MANTISSA = 0x3F800000, 0x3F3504F3, 0x7FFFFF  # 1 and sqrt(1/2), as bits
NEAR_ONE = np.float32(1 - 2.0**-24)
SERIES = (0.2857142857, 0.4, 0.6666666667)  # 2/7, 2/5, 2/3
LOG_2 = 0.6931471806

SAMPLE = 0
"""The purpose of a counter that draws a token; others keep their noise apart from it."""


def philox_reference(counter: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
    """Four random words of four counter and two key words; all int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # Beyond 2^63 a product wraps: its bits are right, and the mask takes the sign away.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (right >> 32) & WORD ^ c1 ^ k0, (left >> 32) & WORD ^ c3 ^ k1
        c1, c3 = right & WORD, left & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack((c0, c1, c2, c3))


def philox(even: Words, odd: Words, key: Words) -> tuple[Words, Words]:
    """The same in numpy; words 0 and 2 apart from 1 and 3.

    even, odd: [2, R, n]; key: [2, R, 1]. Returns the random words likewise.
    """
    shape = np.broadcast_shapes(even.shape, odd.shape)
    steps = np.array(KEY_STEPS, np.uint32)[:, None, None]
    multipliers = np.array(MULTIPLIERS, np.uint64)[:, None, None]
    buffers = np.empty((2, *shape), np.uint64)  # two in turn: a round reads what the last one left
    words = np.empty(shape, np.uint32)
    for number in range(NUM_ROUNDS):
        product = buffers[number % 2]
        np.multiply(even, multipliers, out=product)
        # Crosswise: each side takes its high word from the other side's product.
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
    """Noise of every token for R draws: seeds, indices, choices [R]; [R, num_tokens] float32."""
    num_lanes = -(-num_tokens // 4)
    counters = np.stack((choices, indices, np.full_like(indices, purpose))).astype(np.uint32)
    keys = np.stack((seeds & np.uint64(WORD), seeds >> np.uint64(32))).astype(np.uint32)
    noise = np.empty((len(seeds), 4 * num_lanes), np.float32)
    (_cpu_kernel() or gumbel_noise_reference)(noise, counters, keys)
    return torch.from_numpy(noise[:, :num_tokens])


def load_cpu_kernels() -> None:
    """Load the loop that makes noise on a CPU; compile it, the first time on a machine."""
    if has_numba():
        _cpu_kernels().gumbel_noise.load()


@cache
def _cpu_kernel() -> Callable[[Floats, Words, Words], None] | None:
    """As `fill`, with the same bits; nothing where numba is not installed."""
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
    """Noise of R draws: [R, 4 lanes], counters [3, R] (choice, index, purpose), keys [2, R]."""
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
    """Random words, as float32, to Gumbel noise, in place.

    By sums, products and quotients alone, each rounded on its own: whatever computes them in this
    order gets the same bits, where a library's logarithm is another one on every device.
    """
    # Close to 2^32 a word is rounded up to it, and its noise would be -inf.
    uniform = np.minimum(np.multiply(np.add(words, 0.5, out=words), 2.0**-32, out=words), NEAR_ONE)
    # -log(1 - u) is -log(r) u / (1 - r), where r is 1 - u rounded; or u, where that is 1.
    rest = 1 - uniform
    lost = 1 - rest
    gone = lost == 0
    np.copyto(lost, 1, where=gone)
    scale = np.divide(uniform, lost, out=lost)
    surprise = np.multiply(_log_(rest, words), scale, out=rest)
    np.negative(surprise, out=surprise)
    np.copyto(surprise, uniform, where=gone)
    return np.negative(_log_(surprise, lost), out=words)


def _log_(x: Floats, spare: Floats) -> Floats:
    """The natural logarithm in place, with a second buffer; x positive, and not denormal.

    x = 2^n m with m about 1, and log(m) = 2 artanh(s) with s = (m - 1) / (m + 1).
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
