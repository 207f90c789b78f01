"""CPU loops of `rope_and_cache`, compiled by numba.

Each head is rotated and then immediately written to the cache, so the output of the qkv projection
is read and written only once.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import compile_function, use_threads
from penstock.kernels.kv_cache.cpu_blocks import page_size
from penstock.kernels.kv_cache.cpu_store import store_kv

Floats = npt.NDArray[np.float32]


@inner(fastmath={"contract"})
def rope_neox(head: Floats, cosines: Floats, sines: Floats) -> None:
    """Rotate the feature pairs (i, i + R/2) of a head in place.

    `cosines` and `sines` [R] are from `rotary_table`; the sines include the sign of the rotation.
    """
    half = len(cosines) // 2
    low, high = head[:half], head[half : 2 * half]
    for i in range(half):
        u, v = low[i], high[i]
        low[i] = u * cosines[i] + v * sines[i]
        high[i] = v * cosines[half + i] + u * sines[half + i]


@inner(fastmath={"contract"})
def rope_interleaved(head: Floats, cosines: Floats, sines: Floats) -> None:
    """Rotate the feature pairs (2i, 2i + 1) of a head in place.

    `cosines` and `sines` [R] are from `rotary_table`; the sines include the sign of the rotation.
    """
    for i in range(0, len(cosines), 2):
        u, v = head[i], head[i + 1]
        head[i] = u * cosines[i] + v * sines[i]
        head[i + 1] = v * cosines[i + 1] + u * sines[i + 1]


def _rope_and_cache(
    heads: Floats,  # [T, Hq + 2 H, D] query heads, then key heads, then value heads
    num_heads: int,  # Hq, number of query heads
    cos_sin: Floats,  # [T, 2, R] rows of `rotary_table`
    interleaved: bool,
    # [T, 2 H] slot of each key and value head, see `kv_cache/op.slot_rows`
    rows: npt.NDArray[np.int64],
    kept: Any,  # the cache as a flat array
    block_size: int,  # slots per page of the cache
    num_threads: int,
) -> int:
    """Rotate query and key heads in place, and write key and value heads to the cache.

    Returns:
        The number of heads that were not written, because their slot is outside the cache.
    """
    num_tokens, all_heads, head_dim = heads.shape
    num_rotated = (all_heads + num_heads) // 2
    num_slots = len(kept) // page_size(kept, block_size, head_dim) * block_size
    lost = 0
    for thread in numba.prange(num_threads):
        for t in range(
            num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads
        ):
            for h in range(all_heads):
                head = heads[t, h]
                if h < num_rotated and interleaved:
                    rope_interleaved(head, cos_sin[t, 0], cos_sin[t, 1])
                elif h < num_rotated:
                    rope_neox(head, cos_sin[t, 0], cos_sin[t, 1])
                if h >= num_heads:
                    row = rows[t, h - num_heads]
                    if 0 <= row < num_slots:
                        store_kv(head, kept, row, block_size)
                    else:
                        lost += 1
    return lost


@cache
def rope_and_cache(kept: str) -> Any:
    """Compile `_rope_and_cache` for a flat KV cache of numpy's dtype `kept`."""
    signature = (
        "int64(float32[:,:,::1], int64, float32[:,:,::1], boolean, int64[:,::1],"
        f" {kept}[::1], int64, int64)"
    )
    kernel = compile_function(_rope_and_cache, signature, parallel=True)

    def run(*arguments: Any, num_threads: int) -> int:
        lost: int = kernel(*arguments, use_threads(num_threads))
        return lost

    return run
