"""Triton kernel of the rotary embedding, and its launcher (see `rope/op`).

`kv_cache/triton` also uses `load_rotated` and `store_rotated`.
"""

from torch import Tensor

from penstock.kernels.triton_common.launch import device_info, jit, launch, power_of_2, tl

TILE, THREADS = 2048, 128
"""Number of features and number of threads per program. Each thread loads and stores 8 features
(16 bytes in bfloat16) of each half of a head."""


@jit
def load_rotated(
    source,  # [N, 1] pointers to heads
    cos_sin,  # [N, 1] pointers to the cosines and sines [2, R] of each head
    mask,  # [N, 1] True for the heads to load
    HALF: tl.constexpr,  # R/2
    PAIRS: tl.constexpr,  # R/2 rounded up to a power of two
    INTERLEAVED: tl.constexpr,
):
    """Load N heads and return the rotated pairs (u', v') as two float32 tensors [N, PAIRS]."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        inside = mask & (both < 2 * HALF)
        x = tl.load(source + both, mask=inside, other=0.0).to(tl.float32)
        cosines = tl.load(cos_sin + both, mask=inside, other=0.0).to(tl.float32)
        sines = tl.load(cos_sin + 2 * HALF + both, mask=inside, other=0.0).to(tl.float32)
        u, v = tl.split(x.reshape(x.shape[0], PAIRS, 2))
        cos, _ = tl.split(cosines.reshape(x.shape[0], PAIRS, 2))
        _, sin = tl.split(sines.reshape(x.shape[0], PAIRS, 2))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        inside = mask & (pairs < HALF)
        u = tl.load(source + pairs, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(source + HALF + pairs, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_sin + pairs, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin + 3 * HALF + pairs, mask=inside, other=0.0).to(tl.float32)
    return u * cos - v * sin, v * cos + u * sin


@jit
def store_rotated(
    target,  # [N, 1] pointers to heads
    u,  # [N, PAIRS] first features of the pairs
    v,  # [N, PAIRS] second features of the pairs
    mask,  # [N, 1] True for the heads to store
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store the pairs of N heads in the layout that `load_rotated` reads.

    `target` may point to the same heads as `source` of `load_rotated`, because each thread writes
    only elements that the same thread has read.
    """
    u, v = u.to(target.dtype.element_ty), v.to(target.dtype.element_ty)
    if INTERLEAVED:
        both = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.join(u, v).reshape(u.shape[0], 2 * PAIRS)
        tl.store(target + both, x, mask=mask & (both < 2 * HALF))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        inside = mask & (pairs < HALF)
        tl.store(target + pairs, u, mask=inside)
        tl.store(target + HALF + pairs, v, mask=inside)


@jit(unspecialized=("num_tokens",))
def _rotate_kernel(
    x,  # [T, H, R]
    cos_sin,  # [T, 2, R]
    num_tokens,
    num_heads,
    token_stride,
    head_stride,
    HALF: tl.constexpr,  # R/2
    PAIRS: tl.constexpr,  # R/2 rounded up to a power of two
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens per program
    HEADS: tl.constexpr,  # heads per program
):
    """Rotate HEADS heads of TOKENS tokens in place.

    The grid is [T / TOKENS, H / HEADS], rounded up.
    """
    rows = tl.arange(0, TOKENS * HEADS)[:, None]
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + rows // HEADS
    heads = tl.program_id(1) * HEADS + rows % HEADS
    mask = (tokens < num_tokens) & (heads < num_heads)
    pointers = x + tokens * token_stride + heads * head_stride
    u, v = load_rotated(pointers, cos_sin + tokens * (4 * HALF), mask, HALF, PAIRS, INTERLEAVED)
    store_rotated(pointers, u, v, mask, HALF, PAIRS, INTERLEAVED)


def rows_of_a_tile(num_heads: int, dim: int) -> tuple[int, int]:
    """Return (tokens per program, heads per program); both are powers of two."""
    rows = max(1, TILE // power_of_2(dim))
    heads = min(rows, power_of_2(num_heads))
    return rows // heads, heads


def rotate_triton_(x: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate `x` [T, H, R] in place by `cos_sin` [T, 2, R]."""
    num_tokens, num_heads, dim = x.shape
    tokens, heads = rows_of_a_tile(num_heads, dim)
    launch(
        _rotate_kernel,
        (-(-num_tokens // tokens), -(-num_heads // heads)),
        x,
        cos_sin,
        num_tokens,
        num_heads,
        *x.stride()[:2],
        HALF=dim // 2,
        PAIRS=power_of_2(dim // 2),
        INTERLEAVED=interleaved,
        TOKENS=tokens,
        HEADS=heads,
        num_warps=device_info(x).warps(THREADS),
    )
